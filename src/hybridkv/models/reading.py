"""The notes of the general reader: the source of every field that it used, every default and every assumption.

``refuse_unread`` rejects fields that assign types to layers and that no reader knows, with an error that names them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any, Final, TypeVar

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models.fields import Fields
from hybridkv.models.layers import ranges
from hybridkv.models.model import ASSUMED, ReadFact
from hybridkv.units import MOST_COUNT, shown

LAYERS: Final = (
    *("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_transformer_layers",
)
LAYER_TYPES: Final = ("layer_types", "layers_block_type")
ATTENTION_CODES: Final = "attn_type_list"
"""Field of MiniMax's files: 0 for a layer of lightning attention, 1 for one of softmax attention."""

SHARES: Final = "use_cla"
SHARE_FACTOR: Final = "cla_share_factor"
"""Fields of Hunyuan: whether neighbouring layers share keys and values, and how many do."""

MADE_BY_CLASS: Final = "?"
"""In the table of defaults: the class computes the field from others by a rule that the table does not hold."""

CONFIG: Final = "config"
DEFAULT: Final = "default of its config class"
GIVEN: Final = "given"
DERIVED: Final = "rule of its config class"


@cache
def table(name: str) -> dict[str, dict[str, Any]]:
    """Return a table of model types: ``defaults``, made by tests/runner/config_classes.py, ``newer``, or ``types``.

    ``newer`` has the config classes that the transformers of ``defaults`` lacks; its header names their versions.
    """
    found: dict[str, dict[str, Any]] = json.loads(
        files("hybridkv.models").joinpath("classes", f"{name}.json").read_text("utf-8")
    )
    return found


def class_defaults(model_type: str) -> Mapping[str, object] | None:
    """Return the fields that are read here and that the config class of ``model_type`` has, with their defaults.

    Returns ``None`` for an unknown model type.
    """
    found: Mapping[str, object] | None = table("defaults")["defaults"].get(model_type)
    return table("newer")["defaults"].get(model_type) if found is None else found


def text_parts() -> Mapping[str, str]:
    """Return the model type of the language model by the model type of a config with several parts."""
    return {**table("newer")["text_parts"], **table("defaults")["text_parts"]}


_USUAL: Final = ("num_hidden_layers", "num_attention_heads", "hidden_size", "sliding_window")
"""The names that most configs use."""


T = TypeVar("T")


class Reading:
    """Fields of a config, completed by the defaults of its class, and a list of notes.

    A lookup tries the keys in order: first all keys in the config, then all keys in the defaults.
    """

    def __init__(self, fields: Fields, defaults: Mapping[str, object], given: Collection[str] = ()) -> None:
        self.own = fields
        self.defaults = defaults
        self.facts: list[ReadFact] = []
        self._given = frozenset(given)
        constant = {key: value for key, value in defaults.items() if value != MADE_BY_CLASS}
        self.fields = Fields({**constant, **fields.values}, fields.name)

    @property
    def name(self) -> str:
        """Name of the model, for messages."""
        return self.fields.name

    def key(self, keys: Sequence[str]) -> str | None:
        """Return the first of ``keys`` that has a value."""
        own = (key for key in keys if self.own.values.get(key) is not None)
        return next(own, None) or next((key for key in keys if self.fields.values.get(key) is not None), None)

    def declares(self, keys: Sequence[str]) -> bool:
        """Return whether the config or the class has any of ``keys``, with a value or without."""
        return any(key in self.own or key in self.defaults for key in keys)

    def is_made_by_class(self, key: str) -> bool:
        """Return whether the config omits a field that its class computes."""
        return self.own.values.get(key) is None and self.defaults.get(key) == MADE_BY_CLASS

    def integer(self, what: str, keys: Sequence[str], *, minimum: int = 1, most: int = MOST_COUNT) -> int | None:
        """Return the integer of the first of ``keys`` with a value, or ``None``. ConfigError for another type."""
        key = self.key(keys)
        if key is None:
            return None
        return self.note(what, self.fields.integer(key, minimum=minimum, most=most), key)

    def required(self, what: str, keys: Sequence[str], *, minimum: int = 1, most: int = MOST_COUNT) -> int:
        """Return the integer of the first of ``keys`` with a value. Raises ConfigError that names a field to add."""
        found = self.integer(what, keys, minimum=minimum, most=most)
        if found is None:
            usual = next((key for key in keys if key in _USUAL), keys[0])
            raise self.missing(what, next((key for key in keys if self.declares((key,))), usual))
        return found

    def flag(self, what: str, key: str) -> bool:
        """Return a boolean, False if missing; note it if present."""
        if self.key((key,)) is None:
            return False
        return bool(self.note(what, int(self.fields.flag(key)), key))

    def note(self, what: str, value: int, key: str) -> int:
        """Note the source of ``value`` once, and return it."""
        self.say(what, str(value), key, self.source(key))
        return value

    def source(self, key: str) -> str:
        """Return the source of the value of ``key``."""
        if key in self._given:
            return GIVEN
        return CONFIG if self.own.values.get(key) is not None else DEFAULT

    def say(self, what: str, value: str, field: str, source: str) -> None:
        """Note one fact, once."""
        fact = ReadFact(what, value, field, source)
        if fact not in self.facts:
            self.facts.append(fact)

    def derive(self, what: str, value: T, why: str) -> T:
        """Note ``value``, which the config class computes from other fields, and return it.

        For an unknown class the note is an assumption.
        """
        self.say(what, str(value), why, DERIVED if self.defaults else ASSUMED)
        return value

    def say_types(self, types: Sequence[str], key: str) -> None:
        """Note which layers have which type, according to ``key``."""
        for kind in dict.fromkeys(types):
            where = ranges([i for i, one in enumerate(types) if one == kind])
            self.say(f"{kind} layers", where, key, self.source(key))

    def assume(self, what: str, value: object, why: str) -> None:
        """Note a value that no field gives."""
        self.say(what, str(value), why, ASSUMED)

    def missing(self, what: str, key: str, example: str = "N") -> ConfigError:
        """Return the error for a missing fact that bytes depend on."""
        return self.fields.fail(
            f"{what} ({key}) cannot be read, and the bytes of the cache depend on it: add the field to the config, or "
            f"say it with --set {key}={example} (fields=)"
        )

    def refuse_value(self, key: str, value: object) -> ConfigError:
        """Return the error for a field with a value that is not understood."""
        return self.fields.fail(f"{key} {shown(value)} is not understood: correct it, or say it with --set {key}=...")


