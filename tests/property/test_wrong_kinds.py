"""Every public callable of the control plane with a value of every wrong kind, one argument at a time.

It may be taken for what it is, or be refused by a named error, never by another. Behind a refusal all that must hold
holds (``check``), requests go on, and at the end nothing is held.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from wrong_values import unnamed_errors, wrong_values

from hybridkv.cache import BlockHasher, BlockPool, CacheOptions, EngineHashes, KVCacheBlocks, KVCacheManager
from hybridkv.errors import HybridKVError
from hybridkv.extra_keys import EncoderInput, ExtraKeys, LoraAdapter, MultimodalItem
from hybridkv.planner.config import KVCacheConfig
from hybridkv.request import Lent, Request, SamplingParams, checked_marks, output_ids, token_array
from hybridkv.request_rows import append_tokens
from hybridkv.schedule import FinishReason, Scheduler, SchedulerLimits
from hybridkv.specs import RequestLimits
from hybridkv.step import Csr, Step, StepResult
from hybridkv.testing.configs import full_spec, model_config, natural_model_config, state_spec

B = 4
PARTS = 24
"""Of what is tried where every value needs a world of its own: `make test` tries one in each layout."""


STRANGER = Request("stranger", [1, 2, 3])
ELSEWHERE = KVCacheManager(model_config(9, (full_spec(B),)), 20)


def more_values() -> dict[str, Any]:
    """Of cache and scheduler, and numbers and arrays at their edges."""
    return {
        "7": 7,
        "2**31": 2**31,
        "10**5000": 10**5000,
        "an id in use": "a",
        "a mapping of drafts": {"a": [1]},
        "a mapping of text": {"a": "x"},
        "an iterator": iter((1, 2)),
        "deque": deque([1]),
        "bool_": np.bool_(True),  # noqa: FBT003
        "ids": np.array([1, 2]),
        "no ids": np.array([], np.int32),
        "negative ids": np.array([-1]),
        "large ids": np.array([2**40]),
        "unsigned ids": np.array([2**63], np.uint64),
        "no numbers": np.array([None], object),
        "flags": np.zeros(3, bool),
        "adapter": LoraAdapter("a", "b"),
        "lists": Csr.empty(1),
        "reason": FinishReason.STOP,
        "hasher": BlockHasher(B),
        "request": STRANGER,
        "another of the same id": Request("a", range(9)),
        "manager": ELSEWHERE,
        "result": StepResult(0, Csr.empty(0)),
        "blocks": KVCacheBlocks((np.array([1], np.int32),)),
    }


def wrong() -> list[tuple[str, Any]]:
    """Names and values, made anew."""
    return [*wrong_values().items(), *more_values().items()]


class World:
    """A scheduler in the middle of things: "a" decodes, "b" prefills, "c" waits, and one step is in flight."""

    def __init__(self, layout: str) -> None:
        self.cache = KVCacheManager(CONFIGS[layout], 100, options=CacheOptions(max_pinned_blocks=4))
        self.sched = Scheduler(self.cache, SchedulerLimits(2, 6, 2, num_speculative_tokens=2))
        self.requests = {name: self.request(name, 9 + 100 * i) for i, name in enumerate("abc")}
        for one in self.requests.values():
            self.sched.add(one)
        for _ in range(3):
            self.turn()
        self.flight = self.sched.schedule()
        self.cache.fields.take_transfers()

    def request(self, name: str, first: int = 500, **known: Any) -> Request:  # noqa: ANN401 - by name
        prompt = range(first, first + 9)
        return Request(name, prompt, SamplingParams(max_tokens=3), hasher=self.cache.hasher, **known)

    def turn(self) -> None:
        self.land(self.sched.schedule())

    def land(self, step: Step) -> None:
        self.sched.update(self.result(step))

    @staticmethod
    def result(step: Step) -> StepResult:
        counts = step.samples.astype(np.int32) if len(step.drafts.values) else None
        return StepResult(step.id, Csr.from_lists([[7] if one else [] for one in step.samples.tolist()]), counts)

    def goes_on(self) -> None:
        """Nothing is lost: what waits and runs comes to its end, and gives everything back."""
        self.cache.free("loaded")  # which the scheduler knows nothing of
        self.sched.check()
        while self.sched.num_in_flight:
            self.land(self.flights().pop(0))
        for _ in range(60):
            if self.sched.drained:
                break
            self.turn()
        self.sched.check()
        assert self.sched.drained
        for pin in self.cache.pins:
            self.cache.unpin(pin)
        for lock in self.cache.locks:
            self.cache.engine.unlock(lock)
        for request in self.cache.engine.resident_requests():  # taken without the scheduler, by the call itself
            self.cache.free(request)
        self.cache.fields.take_transfers()
        self.cache.check()
        assert self.cache.usage == 0

    def flights(self) -> list[Step]:
        return [flight.step for flight in self.sched._in_flight]


CONFIGS: dict[str, KVCacheConfig] = {
    "reference": model_config(60, (full_spec(B), state_spec(8, 2))),
    "natural": natural_model_config(60, (full_spec(B), state_spec(B, 2, "none")), [2, 2]),
}

Valid = dict[str, Any]
Calls = Iterator[tuple[Callable[..., Any], Valid]]
Surface = Callable[[World], Calls]


def opened(cache: KVCacheManager) -> Callable[[int], None]:
    """A step, opened and closed."""

    def step_of(step: int) -> None:
        with cache.step(step):
            pass

    return step_of


def cache_calls(world: World) -> Calls:
    """Methods of the manager, with arguments that work."""
    cache, a = world.cache, world.requests["a"]
    rows, fresh = np.array([a.row]), world.request("fresh")
    hit = cache.find_hit(world.request("look"))
    yield cache.bounds.refuse_stranger, {"request": fresh}
    for method in (cache.get_computed_blocks, cache.look_up, cache.find_hit, cache.engine.drop_skipped):
        yield method, {"request": fresh}
    for method in (cache.engine.blocks_to_share, cache.keep_resume_point):
        yield method, {"request": a}
    yield cache.engine.blocks_of, {"hit": hit}
    yield cache.is_longest_hit, {"request": fresh, "hit": hit}
    slots = {"num_new_computed_tokens": 0, "new_computed_blocks": None, "num_lookahead_tokens": 0}
    slots |= {"delay_cache_blocks": False, "num_encoder_tokens": 0, "num_external_computed_tokens": 0}
    yield cache.allocate_slots, {"request": fresh, "num_new_tokens": 3, **slots}
    yield cache.plan_slots, {"request": fresh, "num_new_tokens": 3, **slots, "admission": None}
    yield cache.commit, {"plan": cache.plan_slots(world.request("planned"), 2)}
    yield cache.allocate_batch, {"rows": rows, "num_new_tokens": 1, "num_lookahead_tokens": 0}
    none = np.array([0])
    yield cache.accept_drafts, {"rows": rows, "drafted": none, "kept": none}
    yield cache.cache_blocks, {"request": a, "num_computed_tokens": 4}
    yield cache.fields.forget_moved, {"moved": np.array([], np.int64)}
    yield cache.bounds.refuse_drafts, {"num_drafts": 0}
    yield cache.bounds.peak_blocks, {"limits": RequestLimits(100), "max_in_flight": 1}
    yield cache.free, {"request": "nobody"}
    yield cache.engine.free_many, {"requests": []}
    yield cache.engine.lock, {"request": "a"}
    yield cache.engine.unlock, {"lock": cache.engine.lock("a")}
    yield cache.pin, {"tokens": range(9), "salt": "x"}
    yield cache.unpin, {"pin": cache.pin(range(9))}
    yield cache.get_blocks, {"request_id": "a"}
    yield cache.get_block_ids, {"request_id": "a"}
    yield cache.get_num_common_prefix_blocks, {"request": "a", "num_running_requests": 1}
    computed = np.array([a.num_computed_tokens])
    yield cache.store_checkpoints, {"rows": rows, "computed": computed, "end": computed}
    yield opened(cache), {"step": 1 << 20}
    yield cache.mark_written, {"step": 1 << 20}
    yield cache.revoke, {"first_step": 1 << 20}
    yield append_tokens, {"requests": [], "tokens": []}
    pool = cache.block_pool
    for taking in (pool.free_blocks, pool.touch, pool.evict_blocks, pool.lock, pool.unlock, pool.refuse_foreign):
        yield taking, {next(iter(inspect.signature(taking).parameters)): np.array([], np.int32)}
    yield pool.free_many, {"parts": []}
    yield pool.get_cached_block, {"key": b"x", "group": 0}


def foreign_calls(world: World) -> Calls:
    """Those of the manager's that loops of others need."""
    cache, a = world.cache, world.requests["a"]
    rows, fresh = np.array([a.row]), world.request("fresh")
    loaded = world.request("loaded")
    cache.allocate_slots(loaded, 0, delay_cache_blocks=True, num_external_computed_tokens=2)
    yield cache.engine.finish_load, {"request": loaded, "num_computed_tokens": 2}
    yield cache.evict_blocks, {"group": 0, "block_ids": []}
    for column in (cache.engine.next_events, cache.engine.publish_boundaries):
        yield column, {"rows": rows}
    counts = {"num_tokens": np.array([a.num_tokens]), "num_computed": np.array([a.num_computed_tokens])}
    yield cache.engine.synchronise, {"rows": rows, **counts, "in_flight": cache.rows.in_flight[rows]}
    yield cache.engine.settle, {"step": 0}
    borrowed = Request("borrowed", Lent(SimpleNamespace(num_tokens=3, all_token_ids=[1, 2, 3]), 3), hasher=cache.hasher)
    yield cache.engine.synchronise_one, {"request": borrowed, "num_computed_tokens": 2, "num_in_flight_tokens": 1}
    yield cache.engine.blocks_to_come, {"request": fresh, "limits": RequestLimits(100)}


