"""Options that commands share are named once, and asked for as if each command named them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from hybridkv.cli.options import gathered


@dataclass(frozen=True)
class _Inner:
    deep: int = 3
    left_out: int = 4


@dataclass(frozen=True)
class _Outer:
    needed: str
    inner: _Inner = _Inner(5, 6)
    last: bool = False


def test_option_fields_round_trip_through_parameters() -> None:
    said = []

    def command(*, first: int = 1, outer: _Outer, other: str) -> None:
        said.append((first, outer, other))

    command.__annotations__ = {"first": int, "outer": _Outer, "other": str}
    flat = gathered(command, without=["left_out"])
    parameters = inspect.signature(flat).parameters
    assert list(parameters) == ["needed", "other", "first", "deep", "last"]
    assert [one.default for one in parameters.values()][2:] == [1, 5, False]
    assert parameters["deep"].annotation is int

    flat(first=7, needed="x", other="y", deep=8, last=True)
    assert said == [(7, _Outer("x", _Inner(8, 4), last=True), "y")]
