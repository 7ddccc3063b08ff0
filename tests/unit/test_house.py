"""What import-linter cannot see of who may know what."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hybridkv
from hybridkv.cache import KVCacheManager
from hybridkv.testing import attention_config

ROOT = Path(hybridkv.__file__).parent
PARTS = {"block_pool", "groups", "checkpoints", "transfers", "pins", "locks", "write_log"}
"""Attributes of a manager that are parts of it, and no answers."""


def reaches(source: str) -> Iterator[str]:
    """Where ``source`` asks a cache for one of its parts: ``cache.groups``, ``self._cache.groups``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in PARTS and ast.unparse(node.value).endswith("cache"):
            yield ast.unparse(node)


def test_parts_are_what_a_manager_has() -> None:
    cache = KVCacheManager(attention_config(8), 100)
    assert {name for name in PARTS if hasattr(cache, name)} == PARTS


@pytest.mark.parametrize("path", sorted((ROOT / "schedule").glob("*.py")), ids=lambda path: path.stem)
def test_the_scheduler_asks_the_manager_and_never_its_parts(path: Path) -> None:
    assert list(reaches(path.read_text("utf-8"))) == []


def test_a_reach_past_the_manager_is_seen() -> None:
    assert list(reaches("for group in self._cache.groups:\n    cache.block_pool.evict_blocks(x)")) == [
        "self._cache.groups",
        "cache.block_pool",
    ]