def scheduler_calls(world: World) -> Calls:
    sched = world.sched
    yield sched.add, {"request": world.request("more")}
    yield sched.fork, {"parent_id": "a", "n": 1}
    yield sched.abort, {"request_id": "nobody"}
    yield sched.finish, {"request_id": "nobody", "reason": FinishReason.STOP}
    yield sched.propose, {"drafts": {"a": [1]}}
    yield sched.update, {"result": world.result(world.flight)}
    yield sched.fail, {"step_id": world.flight.id, "error": "lost"}
    yield sched.limits.__class__, {one.name: getattr(sched.limits, one.name) for one in fields(sched.limits)}
    yield Scheduler, {"cache": world.cache, "limits": sched.limits}


def request_calls(world: World) -> Calls:
    a = world.requests["a"]
    waiting = world.request("waiting")
    for request in (a, waiting):
        yield request.truncate, {"num_tokens": request.num_tokens}
        yield request.token_ids, {"start": 0, "stop": 3}
    yield waiting.append, {"token": 3}
    yield waiting.branch, {"request_id": "b2", "sampling": SamplingParams()}
    known: Valid = {"request_id": "new", "prompt": [1, 2, 3], "sampling": None, "hasher": None, "cache_salt": None}
    known |= {"arrival_time": 0.0, "eos_token_ids": (), "lora": None, "multimodal": (), "prompt_embeds": None}
    known |= {"encoder": None, "continues": None, "priority": 0, "marks": ()}
    known |= {"skip_reading_prefix_cache": False, "skip_writing_prefix_cache": False}
    yield Request, known
    yield SamplingParams, {one.name: getattr(SamplingParams(), one.name) for one in fields(SamplingParams)}
    yield LoraAdapter, {"name": "a", "path": "b", "id": 3}
    yield MultimodalItem, {"id": "a", "offset": 0, "length": 3}
    yield EncoderInput, {"digest": "a", "num_tokens": 3}
    extras = {"lora": None, "multimodal": (), "cache_salt": None, "prompt_embeds": None, "encoder": None}
    yield ExtraKeys, {"num_prompt_tokens": 9, "block_size": 4, **extras}
    yield token_array, {"tokens": [1]}
    yield (
        Lent,
        {"lender": SimpleNamespace(num_tokens=3, all_token_ids=[1, 2, 3]), "num_prompt_tokens": 3, "hashes": None},
    )
    yield EngineHashes, {"block_size": 4}
    yield checked_marks, {"marks": [1]}
    yield output_ids, {"request_id": "a", "n": 2}


