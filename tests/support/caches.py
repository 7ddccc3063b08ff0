"""Managers made from arguments and options together, by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.planner import KVCacheConfig, Plan

_OPTIONS: Final = {field.name for field in fields(CacheOptions)}


def cache_with(given: Plan | KVCacheConfig, max_model_len: int | None = None, **known: Any) -> KVCacheManager:  # noqa: ANN401 - of any kind
    """Return a manager. known: arguments of KVCacheManager and fields of CacheOptions."""
    options = CacheOptions(**{name: value for name, value in known.items() if name in _OPTIONS})
    others = {name: value for name, value in known.items() if name not in _OPTIONS}
    return KVCacheManager(given, max_model_len, **others, options=options)
