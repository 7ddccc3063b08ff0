"""Public models known by name: a JSON file each in ``published/``, with fields of its config.json and their source."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from hybridkv.arguments import instance
from hybridkv.errors import ConfigError
from hybridkv.units import shown

HUB: Final = "https://huggingface.co/"
FILE: Final = "/blob/main/config.json"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A public model.

    Attributes:
        name: the name here, for ``read_model`` and the command line.
        title: the name for people.
        source: address of the model's config.json.
        read_in: where the fields were read: a repository or a package, and the file in it.
        verified: whether every field was found there.
        verification: the differences from ``read_in``, or the fields that are from memory.
        config: the fields of its config.json that decide about its cache and weights.
    """

    name: str
    title: str
    source: str
    read_in: str
    verified: bool
    verification: str
    config: Mapping[str, object]

    @property
    def hub(self) -> str:
        """The model's name on the Hugging Face hub: organisation/model."""
        return self.source.removeprefix(HUB).removesuffix(FILE)


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return all known models, by name. Reads the package's JSON files once."""
    found = [one for one in files("hybridkv.models").joinpath("published").iterdir() if one.name.endswith(".json")]
    return tuple(sorted((KnownModel(**json.loads(one.read_text("utf-8"))) for one in found), key=lambda m: m.name))


@cache
def _by_name() -> Mapping[str, KnownModel]:
    """Return the models by all their names in lower case: ours, and the hub's with and without its organisation."""
    every = known_models()
    calls = {one.hub.lower(): one for one in every} | {one.hub.lower().rsplit("/", 1)[-1]: one for one in every}
    return calls | {one.name: one for one in every}


def known_model(name: str) -> KnownModel:
    """Return a known model.

    Args:
        name: the name here or on the hub, in upper or lower case.

    Raises:
        ConfigError: the name is unknown. The message suggests close names.
    """
    asked = instance("the name of a model", name, str).lower()
    found = _by_name().get(asked)
    if found is not None:
        return found
    close = _close(asked.rstrip("/").rsplit("/", 1)[-1])
    hint = f"did you mean {' or '.join(', '.join(close).rsplit(', ', 1))}? " if close else ""
    raise ConfigError(
        f"{shown(name)} is neither a file, a folder nor a known model: {hint}(`hybridkv models` lists them)"
    )


def _close(asked: str) -> list[str]:
    """Return at most three names: a prefix of ``asked``, then names that start with it, then names spelled alike."""
    names = [one.name for one in known_models()]
    variant = sorted((one for one in names if asked.startswith(one)), key=len, reverse=True)
    begun = [one for one in names if len(asked) > 2 and one.startswith(asked)]
    alike = difflib.get_close_matches(asked, list(_by_name()), n=6, cutoff=0.6)
    return list(dict.fromkeys([*variant, *begun, *(_by_name()[one].name for one in alike)]))[:3]