def constructions(world: World) -> Calls:
    config = world.cache.config
    known: Valid = {"enable_caching": True, "use_eagle": False, "log_stats": False, "enable_kv_cache_events": False}
    known |= {"dcp_world_size": 1, "pcp_world_size": 1, "hasher": None, "options": CacheOptions()}
    yield KVCacheManager, {"kv_cache_config": config, "max_model_len": 100, **known}
    options: Valid = {"retention": None, "max_pinned_blocks": 0, "placement": None, "eviction": None}
    options |= {"max_moved_bytes": None, "partial_block_hits": True, "max_event_blocks": 9}
    yield CacheOptions, {**options, "remembered_losses": 0, "block_times": False}
    yield BlockHasher, {"block_size": 4, "algorithm": "sha256_cbor", "seed": "x", "root": None}
    yield BlockPool, {"num_blocks": 9, "num_groups": 1}


def problem_of(call: Callable[..., Any], valid: Valid, argument: str, value: object, world: World | None = None) -> str:
    """What is wrong with what came of one call, "" for nothing. world: must go on behind a refusal, if given."""
    try:
        call(**{**valid, argument: value})
    except HybridKVError as error:
        if len(str(error)) > 1000:
            return "a message of over 1,000 characters"
        return "" if world is None else behind(world)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is none of ours
        return f"{type(error).__name__}: {str(error)[:90]}"
    return ""


