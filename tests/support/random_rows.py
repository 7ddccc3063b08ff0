"""Rows of a random run without a scheduler: they grow, give way to others, and end."""

from collections import Counter
from random import Random
from typing import Protocol

from hybridkv.cache import KVCacheManager
from hybridkv.request import Request

Span = tuple[Request, int, int]
"""A request, and the tokens that a step runs of it: from the first one to the one after the last."""


class Known(Protocol):
    """The tokens that were computed, as an oracle counts them."""

    def add(self, tokens: tuple[int, ...], prompt: int, *, over: bool) -> None: ...


class Rows(Protocol):
    """A run: its cache, its oracle, and the requests that wait and run."""

    random: Random
    counts: Counter[str]
    waiting: list[Request]
    running: list[Request]
    cache: KVCacheManager

    @property
    def known(self) -> Known: ...

    def end(self, request: Request) -> None:
        """End a request that runs, finished or not."""


def grow(rows: Rows, asked: list[Span]) -> None:
    """Add the next tokens of each running request to ``asked``. A request that gets no slots is preempted."""
    for request in list(rows.running):
        start = request.num_computed_tokens
        end = min(start + rows.random.randint(1, 9), request.num_tokens)
        if rows.cache.allocate_slots(request, end - start) is not None and rows.random.random() > 0.02:
            asked.append((request, start, end))
            rows.known.add(request.token_tuple(0, end), request.num_prompt_tokens, over=False)
            continue
        rows.cache.engine.withdraw(request)
        rows.end(request)
        rows.waiting.insert(0, request)
        request.num_computed_tokens = 0
        rows.counts["preempted"] += 1


def finish(rows: Rows, request: Request, end: int) -> None:
    """Settle the step of a request, sample a token after its last one, and end it at random."""
    request.num_computed_tokens = end
    rows.known.add(request.token_tuple(0, end), request.num_prompt_tokens, over=False)
    if end == request.num_tokens:
        request.append(rows.random.randrange(3))
    if request.num_output_tokens > 12 or rows.random.random() < 0.01:
        rows.end(request)
