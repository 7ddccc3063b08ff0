"""Values as CBOR items and back: numbers, text, lists, and records with named fields.

A codec turns one kind of value into what cbor2 encodes (``pack``) and checks what cbor2 decoded (``unpack``). Both
raise WireError; a record puts the field's name in front of its message. What ``pack`` gives is a function of the value
alone, so equal values give equal bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np

from hybridkv.errors import ConfigError, WireError

T = TypeVar("T")

_MAX_BITS: Final = 256
"""More than any count or seed; Python refuses to print integers of some thousands of digits in a message."""


class Codec(Protocol[T]):
    """One kind of value."""

    def pack(self, value: T) -> object:
        """``value`` as an item for cbor2."""
        ...

    def unpack(self, item: object) -> T:
        """The value of an item that cbor2 decoded."""
        ...


def mismatch(wanted: str, got: object) -> WireError:
    """The error for an item of another kind. Names its type only: what a broken message holds may be huge."""
    return WireError(f"must be {wanted}, got {type(got).__name__}")


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

    def unpack(self, item: object) -> int:
        """An int; a CBOR boolean is none."""
        if type(item) is not int:
            raise mismatch("an integer", item)
        return self._checked(item)

    def _checked(self, value: int) -> int:
        if value.bit_length() > _MAX_BITS:
            raise WireError(f"must be an integer of at most {_MAX_BITS} bits")
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

    def unpack(self, item: object) -> float:
        """A float; what it may be is for the class that takes it to say."""
        if type(item) is not float:
            raise mismatch("a float", item)
        return item


class Boolean:
    """True or False."""

    def pack(self, value: bool) -> object:
        """A bool, from numpy's as well."""
        if not isinstance(value, bool | np.bool_):
            raise mismatch("true or false", value)
        return bool(value)

    def unpack(self, item: object) -> bool:
        """A bool."""
        if type(item) is not bool:
            raise mismatch("true or false", item)
        return item


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

    def unpack(self, item: object) -> str:
        """A str."""
        if type(item) is not str:
            raise mismatch("text", item)
        return item


class Digest:
    """A name of content: bytes, or a string that UTF-8 can hold; which of the two is part of it."""

    _text = Text()

    def pack(self, value: bytes | str) -> object:
        """Plain bytes or a plain str, not empty."""
        if isinstance(value, bytes):
            return self._named(bytes(value))
        self._text.pack(value)
        return self._named(str(value))

    def unpack(self, item: object) -> bytes | str:
        """Bytes or a str."""
        return self._named(item if type(item) is bytes else self._text.unpack(item))

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

    def unpack(self, item: object) -> T | None:
        """Null is None."""
        return None if item is None else self._codec.unpack(item)


class TupleOf(Generic[T]):
    """A tuple of any length, all of one kind; packs lists, too."""

    def __init__(self, codec: Codec[T]) -> None:
        self._codec = codec

    def pack(self, value: tuple[T, ...]) -> object:
        """A list."""
        if not isinstance(value, tuple | list):
            raise mismatch("a tuple", value)
        return [_at(f"[{i}]", self._codec.pack, one) for i, one in enumerate(value)]

    def unpack(self, item: object) -> tuple[T, ...]:
        """A tuple."""
        if type(item) is not list:
            raise mismatch("a list", item)
        return tuple(_at(f"[{i}]", self._codec.unpack, one) for i, one in enumerate(item))


class Record(Generic[T]):
    """An instance of the dataclass ``made``: a map from the names of ``fields`` to their values.

    check: raises WireError for an instance whose fields do not fit each other; asked on both ways, so that what packs
    unpacks. ``unpack`` raises WireError for a missing or unknown field as well, and for values that the class refuses.
    """

    def __init__(
        self, made: Callable[..., T], fields: Mapping[str, Codec[Any]], check: Callable[[T], None] | None = None
    ) -> None:
        self.fields: Final = dict(fields)
        self._made, self._check = made, check

    def pack(self, value: T) -> dict[str, object]:
        """A map."""
        items = {name: _at(name, codec.pack, getattr(value, name)) for name, codec in self.fields.items()}
        if self._check is not None:
            self._check(value)
        return items

    def unpack(self, item: object) -> T:
        """An instance, checked."""
        if type(item) is not dict:
            raise mismatch("a map", item)
        if item.keys() != self.fields.keys():
            raise WireError(_name_difference(self.fields.keys() - item.keys(), item.keys() - self.fields.keys()))
        values = {name: _at(name, codec.unpack, item[name]) for name, codec in self.fields.items()}
        try:
            made = self._made(**values)
        except ConfigError as error:
            raise WireError(str(error)) from None
        if self._check is not None:
            self._check(made)
        return made


def _at(place: str, function: Callable[[Any], T], value: object) -> T:
    """``function(value)``, an error of which says where it was."""
    try:
        return function(value)
    except WireError as error:
        raise WireError(f"{place}: {error}") from None


def _name_difference(missing: set[str], unknown: set[object]) -> str:
    """What is wrong with the fields of a map."""
    found = [f"lacks {name!r}" for name in sorted(missing)]
    found += sorted(f"has an unknown field {name[:40]!r}" for name in unknown if isinstance(name, str))
    found += ["has a field whose name is no text"] * any(not isinstance(name, str) for name in unknown)
    return ", ".join(found)
