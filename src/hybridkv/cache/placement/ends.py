"""Ends as a ranking knows them, and the first ranking, which learns no more than which kind of end is hit.

PROMPT    before the last token of a prompt          BRANCH    where requests went different ways, or a mark
OUTPUT    where a request ended                      GRID      any other place that a placement asks for

and what hints promise of them:

NOTHING   no hint, or none that concerns it          NEVER     its session is over, or goes on elsewhere
BY_ALL    it is within what many begin with          SOMETIME  its session goes on from here
WITHIN    and those above: within 4, 16, 64 ... seconds
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, Protocol

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
    saved: tokens that it saves a byte, those behind the nearest kept end before it. passed: its session went on from
    a later end. tenant: by number, whose memory it takes. promise: see the module.
    awaited: a request that waits goes on from it.
    """

    __slots__ = (
        "awaited",
        "hits",
        "kind",
        "log_gap",
        "passed",
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
        self.passed = False
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
    by_saving: whether what an end saves a byte tells where it stands.
    """

    @property
    def by_saving(self) -> bool:
        """See the class."""
        ...

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

    def passed(self, end: End) -> None:
        """The session of ``end``, not added now, has gone on from a later end."""
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


HALVED_EVERY: Final = 1000
"""Requests after which a hit counts half."""

LOSING: Final = 0.25
"""A kind of end whose hits are below this share of the other's goes first."""


class PassedThenLosing:
    """Passed ends first, then the losing one of prompts' and outputs' ends, then what was used longest ago."""

    by_saving = False

    def __init__(self) -> None:
        self._passed = Ring()
        self._rings = {kind: Ring() for kind in Kind}
        self._hits = {Kind.PROMPT: 0.0, Kind.OUTPUT: 0.0}

    def _ring(self, end: End) -> Ring:
        return self._passed if end.passed else self._rings[end.kind]

    def note_request(self, now: float) -> None:  # noqa: ARG002 - the answer of a ranking
        """What was hit counts a little less."""
        for kind in self._hits:
            self._hits[kind] *= 0.5 ** (1 / HALVED_EVERY)

    def add(self, end: End, now: float) -> None:  # noqa: ARG002 - as above
        """Into the ring of its kind."""
        self._ring(end).add(end)

    def remove(self, end: End) -> None:
        """Out of it."""
        self._ring(end).remove(end)

    def kept(self, end: End, now: float) -> None:
        """It is used now."""
        end.used = now

    def hit(self, end: End, now: float) -> None:
        """Its kind wins; it is as good as new."""
        end.note_hit(now)
        end.passed = False
        if end.kind in self._hits:
            self._hits[end.kind] += 1.0

    def passed(self, end: End) -> None:
        """It goes next, unless many go on from there."""
        end.passed = end.kind in self._hits

    def promised(self, end: End, promise: int, now: float) -> None:  # noqa: ARG002 - as above
        """What nobody goes on from goes next, as what was passed."""
        end.promise = promise
        end.passed = promise == NEVER

    def given_up(self, end: End, parent: End | None, now: float, *, declined: bool) -> None:
        """Nobody inherits."""

    def forget(self, end: End, now: float) -> None:
        """Nothing was kept of it."""

    def losing(self) -> Kind | None:
        """The kind whose ends are hit least, None where both are hit."""
        prompt, output = self._hits[Kind.PROMPT], self._hits[Kind.OUTPUT]
        if prompt < LOSING * output:
            return Kind.PROMPT
        return Kind.OUTPUT if output < LOSING * prompt else None

    def lowest(self, now: float) -> End | None:  # noqa: ARG002 - as above
        """O(kinds)."""
        if len(self._passed):
            return self._passed.first()
        losing = self.losing()
        if losing is not None and len(self._rings[losing]):
            return self._rings[losing].first()
        firsts = [ring.first() for ring in self._rings.values() if len(ring)]
        return min(firsts, key=lambda end: (end.used, end.serial), default=None)

    def prefers(self, end: End, other: End, now: float) -> bool:  # noqa: ARG002 - as above
        """What is new is worth more than what is old."""
        return True

    def check(self) -> list[str]:
        """Rings are of the kinds that they are named for."""
        wrong = [
            f"an end of {ring.first().tokens} tokens stands in the ring of {kind.name}"
            for kind, ring in self._rings.items()
            if len(ring) and ring.first().kind is not kind
        ]
        return wrong if not len(self._passed) or self._passed.first().passed else [*wrong, "an end was not passed"]
