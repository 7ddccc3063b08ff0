"""One server for all tests of a module, and an engine alone beside it."""

from collections.abc import Iterator

import pytest
from serve_support import Served, engine_of, serving

from hybridkv.runner import Engine


@pytest.fixture(scope="module")
def llama() -> Iterator[Served]:
    """A served model of attention."""
    with serving(engine_of("llama")) as served:
        yield served


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    """The same model, asked without a server."""
    with engine_of("llama") as engine:
        yield engine
