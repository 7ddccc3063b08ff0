"""Defects of the reference that must not be here: docs/defects.md, one test each.

D1 is also in test_states.py, D6 and D8 in test_extra_keys.py (and test_hashing.py, test_events.py), the cost of a
failed look-up in test_windows.py.
"""

import subprocess
import sys
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridkv.cache import BlockStored, KVCacheBlocks, KVCacheManager, SlotPlan
from hybridkv.cache.index import PrefixIndex
from hybridkv.models import read_model
from hybridkv.planner import plan
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.step import Csr, Step, StepResult
from kinds_support import cache_of, chunked, full, hit, hit_tokens, published, sink, start, state, table, window

PROMPT = list(range(100))


def run(cache: KVCacheManager, prompts: list[list[int]], budget: int, outputs: int = 2) -> list[Step]:
    """All prompts through a scheduler, one after the other."""
    sched = Scheduler(cache, SchedulerLimits(8, budget))
    steps = []
    for i, prompt in enumerate(prompts):
        sched.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=outputs), hasher=cache.hasher))
        while not sched.drained:
            step = sched.schedule()
            steps.append(step)
            sched.update(StepResult(step.id, Csr.from_lists([[7] if one else [] for one in step.samples.tolist()])))
            sched.check()
    return steps


def test_d1_published_state_has_its_own_position() -> None:
    cache = cache_of(full(16), state(32))
    labels: dict[int, int] = {}
    for step in run(cache, [PROMPT], 48):
        labels |= {int(block): int(tokens) for _, _, tokens, block in step.state_writes}
    probe = Request("probe", PROMPT, hasher=cache.hasher)
    index = cache.groups[1].index
    found = {(column + 1) * 32: index.get(key) for column, key in enumerate(cache.groups[1].keys(probe))}
    assert list(found) == [32, 64, 96]
    assert all(block is not None for block in found.values())
    assert {labels[block]: block for block in found.values() if block is not None} == found


@pytest.mark.parametrize("seed", range(40))
def test_d2_commit_takes_the_planned_blocks(seed: int) -> None:
    """Hits, external loads, drafts and chunks at random: a commit uses up the blocks that its plan names, no more."""
    random = Random(seed)
    kinds = [full(4), full(8), window(9), window(16, 8), chunked(8), state(8), state(4, 2), state(16, 3)]
    cache = cache_of(*random.sample(kinds, random.randint(1, 4)), num_blocks=120)
    pool = cache.block_pool
    for i in range(12):
        request = Request(f"r{i}", [random.randrange(3) for _ in range(3)] * 20, hasher=cache.hasher)
        blocks, tokens = cache.get_computed_blocks(request)
        hit: KVCacheBlocks | None = blocks
        external = random.choice((0, 0, random.randint(0, 59 - tokens)))
        while request.num_computed_tokens < 60:
            cache.engine.drop_skipped(request)
            free, ahead = pool.get_num_free_blocks(), random.choice((0, 3))
            new = random.randint(1, 60 - request.num_computed_tokens - tokens - external)
            plan = cache.plan_slots(request, new, tokens, hit, ahead, num_external_computed_tokens=external)
            if not isinstance(plan, SlotPlan):
                break
            used = sum(part.take + pool.count_free(part.reuse[part.reuse != 0]) for part in plan.groups)
            cache.commit(plan)
            assert free - pool.get_num_free_blocks() == used
            request.num_computed_tokens += tokens + external + new
            tokens, hit, external = 0, None, 0
            cache.check()
        if random.random() < 0.7:
            cache.free(request)


def test_d3_sinks_are_planned_and_run() -> None:
    cache = cache_of(sink(4, 4), window(8))
    run(cache, [PROMPT[:30], PROMPT[:40]], 16)
    assert hit_tokens(cache, PROMPT[:41]) == 40
    cache.check()


def test_d4_only_the_reader_of_a_state_waits_one_step() -> None:
    cache = cache_of(full(4), state(4))
    sched = Scheduler(cache, SchedulerLimits(8, 64))
    for name, prompt in (("writer", [*range(8), 50]), ("reader", [*range(8), 60]), ("other", [70] * 6)):
        sched.add(Request(name, prompt, SamplingParams(max_tokens=3), hasher=cache.hasher))
    admitted = []
    for i in range(2):
        sched.add(Request(f"late{i}", [80 + i] * 3, SamplingParams(max_tokens=3), hasher=cache.hasher))
        step = sched.schedule()
        admitted.append([new.request_id for new in step.new_rows])
        sched.update(StepResult(step.id, Csr.from_lists([[7] if one else [] for one in step.samples.tolist()])))
    assert admitted == [["writer", "other", "late0"], ["reader", "late1"]]


def test_d5_chunk_group_alone_hits_only_seen_prompts() -> None:
    cache = cache_of(chunked(8))
    assert hit(cache, PROMPT[:30]) == (0, ([],))
    start(cache, PROMPT[:30], (30,))
    assert hit_tokens(cache, [1000, *PROMPT[1:30]]) == 0
    assert hit_tokens(cache, PROMPT[:30]) == 28


def test_d6_hashes_match_in_another_process() -> None:
    code = (
        "import numpy as np\n"
        "from hybridkv.cache import BlockHasher\n"
        "from hybridkv.request import Request\n"
        "one = Request('x', range(40), hasher=BlockHasher(16), cache_salt='s', prompt_embeds=np.ones((3, 2)))\n"
        "print([key.hex() for key in one.hashes])\n"
    )
    run_once = [sys.executable, "-c", code]
    outputs = {subprocess.run(run_once, capture_output=True, text=True, check=True).stdout for _ in range(2)}  # noqa: S603 - our own code
    assert len(outputs) == 1
    assert len(next(iter(outputs))) > 100


