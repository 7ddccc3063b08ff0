"""A whole stream as a tree of what its requests begin with: what will be asked again, when, and what could be found."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Sequence
from itertools import accumulate

from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.tokens import Pieces

Run = tuple[Hashable, int, int]
"""(what tells its segment from others, offset, length), in tokens."""


class Edge:
    """Tokens that go on behind another edge: of the requests that come through here all have them all.

    prompts: requests, ascending, whose prompts, but for their last tokens, come through. leaves: the last request that
    shares no more than what ends here with any before it, -1 for none. kept: (tokens, serial) of kept ends inside,
    ascending.
    """

    __slots__ = ("children", "kept", "leaves", "length", "prompts")

    def __init__(self, length: int) -> None:
        self.length = length
        self.children: dict[tuple[Hashable, int], Edge] = {}
        self.prompts: list[int] = []
        self.leaves = -1
        self.kept: list[tuple[int, int]] = []


class Future:
    """All requests of a stream, by what they begin with. O(pieces) to make.

    For reading: limit, the hit rate of an endless cache that hits to the token, everything before a request being
    finished. marks: of each request where a later one leaves the longest beginning that it shares with any before it.
    """

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._root = Edge(0)
        known: list[int] = []
        for asked in requests:
            prompt = runs_of([asked.prompt])
            known.append(self._insert(_first(prompt, asked.num_prompt_tokens - 1)))
            self._insert(runs_of([asked.prompt, asked.output]))
        self.limit = sum(known) / sum(asked.num_prompt_tokens for asked in requests)
        self._paths = [self._path(runs_of([asked.prompt, asked.output])) for asked in requests]
        self._depths = [list(accumulate(edge.length for edge in path)) for path in self._paths]
        self._last = [asked.num_prompt_tokens - 1 for asked in requests]
        for number, shared in enumerate(known):
            if shared:
                self._edge(number, shared).leaves = number
            for edge in self._paths[number][: bisect_right(self._depths[number], self._last[number])]:
                edge.prompts.append(number)
        self.marks = [
            tuple(depth for edge, depth in zip(path, depths, strict=True) if edge.leaves > number)
            for number, (path, depths) in enumerate(zip(self._paths, self._depths, strict=True))
        ]

    def _insert(self, runs: Sequence[Run]) -> int:
        """How many of the leading tokens were there before; an edge ends behind them, and one behind the last token."""
        at, shared, new = self._root, 0, False
        for segment, first, tokens in runs:
            offset, length = first, tokens
            while length:
                edge = at.children.get((segment, offset))
                if edge is None:
                    new = True
                    edge = at.children[segment, offset] = Edge(length)
                elif edge.length > length:
                    rest = Edge(edge.length - length)
                    rest.children, edge.children = edge.children, {(segment, offset + length): rest}
                    edge.length = length
                shared += 0 if new else edge.length
                at, offset, length = edge, offset + edge.length, length - edge.length
        return shared

    def _path(self, runs: Sequence[Run]) -> list[Edge]:
        at, found = self._root, list[Edge]()
        for segment, first, tokens in runs:
            offset, end = first, first + tokens
            while offset < end:
                at = at.children[segment, offset]
                found.append(at)
                offset += at.length
        return found

    def _place(self, request: int, tokens: int) -> int:
        return bisect_left(self._depths[request], tokens)

    def _edge(self, request: int, tokens: int) -> Edge:
        return self._paths[request][self._place(request, tokens)]

    # -- kept ends: the first ``tokens`` of ``request``, which begins with them

    def keep(self, request: int, tokens: int, serial: int) -> None:
        """It is kept from now on."""
        insort(self._edge(request, tokens).kept, (tokens, serial))

    def give_up(self, request: int, tokens: int, serial: int) -> None:
        """No longer."""
        self._edge(request, tokens).kept.remove((tokens, serial))

    def before(self, request: int, tokens: int) -> int | None:
        """The serial of the nearest kept end before it."""
        path = self._paths[request]
        for place in range(self._place(request, tokens), -1, -1):
            for its, serial in reversed(path[place].kept):
                if its < tokens:
                    return serial
        return None

    def next_use(self, request: int, tokens: int, now: int) -> float:
        """The first request behind ``now`` that goes on from there, infinity without one."""
        prompts = self._edge(request, tokens).prompts
        for number in range(bisect_right(prompts, now), len(prompts)):
            if not self._goes_on_later(prompts[number], tokens):
                return prompts[number]
        return math.inf

    def _goes_on_later(self, request: int, tokens: int) -> bool:
        """Whether ``request`` finds more than these of its tokens."""
        path, last = self._paths[request], self._place(request, self._last[request])
        return any(
            path[at].kept and path[at].kept[-1][0] > tokens for at in range(self._place(request, tokens), last + 1)
        )


def _first(runs: Sequence[Run], tokens: int) -> list[Run]:
    """The leading ``tokens``."""
    found = list[Run]()
    for segment, offset, length in runs:
        if tokens > 0:
            found.append((segment, offset, min(length, tokens)))
        tokens -= length
    return found


def runs_of(parts: Sequence[Pieces]) -> list[Run]:
    """Of ``parts``, one behind the other; what goes on in the same segment is one run."""
    runs = list[Run]()
    for pieces in parts:
        for number, offset, length in pieces.pieces:
            segment = pieces.kind, number
            if runs and runs[-1][0] == segment and runs[-1][1] + runs[-1][2] == offset:
                runs[-1] = (segment, runs[-1][1], runs[-1][2] + length)
            else:
                runs.append((segment, offset, length))
    return runs
