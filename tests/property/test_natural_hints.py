"""Hints in random runs: every step reads its own, and all that is kept is checked, whatever hints say."""

from __future__ import annotations

import sys
import zlib
from random import Random

import pytest
from test_natural_evictions import MODELS, PAIR

from how_much import how_many
from hybridkv.eviction.ranking import BY_ALL, NEVER, NOTHING, SOMETIME, WITHIN, promise_of
from hybridkv.request import NO_HINTS, Hints, Request
from oracles import random_natural_options, random_run
from oracles.twins import Twins

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

SOME = (
    NO_HINTS,
    Hints(over=True),
    Hints(goes_on=True),
    Hints(within_s=2),
    Hints(within_s=900),
    Hints(secret=True),
    Hints(shared_tokens=6),
    Hints(scratch=True, shared_tokens=3),
    Hints(within_s=3, shared_tokens=5),
)


def test_random_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    promised = set[int]()

    def hinted(name: str, *asked: object, **others: object) -> Request:
        hints = SOME[zlib.crc32(name.encode()) % len(SOME)]
        request = Request(name, *asked, hints=hints, **others)  # type: ignore[arg-type]
        promised.update(promise_of(request, tokens) for tokens in range(1, request.num_tokens))
        return request

    monkeypatch.setattr(sys.modules["oracles.rig_request"], "Request", hinted)
    for seed in range(how_many(4)):
        random = Random(f"hints {seed}")
        random_run(Twins(random_natural_options(random, MODELS["full and states"]), PAIR), random)
    assert promised >= {NOTHING, NEVER, BY_ALL, SOMETIME, WITHIN}
