"""One request's failure ends that request alone: names that are no text, hashers that fail, plans that raise."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridkv.cache import BlockHasher, KVCacheManager
from hybridkv.errors import ConfigError, HashError
from hybridkv.extra_keys import EncoderInput, Extra, LoraAdapter, MultimodalItem
from hybridkv.planner.config import KVCacheConfig
from hybridkv.request import Request, SamplingParams
from hybridkv.request_rows import append_tokens
from hybridkv.schedule import FinishReason, Outcome, Scheduler, SchedulerLimits
from hybridkv.step import Csr, Step, StepResult
from hybridkv.testing.configs import cross_spec, full_spec, model_config, natural_model_config, state_spec, window_spec
from hybridkv.wire import encode_step

LONE = "\ud800"
"""JSON may hold it, UTF-8 may not."""

BAD = 66
"""A token that the hasher below cannot bear."""

BLOCK = 4


class Failing(BlockHasher):
    """Raises for blocks that hold BAD, together with whoever is hashed in the same call."""

    def _refuse(self, tokens: NDArray[np.integer]) -> None:
        if (tokens == BAD).any():
            raise RuntimeError("the hasher is broken")

    def hash_chain(
        self, parent: bytes | None, tokens: NDArray[np.integer], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        self._refuse(tokens)
        return super().hash_chain(parent, tokens, extras)

    def hash_rows(
        self, parents: Sequence[bytes | None], tokens: NDArray[np.integer], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        self._refuse(tokens)
        return super().hash_rows(parents, tokens, extras)


def reference(num_blocks: int = 60, drafts: int = 0) -> KVCacheConfig:
    return model_config(num_blocks, (full_spec(BLOCK), window_spec(BLOCK, 8), state_spec(8, drafts)))


def natural(num_blocks: int = 60, drafts: int = 0) -> KVCacheConfig:
    specs = (full_spec(BLOCK), window_spec(BLOCK, 8), state_spec(8, drafts, "none"))
    return natural_model_config(num_blocks, specs, [2] * 3)


Config = Callable[..., KVCacheConfig]
LAYOUTS: list[Config] = [reference, natural]


def scheduler(config: KVCacheConfig, *, in_flight: int = 1, drafts: int = 0, budget: int = 64) -> Scheduler:
    cache = KVCacheManager(config, 100, hasher=Failing(BLOCK))
    return Scheduler(cache, SchedulerLimits(8, budget, in_flight, num_speculative_tokens=drafts))


def add(sched: Scheduler, name: str, prompt: Sequence[int], max_tokens: int = 12, **known: Any) -> Request:  # noqa: ANN401 - by name
    request = Request(name, prompt, SamplingParams(max_tokens=max_tokens), hasher=sched.cache.hasher, **known)
    sched.add(request)
    return request


def result(step: Step, requests: Sequence[Request], bad: str, at: int, drafts_accepted: int = 0) -> StepResult:
    """Every row samples token 7; ``bad`` samples BAD as its ``at``-th output token, and from then on."""
    lists: list[list[int]] = []
    for i, request in enumerate(requests):
        if not step.samples[i]:
            lists.append([])
            continue
        position = int(step.num_computed[i] + step.num_scheduled[i]) - request.num_prompt_tokens
        token = BAD if request.request_id == bad and position >= at else 7
        lists.append([*step.drafts[i].tolist()[:drafts_accepted], token])
    counts = np.array([len(one) for one in lists], np.int32) if len(step.drafts.values) else None
    return StepResult(step.id, Csr.from_lists(lists), counts)


def turn(sched: Scheduler, bad: str = "", at: int = 0) -> Outcome:
    step = sched.schedule()
    encode_step(step)
    flight = sched._in_flight[-1]
    outcome = sched.update(result(step, flight.requests, bad, at))
    sched.check()
    return outcome


def ended(outcomes: Sequence[Outcome]) -> dict[str, FinishReason]:
    return {one.request.request_id: one.reason for outcome in outcomes for one in outcome.finished}


# -- what can be refused is refused where the request is made


@pytest.mark.parametrize(
    ("known", "named"),
    [
        ({"request_id": LONE}, "request_id"),
        ({"cache_salt": f"tenant{LONE}"}, "cache_salt"),
        ({"lora": ("sql", f"/{LONE}")}, "path of a LoRA adapter"),
        ({"lora": (LONE, "/sql")}, "name of a LoRA adapter"),
        ({"multimodal": LONE}, "id of a multimodal item"),
        ({"encoder": LONE}, "digest of an encoder input"),
        ({"stop": LONE}, "stop"),
        ({"request_id": ""}, "request_id"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"request_id": 5}, "request_id"),
        ({"multimodal": 5}, "id of a multimodal item"),
        ({"encoder": 5.0}, "digest of an encoder input"),
    ],
)
def test_request_with_name_that_is_not_text_is_rejected(known: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} must be text"):
        request_of(**known)


def request_of(**known: Any) -> Request:  # noqa: ANN401 - by name
    """A prompt shorter than a block, so that nothing of it is hashed; names as short as can be."""
    request_id, stop = known.pop("request_id", "a"), known.pop("stop", ())
    if "lora" in known:
        known["lora"] = LoraAdapter(*known["lora"])
    if "multimodal" in known:
        known["multimodal"] = [MultimodalItem(known["multimodal"], 0, 1)]
    if "encoder" in known:
        known["encoder"] = EncoderInput(known["encoder"], 3)
    return Request(request_id, [1, 2], SamplingParams(stop=stop), hasher=BlockHasher(BLOCK), **known)


# -- a hasher that fails


@pytest.mark.parametrize("config", LAYOUTS)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_unhashable_sampled_token_ends_only_its_request(config: Config, in_flight: int) -> None:
    """All three fill a block in the same update."""
    sched = scheduler(config(), in_flight=in_flight)
    requests = [add(sched, name, range(first, first + 6)) for name, first in (("a", 0), ("b", 20), ("c", 40))]
    steps: list[tuple[Step, tuple[Request, ...]]] = []
    outcomes = []
    while not sched.drained or steps:
        while len(steps) < in_flight and not sched.drained:
            steps.append((sched.schedule(), sched._in_flight[-1].requests))
        step, rows = steps.pop(0)
        outcomes.append(sched.update(result(step, rows, "b", at=4)))
        sched.check()
    assert ended(outcomes) == {"a": "length", "b": "error", "c": "length"}
    (failed,) = [one for outcome in outcomes for one in outcome.finished if one.error is not None]
    assert isinstance(failed.error, HashError)
    assert failed.error.request_ids == ("b",)
    assert "'b'" in str(failed.error)
    assert "the hasher is broken" in str(failed.error)
    a, b, c = requests
    assert a.output_token_ids == c.output_token_ids == [7] * 12
    assert b.output_token_ids == [7, 7, 7, 7, BAD]  # in an unfinished block; the next one fills it and is not taken
    plain = BlockHasher(BLOCK)
    for one in (a, c):
        assert one.hashes == plain.hash_chain(None, one.token_ids())
    assert b.hashes == plain.hash_chain(None, b.token_ids())[: len(b.hashes)]
    assert sched.cache.usage == 0


@pytest.mark.parametrize("config", LAYOUTS)
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_unhashable_draft_keeps_drafts_before_it(config: Config, accepted: int) -> None:
    """The drafts before the token that fills the block stay; the others' are all there."""
    sched = scheduler(config(drafts=3), drafts=3)
    for name, first in (("a", 0), ("b", 20)):
        add(sched, name, range(first, first + BLOCK))
    turn(sched)
    drafts = {"a": [7, 7, 7], "b": [7, BAD, 7]}
    sched.propose(drafts)
    step = sched.schedule()
    outcome = sched.update(result(step, sched._in_flight[-1].requests, "", 0, accepted))
    sched.check()
    # known: 5; 3 more fill the block
    fails = accepted >= 2
    assert ended([outcome]) == ({"b": "error"} if fails else {})
    assert [len(outcome.appended[i]) for i in range(2)] == [accepted + 1, 2 if fails else accepted + 1]
    rest = [turn(sched) for _ in range(12) if not sched.drained]
    assert "error" not in ended(rest).values() or not fails
    assert sched.cache.usage == 0


