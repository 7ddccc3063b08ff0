"""Hand-made steps with drafts on tiny models: the draws, the accepted drafts and the states that follow."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from checked_engine import models
from hand_steps import HandRows
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from runner_support import TOLERANCE, generated, greedy, loaded_model, relative_difference, shared_prompts

from hybridkv.errors import WorkerError
from hybridkv.request import SamplingParams
from hybridkv.runner.check import forced_logits
from hybridkv.runner.probe import attention_implementation
from hybridkv.runner.sampling.draws import NO_DRAFT, Draws, check_drafts
from hybridkv.runner.sampling.sampler import SamplingBatch, sample
from hybridkv.step import Cells, Csr, Step

OUTPUT = 30


@contextmanager
def rows_of(
    name: str,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    *,
    most_drafts: int = 8,
    offset: int = 0,
) -> Iterator[HandRows]:
    rows = HandRows(loaded_model(name), prompts, sampling, max_tokens=160, most_drafts=most_drafts, offset=offset)
    try:
        yield rows
    finally:
        rows.runner.detach()


def drafts_for(truth: Sequence[int], known: int, good: int, count: int) -> list[int]:
    """``count`` drafts behind ``known`` tokens of ``truth``, of which the first ``good`` are right."""
    right = list(truth[known : known + good])
    return right + [(truth[known + at] + 1) % 127 if known + at < len(truth) else 1 for at in range(good, count)]


def run_patterns(rows: HandRows, truth: Sequence[Sequence[int]], patterns: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Row i runs the (right drafts, drafts) of ``patterns[i]`` in turn until all rows have OUTPUT tokens."""
    rows.step(chunk=50)  # who has more of a prompt runs the rest beside others that decode already
    at = 0
    while min(len(mine) - len(whole) for mine, whole in zip(rows.tokens, truth, strict=True)) < 0:
        drafts = []
        for row, pattern in enumerate(patterns):
            good, count = pattern[at % len(pattern)]
            drafts.append(drafts_for(truth[row], len(rows.tokens[row]), good, count))
        before = [len(one) for one in rows.tokens]
        appended = rows.step(drafts)
        for row, more in enumerate(appended):
            wanted = drafts[row][: len(more) - 1]
            assert more[:-1] == wanted
            if before[row] + len(drafts[row]) < len(truth[row]):
                assert len(more) == 1 + patterns[row][at % len(patterns[row])][0]
        at += 1


def moved(rows: HandRows, row: int) -> float:
    """The largest difference of the logits of the row's output from one plain forward."""
    prompt, tokens = rows.prompts[row], rows.tokens[row]
    with attention_implementation(rows.runner.model, "eager"), torch.inference_mode():
        reference = forced_logits(rows.runner.model, tokens[:prompt], tokens[prompt:])
    ours = torch.stack([rows.seen.logits[str(row), at] for at in range(prompt, len(tokens))])
    return float(relative_difference(ours, reference).max())


