from collections.abc import Iterator

import pytest
from runner_support import EngineFactory

from hybridkv.runner import tensor_parallel
from warm import starts


@pytest.fixture
def make_engine() -> Iterator[EngineFactory]:
    factory = EngineFactory()
    yield factory
    factory.close()


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of ``Ranks`` start without importing torch."""
    monkeypatch.setattr(tensor_parallel, "subprocess", starts("subprocess"))
