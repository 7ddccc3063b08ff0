"""Drafts, step by step: what is proposed, run, accepted, kept and cached (docs/contracts.md, 4, 8 and 10)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import placement_named
from hybridkv.errors import ConfigError, OwnershipError, WorkerError
from hybridkv.planner.config import KVCacheConfig
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Outcome, Scheduler, SchedulerLimits
from hybridkv.specs import KVCacheSpec, UniformTypeKVCacheSpecs
from hybridkv.step import Csr, Step, StepResult
from hybridkv.testing.configs import full_spec, model_config, natural_model_config, state_spec

TOKEN = 7


def reference(*specs: KVCacheSpec, num_blocks: int = 60) -> KVCacheConfig:
    return model_config(num_blocks, specs)


def natural(*specs: KVCacheSpec, num_blocks: int = 60) -> KVCacheConfig:
    return natural_model_config(num_blocks, specs, [2] * len(specs))


def scheduler(
    config: KVCacheConfig, drafts: int = 3, *, max_batched_tokens: int = 64, max_in_flight: int = 1
) -> Scheduler:
    placement = placement_named("interval:5", 1) if config.slabs is not None else None
    cache = KVCacheManager(config, 100, options=CacheOptions(placement=placement))
    limits = SchedulerLimits(8, max_batched_tokens, max_in_flight, num_speculative_tokens=drafts)
    return Scheduler(cache, limits)


def add(
    sched: Scheduler,
    name: str,
    length: int = 8,
    *,
    first: int = 100,
    marks: Sequence[int] = (),
    **sampling: int | tuple[int, ...],
) -> Request:
    """Tokens first, first + 1, ..."""
    params = SamplingParams(**{"max_tokens": 20, **sampling})  # type: ignore[arg-type]  # by name
    request = Request(name, range(first, first + length), params, hasher=sched.cache.hasher, marks=marks)
    sched.add(request)
    return request


def result(step: Step, accepted: Mapping[int, int] | None = None) -> StepResult:
    """So many drafts of each row are accepted, by its place, all that are not named; then TOKEN."""
    tokens = []
    for i, samples in enumerate(step.samples.tolist()):
        drafts = step.drafts[i].tolist()
        tokens.append([*drafts[: (accepted or {}).get(i, len(drafts))], TOKEN] if samples else [])
    counts = np.array([len(one) for one in tokens], np.int32)
    return StepResult(step.id, Csr.from_lists(tokens), counts)


def update(sched: Scheduler, step: Step, **accepted: int) -> Outcome:
    outcome = sched.update(result(step, {int(place[1:]): count for place, count in accepted.items()}))
    sched.check()
    return outcome


def prefilled(
    config: KVCacheConfig, *lengths: int, drafts: int = 3, max_tokens: int = 20, **limits: int
) -> tuple[Scheduler, list[Request]]:
    """Requests a, b, .. that are done with their prompts and have sampled one token."""
    sched = scheduler(config, drafts, **limits)
    named = enumerate(zip("abcdef", lengths, strict=False))
    requests = [add(sched, name, length, first=100 * i + 100, max_tokens=max_tokens) for i, (name, length) in named]
    update(sched, sched.schedule())
    return sched, requests


def drafts_of(step: Step) -> list[list[int]]:
    return [step.drafts[i].tolist() for i in range(len(step))]


# -- proposals


@pytest.mark.parametrize("wrong", [[-1], [1, 2**31], ["a"]])
def test_drafts_that_are_not_token_ids_are_rejected(wrong: list[int]) -> None:
    sched, _ = prefilled(natural(full_spec(4)), 8, 8)
    with pytest.raises(ConfigError, match="drafts of 'b': token ids must"):
        sched.propose({"a": [1], "b": wrong})
    assert drafts_of(sched.schedule()) == [[], []]  # those of a neither


def test_drafts_from_another_thread_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    sched, _ = prefilled(natural(full_spec(4)), 8)
    monkeypatch.setattr("threading.get_ident", lambda: -1)
    with pytest.raises(OwnershipError):
        sched.propose({"a": [1]})


def states_of_two_sizes(block_size: int, drafts: int, mode: str) -> UniformTypeKVCacheSpecs:
    """Recurrent layers whose pages differ, group 1, of 32 bytes together as a block of 4 tokens."""
    one = state_spec(block_size, drafts, mode)
    layers = ((f"group1.layer{i}", replace(one, shapes=((size,),))) for i, size in enumerate((5, 3)))
    return UniformTypeKVCacheSpecs(block_size=block_size, layers=tuple(layers))


@pytest.mark.parametrize(("natural_layout", "mode"), [(False, "align"), (False, "none"), (True, "none")])
def test_drafts_with_mixed_state_sizes_need_speculative_blocks(natural_layout: bool, mode: str) -> None:
    def config(drafts: int) -> KVCacheConfig:
        specs = full_spec(4), states_of_two_sizes(4, drafts, mode)
        if natural_layout:
            return natural_model_config(60, specs, [2, 2], layers_per_group=2)
        return model_config(60, specs, layers_per_group=2)

    with pytest.raises(ConfigError, match="num_speculative_tokens is 3, but group 1 has 2 speculative state blocks"):
        scheduler(config(2))
    sched, _ = prefilled(config(3), 3)
    sched.propose({"a": [1, 2, 3]})
    step = sched.schedule()
    written = step.state_writes[:, 3]
    assert len(set(written.tolist())) == len(written) == 4  # one block behind each token, none of them null
    assert written.all()
    update(sched, step, _0=2)


def test_drafts_without_speculative_state_blocks_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 3, but group 1 has 2 speculative state blocks"):
        scheduler(natural(full_spec(4), state_spec(4, 2)))
    with pytest.raises(ConfigError, match=r"states kept every 3 tokens \(group 0\) need fewer drafts"):
        scheduler(reference(state_spec(3, 3)))
    scheduler(natural(state_spec(3, 3)))
    with pytest.raises(ConfigError, match="num_speculative_tokens must not be negative"):
        SchedulerLimits(num_speculative_tokens=-1)


# -- results


def drafted() -> tuple[Scheduler, Step]:
    sched, _ = prefilled(natural(full_spec(4)), 8, 6)
    sched.propose({"a": [1, 2]})
    return sched, sched.schedule()


@pytest.mark.parametrize(
    ("tokens", "accepted", "why"),
    [
        ([[1, 2, 7], [7]], None, "has drafts, so its result must set num_accepted"),
        ([[1, 2, 7], [7]], [2, 1], "num_accepted of the result must be the number of tokens"),
        ([[1, 3, 7], [7]], [3, 1], "tokens accepted for row 0 differ from its drafts"),
        ([[1, 2, 7, 7], [7]], [4, 1], "must hold 1 .. drafts \\+ 1 tokens"),
        ([[], [7]], [0, 1], "must hold 1 .. drafts \\+ 1 tokens"),
        ([[7], [7, 7]], [1, 2], "must hold 1 .. drafts \\+ 1 tokens"),
    ],
)
def test_draft_result_that_does_not_fit_is_rejected(
    tokens: list[list[int]], accepted: list[int] | None, why: str
) -> None:
    sched, step = drafted()
    counts = None if accepted is None else np.array(accepted, np.int32)
    with pytest.raises(WorkerError, match=why):
        sched.update(StepResult(step.id, Csr.from_lists(tokens), counts))
    sched.check()
    update(sched, step)  # nothing was changed


def test_step_without_drafts_accepts_num_accepted() -> None:
    sched, _ = prefilled(natural(full_spec(4)), 8)
    step = sched.schedule()
    with pytest.raises(WorkerError, match="num_accepted of the result must be the number"):
        sched.update(StepResult(step.id, Csr.from_lists([[7]]), np.array([2], np.int32)))
    assert sched.update(StepResult(step.id, Csr.from_lists([[7]]))).appended[0].tolist() == [7]


# -- states


def test_state_rotation_is_sent_when_the_request_runs() -> None:
    """A step that fails takes back only what it ran: cells of other rows must not be in it."""
    sched, _ = prefilled(natural(full_spec(4), state_spec(4, 3)), 7, 7, max_batched_tokens=40, max_in_flight=2)
    sched.propose({"b": [1, 2]})
    step = sched.schedule()
    ahead = sched.schedule()
    assert step.rows.tolist() == [0, 1]
    assert ahead.rows.tolist() == [0]  # b waits for the verdict
    update(sched, step)
    assert 1 not in ahead.cells.row
    update(sched, ahead)
    assert sorted(sched.schedule().cells.column[-2:].tolist()) == [0, 2]


# -- together with others


def test_scheduler_waiting_only_for_drafts_is_detected_before_a_step() -> None:
    """Not where another row runs ahead, a request waits, or nobody runs at all."""
    sched, _ = prefilled(natural(full_spec(4)), 8, 6, max_in_flight=2)
    sched.propose({"a": [1, 2]})
    mixed = sched.schedule()
    waits = [sched.waits_for_drafts]
    ahead = sched.schedule()
    assert len(ahead) == 1
    update(sched, mixed)
    update(sched, ahead)
    sched.propose({"a": [1], "b": [2]})
    both = sched.schedule()
    waits.append(sched.waits_for_drafts)
    add(sched, "c")
    waits.append(sched.waits_for_drafts)
    ahead = sched.schedule()
    assert [new.request_id for new in ahead.new_rows] == ["c"]
    update(sched, both)
    waits += [sched.waits_for_drafts, scheduler(natural(full_spec(4))).waits_for_drafts]
    assert waits == [False, True, False, False, False]
