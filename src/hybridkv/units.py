"""Byte and count arithmetic, and how both are written for people.

Units stand in names: ``_tokens``, ``_bytes``, ``_blocks``.
"""

from __future__ import annotations

import re
import reprlib
from fractions import Fraction
from typing import Final

from hybridkv.errors import ConfigError

KiB: Final = 1 << 10
MiB: Final = 1 << 20
GiB: Final = 1 << 30
TiB: Final = 1 << 40

_SUFFIX_BYTES: Final = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("ib", 1024), ("b", 1000), ("", 1024))
}
_SIZE: Final = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-zA-Z]*)\s*")

MOST_BYTES: Final = 1 << 62
"""Of a memory: byte offsets are int64."""

MOST_COUNT: Final = (1 << 31) - 1
"""Of tokens, blocks and whatever a model's config counts: ids and counts are int32."""


_DTYPE_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "fp8": 1,
    "uint8": 1,
    "int8": 1,
}


def ceil_div(a: int, b: int) -> int:
    """Return ``ceil(a / b)`` for integers, ``b > 0``."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def dtype_name(dtype: object) -> str:
    """Return the canonical name of ``dtype``: a name, a torch dtype or a numpy dtype.

    Raises ConfigError for a dtype that no cache holds.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPE_BYTES:
        known = ", ".join(sorted(_DTYPE_BYTES))
        raise ConfigError(f"unknown cache dtype {shown(name)}: use one of {known}")
    return name


def dtype_bytes(dtype: object) -> int:
    """Return the bytes of one element of ``dtype``."""
    return _DTYPE_BYTES[dtype_name(dtype)]


def parse_bytes(text: str | int) -> int:
    """Return the bytes of ``"40GiB"``, ``"512 MiB"``, ``"1.5GB"`` or a plain count.

    ``GiB`` and ``G`` are powers of 1024, ``GB`` a power of 1000. Raises ConfigError for anything else, for zero and
    negative sizes, and for more than MOST_BYTES.
    """
    found = _SIZE.fullmatch(digits(text) if type(text) is int else str(text))
    suffix = found.group(2).lower() if found else None
    if found is None or suffix not in _SUFFIX_BYTES:
        raise ConfigError(f"not a size: {shown(text)}; write it like 40GiB, 512MiB or 1000000")
    size_bytes = int(Fraction(found.group(1)) * _SUFFIX_BYTES[suffix])
    if size_bytes <= 0:
        raise ConfigError(f"size must be positive, got {shown(text)}")
    if size_bytes > MOST_BYTES:
        raise ConfigError(f"size must be at most {format_bytes(MOST_BYTES)}, got {shown(text)}")
    return size_bytes


def format_bytes(size_bytes: int) -> str:
    """Return a readable size: the largest binary unit that leaves at least 1, with two decimals at most."""
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{size_bytes} B"


def shown(value: object) -> str:
    """Return a value as messages show it, cut where it is long or deep."""
    return _SHORT.repr(value)


def digits(number: int) -> str:
    """Return the number as text, or its number of digits: ``str`` rejects integers of thousands of digits."""
    return str(number) if number.bit_length() < 128 else "a number of over 38 digits"


class _Short(reprlib.Repr):
    """Limits lengths and depth, of integers too."""

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002  # the signature of reprlib
        """Return the decimal digits, if they are few."""
        return digits(x)


_SHORT: Final = _Short()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 3


def format_count(n: int) -> str:
    """Return a count with thousands separators."""
    return f"{n:,}"
