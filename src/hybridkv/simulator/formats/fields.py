"""Fields of a record, checked one by one: a record is what a JSON object or a CSV row holds, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from hybridkv.units import MOST_COUNT, shown

MOST_SEGMENT: Final = (1 << 64) - 1

Record = Mapping[str, object]


class MalformedLineError(Exception):
    """What is wrong with a line; whoever knows file and line number says so in a TraceError."""


def field(record: Record, name: str) -> object:
    """That field."""
    if name not in record:
        raise MalformedLineError(f"the field {name!r} is missing")
    return record[name]


def listed(record: Record, name: str) -> list[object]:
    """A list."""
    value = field(record, name)
    if not isinstance(value, list):
        raise MalformedLineError(f"{name} must be a list, not {shown(value)}")
    return value


def text(record: Record, name: str) -> str:
    """Text, which may be empty."""
    value = field(record, name)
    if not isinstance(value, str):
        raise MalformedLineError(f"{name} must be text, not {shown(value)}")
    return value


def integer(value: object, what: str, most: int, *, least: int = 0) -> int:
    """An integer of ``least`` .. ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise MalformedLineError(f"{what} must be an integer, not {shown(value)}")
    if not least <= value <= most:
        raise MalformedLineError(f"{what} must lie in {least} .. {most}, got {shown(value)}")
    return value


def tokens(record: Record, name: str) -> int:
    """A number of tokens, at least 1."""
    value = integer(field(record, name), name, MOST_COUNT, least=-MOST_COUNT)
    if value < 1:
        raise MalformedLineError(f"{name} must be at least 1 token, got {value}")
    return value


def seconds_of_ms(record: Record) -> float:
    """``timestamp``: milliseconds in the line, seconds out."""
    return milliseconds(record, "timestamp") / 1000


def milliseconds(record: Record, name: str) -> float:
    """A time."""
    value = field(record, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedLineError(f"{name} must be a number of milliseconds, not {shown(value)}")
    # the bound keeps integers of any size out of float(), and sums of seconds exact to a microsecond
    if not (0 <= value < 1e15 and math.isfinite(value)):
        raise MalformedLineError(f"{name} must lie in 0 .. 1e15 milliseconds, got {shown(value)}")
    return value


def check_total(total: int) -> None:
    """That no request is longer than one may be."""
    if total > MOST_COUNT:
        raise MalformedLineError(f"a request of {total} tokens is longer than {MOST_COUNT}")
