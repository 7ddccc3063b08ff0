"""Values as CBOR items and back: numbers, text, lists, and records with named fields.

A codec turns one kind of value into what cbor2 encodes (``pack``), and reads that kind alone from the bytes of a
message (``read``): what the schema has not is refused where it begins. Both raise WireError; a record puts the field's
name in front of its message. What ``pack`` gives is a function of the value alone, and ``read`` takes canonical bytes
alone, so equal values and equal bytes are one. ``read`` is O(bytes) in time and memory.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar

import cbor2
import numpy as np

from hybridkv.errors import ConfigError, WireError
from hybridkv.wire.reader import BYTES, MAP, NEGATIVE, TEXT, UNSIGNED, Reader, not_canonical

T = TypeVar("T")
_Field = tuple[bytes, int, str, Callable[[Reader], Any] | None]
"""Of a record: its name as bytes (and the text of a mark), how many, its name, how its value is read."""

_MAX_BITS: Final = 256
"""More than any count or seed; Python refuses to print integers of some thousands of digits in a message."""
_MOST: Final = (1 << _MAX_BITS) - 1
_TOO_LONG: Final = f"must be an integer of at most {_MAX_BITS} bits"
_MAX_SAID: Final = 400
"""Characters of what a class says of a value that it refuses: it may name all of one that is huge."""


_BIG: Final = {b"\xc2": UNSIGNED, b"\xc3": NEGATIVE}
"""Tags 2 and 3, around the bytes of an integer beyond 64 bits."""
_FLOATS: Final = {0xF9: struct.Struct(">e"), 0xFA: struct.Struct(">f"), 0xFB: struct.Struct(">d")}
_SHORTER: Final = {0xFA: struct.Struct(">e"), 0xFB: struct.Struct(">f")}
_NAN: Final = b"\xf9\x7e\x00"


class Codec(Protocol[T]):
    """One kind of value."""

    def pack(self, value: T) -> object:
        """``value`` as an item for cbor2."""
        ...

    def read(self, reader: Reader) -> T:
        """The value that is next in a message, which is passed."""
        ...


def mismatch(wanted: str, got: object) -> WireError:
    """The error for a value of another kind. Names its type only: it may be huge."""
    return WireError(f"must be {wanted}, got {type(got).__name__}")


def unexpected(wanted: str, reader: Reader) -> WireError:
    """The error for a message in which something else is next."""
    return WireError(f"must be {wanted}, got {reader.kind()}")


class Integer:
    """An integer of at most _MAX_BITS bits, at least ``minimum`` if there is one. Packs numpy's integers, too."""

    def __init__(self, minimum: int | None = None) -> None:
        self._minimum = minimum

    def pack(self, value: int) -> object:
        """An int."""
        try:
            return self._checked(operator.index(value))
        except TypeError:
            raise mismatch("an integer", value) from None

    def read(self, reader: Reader) -> int:
        """An int; a CBOR boolean is none."""
        number = reader.take(UNSIGNED)
        if number < 0:
            number = self._below_zero_or_big(reader)
        if self._minimum is not None and number < self._minimum:
            raise WireError(f"must be {self._minimum} or more")
        return number

    @staticmethod
    def _below_zero_or_big(reader: Reader) -> int:
        argument = reader.take(NEGATIVE)
        if argument >= 0:
            return -1 - argument
        sign = _BIG.get(reader.data[reader.at : reader.at + 1])
        if sign is None:
            raise unexpected("an integer", reader)
        reader.at += 1
        size = reader.take(BYTES)
        if size < 0:
            raise unexpected("an integer", reader)
        if size > _MAX_BITS // 8:
            raise WireError(_TOO_LONG)
        digits = reader.data[reader.pass_over(size) : reader.at]
        if size <= 8 or not digits[0]:
            raise not_canonical("an integer longer than its number")
        number = int.from_bytes(digits, "big")
        if sign == UNSIGNED:
            return number
        if number == _MOST:
            raise WireError(_TOO_LONG)  # its negative has one bit more
        return -1 - number

    def _checked(self, value: int) -> int:
        if value.bit_length() > _MAX_BITS:
            raise WireError(_TOO_LONG)
        if self._minimum is not None and value < self._minimum:
            raise WireError(f"must be {self._minimum} or more")
        return value


