"""Real processes, each with its share of every block, give the logits of one process and of no cache at all.

Two ranks run in CI, four with `make test-all`. Controls: what one rank gets wrong must move the logits.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from context_parallel_support import Outcome, Ranks, Setting, Worker, run
from tiny_transformer import KINDS, TinyTransformer

from hybridkv.errors import WorkerError
from hybridkv.worker import PageOrder, combine_over_ranks

TOLERANCE = 1e-4
"""Of logits whose standard deviation is about 1."""

SIZES = [2, pytest.param(4, marks=pytest.mark.thorough)]
KIND = pytest.mark.parametrize("model", KINDS)


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(request.param, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def alone(setting: Setting) -> Outcome:
    """In this process, with everything in its own slots."""
    config = setting.config()
    return run(setting, config, Worker(setting, config, 0, None).execute)


def together(ranks: Ranks, setting: Setting) -> Outcome:
    config = setting.config()
    ranks.begin(setting, config)
    return run(setting, config, ranks.execute)


def difference(one: dict[tuple[str, int], torch.Tensor], other: dict[tuple[str, int], torch.Tensor]) -> float:
    """The largest over what both have computed; NaN where one of them is."""
    common = sorted(one.keys() & other.keys())
    return float((torch.stack([one[at] for at in common]) - torch.stack([other[at] for at in common])).abs().max())


def without_cache(setting: Setting, outcome: Outcome) -> dict[tuple[str, int], torch.Tensor]:
    model = TinyTransformer(setting.model, setting.block_size)
    whole = {name: model.whole(tokens) for name, tokens in outcome.tokens.items()}
    return {(name, p): logits[p] for name, logits in whole.items() for p in range(len(logits))}


@KIND
@pytest.mark.parametrize("layout", ["reference", "natural"])
@pytest.mark.parametrize("order", PageOrder)
def test_one_process_gives_what_no_cache_gives(model: str, layout: str, order: PageOrder) -> None:
    setting = Setting(model, layout=layout, order=order)
    outcome = alone(setting)
    expected = without_cache(setting, outcome)
    assert 0.3 < float(torch.stack(list(expected.values())).std()) < 3
    assert difference(outcome.logits, expected) < TOLERANCE
    assert {name: hit >= 64 for name, hit in outcome.hits.items()} == dict.fromkeys("abde", True) | dict.fromkeys(
        "ac", False
    )
    assert len(expected) - sum(outcome.hits.values()) - 5 == len(outcome.logits)  # the last token of each is not run
    assert outcome.mixed_steps


@KIND
@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("layout", ["reference", "natural"])
def test_ranks_give_the_logits_of_one_process(ranks: Ranks, model: str, interleave: int, layout: str) -> None:
    grids = {2: ((2, 1), (1, 2)), 4: ((4, 1), (2, 2))}[ranks.size]
    dcp, pcp = grids[interleave == 16]
    order = PageOrder.HND if layout == "natural" else PageOrder.NHD
    setting = Setting(model, dcp, pcp, interleave, layout, order)
    outcome = together(ranks, setting)
    one = alone(replace(setting, dcp=1, pcp=1))
    assert outcome.tokens == one.tokens
    assert difference(outcome.logits, one.logits) < TOLERANCE
    expected = without_cache(setting, outcome)
    assert difference(outcome.logits, expected) < TOLERANCE
    assert min(outcome.hits[name] for name in "bde") >= 64
    assert len(expected) - sum(outcome.hits.values()) - 5 == len(outcome.logits)
    assert outcome.mixed_steps


@pytest.mark.parametrize(
    ("model", "damage"),
    [
        ("llama", "tail"),
        ("mla", "tail"),
        ("llama", "slots"),
        ("mla", "alone"),
        ("sliding", "sink"),
        ("sliding", "tail"),
    ],
)
def test_what_one_rank_gets_wrong_moves_the_logits(ranks: Ranks, model: str, damage: str) -> None:
    setting = Setting(model, dcp=ranks.size, interleave=4, damage=damage)
    if damage == "alone":  # each rank attends to its own tokens only: they do not even agree
        with pytest.raises(AssertionError, match="the ranks disagree"):
            together(ranks, setting)
        return
    outcome = together(ranks, setting)
    assert difference(outcome.logits, without_cache(setting, outcome)) > 100 * TOLERANCE


def test_partial_results_that_do_not_match_are_not_sent() -> None:
    nobody = cast("Any", None)
    with pytest.raises(WorkerError, match="partial results of shapes"):
        combine_over_ranks(torch.zeros(3, 2, 4), torch.zeros(3, 4), nobody)
    with pytest.raises(WorkerError, match="of one dtype"):
        combine_over_ranks(torch.zeros(3, 2, 4), torch.zeros(3, 2).double(), nobody)
