"""A stream as a tree of what its requests begin with: what a cache that forgets nothing would find.

runs_of([prompt, output])   ->  [((kind, segment), offset, length), ...]
Prefixes().add(runs)        ->  leading tokens that were there before
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.tokens import Pieces

Run = tuple[Hashable, int, int]
"""(what tells its segment from others, offset, length), in tokens."""


class Edge:
    """Tokens that go on behind another edge: who comes through here has them all."""

    __slots__ = ("children", "length")

    def __init__(self, length: int) -> None:
        self.length = length
        self.children: dict[tuple[Hashable, int], Edge] = {}


class Prefixes:
    """Every run of tokens that was added, from the first token on. Memory: O(pieces)."""

    def __init__(self) -> None:
        self._root = Edge(0)

    def add(self, runs: Sequence[Run]) -> int:
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

    def path(self, runs: Sequence[Run]) -> Iterator[Edge]:
        """The edges of ``runs``, which were added."""
        at = self._root
        for segment, first, tokens in runs:
            offset, end = first, first + tokens
            while offset < end:
                at = at.children[segment, offset]
                yield at
                offset += at.length

    def shared_tokens(self, request: TraceRequest) -> int:
        """Leading tokens of its prompt that can be found, the last one aside, which runs; then it is added.

        Not the last token of its output, which is sampled and never run.
        """
        prompt = runs_of([request.prompt])
        shared = self.add(leading(prompt, request.num_prompt_tokens - 1))
        self.add(leading(runs_of([request.prompt, request.output]), request.num_tokens - 1))
        return shared


def leading(runs: Sequence[Run], tokens: int) -> list[Run]:
    """The first ``tokens``."""
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