# -- fields that assign types to layers and that no reader knows: an error names them, so that no such field is ignored

# A list with one entry per layer decides about the cache. So does a list of layers, or a number, word or switch with
# a name like an interval or a pattern of layers. The exceptions are listed: fields that a reader reads (read_by in the
# table of types, which also lists model types with a cache that does not depend on the field), and fields that only
# weights, positions or training depend on. Tests compare the lists with transformers' config classes (5.19).

_READ_BY_ALL: Final = (ATTENTION_CODES, "cross_attention_layers", "indexer_types", SHARES)
"""Fields that the general reader reads in every model type."""
_PLACING: Final = re.compile(
    r"interval|period|layer_group|group_layers|every|pattern|stride|attn_types?|attention_types?|layers?_types?"
    r"|layers?_block_type|block_types?$|layer_freq|layer_step|hybrid"
)
_SWITCHING: Final = re.compile(
    rf"hybrid|^{SHARES}$|^(use|is|with|enable)_(linear_att(n|ention)|lightning\w*|mamba2?|recurrent\w*|kda|gdn)$"
)
_LISTING: Final = re.compile(
    r"layer|attn|attention|hybrid|full|linear|mamba|conv|recurrent|window|local|global|kda|gdn|swa"
)
_PLACES_NOTHING: Final = re.compile(
    r"moe|mlp|expert|ffn|ff_|feed_forward|intermediate|sparse_step|sparsity|swiglu|topk|rope|rotary|theta|token|mtp_"
    r"|multiplier|time_step|architectures|quant|dropout|drop_path|label|lang|vision|image|audio|speech|suppress"
    r"|save|eval|log|bad_words|exit_layers|aux_hidden|^encoder_|adaptor|resblock|upsample|axial|exceptions|num_attention_heads_per_layer"
)
_POSITIONS: Final = ("min_period", "max_period")


def refuse_unread(fields: Fields, model_type: str, *, general: bool) -> None:
    """Reject a config with layers that may differ in a way that the reader of ``model_type`` does not know.

    ``general``: the general reader reads it. Raises UnsupportedModelError that names the field and the fix.
    """
    placed = any(fields.values.get(key) is not None for key in LAYER_TYPES)
    said = (fields.values.get(key) for key in LAYERS)
    read_by = table("types")["read_by"]
    layers = next((count for count in said if type(count) is int and count > 1), 0)
    for key, value in fields.values.items():
        name = key.lower().strip("_")
        if (
            name in LAYER_TYPES
            or (general and name in _READ_BY_ALL)
            or model_type in read_by.get(name, ())
            or _PLACES_NOTHING.search(name)
        ):
            continue
        for inner, one in value.items() if isinstance(value, dict) else ((key, value),):
            within = "" if one is value else f"has {shown(inner)}, which "
            if isinstance(one, list | tuple) and layers and abs(len(one) - layers) <= 1 and len(one) > 1:
                raise _refusal(fields, key, f"{within}has {len(one)} entries, as many as layers", model_type)
            if not placed and _LISTING.search(str(inner)) and _lists_layers(one, layers):
                raise _refusal(fields, key, f"{within}is {shown(one)}, a list of layers", model_type)
        if placed:
            continue
        switched = isinstance(value, str) or (type(value) is int and value > 1)
        if (switched and value and name not in _POSITIONS and _PLACING.search(name)) or (
            (value is True or isinstance(value, dict)) and value and _SWITCHING.search(name)
        ):
            raise _refusal(fields, key, f"is {shown(value)}", model_type)


def _lists_layers(value: object, layers: int) -> bool:
    """Return whether ``value`` is a list of indices of layers in order, from 0 or from 1, or such a list as text."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,5}(\s*,\s*\d{1,5})+\s*", value):
        value = [int(one) for one in value.split(",")]
    if not isinstance(value, list | tuple) or not value or not all(type(one) is int for one in value):
        return False
    return value[0] >= 0 and value[-1] <= layers and all(one < after for one, after in pairwise(value))


def _refusal(fields: Fields, key: str, what: str, model_type: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"config of {fields.name}: {key} {what}, and what layers of model type {shown(model_type)} keep may depend on "
        "it, which is not supported: say what each layer is (--set layer_types='[...]') and drop the field (--set "
        f"{key}=null), or drop it alone where the cache does not depend on it"
    )
