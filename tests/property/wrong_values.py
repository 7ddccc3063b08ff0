"""Values of every wrong kind, one argument at a time, for whatever can be called."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from hybridkv.errors import HybridKVError
from hybridkv.request import SamplingParams


def wrong_values() -> dict[str, Any]:
    """By name. Made anew for each use: one of them is used up by it."""
    return {
        "None": None,
        "True": True,
        "0": 0,
        "1.5": 1.5,
        "nan": float("nan"),
        "inf": float("inf"),
        "-1": -1,
        "2**70": 2**70,
        "no text": "",
        "text": "x",
        "surrogate": "\ud800",
        "null byte": "a\0b",
        "bytes": b"x",
        "empty list": [],
        "floats": [1.5],
        "Nones": [None],
        "texts": ["x"],
        "lists": [[1], [[2]]],
        "tuple": (1, 2, 3),
        "set": {1, 2},
        "empty dict": {},
        "dict": {"x": 1},
        "object": object(),
        "class": int,
        "function": lambda: None,
        "float32": np.float32(1.5),
        "int64": np.int64(-1),
        "float array": np.array([1.5]),
        "text array": np.array(["a", "b"]),
        "0-d array": np.array(3),
        "2-d array": np.array([[1, 2]]),
        "SamplingParams": SamplingParams(),
        "generator": (one for one in (1, 2)),
    }


def trials(
    arguments: Mapping[str, Any], more: Callable[[], Mapping[str, Any]] = dict, *, functions: Collection[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A name and arguments for each: valid ones but for one.

    more: further values. functions: arguments that are the caller's functions, whose errors are the caller's too.
    """
    for argument in arguments:
        for kind in [*wrong_values(), *more()]:
            value = {**wrong_values(), **more()}[kind]
            if argument not in functions or not callable(value):
                yield f"{argument}: {kind}", {**arguments, argument: value}


def unnamed_errors(
    call: Callable[..., object],
    arguments: Mapping[str, Any],
    more: Callable[[], Mapping[str, Any]] = dict,
    *,
    functions: Collection[str] = (),
) -> list[str]:
    """Every trial that ended otherwise than by a result or an error of ours, which is one short line."""
    wrong = []
    for name, given in trials(arguments, more, functions=functions):
        try:
            call(**given)
        except HybridKVError as error:
            if len(str(error)) > 1000:
                wrong.append(f"{name}: {len(str(error))} characters")
        except Exception as error:  # noqa: BLE001  # whatever it is, it was not meant
            wrong.append(f"{name}: {error!r}")
    return wrong


def arguments_of(made: Any) -> dict[str, Any]:  # noqa: ANN401  # any dataclass
    """What a dataclass was made of."""
    return {one.name: getattr(made, one.name) for one in fields(made) if one.init}


def untyped_fields(made: Any) -> list[str]:  # noqa: ANN401  # any dataclass
    """Every trial that made another one of its class with a field of another type than ``made`` has there."""
    wrong = []
    for name, given in trials(arguments_of(made)):
        try:
            other = type(made)(**given)
        except HybridKVError:
            continue
        for field in fields(made):
            value, wanted = getattr(other, field.name), type(getattr(made, field.name))
            named = type(value).__name__ in re.findall(r"\w+", str(field.type))
            kinds = (wanted, int, str) if wanted is type(None) else (wanted,)
            if (
                type(value) not in kinds
                and not (named and wanted is type(None))
                and not (value is None and "None" in str(field.type))
            ):
                wrong.append(f"{name}: {field.name} is {value!r}")
    return wrong