class Real:
    """A float. Packs any real number that a float holds exactly, as that float."""

    def pack(self, value: float) -> object:
        """A float."""
        if not isinstance(value, float | int | np.floating | np.integer):
            raise mismatch("a number", value)
        try:
            as_float = float(value)
        except OverflowError:
            raise WireError("must fit a 64-bit float") from None
        if as_float != value:
            raise WireError("must be a number that a 64-bit float holds exactly, and not NaN")
        return as_float

    def read(self, reader: Reader) -> float:
        """A float; what it may be is for the class that takes it to say."""
        begin = reader.at
        form = _FLOATS.get(reader.data[begin]) if begin < len(reader.data) else None
        if form is None:
            raise unexpected("a float", reader)
        reader.pass_over(1 + form.size)
        number: float = form.unpack_from(reader.data, begin + 1)[0]
        if number != number:  # noqa: PLR0124  # NaN
            shortest = reader.data[begin : reader.at] == _NAN
        else:
            shortest = not _fits(number, _SHORTER.get(reader.data[begin]))
        if not shortest:
            raise not_canonical("a float longer than its number")
        return number


def _fits(number: float, form: struct.Struct | None) -> bool:
    """Whether ``number`` survives ``form``, if there is one."""
    try:
        return form is not None and form.unpack(form.pack(number))[0] == number
    except OverflowError:
        return False


class Boolean:
    """True or False."""

    def pack(self, value: bool) -> object:
        """A bool, from numpy's as well."""
        if not isinstance(value, bool | np.bool_):
            raise mismatch("true or false", value)
        return bool(value)

    def read(self, reader: Reader) -> bool:
        """A bool."""
        item = reader.data[reader.at : reader.at + 1]
        if item not in (b"\xf4", b"\xf5"):
            raise unexpected("true or false", reader)
        reader.at += 1
        return item == b"\xf5"


class Text:
    """A string that UTF-8 can hold."""

    def pack(self, value: str) -> object:
        """A plain str; lone surrogates are refused, since no byte string stands for them."""
        if not isinstance(value, str):
            raise mismatch("text", value)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise WireError(f"must be text that UTF-8 can hold ({error.reason})") from None
        return str(value)

    def read(self, reader: Reader) -> str:
        """A str."""
        item = reader.take_bytes(TEXT)
        if item is None:
            raise unexpected("text", reader)
        try:
            return item.decode()
        except UnicodeDecodeError as error:
            raise WireError(f"must be text in UTF-8 ({error.reason})") from None


class Digest:
    """A name of content: bytes, or a string that UTF-8 can hold; which of the two is part of it."""

    _text = Text()

    def pack(self, value: bytes | str) -> object:
        """Plain bytes or a plain str, not empty."""
        if isinstance(value, bytes):
            return self._named(bytes(value))
        self._text.pack(value)
        return self._named(str(value))

    def read(self, reader: Reader) -> bytes | str:
        """Bytes or a str."""
        item = reader.take_bytes(BYTES)
        return self._named(self._text.read(reader) if item is None else item)

    @staticmethod
    def _named(value: bytes | str) -> bytes | str:
        if not value:
            raise WireError("must be bytes or text that names something, and is empty")
        return value


class Nullable(Generic[T]):
    """A value or null."""

    def __init__(self, codec: Codec[T]) -> None:
        self._codec = codec

    def pack(self, value: T | None) -> object:
        """None is null."""
        return None if value is None else self._codec.pack(value)

    def read(self, reader: Reader) -> T | None:
        """Null is None."""
        if not reader.data.startswith(b"\xf6", reader.at):
            return self._codec.read(reader)
        reader.at += 1
        return None


class TupleOf(Generic[T]):
    """A tuple of any length, all of one kind; packs lists, too."""

    def __init__(self, codec: Codec[T]) -> None:
        self._codec = codec

    def pack(self, value: tuple[T, ...]) -> object:
        """A list."""
        if not isinstance(value, tuple | list):
            raise mismatch("a tuple", value)
        return [_at(f"[{i}]", self._codec.pack, one) for i, one in enumerate(value)]

    def read(self, reader: Reader) -> tuple[T, ...]:
        """A tuple. WireError for more items than all lists of a message may have."""
        length, read = reader.take_list(), self._codec.read
        if length < 0:
            raise unexpected("a list", reader)
        items: list[T] = []
        try:
            for _ in range(length):
                items.append(read(reader))  # noqa: PERF401  # how many there are is the place of the error
        except WireError as error:
            raise WireError(f"[{len(items)}]: {error}") from None
        return tuple(items)


