"""numpy arrays as CBOR typed arrays (RFC 8746), little-endian.

one dimension    tag 64 uint8 | 78 int32 | 79 int64 | 85 float32, around the bytes
two dimensions   tag 40 [[rows, columns], typed array], row after row

Truth values travel as uint8, 0 and 1: the RFC has no typed array of them.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from cbor2 import CBORTag
from numpy.typing import NDArray

from hybridkv.errors import WireError
from hybridkv.wire.codecs import mismatch

_MULTIDIMENSIONAL: Final = 40
_WIRE_FORMS: Final[dict[str, tuple[int, np.dtype[Any]]]] = {
    "bool": (64, np.dtype("u1")),
    "int32": (78, np.dtype("<i4")),
    "int64": (79, np.dtype("<i8")),
    "float32": (85, np.dtype("<f4")),
}
_MAX_DIMENSION: Final = (1 << 31) - 1


class Array:
    """An array of dtype ``name``, one of _WIRE_FORMS. shape: its dimensions, one or two; None is any length.

    ``pack`` copies the array's bytes and converts nothing: another dtype or shape is a WireError. ``unpack`` gives an
    array of its own memory, which may be written like that of a Step that never left its process. Both O(bytes).
    """

    def __init__(self, name: str, shape: tuple[int | None, ...] = (None,)) -> None:
        self._dtype: np.dtype[Any] = np.dtype(name)
        self._tag, self._wire = _WIRE_FORMS[name]
        self._shape = shape
        self._form = f"{name}[{', '.join('n' if size is None else str(size) for size in shape)}]"

    def pack(self, value: NDArray[Any]) -> object:
        """A tagged byte string."""
        if not isinstance(value, np.ndarray):
            raise mismatch(f"an array {self._form}", value)
        if value.dtype != self._dtype or not self._fits(value.shape):
            raise WireError(f"must be {self._form}, got {value.dtype}{list(value.shape)}")
        typed = CBORTag(self._tag, value.astype(self._wire, copy=False).tobytes())
        return typed if value.ndim == 1 else CBORTag(_MULTIDIMENSIONAL, [list(value.shape), typed])

    def unpack(self, item: object) -> NDArray[Any]:
        """The array, checked against dtype and shape."""
        if len(self._shape) == 1:
            return self._typed(item)
        dimensions, typed = self._pair(item)
        values = self._typed(typed)
        if not all(type(size) is int and 0 <= size <= _MAX_DIMENSION for size in dimensions):
            raise WireError(f"must be {self._form}, got dimensions that are no such numbers")
        if not self._fits(dimensions) or math.prod(dimensions) != len(values):
            raise WireError(f"must be {self._form}, got {len(values)} elements for {list(dimensions)}")
        return values.reshape(dimensions)

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self._shape) and all(
            wanted in (None, size) for wanted, size in zip(self._shape, shape, strict=True)
        )

    def _pair(self, item: object) -> tuple[tuple[Any, ...], object]:
        """Dimensions and typed array of a tag 40."""
        # what is inside of a tag comes as lists or as tuples, depending on cbor2's version
        value = item.value if isinstance(item, CBORTag) and item.tag == _MULTIDIMENSIONAL else None
        if not isinstance(value, list | tuple) or len(value) != 2 or not isinstance(value[0], list | tuple):
            raise mismatch(f"{self._form} as tag {_MULTIDIMENSIONAL} [dimensions, typed array]", item)
        return tuple(value[0]), value[1]

    def _typed(self, item: object) -> NDArray[Any]:
        if not isinstance(item, CBORTag) or item.tag != self._tag or type(item.value) is not bytes:
            tag = f" {item.tag}" if isinstance(item, CBORTag) else ""
            raise WireError(f"must be {self._form} as tag {self._tag} around bytes, got {type(item).__name__}{tag}")
        if len(item.value) % self._wire.itemsize:
            raise WireError(f"must be {self._form}, got {len(item.value)} bytes, no multiple of {self._wire.itemsize}")
        values: NDArray[Any] = np.frombuffer(item.value, self._wire)
        if self._dtype == np.bool_ and len(values) and values.max() > 1:
            raise WireError(f"must be {self._form}: bytes 0 and 1, got {values.max()}")
        own: NDArray[Any] = values.astype(self._dtype)
        return own
