"""The form that an output must have: JSON, a regular expression, one of some texts, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from hybridkv.arguments import text
from hybridkv.errors import ConfigError
from hybridkv.units import shown

StructuredKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

_KINDS: Final = get_args(StructuredKind)
_MOST_CHARACTERS: Final = 1 << 17
"""Characters of ``text`` and of ``frame``: more than OpenAI takes, and few enough for a compiler that recurses."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What an output must be. A tokenizer is needed to obey it, so only an engine with one takes such a request.

    Attributes:
        kind: "json_object", "json_schema", "regex", "choice" or "grammar".
        text: the JSON schema; the regular expression, which the whole output must match; a JSON list of the texts to
            choose from; or the grammar, in Lark's syntax. Empty for "json_object".
        frame: a grammar in Lark's syntax of the whole output, with the form as ``@form``; empty without one. Special
            tokens are text in both, but for end tokens: ``start: thought @form``.
    """

    kind: StructuredKind
    text: str = ""
    frame: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"kind of a structured output must be one of {', '.join(_KINDS)}, got {shown(self.kind)}")
        if self.frame != "" and len(text("frame", self.frame)) > _MOST_CHARACTERS:
            raise ConfigError(f"frame may have {_MOST_CHARACTERS:,} characters, got {len(self.frame):,}: shorten it")
        name = f"text of {self.kind}"
        if self.kind == "json_object":
            if self.text != "":
                raise ConfigError(f"json_object takes no text: leave it out or use json_schema, got {shown(self.text)}")
            return
        if len(text(name, self.text)) > _MOST_CHARACTERS:
            raise ConfigError(f"{name} may have {_MOST_CHARACTERS:,} characters, got {len(self.text):,}: shorten it")
        if self.kind == "choice":
            _ = self.choices
        elif self.kind == "json_schema" and not isinstance(_parsed(name, self.text), dict):
            raise ConfigError(f"{name} must be a JSON object, got {shown(self.text)}")

    @property
    def choices(self) -> list[str]:
        """The texts of a "choice". O(characters)."""
        found = _parsed("text of choice", self.text)
        if not isinstance(found, list) or not found or not all(isinstance(one, str) and one for one in found):
            raise ConfigError(f"choice must be a list of texts that are not empty, got {shown(found)}")
        return found


def checked_structured(name: str, value: object) -> StructuredOutput | None:
    """Return ``value``; a mapping of ``kind`` and ``text`` becomes a StructuredOutput. Else ConfigError."""
    if isinstance(value, Mapping) and {"kind"} <= {*value} <= {"kind", "text", "frame"}:
        return StructuredOutput(**value)
    if not isinstance(value, StructuredOutput | None):
        raise ConfigError(f"{name} must be a StructuredOutput, its kind and text, or None, got {shown(value)}")
    return value


def _parsed(name: str, given: str) -> object:
    try:
        made: object = json.loads(given)
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested thousands deep
        raise ConfigError(f"{name} is not JSON: {error}") from None
    return made
