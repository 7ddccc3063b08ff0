"""Typed access to a config dictionary: a field that is missing or of the wrong type raises a ConfigError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hybridkv.errors import ConfigError
from hybridkv.units import dtype_name

DTYPE_NAMES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "fp8"}
"""Short names of cache dtypes; fp8 is for keys and values, a backend has to know how."""

LEGACY_LAYER_TYPES: Final = {"attention": "full_attention", "mamba": "linear_attention"}
"""What older config files call layer types, and transformers 5 now."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A config dictionary and the model's name, for messages.

    Getters take a default for a missing field; without one the field is required. None in the
    file counts as missing, except for ``optional``.
    """

    values: Mapping[str, object]
    name: str

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fail(self, message: str) -> ConfigError:
        """An error that names the model."""
        return ConfigError(f"config of {self.name}: {message}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least ``minimum``."""
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(f"{key} is missing: add it")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(f"{key} must be an integer of at least {minimum}, got {value!r}")
        return value

    def optional(self, key: str, default: int | None = None, *, minimum: int = 1) -> int | None:
        """An integer, or None where the file says null; ``default`` where it says nothing."""
        value = self.values.get(key, default)
        return None if value is None else self.integer(key, default, minimum=minimum)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A boolean."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"{key} must be true or false, got {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(f"{key} must be a string, got {value!r}")
        return value

    def mapping(self, key: str) -> Mapping[str, object]:
        """An object; empty where missing."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(f"{key} must be an object, got {value!r}")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of integers of at least 0; None where missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(type(one) is int and one >= 0 for one in value):
            raise self.fail(f"{key} must be a list of integers")
        return tuple(value)

    def layer_types(self, key: str, count: int, default: Sequence[str]) -> tuple[str, ...]:
        """A list of strings, one for each of ``count`` layers; ``default`` where missing."""
        found = self.names(key)
        if found is None:
            return tuple(default)
        if len(found) != count:
            raise self.fail(f"{key} has {len(found)} entries for {count} layers: correct one of them")
        return tuple(LEGACY_LAYER_TYPES.get(one, one) for one in found)

    def names(self, key: str) -> tuple[str, ...] | None:
        """A list of strings; None where missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise self.fail(f"{key} must be a list of strings")
        return tuple(value)


def config_dtype(fields: Fields) -> str | None:
    """The dtype of the weights: ``dtype``, or ``torch_dtype`` as older files call it; None where neither says one."""
    for key in ("dtype", "torch_dtype"):
        found = fields.values.get(key)
        if found is not None and found != "auto":
            return dtype_name(found)
    return None


def max_model_len(fields: Fields, *, rope_scales: bool = True) -> int | None:
    """Most tokens the positions allow, None where the config sets no limit.

    ``max_position_embeddings``, else Whisper's ``max_target_positions`` or Kimi's ``model_max_length``. It is longer
    where a rotary scaling says so, unless ``rope_scales`` is off: yarn reaches ``original_max_position_embeddings *
    factor``, linear and dynamic scaling ``max_position_embeddings * factor``; others (llama3, longrope) have it in
    the field already.
    """
    known = ("max_position_embeddings", "max_target_positions", "model_max_length")
    key = next((one for one in known if fields.values.get(one) is not None), None)
    if key is None:
        return None
    positions = fields.integer(key)
    scaling = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if not rope_scales or isinstance(factor, bool) or not isinstance(factor, int | float):
        return positions
    original = scaling.get("original_max_position_embeddings")
    if kind == "yarn" and isinstance(original, int):
        return max(positions, int(original * factor))
    return int(positions * factor) if kind in ("linear", "dynamic") else positions
