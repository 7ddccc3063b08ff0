"""Byte and count arithmetic, and how both are written for people.

Units stand in names: ``_tokens``, ``_bytes``, ``_blocks``.
"""

from __future__ import annotations

import re
from typing import Final

from hybridkv.errors import ConfigError

KiB: Final = 1 << 10
MiB: Final = 1 << 20
GiB: Final = 1 << 30
TiB: Final = 1 << 40

_SUFFIX_BYTES: Final = {
    "": 1,
    "b": 1,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": KiB,
    "m": MiB,
    "g": GiB,
    "t": TiB,
}
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")

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
    """``ceil(a / b)`` for integers, ``b > 0``."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def dtype_name(dtype: object) -> str:
    """The canonical name of ``dtype``: a name, a torch dtype or a numpy dtype.

    Raises ConfigError for a dtype that no cache holds.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPE_BYTES:
        known = ", ".join(sorted(_DTYPE_BYTES))
        raise ConfigError(f"unknown cache dtype {name!r}: use one of {known}")
    return name


def dtype_bytes(dtype: object) -> int:
    """Bytes of one element of ``dtype``."""
    return _DTYPE_BYTES[dtype_name(dtype)]


def parse_bytes(text: str | int) -> int:
    """``"40GiB"``, ``"512 MiB"``, ``"1.5GB"`` or a plain count of bytes -> bytes.

    ``GiB`` and ``G`` are powers of 1024, ``GB`` a power of 1000.
    Raises ConfigError for anything else, zero and negative sizes included.
    """
    found = _SIZE.fullmatch(str(text))
    suffix = found.group(2).lower() if found else None
    if found is None or suffix not in _SUFFIX_BYTES:
        raise ConfigError(f"not a size: {text!r}; write it like 40GiB, 512MiB or 1000000")
    size_bytes = int(float(found.group(1)) * _SUFFIX_BYTES[suffix])
    if "." not in found.group(1):
        size_bytes = int(found.group(1)) * _SUFFIX_BYTES[suffix]
    if size_bytes <= 0:
        raise ConfigError(f"size must be positive, got {text!r}")
    return size_bytes


def format_bytes(size_bytes: int) -> str:
    """Bytes for people: the largest binary unit that leaves at least 1, two decimals at most."""
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{size_bytes} B"


def format_count(n: int) -> str:
    """A count with thousands separators."""
    return f"{n:,}"
