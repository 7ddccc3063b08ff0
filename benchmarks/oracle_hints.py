"""Hints of a caller that knows the rest of the trace: where each session continues, and when.

A prefix of many requests in the trace is shared. A session continues at the longest further prefix that a later request
begins with. A session without one is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from hybridkv.request import Hints
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.trace import RequestSource, TraceSummary

MANY = 50
"""Requests that begin alike, from which on a prefix is said to be shared by all."""


def keys_of(tokens: np.ndarray, block: int) -> list[bytes]:
    """Of every prefix of whole blocks of ``tokens``."""
    whole, state = np.ascontiguousarray(tokens[: len(tokens) // block * block], np.int32), blake2b(digest_size=16)
    found = []
    for start in range(0, len(whole), block):
        state.update(whole[start : start + block].tobytes())
        found.append(state.copy().digest())
    return found


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that both begin with."""
    least = min(len(one), len(other))
    differ = np.flatnonzero(one[:least] != other[:least])
    return int(differ[0]) if differ.size else least


def hinted(requests: Sequence[TraceRequest], block: int) -> list[TraceRequest]:
    """Yield ``requests`` with hints, and marks where a session resumes before its end; ``block`` is in tokens."""
    prompts = [keys_of(one.prompt.token_ids(), block) for one in requests]
    begins = Counter(key for keys in prompts for key in keys)
    following: dict[bytes, TraceRequest] = {}
    found: list[TraceRequest] = []
    for asked, keys in zip(reversed(requests), reversed(prompts), strict=True):
        tokens = np.concatenate((asked.prompt.token_ids(), asked.output.token_ids()))
        known = keys_of(tokens, block)
        shared = next((depth for depth in range(len(keys), 0, -1) if begins[keys[depth - 1]] >= MANY), 0)
        depth = next((at for at in range(len(known), shared, -1) if known[at - 1] in following), 0)
        marks = asked.marks
        if not depth:
            hints = Hints(over=True, shared_tokens=shared * block)
        else:
            later = following[known[depth - 1]]
            hints = Hints(within_s=later.timestamp_s - asked.timestamp_s, shared_tokens=shared * block)
            alike = common(tokens, later.prompt.token_ids())
            if alike < len(tokens) - 1:  # the last token is not run
                marks = tuple(sorted({*marks, alike}))
        found.append(replace(asked, hints=hints, marks=marks))
        following.update(dict.fromkeys(keys, asked))
    return found[::-1]


class Hinted:
    """``source`` with hints. block: tokens, of what is compared."""

    def __init__(self, source: RequestSource, block: int) -> None:
        self.name = source.name
        self._source = source
        self._requests = hinted(list(source), block)

    def summary(self) -> TraceSummary:
        """Return the summary of the source."""
        return self._source.summary()

    def __iter__(self) -> Iterator[TraceRequest]:
        """Its requests."""
        return iter(self._requests)