class Local:
    """What stays in its process: anything but the value that a record leaves out. why: said where it is sent."""

    def __init__(self, why: str) -> None:
        self._why = why

    def pack(self, _: object) -> NoReturn:
        """WireError."""
        raise WireError(self._why)

    def read(self, _: Reader) -> NoReturn:
        """WireError."""
        raise WireError(self._why)


class Record(Generic[T]):
    """An instance of the dataclass ``made``: a map from the names of ``fields`` to their values.

    marks: names and texts that every such map has as well, and ``made`` is not told.
    later: fields that a map has only where they are not the value beside their codec, so that older ones read the rest.
    check: raises WireError for an instance whose fields do not fit each other; asked on both ways, so that what packs
    is read. ``read`` raises WireError for a missing or unknown field as well, and for values that the class refuses.
    """

    def __init__(
        self,
        made: Callable[..., T],
        fields: Mapping[str, Codec[Any]],
        check: Callable[[T], None] | None = None,
        marks: Mapping[str, str] | None = None,
        later: Mapping[str, tuple[Codec[Any], object]] | None = None,
    ) -> None:
        self.fields: Final = dict(fields)
        self._made, self._check, self._marks = made, check, dict(marks or {})
        self._later = dict(later or {})
        self._order = self._ordered({**self.fields, **dict.fromkeys(self._marks)})
        codecs = {name: codec for name, (codec, _) in self._later.items()}
        self._whole_order = self._ordered({**self.fields, **dict.fromkeys(self._marks), **codecs})

    def _ordered(self, names: Mapping[str, Codec[Any] | None]) -> list[_Field]:
        """In the order of 4.2.1."""
        found: list[_Field] = []
        for key, name in sorted((cbor2.dumps(name), name) for name in names):
            codec = names[name]
            whole = key if codec is not None else key + cbor2.dumps(self._marks[name])
            found.append((whole, len(whole), name, None if codec is None else codec.read))
        return found

    def pack(self, value: T) -> dict[str, object]:
        """A map."""
        items = {name: _at(name, codec.pack, getattr(value, name)) for name, codec in self.fields.items()}
        for name, (codec, absent) in self._later.items():
            if (one := getattr(value, name)) != absent:
                items[name] = _at(name, codec.pack, one)
        if self._check is not None:
            self._check(value)
        return {**self._marks, **items}

    def read(self, reader: Reader) -> T:
        """An instance, checked."""
        length = reader.take(MAP)
        if length < 0:
            raise unexpected("a map", reader)
        begin = reader.at
        values = self._values(reader, self._order if length == len(self._order) else self._whole_order)
        if values is None or len(values) + len(self._marks) != length:
            reader.at = begin
            raise self._misnamed(reader, length)
        try:
            made = self._made(**values)
        except ConfigError as error:
            raise WireError(str(error)[:_MAX_SAID]) from None
        if self._check is not None:
            self._check(made)
        return made

    def _values(self, reader: Reader, order: Sequence[_Field]) -> dict[str, Any] | None:
        """Values by name; None where a field lacks that must be there."""
        data, name, values = reader.data, "", dict[str, Any]()
        try:
            for key, size, name, read in order:
                if not data.startswith(key, reader.at):
                    if name in self._later:
                        continue
                    return None
                reader.at += size
                if read is not None:
                    values[name] = read(reader)
            for name in self._later.keys() & values.keys() if self._later else ():
                if values[name] == self._later[name][1]:
                    raise not_canonical("a field that says what its absence says")
        except WireError as error:
            raise WireError(f"{name}: {error}") from None
        return values

    def _misnamed(self, reader: Reader, length: int) -> WireError:
        """What is wrong with the names of a map of ``length`` fields, the first of which is next. O(its items)."""
        missing, unknown, last = {name for _, _, name, _ in self._order}, "", b""
        known = missing | set(self._later)
        for _ in range(length):
            begin = reader.at
            name = reader.take_bytes(TEXT)
            if name is None:
                return WireError("has a field whose name is no text")
            if (key := reader.data[begin : reader.at]) <= last:
                return not_canonical("a field out of order, or twice")
            text, last = name.decode(errors="replace"), key
            if text not in known:
                unknown = unknown or text[:40]
            missing.discard(text)
            reader.skip()
        found = [f"lacks {name!r}" for name in sorted(missing)] + [f"has an unknown field {unknown!r}"] * bool(unknown)
        return WireError(", ".join(found) or "has another mark")


def _at(place: str, function: Callable[[Any], T], value: object) -> T:
    """``function(value)``, an error of which says where it was."""
    try:
        return function(value)
    except WireError as error:
        raise WireError(f"{place}: {error}") from None
