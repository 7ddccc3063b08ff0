"""Random JSON schemas whose answers end: every string, list and number is bounded."""

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

_PATTERNS = ("^[a-z]{1,6}$", "^(ab|cd)+[0-9]{2}$", "^[A-Z][a-z]{0,4}-[0-9]$", "^x?y?z$")
_CONSTANTS: tuple[object, ...] = ("a", "zwölf", 'quo"te', "", 0, -1, 2.5, True, False, None, [1], {"k": "v"})


def random_schema(rng: Random) -> Schema:
    """Return an object schema with up to two definitions, which refer to each other at most once."""
    inner = {"leaf": _leaf(rng)}
    names = {"pair": _object(rng, 1, [*inner]), **inner} if rng.random() < 0.5 else inner
    return {**_object(rng, 3, [*names]), "$defs": names}


def _any(rng: Random, depth: int, names: list[str]) -> Schema:
    kinds: list[Callable[[], Schema]] = [lambda: _leaf(rng), lambda: {"$ref": f"#/$defs/{rng.choice(names)}"}]
    if depth:
        kinds += [
            lambda: _object(rng, depth - 1, names),
            lambda: _array(rng, depth - 1, names),
            lambda: {"anyOf": [_any(rng, depth - 1, names) for _ in range(rng.randint(1, 3))]},
        ]
    return rng.choice(kinds)()


def _object(rng: Random, depth: int, names: list[str]) -> Schema:
    keys = rng.sample(["id", "name", "größe", "a b", "x", "list", "n_1", "$y"], rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {key: _any(rng, depth, names) for key in keys},
        "required": [key for key in keys if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: Random, depth: int, names: list[str]) -> Schema:
    least = rng.randint(0, 2)
    made: Schema = {"type": "array", "items": _any(rng, depth, names), "minItems": least, "maxItems": least + 2}
    if rng.random() < 0.3:
        made["prefixItems"] = [_any(rng, 0, names) for _ in range(rng.randint(1, 2))]
    return made


def _leaf(rng: Random) -> Schema:
    low = rng.randint(-50, 50)
    kinds: list[Callable[[], Schema]] = [
        lambda: {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 9)},
        lambda: {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 12},
        lambda: {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])},
        lambda: {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)},
        lambda: {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": rng.choice([2, 5, 7])},
        lambda: {"enum": rng.sample(_CONSTANTS, rng.randint(1, 4))},
        lambda: {"const": rng.choice(_CONSTANTS)},
        lambda: {"type": rng.choice([["boolean", "null"], "boolean", "null"])},
    ]
    return rng.choice(kinds)()