def test_d7_two_windows_are_two_groups() -> None:
    config = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "hidden_size": 8,
        "intermediate_size": 8,
        "vocab_size": 10,
        "sliding_window": 16,
        "max_position_embeddings": 200,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "dtype": "float32",
    }
    model = read_model(config)
    assert plan(model, "1MiB", max_model_len=100).config.num_blocks > 1
    cache = cache_of(window(8), window(16))
    start(cache, PROMPT[:64], (64,))
    assert hit_tokens(cache, PROMPT[:65]) == 64


def test_d8_token_spans_match_hashes_in_every_group() -> None:
    cache = cache_of(full(4), window(8, 8), state(16), enable_kv_cache_events=True)
    run(cache, [PROMPT[:50], PROMPT[:70]], 16)
    stored = [event for event in cache.take_events() if isinstance(event, BlockStored)]
    assert {event.group_idx for event in stored} == {0, 1, 2}
    hasher = cache.hasher
    assert hasher is not None
    for event in stored:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        stride = event.block_size // hasher.block_size
        chain = hasher.hash_chain(event.parent_block_hash, np.array(event.token_ids, np.int32))
        assert tuple(chain[stride - 1 :: stride]) == event.block_hashes


def test_d9_readmitted_request_is_not_preempted_at_once() -> None:
    """Two that cannot run together to their ends: whoever returns has room for all of its tokens, and runs on."""
    cache = cache_of(full(4), state(4), num_blocks=24)
    sched = Scheduler(cache, SchedulerLimits(8, 64))
    requests = [Request(name, [ord(name)] * 16, SamplingParams(max_tokens=40), hasher=cache.hasher) for name in "ab"]
    for request in requests:
        sched.add(request)
    admitted, lives = dict.fromkeys("ab", 0), []
    while not sched.drained:
        running = {request.request_id for request in cache.engine.resident_requests()}
        step = sched.schedule()
        admitted |= {new.request_id: step.id for new in step.new_rows}
        gone = running - {request.request_id for request in cache.engine.resident_requests()}
        lives += [step.id - admitted[name] for name in gone]
        sched.update(StepResult(step.id, Csr.from_lists([[7] if one else [] for one in step.samples.tolist()])))
    assert lives
    assert min(lives) > 1


def test_failed_window_look_up_is_not_repeated_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that nobody has seen waits for room: from its second step on it costs a key or two a group."""
    cache = KVCacheManager(cache_of(window(1024, 16), full(16), num_blocks=1400).config, 20_000)
    sched = Scheduler(cache, SchedulerLimits(8, 8192))
    sched.add(Request("running", [1] * 8000, SamplingParams(max_tokens=30), hasher=cache.hasher))
    sched.add(Request("waiting", [2] * 9000, SamplingParams(max_tokens=1), hasher=cache.hasher))
    asked: list[int] = []
    get, run_of = PrefixIndex.get, PrefixIndex.leading_run

    def counted_get(index: PrefixIndex, key: bytes) -> int | None:
        asked.append(1)
        return get(index, key)

    def counted_run(index: PrefixIndex, keys: Sequence[bytes], stop: int | None = None) -> NDArray[np.int32]:
        found = run_of(index, keys, stop)
        asked.append(len(found) + 1)
        return found

    monkeypatch.setattr(PrefixIndex, "get", counted_get)
    monkeypatch.setattr(PrefixIndex, "leading_run", counted_run)
    costs = []
    for _ in range(6):
        asked.clear()
        step = sched.schedule()
        sched.update(StepResult(step.id, Csr.from_lists([[7] if one else [] for one in step.samples.tolist()])))
        costs.append(sum(asked))
    assert sched.num_waiting == 1
    assert max(costs[1:]) <= 2 * len(cache.groups)


def test_groups_of_different_block_sizes_hit() -> None:
    cache = cache_of(full(4), full(8), window(12, 4), state(16))
    run(cache, [PROMPT[:50]], 16)
    assert hit_tokens(cache, PROMPT[:50]) == 48


def test_context_parallel_windows_and_groups_hit() -> None:
    cache = cache_of(full(4), window(20, 4), state(16), dcp_world_size=2, pcp_world_size=2)
    run(cache, [PROMPT[:70]], 32)
    assert hit_tokens(cache, PROMPT[:70]) == 64


@pytest.mark.parametrize("budget", [16, 64])
def test_resumed_request_hits_its_own_tokens(budget: int) -> None:
    """Sent back behind its prompt: the outputs are part of what is looked up, and no token is lost or doubled."""
    cache = cache_of(full(4), window(8), state(8))
    sched = Scheduler(cache, SchedulerLimits(8, budget))
    request = Request("a", PROMPT[:24], SamplingParams(max_tokens=30), hasher=cache.hasher)
    sched.add(request)
    resumed = []
    while not sched.drained:
        step = sched.schedule()
        resumed += [(len(new.token_ids), int(step.num_computed[0])) for new in step.new_rows]
        if request.num_output_tokens == 19 and len(resumed) == 1:
            sched.fail(step.id, "lost")
            continue
        sched.update(StepResult(step.id, Csr.from_lists([[7] if one else [] for one in step.samples.tolist()])))
        sched.check()
    assert resumed == [(24, 0), (43, 40)]
    assert request.num_output_tokens == 30


def test_draft_states_are_not_published() -> None:
    cache = cache_of(full(16), state(16, 2))
    request = start(cache, PROMPT[:14], (14,))
    request.append(5)
    cache.allocate_slots(request, 3)  # tokens 14, 15 and 16, the last two drafts
    assert published(cache, request, 1) == []
    assert len(table(cache, 1)) == 4
