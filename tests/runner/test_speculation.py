"""Engines with drafts against engines without: equal tokens, right logits, and no state left after the end."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from checked_engine import CheckedEngine, models, models_with
from models_table import DraftResult, note_model
from runner_support import ALL_TINY, EngineFactory, drawn, failing, greedy, loaded_model, shared_prompts
from scripted import Script, ScriptedDrafter
from test_disturbances import module_at, unlike_prompts

from hybridkv.errors import ConfigError
from hybridkv.request import Request, SamplingParams
from hybridkv.runner import TINY_COMPRESSED, Completion, Engine, load
from hybridkv.runner.drafters import MOST_TOKENS, Drafter, DraftModel
from hybridkv.schedule import FinishReason

DRAFTS = 4
ONE_OF_EACH_KIND = ("llama", "gemma3", "deepseek_v2", "mamba", "mamba2", "qwen3_next", "lfm2")
PAGED_ALIKE = ("gemma3", "qwen3_next")
"""In the reference layout: windows, and states that make all pages larger."""
OUTPUT = 24


def random_script(seed: int, most: int = DRAFTS) -> Script:
    """Any number of right drafts among any number of drafts, and sometimes none at all."""
    rng = np.random.default_rng(seed)

    def script(_request: Request, _asked: int) -> tuple[int, int]:
        count = int(rng.integers(0, most + 1))
        return int(rng.integers(0, count + 1)), count

    return script


class Pair:
    """Plain runs, and runs of an engine with ``script``, on the same model. options: as CheckedEngine has them."""

    def __init__(
        self,
        make: EngineFactory,
        name: str,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        script: Script,
        drafts: int = DRAFTS,
        **options: int | bool | str | None,
    ) -> None:
        longest = max(one.max_tokens for one in sampling)
        plain = make(loaded_model(name), prompts, longest, room_for=2 * len(prompts))
        self.plain = plain.generate(prompts, sampling)
        self.drafter = ScriptedDrafter(script, drafts)
        asked = [one.of_branch(number) for one in sampling for number in range(one.n)]
        self.drafter.learn(zip(self.plain, asked, strict=True))
        self.prompts, self.sampling = prompts, sampling
        self.checked = CheckedEngine(make, name, prompts, longest, speculate=self.drafter, **options)

    def add(self) -> list[str]:
        """All requests, queued; the ids of their outputs."""
        engine = self.checked.engine
        ids = [engine.add(*one) for one in zip(self.prompts, self.sampling, strict=True)]
        return [one.request.request_id for one in engine._live.values() if one.request.request_id.split("#")[0] in ids]

    def run(self) -> list[Completion]:
        done = self.checked.run(self.prompts, self.sampling)
        self.same(done)
        return done

    def same(self, done: Sequence[Completion]) -> None:
        """``done``, all that were asked for in their order, came to what they do without drafts."""
        assert [one.token_ids for one in done] == [one.token_ids for one in self.plain]
        assert [one.finish_reason for one in done] == [one.finish_reason for one in self.plain]
        self.counts(done)

    def counts(self, done: Sequence[Completion]) -> None:
        """Steps, completions and statistics say the same of drafts."""
        stats = self.checked.engine.statistics()
        assert sum(one.drafted_tokens for one in done) == stats.drafted_tokens
        assert sum(one.accepted_tokens for one in done) == stats.accepted_tokens
        assert stats.drafted_tokens == sum(len(step.drafts.values) for step in self.checked.steps)


# -- every pattern, at every place around the edges of blocks


def edge_prompts(block: int) -> list[list[int]]:
    """That end so far before an edge of blocks of ``block`` tokens that drafts begin to reach it, .., pass it."""
    edge = -(-40 // block) * block
    text = np.random.default_rng(8).integers(32, 127, edge).tolist()
    return [text[: edge - 1 - before] for before in range(DRAFTS + 2)]


EDGES = [
    *(pytest.param(name, "natural") for name in ONE_OF_EACH_KIND),
    *(
        pytest.param(name, "reference", marks=() if name in PAGED_ALIKE else pytest.mark.thorough)
        for name in ONE_OF_EACH_KIND
    ),
]


@pytest.mark.parametrize(("name", "layout"), EDGES)
def test_draft_patterns_across_block_boundaries_keep_the_outputs(
    name: str, layout: str, make_engine: EngineFactory
) -> None:
    loaded = loaded_model(name)
    probe = make_engine(loaded, [[1] * 40], OUTPUT, layout=layout, speculate=ScriptedDrafter(random_script(0)))
    size = max(group.spec.block_size for group in probe.plan.config.groups)
    prompts = edge_prompts(size)
    patterns = range(DRAFTS + 1)
    asked = [replace(greedy(12), seed=good) for _ in prompts for good in patterns]  # the seed says the pattern
    pair = Pair(
        make_engine,
        name,
        [prompt for prompt in prompts for _ in patterns],
        asked,
        script=lambda request, _: (request.sampling.seed, DRAFTS),
        layout=layout,
        room_for=2 * len(asked),
    )
    pair.run()
    steps = pair.checked.steps
    seen = {
        (int(computed) + 1) % size
        for step in steps
        for row, computed in enumerate(step.num_computed)
        if len(step.drafts[row]) == DRAFTS
    }
    assert seen >= {(size - before) % size for before in range(DRAFTS + 2)}
    accepted = pair.checked.engine.statistics().accepted_by_position
    assert len(accepted) == DRAFTS
    assert accepted[0] > accepted[1] > accepted[2] > accepted[3] > 0


# -- outputs that end inside accepted drafts, or behind them


@pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.thorough), 2])
@pytest.mark.parametrize("name", models("llama", "gemma3", "mamba", "qwen3_next"))
def test_outputs_that_end_in_or_after_drafts_match_plain_outputs(
    name: str, in_flight: int, make_engine: EngineFactory
) -> None:
    """Outputs end at every position by stop token, stop string or length. The blocks that they leave are hit correctly.

    In some runs all drafts are right, in others only the first ones.
    """
    (prompt,) = shared_prompts(1, 3)
    loaded = loaded_model(name)
    whole = make_engine(loaded, [prompt], OUTPUT).generate([prompt], greedy(OUTPUT))[0]
    assert whole.text is not None
    ends = [greedy(length) for length in range(1, 2 * DRAFTS + 4)]
    ends += [replace(greedy(OUTPUT), stop_token_ids=(token,)) for token in whole.token_ids[: 2 * DRAFTS]]
    exact = len(ends)  # who ends by a token leaves all that it has run
    ends += [replace(greedy(OUTPUT), stop=(whole.text[at : at + 2],)) for at in range(2 * DRAFTS)]
    ends += [replace(greedy(OUTPUT), stop=(whole.text[3:5],), logprobs=1)]
    goods = [*(DRAFTS for _ in ends), *(at % DRAFTS for at in range(len(ends)))]
    asked = [replace(one, seed=good) for one, good in zip(ends * 2, goods, strict=True)]
    pair = Pair(
        make_engine,
        name,
        [prompt] * len(asked),
        asked,
        script=lambda request, _: (request.sampling.seed, DRAFTS),
        in_flight=in_flight,
        room_for=2 * len(asked),
    )
    # all have one prompt, and greedy tokens whatever the seed: the drafter knows the longest
    pair.drafter.learn([(whole, replace(greedy(OUTPUT), seed=good)) for good in range(DRAFTS + 1)])
    # by salts of their own, as a block has few ends
    done = salted(pair.checked, [prompt] * len(asked), asked)
    pair.same(done)
    reasons = {one.finish_reason for one in done}
    assert reasons == {FinishReason.LENGTH, FinishReason.STOP}
    assert [one.text for one in done] == [one.text for one in pair.plain]
    assert done[-1].logprobs is not None
    assert [one.token_id for one in done[-1].logprobs] == list(done[-1].token_ids)
    assert len({len(one.token_ids) for one in done}) > 2 * DRAFTS
    assert {one.accepted_tokens % (DRAFTS + 1) for one in done} == set(range(DRAFTS + 1))
    right = done[: len(ends)]
    assert sum(one.accepted_tokens for one in right) > sum(len(one.token_ids) for one in right) // 2
    # who goes on from what they left: from their ends, and from in between
    more = np.random.default_rng(4).integers(32, 127, 6).tolist()
    texts = [[*prompt, *one.token_ids] for one in done]
    after = salted(pair.checked, [text + more for text in texts], [greedy(3)] * len(texts))
    hits = [one.hit_tokens - len(text) for one, text in zip(after, texts, strict=True)]
    assert set(hits[:exact] + hits[len(ends) : len(ends) + exact]) == {-1, 0}  # the last token may not have run
    between = salted(pair.checked, [text[:-1] + more for text in texts], [greedy(3)] * len(texts))
    assert min(one.hit_tokens for one in between) >= len(prompt) - 1


def salted(
    checked: CheckedEngine, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
) -> list[Completion]:
    """As ``checked.run``, but nobody hits what another left."""
    asked = enumerate(zip(prompts, sampling, strict=True))
    ids = [checked.engine.add(*one, cache_salt=str(number)) for number, one in asked]
    done = checked.drain()
    return [done[request_id] for request_id in ids]


# -- together with everything else


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
@pytest.mark.parametrize(
    "name", [*models("gemma3", "gpt_oss", "deepseek_v32", "mamba", "qwen3_next", "zamba2"), *TINY_COMPRESSED]
)
def test_random_draft_patterns_in_little_memory_keep_the_outputs(
    name: str, seed: int, make_engine: EngineFactory
) -> None:
    """Prefix hits, chunked prefill, preemption for lack of memory or for no reason, forks; one and two steps ahead."""
    layout, in_flight = ("natural", "reference")[seed % 2], 1 + (ALL_TINY.index(name) + seed // 2) % 2
    prompts = [*shared_prompts(3, seed), *unlike_prompts(2, seed)]
    sampling = [replace(one, n=2 if at == 1 else 1) for at, one in enumerate(drawn(5, OUTPUT))]
    pair = Pair(
        make_engine,
        name,
        prompts,
        [replace(one, seed=10 * one.seed) for one in sampling],
        script=random_script(seed),
        layout=layout,
        placement="interval:5" if seed == 2 else None,
        in_flight=in_flight,
        token_budget=60,
        room_for=4,
    )
    ids, done = pair.add(), list[Completion]()
    engine = pair.checked.engine
    for number in itertools.count():
        if engine.idle:
            break
        done += engine.step()
        if number in {6, 9} and engine.scheduler.num_running:
            engine.scheduler._running.preempt_last(engine.scheduler._in_flight)
    pair.checked.check(done)
    by_id = {one.request_id: one for one in done}
    pair.same([by_id[one] for one in ids])
    stats = engine.statistics()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.preemptions >= 2
    assert any(not step.samples.all() for step in pair.checked.steps), "no chunk of a prompt"
    again = pair.checked.run(prompts, [replace(one, n=1) for one in pair.sampling])
    assert [one.token_ids for one in again] == [by_id[one].token_ids for one in ids if "#" not in one]
    tokens, stats = sum(len(one.token_ids) for one in (*done, *again)), engine.statistics()
    counts = tokens, stats.drafted_tokens, stats.accepted_tokens
    note_model(DraftResult(name, seed, layout, *counts, largest=pair.checked.largest))


@pytest.mark.parametrize("name", models("llama", "mamba", "qwen3_next"))
def test_largest_number_of_drafts_keeps_the_outputs(name: str, make_engine: EngineFactory) -> None:
    prompts = shared_prompts(4, 11)
    pair = Pair(
        make_engine, name, prompts, drawn(4, 40), script=random_script(11, MOST_TOKENS), drafts=MOST_TOKENS, room_for=12
    )
    pair.run()
    stats = pair.checked.engine.statistics()
    assert len(stats.accepted_by_position) == MOST_TOKENS
    assert min(stats.accepted_by_position) > 0
    assert {len(step.drafts[row]) for step in pair.checked.steps for row in range(len(step))} == set(range(9))


@pytest.mark.parametrize("name", models("qwen3_next", "falcon_h1"))
def test_blocks_moved_in_steps_with_drafts_keep_the_outputs(name: str, make_engine: EngineFactory) -> None:
    prompts = unlike_prompts(12, 3)
    pair = Pair(make_engine, name, prompts, drawn(12, OUTPUT), script=random_script(3), room_for=3, max_running=4)
    pair.run()
    moved = [copy.kind == "move" for step in pair.checked.steps if len(step.drafts.values) for copy in step.copies]
    slabs = pair.checked.engine.plan.config.slabs
    assert slabs is not None
    assert any(moved) == (len(slabs.classes) > 1)


@pytest.mark.parametrize(("name", "in_flight"), models_with([1, 2], {"mamba": [2]}))
def test_aborts_and_failed_forwards_with_drafts_keep_the_outputs(
    name: str, in_flight: int, make_engine: EngineFactory
) -> None:
    prompts = [*shared_prompts(4, 7), *unlike_prompts(2, 7)]
    pair = Pair(
        make_engine,
        name,
        prompts,
        drawn(6, OUTPUT),
        script=random_script(7),
        in_flight=in_flight,
        token_budget=100,
        room_for=12,
    )
    ids, done, failures = pair.add(), list[Completion](), 0
    engine = pair.checked.engine
    with failing(module_at(pair.checked.loaded.model, "head"), {2, 7, 11}.__contains__):
        for number in itertools.count():
            if engine.idle:
                break
            if number == 9:
                assert engine.abort(ids[2])
            try:
                done += engine.step()
            except RuntimeError as error:
                assert str(error) == "the device is gone"  # noqa: PT017  # the loop must go on behind it
                failures += 1
                engine.scheduler.check()
    assert failures == 3
    pair.checked.check(done)
    by_id = {one.request_id: one for one in done}
    assert by_id[ids[2]].finish_reason is FinishReason.ABORT
    for request_id, plain in zip(ids, pair.plain, strict=True):
        cut = by_id[request_id].token_ids
        assert cut == plain.token_ids[: len(cut)]
        assert len(cut) == OUTPUT or request_id == ids[2]
    again = pair.checked.run(prompts, drawn(6, OUTPUT))
    assert [one.token_ids for one in again] == [one.token_ids for one in pair.plain]
    assert all(one.hit_tokens for one in again)


@pytest.mark.parametrize("name", models("mamba"))
def test_resume_marks_inside_drafts_are_hit_to_the_token(name: str, make_engine: EngineFactory) -> None:
    """The mark lies inside the accepted drafts or after the last accepted draft."""
    (prompt,) = shared_prompts(1, 5)
    sampling = [greedy(40)]
    for good in range(DRAFTS + 1):
        pair = Pair(make_engine, name, [prompt], sampling, script=lambda *_, g=good: (g, DRAFTS), room_for=16)
        marks = [len(prompt) + at for at in (3, 18, 33)]
        request = pair.checked.engine.add(prompt, sampling[0], marks=marks)
        done = pair.checked.drain()[request]
        pair.same([done])
        text = [*prompt, *done.token_ids]
        for mark in marks:
            other = [*text[:mark], (text[mark] + 1) % 127, 50, 51]
            (after,) = pair.checked.run([other], greedy(2))
            assert after.hit_tokens == mark, (good, mark - len(prompt))


def test_stream_parts_with_drafts_have_several_tokens(make_engine: EngineFactory) -> None:
    (prompt,) = shared_prompts(1, 6)
    asked = replace(greedy(OUTPUT), logprobs=0)
    pair = Pair(make_engine, "qwen3_next", [prompt], [asked], script=lambda *_: (DRAFTS, DRAFTS))
    parts = list(pair.checked.engine.stream(prompt, asked))
    assert [token for part in parts for token in part.token_ids] == list(pair.plain[0].token_ids)
    assert "".join(part.text or "" for part in parts) == pair.plain[0].text
    for part in parts:
        assert part.logprobs is not None
        assert [one.token_id for one in part.logprobs] == list(part.token_ids)
    assert max(len(part.token_ids) for part in parts) == DRAFTS + 1


def test_engine_closes_its_drafter_and_rejects_unsuitable_ones(make_engine: EngineFactory) -> None:
    loaded = loaded_model("mamba")
    drafter = ScriptedDrafter(random_script(0))
    with Engine(loaded, memory="64MiB", max_model_len=64, speculate=drafter) as engine:
        assert engine.plan.model.num_speculative_tokens == DRAFTS
        closed = [drafter.closed]
    assert [*closed, drafter.closed] == [False, True]
    plan = make_engine(loaded, [[1] * 20], 4).plan
    make_engine.close()
    with pytest.raises(ConfigError, match="num_speculative_tokens is 4, but group 0 has 0 speculative state blocks"):
        Engine(loaded, plan, speculate=drafter)
    attends = loaded_model("llama")
    plan = make_engine(attends, [[1] * 20], 4).plan
    make_engine.close()
    Engine(attends, plan, speculate=drafter).close()  # nothing to make room for
    other: Drafter = DraftModel(Engine(load("tiny:llama"), memory="1MiB", max_model_len=32))
    wrong = replace(loaded, tokenizer=None)
    wrong.model.resize_token_embeddings(300)
    with pytest.raises(ConfigError, match="use a draft model with the vocabulary of its target"):
        Engine(wrong, memory="64MiB", max_model_len=64, speculate=other)
    wrong.model.resize_token_embeddings(257)
    other.close()