def behind(world: World) -> str:
    try:
        world.goes_on()
    except Exception as error:  # noqa: BLE001 - as above
        return f"behind it {type(error).__name__}: {str(error)[:90]}"
    return ""


@pytest.mark.parametrize("part", [pytest.param(n, marks=[pytest.mark.thorough] if n else []) for n in range(PARTS)])
@pytest.mark.parametrize("layout", list(CONFIGS))
@pytest.mark.parametrize("surface", [cache_calls, foreign_calls, scheduler_calls])
def test_wrong_type_for_a_method_is_accepted_or_rejected_by_name(surface: Surface, layout: str, part: int) -> None:
    """In a world of its own for each value, which must go on behind it. part: of the values, others in each layout."""
    problems = []
    mine = (part + list(CONFIGS).index(layout)) % PARTS
    for place, (_, names) in enumerate(surface(World(layout))):
        for at, argument in enumerate(names):
            for name, value in wrong()[(place + at + mine) % PARTS :: PARTS]:
                world = World(layout)
                call, valid = next(one for i, one in enumerate(surface(world)) if i == place)
                problem = problem_of(call, valid, argument, value, world)
                if problem:
                    problems.append(f"{call.__name__}({argument}=): {problem}, for {name}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("surface", [request_calls, constructions])
def test_wrong_type_for_a_constructor_is_accepted_or_rejected_by_name(surface: Surface) -> None:
    world, problems = World("natural"), list[str]()
    for call, valid in surface(world):
        problems += [f"{call.__name__}: {line}" for line in unnamed_errors(call, valid, more_values)]
    assert not problems, "\n".join(problems)
    assert not behind(world)
