"""Everything here runs with runs of keys and remembered chains of a few blocks, which need dozens and hundreds elsewhere."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def short_runs() -> Iterator[None]:
    """Prompts of these tests are short."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("runs", "index"):
            patch.setattr(f"hybridkv.cache.blocks.{module}.LEAST_KEYS", 2)
        patch.setattr("hybridkv.cache.hashing.block_hasher.LEAST_BLOCKS", 2)
        yield