@pytest.mark.parametrize("config", LAYOUTS)
def test_unhashable_late_token_ends_only_the_preempted_request(config: Config) -> None:
    sched = scheduler(config(), in_flight=2)
    a = add(sched, "a", range(BLOCK - 1))
    b = add(sched, "b", range(20, 20 + BLOCK - 1))
    step = sched.schedule()
    rows = sched._in_flight[-1].requests
    sched._running.preempt_last(sched._in_flight)
    outcome = sched.update(result(step, rows, "b", 0))
    sched.check()
    assert ended([outcome]) == {"b": "error"}
    assert b.num_output_tokens == 0
    assert a.output_token_ids == [7]
    outcomes = []
    while not sched.drained:
        outcomes.append(turn(sched))
    assert ended(outcomes) == {"a": "length"}
    assert sched.cache.usage == 0


class Deaf(BlockHasher):
    """Raises for chains that no parent begins, of one value: an encoder's."""

    def hash_chain(
        self, parent: bytes | None, tokens: NDArray[np.integer], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        if extras is not None and any(extra and extra[-1] == ("encoder", "broken") for extra in extras):
            raise RuntimeError("the hasher is broken")
        return super().hash_chain(parent, tokens, extras)


def test_unhashable_encoder_input_ends_only_its_request() -> None:
    config = natural_model_config(40, (full_spec(BLOCK), cross_spec(BLOCK)), [2, 2])
    sched = Scheduler(KVCacheManager(config, 100, hasher=Deaf(BLOCK)), SchedulerLimits(8, 64))
    for name, digest in (("a", "sound"), ("b", "broken"), ("c", "voice")):
        add(sched, name, range(3), 3, encoder=EncoderInput(digest, 5), skip_reading_prefix_cache=name == "b")
    outcomes = []
    while not sched.drained:
        outcomes.append(turn(sched))
    assert ended(outcomes) == {"a": "length", "b": "error", "c": "length"}
    assert sched.cache.usage == 0


# -- without a scheduler


@pytest.mark.parametrize("config", LAYOUTS)
def test_append_that_fails_for_one_request_keeps_others_whole(config: Config) -> None:
    cache = KVCacheManager(config(), 100, hasher=Failing(BLOCK))
    requests = [Request(name, range(i, i + 3), hasher=cache.hasher) for i, name in enumerate("abc")]
    for request in requests:
        assert cache.allocate_slots(request, 3) is not None
        request.num_computed_tokens = 3
    with pytest.raises(HashError, match="'b'") as found:
        append_tokens(requests, [7, BAD, 7])
    assert found.value.request_ids == ("b",)
    assert [request.num_tokens for request in requests] == [4, 3, 4]
    assert requests[1].token_ids().tolist() == [1, 2, 3]
    cache.check()
    append_tokens(requests, [7, 8, 7])  # a token that can be hashed goes on from there
    assert requests[1].token_ids().tolist() == [1, 2, 3, 8]
    assert requests[1].hashes == BlockHasher(BLOCK).hash_chain(None, np.array([1, 2, 3, 8], np.int32))
    cache.check()


def test_append_with_one_token_blocks_keeps_last_token() -> None:
    cache = KVCacheManager(model_config(20, (full_spec(1),)), 100, hasher=Failing(1))
    request = Request("a", [1, 2], hasher=cache.hasher)
    assert cache.allocate_slots(request, 2) is not None
    with pytest.raises(HashError):
        request.append(BAD)
    assert cache.rows.last_tokens(np.array([request.row])).tolist() == [2]
    request.append(3)
    assert request.token_ids().tolist() == [1, 2, 3]


def test_failed_hash_leaves_a_waiting_request_unchanged() -> None:
    request = Request("a", [1, 2, 3], hasher=Failing(BLOCK))
    with pytest.raises(HashError, match="'a' could not be hashed: RuntimeError"):
        request.append(BAD)
    assert request.token_ids().tolist() == [1, 2, 3]
    request.append(4)
    assert len(request.hashes) == 1
    with pytest.raises(HashError):
        Request("b", [BAD] * BLOCK, hasher=Failing(BLOCK))


# -- plans that raise


@pytest.mark.parametrize("config", LAYOUTS)
def test_unplannable_waiting_request_ends_alone(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    sched = scheduler(config())
    planned = sched.cache.find_hit

    def broken(request: Request) -> object:
        if request.request_id == "b":
            raise ValueError("what nobody thought of")
        return planned(request)

    monkeypatch.setattr(sched.cache, "look_up", broken)
    for name in "abc":
        add(sched, name, range(6), 3)
    outcomes = [turn(sched)]
    assert ended(outcomes) == {"b": "error"}
    while not sched.drained:
        outcomes.append(turn(sched))
    assert ended(outcomes) == {"a": "length", "b": "error", "c": "length"}
    add(sched, "b", range(60, 66), 3)  # its id is free again
    assert sched.cache.usage == 0
