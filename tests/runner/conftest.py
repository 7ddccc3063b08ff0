from collections.abc import Iterator

import pytest
from runner_support import EngineFactory


@pytest.fixture
def make_engine() -> Iterator[EngineFactory]:
    factory = EngineFactory()
    yield factory
    factory.close()
