"""What a caller knows of when a prefix is wanted again: it says what is worth keeping, never what is right."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Final, Self

from hybridkv.arguments import check_fields, flag, integer, or_none, real
from hybridkv.errors import ConfigError
from hybridkv.units import MOST_COUNT, shown

_MOST_SECONDS: Final = 1e9


@dataclass(frozen=True, slots=True)
class Hints:
    """over: nobody goes on from here. goes_on: its session does, at the request's marks or, without any, at its end.

    within_s: so many seconds from now, which says that it goes on. shared_tokens: with so many of the prompt's first
    tokens many requests begin, whoever asks; a mark. scratch: nothing of it, but for those, is worth keeping.
    secret: nothing of it is kept for reuse at all, its blocks are found by nobody.
    ConfigError for what is none of it, and for hints that contradict each other.
    """

    over: bool = False
    goes_on: bool = False
    within_s: float | None = None
    shared_tokens: int = 0
    scratch: bool = False
    secret: bool = False

    def __post_init__(self) -> None:
        check_fields(self, flag, "over", "goes_on", "scratch", "secret")
        check_fields(self, partial(integer, least=0, most=MOST_COUNT), "shared_tokens")
        check_fields(self, or_none(real), "within_s")
        if self.within_s is not None:
            if not 0 <= self.within_s <= _MOST_SECONDS:
                raise ConfigError(f"within_s must lie in 0 .. {_MOST_SECONDS:g} seconds, got {self.within_s}")
            object.__setattr__(self, "goes_on", True)
        ends = [name for name in ("over", "scratch", "secret") if getattr(self, name)]
        if self.goes_on and ends:
            raise ConfigError(f"hints say that a session goes on, and that it is {ends[0]}: leave one of them out")
        if self.shared_tokens and self.secret:
            raise ConfigError("hints say that a prompt's beginning is shared, and that it is secret: leave one out")

    @classmethod
    def parse(cls, given: object) -> Self:
        """Those of an object by its fields, such as {"within_s": 30}. ConfigError for what is none."""
        if not isinstance(given, dict):
            raise ConfigError(f"hints must be an object, not {shown(given)}")
        known = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(f"hints have no field {shown(unknown[0])}: use {', '.join(known)}")
        return cls(**given)


NO_HINTS: Final = Hints()
