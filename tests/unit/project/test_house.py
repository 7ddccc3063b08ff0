"""What import-linter cannot see of who may know what."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import hybridkv
from hybridkv.cache import KVCacheManager
from hybridkv.cache.policies import Policy
from hybridkv.testing import attention_config

ROOT = Path(hybridkv.__file__).parent
PARTS = {"block_pool", "groups", "checkpoints", "pins", "locks"}
"""Attributes of a manager that are parts of it, and no answers."""


def reaches(source: str) -> Iterator[str]:
    """Where ``source`` asks a cache for one of its parts: ``cache.groups``, ``self._cache.groups``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in PARTS and ast.unparse(node.value).endswith("cache"):
            yield ast.unparse(node)


def test_manager_parts_list_is_current() -> None:
    cache = KVCacheManager(attention_config(8), 100)
    assert {name for name in PARTS if hasattr(cache, name)} == PARTS


@pytest.mark.parametrize("path", sorted((ROOT / "schedule").glob("*.py")), ids=lambda path: path.stem)
def test_scheduler_uses_the_manager_only(path: Path) -> None:
    assert list(reaches(path.read_text("utf-8"))) == []


def test_access_past_the_manager_is_detected() -> None:
    assert list(reaches("for group in self._cache.groups:\n    cache.block_pool.evict_blocks(x)")) == [
        "self._cache.groups",
        "cache.block_pool",
    ]


def test_cache_modules_are_imported_through_the_package() -> None:
    """Eviction and observers read the core's values; nothing else imports below the package."""
    inside = {"cache", "eviction", "observe"}
    outside = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in inside]
    below = [path for path in outside if "from hybridkv.cache." in path.read_text("utf-8")]
    assert len(outside) > 100
    assert below == []


MANY_ARGUMENTS = {
    "KVCacheManager": "the signature that users of vLLM know",
    "BlockTable": "vllm-ascend's",
    "MultiGroupBlockTable": "vllm-ascend's",
    "Request": "what a request is, for users to say",
    "ExtraKeys": "one argument a kind of extra key",
    "Engine": "what users compose an engine of",
    "ModelRunner": "what users compose a runner of",
    "TraceFile": "how a file is to be read, for users to say",
    "KVEventPublisher": "what vLLM's config of it says",
}
"""Constructors of more than six, and why."""


def constructors(source: str) -> Iterator[tuple[str, int]]:
    """Classes and how many arguments their constructors have."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    yield node.name, len(method.args.args) + len(method.args.kwonlyargs) - 1


def test_constructors_with_many_arguments_are_listed() -> None:
    found = {name for path in ROOT.rglob("*.py") for name, count in constructors(path.read_text("utf-8")) if count > 6}
    assert found == set(MANY_ARGUMENTS)


def test_eviction_policy_has_at_most_twelve_methods() -> None:
    common = set.intersection(*(set(dir(policy)) for policy in get_args(Policy)))
    questions = [name for name in common if not name.startswith("_")]
    assert 10 < len(questions) <= 12


def test_cache_package_has_few_modules() -> None:
    rooms = {
        path.stem for path in (ROOT / "cache").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert len(rooms - {"__init__"}) <= 26


LAYOUT_IS_KNOWN = {
    "cache/assembly.py": "the one place",
    "cache/placement/named.py": "beside the plan, which says its placement",
    "planner": "which makes it",
    "worker/copies.py": "where blocks lie",
    "worker/states.py": "where states lie in columns",
    "testing": "checks of both",
    "vllm/natural": "slabs in the memory of vLLM's workers",
    "cli": "words for people",
    "observe/prefixes": "which events say that a state is kept",
}
"""Who may read ``slabs`` of a config, and so know which layout it is."""


def test_layout_is_known_in_listed_modules_only() -> None:
    places = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "slabs" and ast.unparse(node.value).endswith("config")
    }
    assert {one for one in places if not one.startswith(tuple(LAYOUT_IS_KNOWN))} == set()
    assert {one for one in LAYOUT_IS_KNOWN if not any(place.startswith(one) for place in places)} == set()


def test_scheduler_does_not_ask_for_the_placement() -> None:
    asks = [
        path.name
        for path in (ROOT / "schedule").rglob("*.py")
        if "placement"
        in {node.attr for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Attribute)}
    ]
    assert asks == []


def test_manager_has_a_small_public_surface() -> None:
    public = [name for name in vars(KVCacheManager) if not name.startswith("_")]
    assert len(public) <= 30
    assert len(inspect.signature(KVCacheManager).parameters) <= 10
