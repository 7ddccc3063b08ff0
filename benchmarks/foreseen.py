"""A whole stream as a tree of its requests' prefixes, with the time of each later request and its possible hits."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from hybridkv.simulator.described import Edge, Prefixes, leading, runs_of
from hybridkv.simulator.formats import TraceRequest


class _Known:
    """What is known of an edge: of the requests that come through there all have all its tokens.

    prompts: requests, ascending, whose prompts, but for their last tokens, come through. leaves: the last request that
    shares no more than what ends here with any before it, -1 for none. kept: (tokens, serial) of kept ends inside,
    ascending.
    """

    __slots__ = ("kept", "leaves", "prompts")

    def __init__(self) -> None:
        self.prompts: list[int] = []
        self.leaves = -1
        self.kept: list[tuple[int, int]] = []


class Future:
    """All requests of a stream, by what they begin with. O(pieces) to make.

    For reading: limit, the hit rate of an endless cache that hits to the token, everything before a request being
    finished. marks: of each request where a later one leaves the longest beginning that it shares with any before it.
    """

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        prefixes, known = Prefixes(), list[int]()
        for asked in requests:
            prompt = runs_of([asked.prompt])
            known.append(prefixes.add(leading(prompt, asked.num_prompt_tokens - 1)))
            prefixes.add(runs_of([asked.prompt, asked.output]))
        self.limit = sum(known) / sum(asked.num_prompt_tokens for asked in requests)
        whole = [list(prefixes.path(runs_of([asked.prompt, asked.output]))) for asked in requests]
        self._depths = [list(accumulate(edge.length for edge in path)) for path in whole]
        met = defaultdict[Edge, _Known](_Known)
        self._paths = [[met[edge] for edge in path] for path in whole]
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

    def _place(self, request: int, tokens: int) -> int:
        return bisect_left(self._depths[request], tokens)

    def _edge(self, request: int, tokens: int) -> _Known:
        return self._paths[request][self._place(request, tokens)]

    # -- kept ends: the first ``tokens`` of ``request``, which begins with them

    def keep(self, request: int, tokens: int, serial: int) -> None:
        """Keep the point from now on."""
        insort(self._edge(request, tokens).kept, (tokens, serial))

    def give_up(self, request: int, tokens: int, serial: int) -> None:
        """No longer."""
        self._edge(request, tokens).kept.remove((tokens, serial))

    def before(self, request: int, tokens: int) -> int | None:
        """Return the serial number of the nearest kept point before it."""
        path = self._paths[request]
        for place in range(self._place(request, tokens), -1, -1):
            for its, serial in reversed(path[place].kept):
                if its < tokens:
                    return serial
        return None

    def next_use(self, request: int, tokens: int, now: int) -> float:
        """Return the first request after ``now`` that resumes there and at no later point, or infinity."""
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
