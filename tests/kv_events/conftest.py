"""What tests of published events share."""

from collections.abc import Iterator
from typing import Any

import pytest
import zmq


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)