def whole(rows: HandRows, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Prompt and OUTPUT tokens of each row, run without drafts."""
    while min(len(mine) - len(prompt) for mine, prompt in zip(rows.tokens, prompts, strict=True)) < OUTPUT:
        rows.step()
    return [list(one) for one in rows.tokens]


# -- controls: what the tests above must not let pass


@pytest.mark.parametrize("offset", [1, -1])
@pytest.mark.parametrize("name", models("mamba", "lfm2"))
def test_state_of_another_position_changes_the_logits(name: str, offset: int) -> None:
    prompts = shared_prompts(2, 1)
    truth = [[*prompt, *generated(loaded_model(name), prompt, OUTPUT)] for prompt in prompts]
    with rows_of(name, prompts, [greedy(OUTPUT)] * 2, offset=offset) as rows:
        if not rows.keeps_states:
            pytest.skip("no state at all")
        rows.step()
        for _ in range(6):
            rows.step([drafts_for(text, len(mine), 2, 3) for text, mine in zip(truth, rows.tokens, strict=True)])
        assert min(moved(rows, row) for row in range(2)) > 10 * TOLERANCE


# -- tokens drawn at random


SAMPLED = [
    SamplingParams(temperature=1.0, seed=11, logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=12),
    SamplingParams(temperature=1.2, min_p=0.02, repetition_penalty=1.3, seed=13, logprobs=0),
    SamplingParams(repetition_penalty=1.5, logprobs=1),
    SamplingParams(repetition_penalty=0.2),  # repeats itself: a draft makes the next token likely
]


@pytest.mark.parametrize("name", models("llama", "mamba"))
def test_sampled_tokens_and_logprobs_do_not_depend_on_drafts(name: str) -> None:
    prompts = shared_prompts(5, 9)
    with rows_of(name, prompts, SAMPLED) as rows:
        truth, plain = whole(rows, prompts), logprobs(rows)
    patterns = [[(3, 3), (0, 2), (2, 4)], [(1, 4), (4, 4)], [(2, 3), (3, 3)], [(4, 5), (1, 1)], [(0, 0), (6, 6)]]
    with rows_of(name, prompts, SAMPLED) as rows:
        run_patterns(rows, truth, patterns)
        for row, text in enumerate(truth):
            end = len(prompts[row]) + OUTPUT
            assert rows.tokens[row][:end] == text[:end]
            assert moved(rows, row) <= TOLERANCE
        found = logprobs(rows)
    asked = {(row, len(prompts[row]) + at) for row in (0, 2, 3) for at in range(OUTPUT)}
    assert found.keys() >= asked <= plain.keys()
    assert {row for row, _ in found} == {0, 2, 3}
    for key in asked:
        ours, theirs = found[key], plain[key]
        assert (ours[0], ours[2:]) == (theirs[0], theirs[2:])
        assert abs(ours[1] - theirs[1]) < 1e-3


def logprobs(rows: HandRows) -> dict[tuple[int, int], tuple[int, float, int, tuple[int, ...]]]:
    """(row, position) -> token, value, rank, most probable tokens; each position once."""
    found: dict[tuple[int, int], tuple[int, float, int, tuple[int, ...]]] = {}
    for result in rows.results:
        one = result.logprobs
        assert one is not None
        for i in range(len(one)):
            key = int(one.row[i]), int(one.position[i])
            assert key not in found
            assert rows.tokens[key[0]][key[1]] == one.token[i]
            found[key] = int(one.token[i]), float(one.logprob[i]), int(one.rank[i]), tuple(one.best[i].tolist())
    return found


VOCABULARY, LENGTH, ROWS = 4, 3, 30_000
TEMPERATURE = 0.8
CHI_SQUARE = 103.4
"""99.9 % of a chi-square with 63 degrees of freedom."""


def plain_batch(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> SamplingBatch:
    """Rows that differ in nothing but seed and position."""
    batch = SamplingBatch.of([SamplingParams(temperature=TEMPERATURE)], [0])
    how = np.repeat(batch.how, len(seeds))
    how["seed"] = seeds
    return SamplingBatch(how, positions)


def chi_square(draw_again: bool) -> float:
    """Of ROWS sequences of LENGTH tokens of a Markov chain, run with two drafts a step, against their probabilities.

    draw_again: the fault of a sampler that draws once more, by other noise, where a draft was refused.
    """
    generator = torch.Generator().manual_seed(4)
    chain = torch.randn(VOCABULARY, VOCABULARY, generator=generator)  # logits behind each token
    rng, seeds = np.random.default_rng(4), np.arange(ROWS)
    tokens = np.zeros((ROWS, LENGTH + 3), np.int64)
    known = np.ones(ROWS, np.int64)  # every sequence begins with token 0
    while known.min() <= LENGTH:
        rows = np.flatnonzero(known <= LENGTH)
        drafts = rng.integers(0, 2, (len(rows), 2))  # only ever 0 and 1
        at, draft = np.repeat(rows, 3), np.column_stack((drafts, np.full(len(rows), NO_DRAFT))).reshape(-1)
        place = np.tile(np.arange(3), len(rows))
        draws = Draws(np.repeat(np.arange(len(rows)), 3), place, known[at] + place, place, draft)
        behind = np.where(place == 0, tokens[at, known[at] - 1], draws.before)
        logits = chain[torch.from_numpy(behind)]
        drawn = sample(logits, plain_batch(seeds[at], draws.position))[0].numpy()
        kept = draws.kept(drawn)
        if draw_again:
            other = sample(logits, plain_batch(seeds[at] + ROWS, draws.position))[0].numpy()
            drawn = np.where(drawn == draft, drawn, other)
        appended = draws.appended(drawn, kept, len(rows))
        for i, row in enumerate(rows.tolist()):
            more = appended[i]
            tokens[row, known[row] : known[row] + len(more)] = more
            known[row] += len(more)
    cells = tokens[:, 1 : LENGTH + 1] @ (VOCABULARY ** np.arange(LENGTH))
    counts = np.bincount(cells, minlength=VOCABULARY**LENGTH)
    ways = np.array(list(np.ndindex(*[VOCABULARY] * LENGTH)))
    probability = (chain.double() / TEMPERATURE).softmax(dim=-1).numpy()
    before = np.column_stack((np.zeros(len(ways), np.int64), ways[:, :-1]))
    expected = np.zeros(len(ways))
    expected[ways @ (VOCABULARY ** np.arange(LENGTH))] = ROWS * probability[before, ways].prod(axis=1)
    return float(((counts - expected) ** 2 / expected).sum())


def test_tokens_with_drafts_follow_the_distribution() -> None:
    assert chi_square(draw_again=False) < CHI_SQUARE
    assert chi_square(draw_again=True) > 10 * CHI_SQUARE


# -- what is accepted, against the definition


@given(data=st.data(), rows=st.integers(1, 6))
def test_kept_draws_match_the_definition(data: st.DataObject, rows: int) -> None:
    few = st.lists(st.integers(0, 3), max_size=4)
    certain = [data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)) for _ in range(rows)]
    samples = [data.draw(st.booleans()) for _ in range(rows)]
    drafts = [data.draw(few) if one else [] for one in samples]
    computed = [data.draw(st.integers(0, 50)) for _ in range(rows)]
    step = step_of(computed, certain, drafts, samples)
    check_drafts(step)
    draws = Draws.of(step)
    drawn = np.array([data.draw(st.integers(0, 3)) for _ in range(len(draws))], np.int64)
    kept = draws.kept(drawn)
    expected: list[list[int]] = []
    at = source = 0
    for row in range(rows):
        source += len(certain[row]) + len(drafts[row])
        expected.append([])
        if not samples[row]:
            continue
        going = True
        for place in range(len(drafts[row]) + 1):
            assert (draws.row[at], draws.place[at]) == (row, place)
            assert draws.position[at] == computed[row] + len(certain[row]) + place
            assert draws.source[at] == source - len(drafts[row]) + place - 1
            assert draws.before[at] == (drafts[row][place - 1] if place else NO_DRAFT)
            if going:
                expected[row].append(int(drawn[at]))
            going = going and place < len(drafts[row]) and drafts[row][place] == drawn[at]
            at += 1
    assert at == len(draws)
    appended = draws.appended(drawn, kept, rows)
    assert [appended[row].tolist() for row in range(rows)] == expected


def step_of(
    computed: Sequence[int], certain: Sequence[list[int]], drafts: Sequence[list[int]], samples: Sequence[bool]
) -> Step:
    run = [mine + more for mine, more in zip(certain, drafts, strict=True)]
    return Step(
        id=0,
        after=-1,
        rows=np.arange(len(run), dtype=np.int32),
        num_computed=np.array(computed, np.int32),
        num_scheduled=np.array([len(one) for one in run], np.int32),
        samples=np.array(samples),
        token_ids=Csr.from_lists(run),
        drafts=Csr.from_lists(drafts),
        cells=Cells.empty(),
        finished_rows=np.empty(0, np.int32),
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": np.array([False])}, "in rows that sample"),
        ({"num_scheduled": np.array([2], np.int32)}, "after a certain token"),
        ({"drafts": Csr.from_lists([[4, 6]])}, "equal the last tokens of their row"),
        ({"drafts": Csr.from_lists([[4, 5], []])}, "1 rows, but its drafts have 2"),
        ({"token_ids": Csr.from_lists([[3, 4, -1]]), "drafts": Csr.from_lists([[4, -1]])}, "drafts must be token ids"),
    ],
)
def test_invalid_drafts_of_a_step_are_rejected(change: dict[str, object], said: str) -> None:
    good = step_of([7], [[3]], [[4, 5]], [True])
    check_drafts(good)
    with pytest.raises(WorkerError, match=said):
        check_drafts(replace(good, **change))  # type: ignore[arg-type]  # by name


def test_runner_rejects_invalid_drafts_and_states_and_writes_nothing() -> None:
    prompts = shared_prompts(2, 3)
    with rows_of("qwen3_next", prompts, [greedy(4)] * 2) as rows:
        first = rows.make()
        early = first.state_writes - np.array([0, 0, 1, 0], np.int32)
        with pytest.raises(WorkerError, match="lacks the state after the last certain token"):
            rows.runner.execute(replace(first, state_writes=early))
    with rows_of("qwen3_next", prompts, [greedy(4)] * 2) as rows:
        rows.step()
        step = rows.make([[1, 2], [3]])
        writes = step.state_writes
        behind = step.num_computed[writes[:, 0]] + 2 == writes[:, 2]  # behind the first draft
        for wrong, said in (
            (replace(step, drafts=Csr.from_lists([[1, 2], [4]])), "equal the last tokens of their row"),
            (replace(step, state_writes=writes[~behind]), "lacks the state after the last certain token or a draft"),
            (
                replace(step, state_writes=writes + np.array([0, 0, 2, 0], np.int32)),
                r"writes a state of group . after 4 of them",
            ),
        ):
            before = [view.clone() for views in rows.runner.storage.views.values() for view in views]
            with pytest.raises(WorkerError, match=said):
                rows.runner.execute(wrong)
            after = [view for views in rows.runner.storage.views.values() for view in views]
            assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
