"""Ends as a ranking knows them, and what a ranking answers.

PROMPT    before the last token of a prompt          BRANCH    where requests went different ways, or a mark
OUTPUT    where a request ended                      GRID      any other place that a placement asks for

and what hints promise of them:

NOTHING   no hint, or none that concerns it          NEVER     its session is over, or goes on elsewhere
BY_ALL    it is within what many begin with          SOMETIME  its session goes on from here
WITHIN    and those above: within 4, 16, 64 ... seconds

What an end is made as: its kind, and what hints promise of it (docs/design/0026).

A promise is a class of its own for what learns, with a rate to begin with; what its like have done outweighs that.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, Protocol

from hybridkv.request import NO_HINTS, Hints, Request

NOTHING: Final = 0
NEVER: Final = 1
BY_ALL: Final = 2
SOMETIME: Final = 3
WITHIN: Final = 4

_SHORTEST_GAP: Final = 1e-3
"""Seconds between two hits: at less they count as this."""


class Kind(IntEnum):
    """See the module."""

    PROMPT = 0
    OUTPUT = 1
    BRANCH = 2
    GRID = 3


class End:
    """An end, kept or remembered (a ghost).

    tokens: of the prefix. serial: in the order in which ends were first made. used: when it was kept or last hit.
    hits: so far. log_gap: of the natural logarithm of the seconds between hits, the mean of which the last counts half;
    0.0 before the first. session_gap: seconds that its session had paused when it was made, None where it was new.
    saved: tokens that it saves a byte, those behind the nearest kept end before it. tenant: by number, whose memory it
    takes. promise: see the module. awaited: a request that waits goes on from it.
    """

    __slots__ = (
        "awaited",
        "hits",
        "kind",
        "log_gap",
        "promise",
        "saved",
        "serial",
        "session_gap",
        "tenant",
        "tokens",
        "used",
    )

    def __init__(  # noqa: PLR0917 - what an end is
        self, serial: int, kind: Kind, tokens: int, used: float, session_gap: float | None, tenant: int = 0
    ) -> None:
        self.serial = serial
        self.kind = kind
        self.tokens = tokens
        self.used = used
        self.session_gap = session_gap
        self.hits = 0
        self.log_gap = 0.0
        self.saved = 0.0
        self.promise = NOTHING
        self.awaited = False
        self.tenant = tenant

    def note_hit(self, now: float) -> None:
        """It is used now."""
        gap = math.log(max(now - self.used, _SHORTEST_GAP))
        self.log_gap = (self.log_gap + gap) / 2 if self.hits else gap
        self.hits += 1
        self.used = now


class Ring:
    """Ends in the order of their last use. O(log n) in Python, and a shift of the list."""

    __slots__ = ("_ends", "_keys")

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._ends: dict[int, End] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, end: End) -> bool:
        return end.serial in self._ends

    def add(self, end: End) -> bool:
        """``end``, which is in no ring. Whether it is the first or the last one now."""
        keys, key = self._keys, (end.used, end.serial)
        self._ends[end.serial] = end
        if not keys or keys[-1] < key:  # as nearly always
            keys.append(key)
            return True
        place = bisect_left(keys, key)
        keys.insert(place, key)
        return not place

    def remove(self, end: End) -> bool:
        """``end``, whose last use has not changed since it was added. Whether it was the first or the last one."""
        keys = self._keys
        place = bisect_left(keys, (end.used, end.serial))
        del keys[place], self._ends[end.serial]
        return not place or place == len(keys)

    def is_outer(self, end: End) -> bool:
        """Whether ``end``, one of them, is the first or the last."""
        return end.serial in {self._keys[0][1], self._keys[-1][1]}

    def ends(self) -> Iterator[End]:
        """All of them, in no order."""
        return iter(self._ends.values())

    def first(self) -> End:
        """Used longest ago."""
        return self._ends[self._keys[0][1]]

    def both_ends(self) -> tuple[End, ...]:
        """The one used longest ago, and the one used last, if that is another."""
        keys, ends = self._keys, self._ends
        if len(keys) == 1:
            return (ends[keys[0][1]],)
        return ends[keys[0][1]], ends[keys[-1][1]]


class Ranking(Protocol):
    """Which kept end goes next. ``now``: seconds, never less than before.

    An end changes between ``remove`` and ``add`` only. Only ``kept`` and ``hit`` change when it was used.
    """

    def note_request(self, now: float) -> None:
        """One more request begins."""
        ...

    def add(self, end: End, now: float) -> None:
        """``end`` is kept, and may be given up."""
        ...

    def remove(self, end: End) -> None:
        """``end``, added before, may not be given up, or is kept no longer."""
        ...

    def kept(self, end: End, now: float) -> None:
        """``end``, a ghost or new and not added now, is kept from now on: it is used now, and a new age begins."""
        ...

    def hit(self, end: End, now: float) -> None:
        """``end``, not added now, was hit, or would have been; its ``used`` is that before."""
        ...

    def promised(self, end: End, promise: int, now: float) -> None:
        """``promise`` is what hints say of ``end``, not added now, from now on."""
        ...

    def given_up(self, end: End, parent: End | None, now: float, *, declined: bool) -> None:
        """``end`` is kept no longer, or was declined. parent: the kept end that serves its requests now."""
        ...

    def forget(self, end: End, now: float) -> None:
        """``end``, a ghost, is remembered no longer."""
        ...

    def lowest(self, now: float) -> End | None:
        """The end to give up next, None where there is none."""
        ...

    def prefers(self, end: End, other: End, now: float) -> bool:
        """Whether ``other``, which is kept, is to be given up for ``end``."""
        ...

    def check(self) -> list[str]:
        """A line for each thing kept that is not what it would be when made anew. O(ends)."""
        ...


_BASE: Final = 4.0
_MOST: Final = 11
_KINDS: Final = len(Kind)


def kind_of(request: Request, tokens: int, *, ended: bool) -> Kind:
    """Of the end at ``tokens`` of ``request``. ended: it ends there."""
    if ended:
        return Kind.OUTPUT
    if tokens == request.branch_tokens or tokens in request.marks:
        return Kind.BRANCH
    return Kind.PROMPT if tokens == request.num_prompt_tokens - 1 else Kind.GRID


def promise_of(request: Request, tokens: int) -> int:
    """What is promised of the end at ``tokens`` of ``request``. O(marks)."""
    hints = request.hints
    if hints is NO_HINTS:
        return NOTHING
    if tokens <= hints.shared_tokens:
        return BY_ALL
    if tokens in request.marks:
        return of_session(hints)
    if tokens == request.branch_tokens:
        return NOTHING
    elsewhere = hints.goes_on and any(mark > hints.shared_tokens for mark in request.marks)
    return NEVER if elsewhere else of_session(hints)


def of_session(hints: Hints) -> int:
    """What is promised of where a session goes on."""
    if hints.over or hints.scratch:
        return NEVER
    if hints.within_s is not None:
        return WITHIN + _step_of(hints.within_s)
    return SOMETIME if hints.goes_on else NOTHING


def _step_of(seconds: float) -> int:
    step, bound = 0, _BASE
    while seconds > bound and step < _MOST:
        step, bound = step + 1, bound * _BASE
    return step


def is_of_session(promise: int) -> bool:
    """Whether it holds for one session, which keeps it by going on."""
    return promise not in {NOTHING, BY_ALL}


def in_words(promise: int) -> str:
    """What hints said, as they are named."""
    if promise >= WITHIN:
        return f"within {_BASE ** (1 + promise - WITHIN):.0f} s"
    return {NOTHING: "", NEVER: "never", BY_ALL: "by all", SOMETIME: "some time"}[promise]


# -- as part of a class


def class_kind(kind: Kind, promise: int) -> int:
    """One number for both."""
    return int(kind) + _KINDS * promise


def parts_of(number: int) -> tuple[Kind, int]:
    """Kind and promise of a ``class_kind``."""
    return Kind(number % _KINDS), number // _KINDS


def is_promised(number: int) -> bool:
    """Whether anything is promised of ends of ``class_kind`` ``number``."""
    return number >= _KINDS


def promised_rate(number: int, usual: float, age: float) -> float:
    """Hits a second to begin with, of ends of ``class_kind`` ``number`` at ``age`` seconds; of all together: usual."""
    promise = number // _KINDS
    if promise >= WITHIN:
        bound = _BASE ** (1 + promise - WITHIN)
        return max(usual, 2 / bound) if age < bound else usual
    return usual * {NOTHING: 1.0, NEVER: 1e-3, BY_ALL: 100.0, SOMETIME: 10.0}[promise]
