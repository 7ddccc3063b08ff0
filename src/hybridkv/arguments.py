"""Check arguments: numbers, text, flags, arrays of integers, objects of a class.

Each check returns the value in the type that is stored: for example, it converts numpy numbers to Python numbers. If
the value is wrong, the check raises ConfigError with the name of the argument. Code after a check trusts the value.
``check_types`` checks the fields of a frozen dataclass by their annotations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.units import MOST_COUNT, shown

T = TypeVar("T")


def integer(name: str, value: object, least: float = -math.inf, most: float = math.inf) -> int:
    """Check that ``value`` is an integer from ``least`` to ``most``, and not a boolean."""
    if type(value) is not int:  # fast path: isinstance with Integral costs more than the rest of this function
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ConfigError(f"{name} must be an integer, got {shown(value)}")
        value = int(value)
    if not least <= value <= most:
        raise ConfigError(f"{name} must {_bound(value, least, most)}, got {shown(value)}")
    return value


def _bound(value: int, least: float, most: float) -> str:
    """Return the bound that ``value`` violates, in words."""
    if value > most:
        return f"be at most {most}"
    return f"be at least {least}" if least else "not be negative"


def real(name: str, value: object) -> float:
    """Check that ``value`` is a finite number that a float can hold, and not a boolean."""
    if type(value) is float and math.isfinite(value):  # fast path
        return value
    if type(value) is int or (not isinstance(value, bool) and isinstance(value, Real)):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise ConfigError(f"{name} must be a number, and finite, got {shown(value)}")


def text(name: str, value: object) -> str:
    """Check that ``value`` is text, not empty, and without lone surrogates, which UTF-8 cannot hold."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be text, and not empty, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} must be text that UTF-8 can hold ({error.reason}), got {shown(value)}") from None
    return str(value)


def flag(name: str, value: object) -> bool:
    """Check that ``value`` is a boolean of Python or numpy."""
    if type(value) is not bool and not isinstance(value, np.bool_):
        raise ConfigError(f"{name} must be true or false, got {shown(value)}")
    return bool(value)


def instance(name: str, value: object, wanted: type[T]) -> T:
    """Check that ``value`` is an object of class ``wanted``."""
    if not isinstance(value, wanted):
        raise ConfigError(f"{name} must be a {wanted.__name__}, got {shown(value)}")
    return value


def instances(name: str, values: object, wanted: type[T]) -> Sequence[T]:
    """Check that ``values`` is a sequence of objects of class ``wanted``; return it unchanged. O(n)."""
    if isinstance(values, (list, tuple)) and {wanted}.issuperset(map(type, values)):
        return values  # fast path: a tenth of the time of the loop below
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ConfigError(f"{name} must be a list of {wanted.__name__} objects, got {shown(values)}")
    for one in values:
        if not isinstance(one, wanted):
            raise ConfigError(f"each of {name} must be a {wanted.__name__}, got {shown(one)}")
    return values


def integers(name: str, values: object, least: int, most: int = MOST_COUNT) -> NDArray[np.int64]:
    """Check that ``values``, an array or sequence, holds integers from ``least`` to ``most``; return int64[n]. O(n)."""
    if not isinstance(values, np.ndarray):
        if isinstance(values, str | bytes | bytearray) or not isinstance(values, Sequence):
            raise ConfigError(f"{name} must be a list or array of integers, got {shown(values)}")
        values = np.array([integer(name, one, least, most) for one in values], np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ConfigError(f"{name} must be a one-dimensional integer array, got {values.dtype}{list(values.shape)}")
    if values.size and not (least <= np.minimum.reduce(values) and np.maximum.reduce(values) <= most):
        wrong = values[(values < least) | (values > most)]
        raise ConfigError(f"{name} must lie in {least} .. {most}, got {wrong[0]}")
    return values.astype(np.int64, copy=False)


# -- fields of frozen dataclasses

Check = Callable[[str, object], Any]
"""A function of a name and a value. It returns the value to store, or raises ConfigError with the name."""


def check_types(owner: Any) -> None:  # noqa: ANN401  # an object of any frozen dataclass
    """Check every field of ``owner``, a frozen dataclass, by its annotation, and store the checked values.

    ``int`` accepts integers, ``tuple[X, ...]`` a list or tuple of X, and a class its objects. ``Annotated`` names
    another check.
    """
    for name, check in _checks(owner.__class__).items():
        check_fields(owner, check, name)


@cache
def _checks(owner: type) -> dict[str, Check]:
    """Return the check of each field of the dataclass ``owner``."""
    hints = get_type_hints(owner, include_extras=True)
    return {field.name: _check_of(hints[field.name]) for field in fields(owner)}


def _check_of(kind: Any) -> Check:  # noqa: ANN401  # a type or an object of typing, such as a union
    """Return the check for values of ``kind``."""
    if get_origin(kind) is Annotated:
        check: Check = kind.__metadata__[0]
        return check
    inner = get_args(kind)
    if NoneType in inner:
        return or_none(_check_of(inner[0]))
    if get_origin(kind) is tuple:
        return each(_check_of(inner[0]))
    numbers: dict[type, Check] = {int: integer, float: real, bool: flag}
    return numbers.get(kind) or one_of(kind)


def check_fields(owner: object, check: Check, *names: str) -> None:
    """Check the fields ``names`` of ``owner``, a frozen dataclass, with ``check``, and store the checked values."""
    for name in names:
        given = getattr(owner, name)
        value = check(name, given)
        if value is not given:
            object.__setattr__(owner, name, value)


def at_least(least: int) -> Check:
    """Return a check for integers of ``least`` or more."""
    return lambda name, value: integer(name, value, least)


Count = Annotated[int, at_least(0)]
"""Annotation of integers of at least 0, for ``check_types``."""
Positive = Annotated[int, at_least(1)]
"""Annotation of integers of at least 1, for ``check_types``."""


def or_none(check: Check) -> Check:
    """Return a check that accepts ``None`` and the values that ``check`` accepts."""
    return lambda name, value: None if value is None else check(name, value)


def one_of(wanted: type[T]) -> Callable[[str, object], T]:
    """Return a check for objects of class ``wanted``."""
    return lambda name, value: instance(name, value, wanted)


def each(check: Callable[[str, object], T]) -> Callable[[str, object], tuple[T, ...]]:
    """Return a check for lists and tuples of values that ``check`` accepts. It returns a tuple. O(n)."""

    def checked(name: str, values: object) -> tuple[T, ...]:
        if not isinstance(values, list | tuple):
            raise ConfigError(f"{name} must be a list, got {shown(values)}")
        return tuple(check(name, one) for one in values)

    return checked
