"""What the general reader took from where: every field that it used, every default, and everything that it assumed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Final

from hybridkv.errors import ConfigError
from hybridkv.models.fields import Fields
from hybridkv.models.model import ASSUMED, ReadFact
from hybridkv.units import MOST_COUNT, shown

MADE_BY_CLASS: Final = "?"
"""In the table of defaults: the class makes the field's value from others, in a way that only it knows."""

CONFIG: Final = "config"
DEFAULT: Final = "default of its config class"
GIVEN: Final = "given"
DERIVED: Final = "rule of its config class"


@cache
def _classes() -> Mapping[str, Mapping[str, object]]:
    """Written by tests/runner/config_classes.py from transformers' config classes."""
    found: dict[str, dict[str, object]] = json.loads(
        files("hybridkv.models").joinpath("classes", "defaults.json").read_text("utf-8")
    )
    return found


def class_defaults(model_type: str) -> Mapping[str, object] | None:
    """The fields that the config class of ``model_type`` has, of those that are read here, and their defaults.

    None for a model type that nobody described.
    """
    found = _classes()["defaults"].get(model_type)
    return found if isinstance(found, dict) else None


def text_parts() -> Mapping[str, str]:
    """What the language model is called in configs of several parts, by the model type of the whole."""
    return {whole: str(part) for whole, part in _classes()["text_parts"].items()}


def _usual(keys: Sequence[str]) -> str:
    """The name that most configs have for a field of ``keys``."""
    return next((key for key in keys if key in _USUAL), keys[0])


_USUAL: Final = ("num_hidden_layers", "num_attention_heads", "hidden_size", "sliding_window")


class Reading:
    """Fields of a config with the defaults of its class behind them, and a list of what was made of them.

    Keys are tried in order: those that the config has first, then those that the class gives a default.
    """

    def __init__(self, fields: Fields, defaults: Mapping[str, object], given: Collection[str] = ()) -> None:
        self.own = fields
        self.defaults = defaults
        self.facts: list[ReadFact] = []
        self._given = frozenset(given)
        behind = {key: value for key, value in defaults.items() if value != MADE_BY_CLASS}
        self.fields = Fields({**behind, **fields.values}, fields.name)

    @property
    def name(self) -> str:
        """Of the model, for messages."""
        return self.fields.name

    def key(self, keys: Sequence[str]) -> str | None:
        """The first of ``keys`` that has a value."""
        own = (key for key in keys if self.own.values.get(key) is not None)
        return next(own, None) or next((key for key in keys if self.fields.values.get(key) is not None), None)

    def declares(self, keys: Sequence[str]) -> bool:
        """Whether config or class know any of ``keys``, with a value or without."""
        return any(key in self.own or key in self.defaults for key in keys)

    def is_made_by_class(self, key: str) -> bool:
        """Whether the config leaves out what its class would make."""
        return self.own.values.get(key) is None and self.defaults.get(key) == MADE_BY_CLASS

    def integer(self, what: str, keys: Sequence[str], *, minimum: int = 1, most: int = MOST_COUNT) -> int | None:
        """The integer in the first of ``keys`` that has one, or None. Raises ConfigError for what is no integer."""
        key = self.key(keys)
        if key is None:
            return None
        return self.note(what, self.fields.integer(key, minimum=minimum, most=most), key)

    def required(self, what: str, keys: Sequence[str], *, minimum: int = 1, most: int = MOST_COUNT) -> int:
        """The integer in the first of ``keys`` that has one. Raises ConfigError that says what would supply it."""
        found = self.integer(what, keys, minimum=minimum, most=most)
        if found is None:
            raise self.missing(what, next((key for key in keys if self.declares((key,))), _usual(keys)))
        return found

    def flag(self, what: str, key: str) -> bool:
        """A truth value; noted where there is one."""
        if self.key((key,)) is None:
            return False
        return bool(self.note(what, int(self.fields.flag(key)), key))

    def note(self, what: str, value: int, key: str) -> int:
        """Write down where ``value`` was read, once, and hand it back."""
        self.say(what, str(value), key, self.source(key))
        return value

    def source(self, key: str) -> str:
        """Where the value of ``key`` is from."""
        if key in self._given:
            return GIVEN
        return CONFIG if self.own.values.get(key) is not None else DEFAULT

    def say(self, what: str, value: str, field: str, source: str) -> None:
        """Write down one fact, once."""
        fact = ReadFact(what, value, field, source)
        if fact not in self.facts:
            self.facts.append(fact)

    def derive(self, what: str, value: object, why: str) -> None:
        """Write down what the config class makes of other fields; an assumption where nobody described the class."""
        self.say(what, str(value), why, DERIVED if self.defaults else ASSUMED)

    def assume(self, what: str, value: object, why: str) -> None:
        """Write down what no field says."""
        self.say(what, str(value), why, ASSUMED)

    def missing(self, what: str, key: str, example: str = "N") -> ConfigError:
        """The error for a fact that bytes depend on and that is nowhere."""
        return self.fields.fail(
            f"{what} ({key}) cannot be read, and the bytes of the cache depend on it: add the field to the config, or "
            f"say it with --set {key}={example} (fields=)"
        )

    def refuse_value(self, key: str, value: object) -> ConfigError:
        """The error for a field whose value is not understood."""
        return self.fields.fail(f"{key} {shown(value)} is not understood: correct it, or say it with --set {key}=...")
