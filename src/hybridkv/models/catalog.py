"""Public models known by name: one JSON file each, with the fields of its config.json and where they come from."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from hybridkv.arguments import instance
from hybridkv.errors import ConfigError
from hybridkv.units import shown


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A public model. config: the fields of its config.json that are read.

    verified: every field was found in a public copy of the source; ``verification`` says where, or what
    is from memory.
    """

    name: str
    title: str
    source: str
    verified: bool
    verification: str
    config: Mapping[str, object]


@cache
def known_models() -> tuple[KnownModel, ...]:
    """All known models, by name. Reads the package's JSON files once."""
    found = [one for one in files("hybridkv.models").iterdir() if one.name.endswith(".json")]
    return tuple(sorted((KnownModel(**json.loads(one.read_text("utf-8"))) for one in found), key=lambda m: m.name))


def known_model(name: str) -> KnownModel:
    """The model of that name. Raises ConfigError with close names for any other."""
    by_name = {one.name: one for one in known_models()}
    found = by_name.get(instance("the name of a model", name, str).lower())
    if found is not None:
        return found
    close = difflib.get_close_matches(name.lower().rsplit("/", 1)[-1], by_name, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known names: {', '.join(by_name)}"
    raise ConfigError(
        f"{shown(name)} is neither a file, a folder nor a known model: {hint} (`hybridkv models` lists them)"
    )
