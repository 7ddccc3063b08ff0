"""What is made for hundreds, met by few: random runs lack hundreds."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

_OF_FEW = {
    "hybridkv.cache.index.LEAST_KEYS": 2,
    "hybridkv.cache.hashing.LEAST_BLOCKS": 2,
    "hybridkv.cache.allocator.FEW": 1,
}


@contextmanager
def few_are_many() -> Iterator[None]:
    """Runs of keys and remembered chains are of two blocks, and two rows of a step are served together."""
    with ExitStack() as patched:
        for name, value in _OF_FEW.items():
            patched.enter_context(patch(name, value))
        yield
