"""Typed access to a config dictionary: a missing field or one of the wrong type raises a ConfigError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from hybridkv.arguments import Check, at_least, each, flag, integer, one_of
from hybridkv.errors import ConfigError, MissingFieldError
from hybridkv.models.model import MOST_LAYERS
from hybridkv.units import MOST_COUNT, dtype_name, shown

DTYPE_NAMES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "fp8"}
"""Short names of cache dtypes. fp8 is for keys and values; the attention backend must support it."""

LEGACY_LAYER_TYPES: Final = {
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "mamba": "linear_attention",
}
"""Names of layer types in other versions of config files, with the names in transformers 5.19."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fields:
    """A config dictionary and the model's name, for messages.

    Getters take a default for a missing field; without one the field is required. A null in the file counts as missing,
    except in ``optional``.
    """

    values: Mapping[str, object]
    name: str

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fail(self, message: str) -> ConfigError:
        """Return an error that names the model."""
        return ConfigError(f"config of {self.name}: {message}")

    def _given(self, key: str, check: Check, default: Any = None) -> Any:  # noqa: ANN401  # what the check returns
        value = self.values.get(key)
        return default if value is None else check(f"config of {self.name}: {key}", value)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, most: int = MOST_COUNT) -> int:
        """Return an integer from ``minimum`` to ``most``."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise MissingFieldError(f"config of {self.name}: {key} is missing: add it")
        return integer(f"config of {self.name}: {key}", value, minimum, most)

    def layers(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return a number of layers, at most MOST_LAYERS, because every layer costs time and memory."""
        return self.integer(key, default, minimum=minimum, most=MOST_LAYERS)

    def number(self, key: str) -> float | None:
        """Return a finite number above 0; ``None`` for a boolean or another type: transformers decides about these."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if not 0 < value <= MOST_COUNT:  # also false for what is not a number
            raise self.fail(f"{key} must lie above 0 and be at most {MOST_COUNT}, got {shown(value)}")
        return float(value)

    def optional(self, key: str, default: int | None = None, *, minimum: int = 1) -> int | None:
        """Return an integer, ``None`` where the file has null, and ``default`` where it has no such field."""
        value = self.values.get(key, default)
        return None if value is None else self.integer(key, default, minimum=minimum)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        found: bool = self._given(key, flag, default)
        return found

    def text(self, key: str) -> str | None:
        """Return a string; ``None`` where missing."""
        found: str | None = self._given(key, one_of(str))
        return found

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object; empty where missing."""
        found: Mapping[str, Any] = self._given(key, one_of(dict), {})
        return found

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Return a list of integers of at least 0; ``None`` where missing."""
        return self.of_layers(key, self._given(key, each(at_least(0))))

    def names(self, key: str) -> tuple[str, ...] | None:
        """Return a list of strings; ``None`` where missing."""
        return self.of_layers(key, self._given(key, each(one_of(str))))

    def layer_types(self, key: str, count: int, default: Sequence[str]) -> tuple[str, ...]:
        """Return one string for each of ``count`` layers; ``default`` where missing."""
        found = self.names(key)
        if found is None:
            return tuple(default)
        if len(found) != count:
            raise self.fail(f"{key} has {len(found)} entries for {count} layers: correct one of them")
        return tuple(LEGACY_LAYER_TYPES.get(one, one) for one in found)

    def of_layers(self, key: str, values: tuple[T, ...] | None) -> tuple[T, ...] | None:
        """Return ``values``, a list with at most one entry per layer. Raises ConfigError for more than MOST_LAYERS."""
        if values is not None and len(values) > MOST_LAYERS:
            raise self.fail(f"{key} has {len(values)} entries: at most {MOST_LAYERS} layers can be planned")
        return values


def config_dtype(fields: Fields) -> str | None:
    """Return the dtype of the weights: ``dtype``, or ``torch_dtype`` in older files; ``None`` without either."""
    for key in ("dtype", "torch_dtype"):
        found = fields.values.get(key)
        if found is not None and found != "auto":
            return dtype_name(found)
    return None


def max_model_len(fields: Fields, *, rope_scales: bool = True, said_by: str | None = None) -> int | None:
    """Return the most tokens that the positions allow; ``None`` where the config sets no limit.

    The field is ``said_by``, or else ``max_position_embeddings``, Whisper's ``max_target_positions`` or Kimi's
    ``model_max_length``. A rotary scaling extends it unless ``rope_scales`` is off: yarn to
    ``original_max_position_embeddings * factor``, linear and dynamic scaling to ``max_position_embeddings * factor``.
    With other scalings (llama3, longrope) the field holds the extended length already.
    """
    usual = ("max_position_embeddings", "max_target_positions", "model_max_length")
    known = usual if said_by is None else (said_by,)
    key = next((one for one in known if fields.values.get(one) is not None), None)
    if key is None:
        return None
    positions = fields.integer(key)
    scaling = Fields(fields.mapping("rope_scaling") or fields.mapping("rope_parameters"), fields.name)
    kind = scaling.values.get("rope_type", scaling.values.get("type"))
    factor = scaling.number("factor") if rope_scales and kind in ("yarn", "linear", "dynamic") else None
    if factor is None:
        return positions
    scaled = positions
    if kind == "yarn" and isinstance(scaling.values.get("original_max_position_embeddings"), int):
        scaled = max(positions, int(scaling.integer("original_max_position_embeddings") * factor))
    elif kind != "yarn":
        scaled = max(1, int(positions * factor))
    if scaled > MOST_COUNT:
        raise fields.fail(
            f"{key} {positions} scaled by {factor:g} is {scaled} positions, at most {MOST_COUNT} work: lower it"
        )
    return scaled
