"""The requests that a running engine publishes, as those of a trace, for `hybridkv trace record`."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator

from hybridkv.kv_events.requests import EndedRequest
from hybridkv.request import Hints
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.formats.texts import TokenTree, split
from hybridkv.simulator.tokens import Pieces


class LiveRequests:
    """The requests of a trace, from ended requests, which are read once. KeyboardInterrupt ends it.

    Requests end in another order than they arrived. One is yielded when no earlier one still runs. Requests that ended
    before their first output token are left out.

    Args:
        ended: the requests, as they end.
    """

    def __init__(self, ended: Iterable[EndedRequest]) -> None:
        self._ended = ended
        self._segments = itertools.count()
        self._trees: dict[str, TokenTree] = {}

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests in the order of their arrivals."""
        first_s = last_s = math.nan
        for one in self._in_order():
            if len(one.token_ids) <= one.num_prompt_tokens:
                continue
            first_s = one.arrival_s if math.isnan(first_s) else first_s
            last_s = one.arrival_s if math.isnan(last_s) else max(last_s, one.arrival_s)
            yield self._request(one, last_s - first_s)

    def _in_order(self) -> Iterator[EndedRequest]:
        held: list[tuple[float, int, EndedRequest]] = []
        try:
            for number, one in enumerate(self._ended):
                heapq.heappush(held, (one.arrival_s, number, one))
                while held and held[0][0] <= one.oldest_s:
                    yield heapq.heappop(held)[2]
        except KeyboardInterrupt:
            pass
        while held:
            yield heapq.heappop(held)[2]

    def _request(self, one: EndedRequest, timestamp_s: float) -> TraceRequest:
        tree = self._trees.get(one.space)
        if tree is None:
            tree = self._trees[one.space] = TokenTree(self._segments)
        prompt, output = split(tree.pieces(one.token_ids), one.num_prompt_tokens)
        return TraceRequest(
            timestamp_s,
            Pieces(0, prompt),
            Pieces(0, output),
            marks=one.marks,
            tenant=one.tenant,
            took_s=max(one.ended_s - one.arrival_s, 0.0),
            hints=Hints.parse(one.hints),
        )
