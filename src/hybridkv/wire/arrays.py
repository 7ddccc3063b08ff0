"""numpy arrays as CBOR typed arrays (RFC 8746), little-endian.

    one dimension    tag 64 uint8 | 78 int32 | 79 int64 | 85 float32 | 86 float64, around the bytes
    two dimensions   tag 40 [[rows, columns], typed array], row after row

Truth values travel as uint8, 0 and 1: the RFC has no typed array of them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from cbor2 import CBORTag
from numpy.typing import NDArray

from hybridkv.errors import WireError
from hybridkv.wire.codecs import mismatch, unexpected
from hybridkv.wire.reader import BYTES, LIST, UNSIGNED, Reader

_MULTIDIMENSIONAL: Final = 40
_MULTIDIMENSIONAL_HEAD: Final = bytes((0xD8, _MULTIDIMENSIONAL))  # a tag of one more byte
_WIRE_FORMS: Final[dict[str, tuple[int, np.dtype[Any]]]] = {
    "bool": (64, np.dtype("u1")),
    "int32": (78, np.dtype("<i4")),
    "int64": (79, np.dtype("<i8")),
    "float32": (85, np.dtype("<f4")),
    "float64": (86, np.dtype("<f8")),
}
_MAX_DIMENSION: Final = (1 << 31) - 1


class Array:
    """An array of dtype ``name``, one of _WIRE_FORMS. shape: its dimensions, one or two; None is any length.

    ``pack`` copies the array's bytes and converts nothing: another dtype or shape is a WireError. ``read`` gives an
    array of its own memory, which may be written like that of a Step that never left its process; what dimensions and
    lengths claim is compared with the bytes that are there before any is made. Both O(bytes).
    """

    def __init__(self, name: str, shape: tuple[int | None, ...] = (None,)) -> None:
        self._dtype: np.dtype[Any] = np.dtype(name)
        self._tag, self._wire = _WIRE_FORMS[name]
        self._head = bytes((0xD8, self._tag))
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

    def read(self, reader: Reader) -> NDArray[Any]:
        """The array, checked against dtype and shape."""
        if len(self._shape) == 1:
            return self._typed(reader)
        shape = self._dimensions(reader)
        values = self._typed(reader)
        if not self._fits(shape) or shape[0] * shape[1] != len(values):
            raise WireError(f"must be {self._form}, got {len(values)} elements for {list(shape)}")
        return values.reshape(shape)

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self._shape) and all(
            wanted in (None, size) for wanted, size in zip(self._shape, shape, strict=True)
        )

    def _dimensions(self, reader: Reader) -> tuple[int, int]:
        """Rows and columns of a tag 40; what follows is its typed array."""
        form = f"{self._form} as tag {_MULTIDIMENSIONAL} [dimensions, typed array]"
        if not reader.data.startswith(_MULTIDIMENSIONAL_HEAD, reader.at):
            raise unexpected(form, reader)
        reader.at += len(_MULTIDIMENSIONAL_HEAD)
        if reader.take(LIST) != 2 or (count := reader.take(LIST)) < 0:
            raise WireError(f"must be {form}, got something else in it")
        if count != 2:
            raise WireError(f"must be {self._form}, got {count} dimensions")
        rows, columns = reader.take(UNSIGNED), reader.take(UNSIGNED)
        if not (0 <= rows <= _MAX_DIMENSION and 0 <= columns <= _MAX_DIMENSION):
            raise WireError(f"must be {self._form}, got dimensions that are no such numbers")
        return rows, columns

    def _typed(self, reader: Reader) -> NDArray[Any]:
        if not reader.data.startswith(self._head, reader.at):
            raise unexpected(f"{self._form} as tag {self._tag} around bytes", reader)
        reader.at += len(self._head)
        size = reader.take(BYTES)
        if size < 0:
            raise WireError(f"must be {self._form} as tag {self._tag} around bytes, got it around {reader.kind()}")
        count, rest = divmod(size, self._wire.itemsize)
        if rest:
            raise WireError(f"must be {self._form}, got {size} bytes, no multiple of {self._wire.itemsize}")
        begin = reader.pass_over(size)
        if not count:  # numpy takes no empty piece of a buffer
            return np.empty(0, self._dtype)
        values: NDArray[Any] = np.frombuffer(reader.data, self._wire, count, begin)
        if self._dtype == np.bool_ and values.max() > 1:
            raise WireError(f"must be {self._form}: bytes 0 and 1, got {values.max()}")
        own: NDArray[Any] = values.astype(self._dtype)
        return own
