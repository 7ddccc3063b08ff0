"""Every missed token has the reason that the naive oracle finds, in random runs of both layouts; they add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from how_much import how_many, too_rare
from hybridkv.cache import Miss, MissReason
from hybridkv.request import Request
from hybridkv.testing.configs import chunk_spec, full_spec, state_spec, window_spec
from hybridkv.testing.event_follower import same
from oracles import Rig, RigOptions, random_natural_options, random_options, random_run
from oracles.cache import OracleRequest
from oracles.misses import WhyMissed
from oracles.rig import RigRequest

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

MODELS = {
    "full": (full_spec(4),),
    "two sizes": (full_spec(4), full_spec(8)),
    "full and states": (full_spec(4), state_spec(4)),
    "full, window and states": (full_spec(2), window_spec(4, 9), state_spec(8)),
    "windows": (window_spec(4, 8), window_spec(4, 13)),
    "chunks and drafts": (chunk_spec(4, 6), full_spec(4), state_spec(4, drafts=2)),
    "states": (state_spec(4),),
}


class Explained(Rig):
    """A rig that explains every request that waits, and another one, after every action. counts: tokens by reason."""

    def __init__(self, options: RigOptions) -> None:
        super().__init__(replace(options, remembered_losses=1 << 20))
        self.why = WhyMissed(self)
        self.counts: Counter[MissReason] = Counter()
        self._random = Random(0)

    def check(self) -> None:
        super().check()
        for name in self.oracle.live_ids:
            request, expected = self.requests.get(name, (None, None))
            if request is not None and expected is not None and not expected.rows and request.row < 0:
                self._explain(request, expected)
        if self.requests:
            self._explain(*self._stranger())

    def _stranger(self) -> tuple[Request, OracleRequest]:
        """One that begins as another did, under its salt or another's."""
        request, expected = self._random.choice(list(self.requests.values()))
        tokens = expected.tokens[: self._random.randint(1, len(expected.tokens))]
        tokens += [self._random.randrange(self.options.vocabulary) for _ in range(self._random.randint(0, 3)) or (0,)]
        salt = self._random.choice((request.cache_salt, request.cache_salt, None, "tenant"))
        asked = RigRequest(tuple(tokens), 1, salt=salt, encoder=request.encoder)
        return asked.request("stranger", self.cache.hasher), OracleRequest(
            "stranger", tokens, len(tokens), salt=asked.origin
        )

    def _explain(self, request: Request, expected: OracleRequest) -> None:
        misses = self.cache.explain(request)
        hit = min(self.cache.find_hit(request).tokens, request.num_prompt_tokens)
        same(f"misses of {request.request_id}", by_token(misses), self.why.explain(expected))
        same("tokens", hit + sum(miss.tokens for miss in misses), request.num_prompt_tokens)
        same("places", [miss.first for miss in misses], places(hit, misses))
        for miss in misses:
            self.counts[miss.reason] += miss.tokens


def by_token(misses: tuple[Miss, ...]) -> list[tuple[MissReason, int | None]]:
    return [(miss.reason, miss.group) for miss in misses for _ in range(miss.tokens)]


def places(first: int, misses: tuple[Miss, ...]) -> list[int]:
    found = []
    for miss in misses:
        found.append(first)
        first += miss.tokens
    return found


def counted(options: list[RigOptions]) -> Counter[MissReason]:
    found: Counter[MissReason] = Counter()
    for seed, one in enumerate(options):
        rig = Explained(one)
        random_run(rig, Random(seed))
        found += rig.counts
    return found


MAKERS = {"reference": random_options, "natural": random_natural_options}


@pytest.mark.parametrize("layout", MAKERS)
def test_miss_reasons_match_the_oracle(layout: str) -> None:
    make, runs = MAKERS[layout], range(how_many(6))
    made = [make(Random(f"{model} {seed}"), specs) for model, specs in MODELS.items() for seed in runs]
    found = counted([replace(one, caching=True, num_blocks=one.num_blocks + 8) for one in made])
    assert found.total() > 0


@pytest.mark.parametrize("layout", MAKERS)
def test_miss_reasons_of_any_model_match_the_oracle(layout: str) -> None:
    found = counted([MAKERS[layout](Random(seed)) for seed in range(how_many(50))])
    common = set(MissReason) - {MissReason.NO_ROOM, MissReason.BLOCK_EDGE}
    if layout == "reference":
        common.add(MissReason.BLOCK_EDGE)
    least = {str(reason): 10 for reason in common}
    assert too_rare({str(reason): found[reason] for reason in found}, least) == {}, found
