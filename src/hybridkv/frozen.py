"""Fields of frozen dataclasses, checked where they are made: each is kept as the plain value that its check returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hybridkv.arguments import instance
from hybridkv.errors import ConfigError
from hybridkv.units import shown

T = TypeVar("T")

Check = Callable[[str, object], object]
"""As those of hybridkv.arguments: the value, or ConfigError that names it."""


def check_fields(owner: object, check: Check, *names: str) -> None:
    """The fields ``names`` of ``owner``, each as ``check`` makes of it."""
    for name in names:
        given = getattr(owner, name)
        value = check(name, given)
        if value is not given:
            object.__setattr__(owner, name, value)


def or_none(check: Check) -> Check:
    """``check`` for values that may be None."""
    return lambda name, value: None if value is None else check(name, value)


def one_of(wanted: type[T]) -> Callable[[str, object], T]:
    """A check for objects of class ``wanted``."""
    return lambda name, value: instance(name, value, wanted)


def each(check: Callable[[str, object], T]) -> Callable[[str, object], tuple[T, ...]]:
    """A check for lists and tuples of what ``check`` takes; made tuples. O(n)."""

    def checked(name: str, values: object) -> tuple[T, ...]:
        if not isinstance(values, list | tuple):
            raise ConfigError(f"{name} must be a list, got {shown(values)}")
        return tuple(check(name, one) for one in values)

    return checked
