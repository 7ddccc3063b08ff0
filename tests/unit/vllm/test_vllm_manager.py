"""hybridkv.vllm without vLLM: requests and groups as vLLM's have them, by the names of their fields; loads.

Whole engines are compared beside vLLM itself: tests/vllm/engine_duel.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from engine_groups import (
    PROMPT,
    SIZE,
    Asked,
    CircularBufferSpec,
    Config,
    FullAttentionSpec,
    Group,
    MambaSpec,
    Sampling,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    manager,
    run,
)
from hybridkv import vllm
from hybridkv.cache import KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.eviction import HAZARD, LRU, Eviction
from hybridkv.request import Request
from hybridkv.spec_fields import Feature
from hybridkv.specs import RequestLimits
from hybridkv.vllm.manager import CacheManager
from hybridkv.vllm.requests import HINTS
from hybridkv.vllm.specs import cache_config, copied_tokens, refuse, refuse_captured, spec_of


@dataclass
class Stats:
    seen: list[tuple[int, int, bool]] = field(default_factory=list)
    reset: bool = False

    def record(self, *, num_tokens: int, num_hits: int, preempted: bool) -> None:
        self.seen.append((num_tokens, num_hits, preempted))


class HiSparseHotSpec(FullAttentionSpec):
    pass


class OffloadingConnector:
    """Of that name is vLLM's."""


class Gathers(OffloadingConnector):
    """Somebody's own."""


class InPool:
    def bind_gpu_block_pool(self, pool: object) -> None:
        pass


def finish(cache: CacheManager, request: Asked) -> None:
    """Compute the prompt of a request, its whole blocks first, and end it."""
    whole = len(request.block_hashes) * SIZE
    run(cache, request, whole)
    run(cache, request, request.num_tokens - whole)
    cache.free(request)


def test_vllm_manager_hits_and_tables_match_the_core() -> None:
    cache = manager(FullAttentionSpec(), SlidingWindowSpec())
    itself = KVCacheManager(cache_config(cache.kv_cache_config), 64)
    for name in "ab":
        request, mine = Asked(name, PROMPT), Request(name, PROMPT, hasher=itself.hasher)
        run(cache, request, len(PROMPT))
        blocks, hits = itself.get_computed_blocks(mine)
        itself.allocate_slots(mine, len(PROMPT) - hits, hits, blocks if hits else None)
        assert cache.get_block_ids(name) == itself.get_block_ids(name)
        assert request.num_computed_tokens == len(PROMPT)
        assert hits == (12 if name == "b" else 0)
        cache.cache_blocks(request, request.num_computed_tokens)
    assert cache.usage == itself.usage > 0
    cache.cache.check()


def test_vllm_manager_publishes_outputs() -> None:
    cache = manager(FullAttentionSpec())
    first = Asked("a", PROMPT)
    run(cache, first, len(PROMPT))
    for token in (7, 8, 9):
        first.append(token)
        run(cache, first, 1)
    second = Asked("b", first.all_token_ids)
    assert cache.get_computed_blocks(second)[1] == 16
    cache.free(first)
    assert cache.usage == 0
    assert cache.get_computed_blocks(second)[1] == 16


def test_vllm_manager_preempted_request_restarts_without_prompt_growth() -> None:
    cache = manager(FullAttentionSpec(), MambaSpec(), retention=0)
    request = Asked("a", PROMPT)
    run(cache, request, len(PROMPT))
    for token in range(3):
        request.append(token)
        run(cache, request, 1)
    cache.free(request)
    request.num_computed_tokens, request.num_in_flight_tokens = 0, 5
    run(cache, request, request.num_tokens)
    mine = cache._mirrors.known("a")
    assert mine is not None
    assert (mine.num_prompt_tokens, mine.num_tokens) == (len(PROMPT), len(PROMPT) + 3)
    cache.cache.check()


def test_vllm_manager_state_is_not_hit_before_its_step() -> None:
    cache = manager(FullAttentionSpec(), MambaSpec())
    first, second = Asked("a", PROMPT[:9]), Asked("b", PROMPT[:9])
    with cache.step():
        assert cache.allocate_slots(first, 8) is not None
        first.num_computed_tokens = 8
        blocks, hits, _ = cache.get_computed_blocks(second)
        assert hits == 8
        assert cache.allocate_slots(second, 1, hits, blocks) is None
    output = object()
    cache.scheduled(output)
    cache.executed(output)
    with cache.step():
        blocks, hits, _ = cache.get_computed_blocks(second)
        assert cache.allocate_slots(second, 1, hits, blocks) is not None


@pytest.mark.parametrize("specs", [(FullAttentionSpec(),), (FullAttentionSpec(), MambaSpec())])
@pytest.mark.parametrize("ends", ["begins", "aborted"])
def test_vllm_manager_evicts_the_prefix_of_a_waiting_request_last(specs: tuple[object, ...], ends: str) -> None:
    found = []
    for waits in (False, True):
        cache, request = manager(*specs, eviction=HAZARD), Asked("next", [*PROMPT, 1, 2, 3])
        finish(cache, Asked("first", PROMPT))
        if waits:
            with cache.step():
                cache.expect([request])
        for number in range(8):
            finish(cache, Asked(f"other {number}", [20 + number] * len(PROMPT)))
        found.append(cache.get_computed_blocks(request)[1])
        cache.cache.check()
    assert found == [0, 12]
    if ends == "begins":
        run(cache, request, request.num_tokens)
        assert not cache._expected
        return
    cache.free(request)
    for number in range(8):
        finish(cache, Asked(f"another {number}", [40 + number] * len(PROMPT)))
    assert cache.get_computed_blocks(request)[1] == 0


def test_vllm_manager_expects_the_next_requests_that_hold_nothing() -> None:
    cache, lru = manager(FullAttentionSpec(), eviction=HAZARD), manager(FullAttentionSpec())
    asked = [Asked(str(number), [number] * 5) for number in range(8)]
    run(cache, asked[1], 5)
    for one in (cache, lru):
        one.expect(asked[:3])
        one.expect(asked)
    assert [*cache._expected] == ["0", "2", "3", "4"]
    cache.expect([Asked("preempted", [9] * 5), *asked])
    assert [*cache._expected] == ["0", "2", "3", "4", "preempted"]
    cache.expect([])
    assert not lru._expected
    assert lru._mirrors.known("0") is None


def test_vllm_manager_skips_steps_without_output() -> None:
    cache = manager(FullAttentionSpec())
    outputs = [object() for _ in range(3)]
    for number, output in enumerate(outputs):
        with cache.step():
            cache.allocate_slots(Asked(str(number), [number] * 4), 4)
        cache.scheduled(output)
    cache.executed(outputs[1])
    assert cache.cache.statistics().unwritten_blocks == 1
    cache.executed(outputs[1])
    cache.executed(outputs[2])
    with pytest.raises(Exception, match="step"):
        cache.cache.mark_written(2)


def test_vllm_manager_returns_none_when_the_sequence_does_not_fit() -> None:
    cache = manager(FullAttentionSpec(), num_blocks=4)
    request = Asked("a", PROMPT)
    assert cache.allocate_slots(request, 4, full_sequence_must_fit=True) is None
    assert cache.allocate_slots(request, 4) is not None
    request.num_computed_tokens = 4
    assert cache.allocate_slots(request, 10) is None
    assert cache.get_block_ids("a") == ([1],)


def test_vllm_manager_keeps_the_watermark_free() -> None:
    cache = manager(FullAttentionSpec(), num_blocks=11, watermark=0.5)
    assert cache.allocate_slots(Asked("a", PROMPT), len(PROMPT)) is not None
    assert cache.allocate_slots(Asked("b", PROMPT[1:9]), 8) is None
    assert cache.allocate_slots(Asked("b", PROMPT[1:9]), 8, has_scheduled_reqs=False) is not None


def test_vllm_manager_admission_counts_one_state_per_chunk() -> None:
    """As vLLM's: it finds no block later, and another request gives way then."""
    cache = manager(FullAttentionSpec(), MambaSpec(), num_blocks=6)
    assert cache.allocate_slots(Asked("a", PROMPT), 4, full_sequence_must_fit=True) is not None
    cache = manager(FullAttentionSpec(), MambaSpec(), num_blocks=5)
    assert cache.allocate_slots(Asked("a", PROMPT), 4, full_sequence_must_fit=True) is None


def test_vllm_manager_admission_after_a_long_hit_counts_only_the_window_that_follows() -> None:
    """Ten full columns are hit, one follows. Of the window two columns are hit, one follows: 14 blocks of 15."""
    cache = manager(FullAttentionSpec(), SlidingWindowSpec(), num_blocks=16)
    first, second = Asked("a", list(range(1, 41))), Asked("b", list(range(1, 43)))
    for _ in range(10):
        assert run(cache, first, 4) is not None
    cache.free(first)
    blocks, hits, _ = cache.get_computed_blocks(second)
    assert hits == 40
    assert cache.allocate_slots(second, 2, hits, blocks, full_sequence_must_fit=True) is not None
    assert cache.block_pool.get_num_free_blocks() == 1


def test_vllm_manager_with_states_keeps_blocks_free_for_running_requests() -> None:
    """Half a block for each running request, rounded up. Without states admissions are vLLM's."""
    states, dense = manager(FullAttentionSpec(), MambaSpec(), num_blocks=6), manager(FullAttentionSpec(), num_blocks=4)
    for cache in (states, dense):
        assert run(cache, Asked("a", [1, 2, 3]), 3) is not None
    second = Asked("b", list(range(10, 18)))
    assert states.allocate_slots(second, 8) is None
    assert states.allocate_slots(second, 8, has_scheduled_reqs=False) is not None
    assert dense.allocate_slots(second, 8) is not None
    assert [cache.block_pool.get_num_free_blocks() for cache in (states, dense)] == [0, 0]


@pytest.mark.parametrize(("eviction", "fits"), [(HAZARD, False), (LRU, True)])
def test_vllm_manager_without_states_keeps_blocks_free_while_others_wait(eviction: Eviction, *, fits: bool) -> None:
    cache = manager(FullAttentionSpec(), num_blocks=4, eviction=eviction)
    assert run(cache, Asked("a", [1, 2, 3]), 3) is not None
    second, third = Asked("b", list(range(10, 18))), Asked("c", list(range(20, 28)))
    cache.expect([second, third])
    assert (cache.allocate_slots(second, 8) is not None) == fits
    cache.free(third)
    assert fits or cache.allocate_slots(second, 8) is not None


def test_vllm_manager_holds_blocks_in_flight_after_the_end() -> None:
    cache = manager(FullAttentionSpec())
    request = Asked("a", PROMPT)
    run(cache, request, len(PROMPT))
    free = cache.block_pool.get_num_free_blocks()
    held = cache.pop_blocks_for_free(request)
    assert (cache.block_pool.get_num_free_blocks(), cache.get_block_ids("a")) == (free, ([],))
    cache.block_pool.free_blocks(reversed(held))
    assert cache.usage == 0
    assert cache.pop_blocks_for_free(request) == []


def test_vllm_manager_frees_windows_after_settled_tokens() -> None:
    cache = manager(SlidingWindowSpec())
    request = Asked("a", PROMPT)
    run(cache, request, len(PROMPT))
    cache.remove_skipped_blocks("a", 4)
    assert 0 not in cache.get_block_ids("a")[0]
    cache.remove_skipped_blocks("a", 14)
    assert cache.get_block_ids("a")[0][:2] == [0, 0]


def test_vllm_manager_clears_attention_blocks_only() -> None:
    cache = manager(FullAttentionSpec(), MambaSpec())
    request = Asked("a", PROMPT)
    run(cache, request, len(PROMPT))
    attention, states = cache.get_block_ids("a")
    assert cache.take_new_block_ids() == attention
    assert cache.take_new_block_ids() == []
    assert set(states) - {0}
    cache.record_blocks_for_zeroing("a", 8)
    assert cache.take_new_block_ids() == attention[2:]


def test_vllm_manager_blocks_have_the_vllm_interface() -> None:
    cache = manager(FullAttentionSpec(), FullAttentionSpec())
    request = Asked("a", PROMPT)
    new = run(cache, request, len(PROMPT))
    assert new.get_block_ids() == cache.get_block_ids("a") == ([1, 2, 3, 4], [5, 6, 7, 8])
    assert new.get_block_ids(group_ids=[1]) == ([5, 6, 7, 8],)
    assert new.get_unhashed_block_ids_all_groups() == [[4], [8]]
    assert [one.block_hash for one in new.blocks[0]] == [*request.block_hashes, None]
    assert new.new_empty().get_block_ids(allow_none=True) is None
    assert cache.empty_kv_cache_blocks.get_block_ids() == ([], [])
    assert cache.get_block_ids_for_computed_tokens("a", 5) == ([1, 2], [5, 6])
    assert cache.estimate_cached_tokens(request) == 12


def test_vllm_manager_groups_have_their_spec_and_block_size() -> None:
    """EngineCore looks at each when it starts."""
    specs = FullAttentionSpec(), SlidingWindowSpec()
    found = manager(*specs).coordinator.single_type_managers
    assert [(one.block_size, one.kv_cache_spec) for one in found] == [(SIZE, spec) for spec in specs]


def test_vllm_manager_statistics_match_vllm() -> None:
    cache = manager(FullAttentionSpec(), new_stats=Stats)
    request = Asked("a", PROMPT)
    cache.record_prefix_cache_stats(request, 8)
    request.num_preemptions = 1
    cache.record_prefix_cache_stats(request, 4)
    assert cache.reset_prefix_cache()
    assert cache.make_prefix_cache_stats() == Stats([(14, 8, False), (14, 4, True)], reset=True)
    assert cache.make_prefix_cache_stats() == Stats()
    assert manager(FullAttentionSpec()).make_prefix_cache_stats() is None


def test_vllm_manager_without_caching_neither_looks_up_nor_hashes() -> None:
    cache = manager(FullAttentionSpec(), MambaSpec(mamba_cache_mode="none", block_size=64), enable_caching=False)
    for name in "ab":
        request = Asked(name, PROMPT)
        request.block_hashes = []
        assert cache.get_computed_blocks(request)[1:] == (0, 0)
        assert run(cache, request, len(PROMPT)) is not None
        cache.cache_blocks(request, len(PROMPT))
        assert cache.estimate_cached_tokens(request) == 0


def test_vllm_manager_encoder_input_is_not_in_the_prompt() -> None:
    """vLLM caches no prefixes of such models; where the input's features lie says nothing of the decoder's tokens."""
    cache = manager(FullAttentionSpec(), enable_caching=False)
    request = Asked("a", PROMPT)
    request.block_hashes = []
    request.mm_features = [SimpleNamespace(identifier="sound", mm_position=SimpleNamespace(offset=0, length=500))]
    assert run(cache, request, len(PROMPT)) is not None


def test_vllm_manager_keeps_states_at_chunk_ends_only() -> None:
    """The block that vLLM would take for one is never taken: its column is null."""
    cache = manager(FullAttentionSpec(), MambaSpec(num_prefill_checkpoint_blocks=1))
    request = Asked("a", PROMPT)
    run(cache, request, len(PROMPT))
    assert [bool(one) for one in cache.get_block_ids("a")[1]] == [False, False, False, True]


@pytest.mark.parametrize("given", [{"secret": True}, '{"secret": true}'])
def test_vllm_manager_applies_hints(given: object) -> None:
    cache = manager(FullAttentionSpec())
    for name, extra in (("secret", {HINTS: given, "others": 1}), ("said", None)):
        request = Asked(name, PROMPT)
        request.sampling_params = Sampling(extra)
        run(cache, request, len(PROMPT))
        cache.free(request)
        assert cache.get_computed_blocks(Asked("again", PROMPT))[1] == (0 if name == "secret" else 12)
        cache.free(Asked("again", PROMPT))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"secrt": True}, "no field 'secrt'"),
        ({"over": True, "goes_on": True}, "leave one of them out"),
        ("{", "an invalid hybridkv_hints"),
        (7, "must be an object"),
    ],
)
def test_vllm_manager_ignores_invalid_hints(given: object, said: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = manager(FullAttentionSpec())
    request = Asked("wrong", PROMPT)
    request.sampling_params = Sampling({HINTS: given})
    assert run(cache, request, len(PROMPT)) is not None
    assert said in caplog.text
    assert "wrong" in caplog.text


def test_vllm_manager_events_use_the_engine_hashes() -> None:
    cache = manager(FullAttentionSpec(), enable_events=True)
    request = Asked("a", PROMPT)
    request.cache_salt = "tenant"
    run(cache, request, len(PROMPT))
    (stored,) = cache.take_events()
    assert list(stored.block_hashes) == request.block_hashes
    assert stored.cache_salt == "tenant"
    assert not cache.take_events()


def test_vllm_manager_converts_no_events_in_steps_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = manager(FullAttentionSpec())
    run(cache, Asked("a", PROMPT), len(PROMPT))
    monkeypatch.setattr(cache, "_to_engine_events", lambda events: pytest.fail(f"{events} are converted"))
    assert cache.take_events() == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (HiSparseHotSpec(), "HiSparseHotSpec is not supported"),
        (MambaSpec(mamba_cache_mode="all"), "--mamba-cache-mode all"),
    ],
)
def test_vllm_manager_rejects_unsupported_options(spec: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(spec)


def test_vllm_compressed_specs_keep_what_hits_depend_on() -> None:
    rate = spec_of(FullAttentionSpec(tokens_per_state=Fraction(1, 2), dcp_sharded=False))
    window = spec_of(SlidingWindowMLASpec(extra_retained_tokens=3, bounded_replay=True))
    assert (rate.tokens_per_state, rate.dcp_sharded) == (Fraction(1, 2), False)  # type: ignore[attr-defined]
    assert window.features == {Feature.RETAINED, Feature.REPLAY}
    assert spec_of(CircularBufferSpec()).max_row_blocks(RequestLimits(4096)) == 1


def test_vllm_manager_adopts_a_hit_before_the_end_of_a_window_is_computed_again() -> None:
    cache = manager(FullAttentionSpec(tokens_per_state=4), SlidingWindowMLASpec(bounded_replay=True))
    first, second = Asked("first", PROMPT), Asked("second", PROMPT)
    run(cache, first, len(PROMPT))
    cache.take_new_block_ids()
    blocks, hit, _ = cache.get_computed_blocks(second)
    with cache.step():
        cache.allocate_slots(second, 0, num_new_computed_tokens=hit, new_computed_blocks=blocks)
    second.num_computed_tokens = hit - 4  # of a window of 6 tokens, two were computed in the first step
    with cache.step():
        cache.allocate_slots(second, len(PROMPT) - second.num_computed_tokens)
    (full, window), (theirs, others) = (cache.get_block_ids(name) for name in ("second", "first"))
    assert (hit, full[:3], window[0], len(window)) == (12, theirs[:3], 0, 4)
    assert not {0, *others} & set(window[1:])
    assert sorted(cache.take_new_block_ids()) == sorted([full[3], *window[1:]])


def test_vllm_state_spec_pairs_shapes_with_dtypes() -> None:
    spec = spec_of(MambaSpec(shapes=((2, 2), (3,)), dtypes=("torch.float32",)))
    assert (spec.shapes, spec.dtypes) == (((2, 2),), ("float32",))  # type: ignore[attr-defined]


def several(*connectors: object) -> SimpleNamespace:
    """As vLLM's MultiConnector."""
    return SimpleNamespace(sub_connectors=list(connectors))


def started(**changed: Any) -> SimpleNamespace:  # noqa: ANN401 - of vLLM's kinds
    """A scheduler of vLLM's that is supported, but for what is ``changed``."""
    coordinator = SimpleNamespace(enable_partial_hash_hits=changed.pop("partial", False))
    spec = changed.pop("spec", SimpleNamespace(block_size=64))
    group = SimpleNamespace(layer_names=["layer0"], kv_cache_spec=spec, host_resident=False, role="default")
    vars(group).update(changed.pop("group", {}))
    fields = {
        "vllm_config": SimpleNamespace(
            speculative_config=changed.pop("drafts", None),
            num_prefill_lookahead_tokens=changed.pop("modules", 0),
            observability_config=SimpleNamespace(kv_cache_metrics=changed.pop("metrics", False)),
            parallel_config=SimpleNamespace(decode_context_parallel_size=changed.pop("ranks", 1)),
        ),
        "kv_cache_manager": SimpleNamespace(enable_caching=True, coordinator=coordinator),
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[group]),
        "connector": None,
        "block_size": 64,
        "hash_block_size": 32,
    }
    return SimpleNamespace(**(fields | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"connector": InPool()}, "InPool, which reads and locks blocks in vLLM's own pool"),
        ({"connector": Gathers(), "spec": MambaSpec()}, "Gathers for models with recurrent states"),
        ({"connector": several(object(), several(InPool()))}, "InPool, which reads and locks"),
        ({"connector": several(Gathers()), "spec": MambaSpec()}, "Gathers for models with recurrent"),
        (
            {"partial": True, "connector": object()},
            "hits inside a block of 64 tokens, at multiples of 32, with a connector",
        ),
        ({"partial": True, "drafts": object()}, "hits inside a block .* with drafts"),
        ({"partial": True, "ranks": 2}, "hits inside a block .* with context parallelism"),
        ({"modules": 2}, "drafts of 2 modules"),
        ({"num_hash_lookahead_tokens": 1}, "cover tokens after the block"),
        ({"metrics": True}, "--kv-cache-metrics"),
        ({"group": {"role": "hisparse_source"}}, r"two places \(layer0\)"),
        ({"group": {"host_resident": True}}, r"two places \(layer0\)"),
    ],
)
def test_vllm_manager_rejects_unsupported_vllm_settings(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"hybridkv.vllm does not support .*{message}"):
        refuse(started(**changed))


def test_vllm_manager_accepts_supported_vllm_settings() -> None:
    refuse(started())
    refuse(started(partial=True))
    refuse(started(connector=object(), modules=1))
    refuse(started(connector=several(object(), object()), spec=MambaSpec()))
    refuse(started(connector=several(Gathers(), object())))
    refuse(started(ranks=2))


@pytest.mark.parametrize("part", ["manager", "coordinator", "block_pool"])
def test_vllm_manager_names_helpers_that_captured_vllms_manager(part: str) -> None:
    theirs = SimpleNamespace(coordinator=object(), block_pool=object())
    held = theirs if part == "manager" else getattr(theirs, part)
    scheduler = SimpleNamespace(kv_cache_manager=object(), waiting=[], helper=SimpleNamespace(cache=object()))
    refuse_captured(scheduler, theirs)
    scheduler.aux_output_connector = SimpleNamespace(pool=held)
    with pytest.raises(ConfigError, match=r"support routed experts in the output \(aux_output_config\)"):
        refuse_captured(scheduler, theirs)
    scheduler.aux_output_connector, scheduler.helper = None, held
    with pytest.raises(ConfigError, match="support helper, which reads"):
        refuse_captured(scheduler, theirs)


def test_vllm_manager_rejects_impossible_calls() -> None:
    cache = manager(FullAttentionSpec())
    request = Asked("a", PROMPT)
    with pytest.raises(ConfigError, match="end at blocks"):
        cache.truncate_computed_blocks(cache.empty_kv_cache_blocks, 3)
    run(cache, request, len(PROMPT))
    again = Asked("again", PROMPT)
    assert cache.get_computed_blocks(again, len(PROMPT))[1] == 12
    with pytest.raises(ConfigError, match="a hit of 12 tokens cannot be bounded to 11"):
        cache.get_computed_blocks_for_connector(again, 11)
    request.all_token_ids = request.all_token_ids[:5]
    with pytest.raises(ConfigError, match="has 14 tokens, and cannot have 5"):
        cache.allocate_slots(request, 3)
    longer = Asked("b", PROMPT)
    longer.block_hashes = longer.block_hashes[:1]
    with pytest.raises(ConfigError, match="its engine has hashed 1"):
        cache.get_computed_blocks(longer)


@pytest.mark.parametrize("name", vllm.__all__)
def test_vllm_scheduler_without_vllm_names_the_package(name: str) -> None:
    code = f"import sys, hybridkv.vllm; assert 'vllm' not in sys.modules; hybridkv.vllm.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603 - ours
    assert done.returncode
    assert "pip install 'vllm>=0.32,<0.34'" in done.stderr.splitlines()[-1]
    with pytest.raises(AttributeError, match="no attribute 'Schedule'"):
        _ = vllm.Schedule


def admit_load(cache: CacheManager, request: Asked, external: int, **asked: Any) -> Any:  # noqa: ANN401 - Blocks or None
    """As a scheduler does whose connector brings ``external`` tokens beside the steps."""
    with cache.step():
        blocks, hit, _ = cache.get_computed_blocks(request)
        new = cache.allocate_slots(
            request,
            0,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            num_external_computed_tokens=external,
            delay_cache_blocks=True,
            **asked,
        )
    if new is not None:
        request.num_computed_tokens = hit + external
    return new


def other_hits(cache: CacheManager) -> int:
    return int(cache.get_computed_blocks(Asked("other", [*PROMPT, 1]))[1])


def test_vllm_manager_loaded_blocks_are_hit_after_the_load() -> None:
    cache = manager(FullAttentionSpec())
    request = Asked("a", PROMPT)
    assert admit_load(cache, request, 8) is not None
    assert len(cache.get_block_ids("a")[0]) == 2
    assert other_hits(cache) == 0
    cache.cache_blocks(request, 8)
    assert other_hits(cache) == 8
    run(cache, request, 6)
    assert other_hits(cache) == 12
    cache.free(request)
    assert cache.usage == 0
    cache.cache.check()


def test_vllm_manager_fully_loaded_prompt_computes_its_last_token() -> None:
    cache = manager(FullAttentionSpec())
    request = Asked("a", PROMPT[:13])
    assert admit_load(cache, request, 13) is not None
    assert len(cache.get_block_ids("a")[0]) == 4  # what the transfer writes, the 13th token's too
    cache.cache_blocks(request, 13)
    request.num_computed_tokens = 12
    run(cache, request, 1)
    assert other_hits(cache) == 12
    cache.cache.check()


def test_vllm_manager_load_of_the_last_token_writes_its_block() -> None:
    """The hit is as long as a hit can be, and a connector for dense models still brings the last token."""
    cache = manager(FullAttentionSpec())
    run(cache, Asked("a", PROMPT[:13]), 13)
    request = Asked("b", PROMPT[:13])
    assert admit_load(cache, request, 1) is not None
    (blocks,) = cache.get_block_ids("b")
    assert [one.block_id for one in cache.get_blocks("b").blocks[0] if one.block_hash is None] == blocks[3:]
    assert len(blocks) == 4
    cache.cache_blocks(request, 13)
    request.num_computed_tokens = 12
    assert run(cache, request, 1) is not None
    assert cache.get_block_ids("b") == (blocks,)
    cache.free(request)
    states = manager(FullAttentionSpec(), MambaSpec())
    run(states, Asked("a", PROMPT[:12]), 12)
    with pytest.raises(ConfigError, match="no state is left from which the last token can be computed"):
        admit_load(states, Asked("b", PROMPT[:13]), 1)


def test_vllm_manager_partly_loaded_window_is_recomputed() -> None:
    cache = manager(SlidingWindowSpec())
    request = Asked("a", PROMPT)
    assert admit_load(cache, request, 12) is not None
    cache.cache_blocks(request, 4)
    assert request.num_computed_tokens == 0
    assert cache.get_block_ids("a") == ([],)
    run(cache, request, len(PROMPT))
    cache.cache.check()


def test_vllm_manager_load_keeps_the_blocks_reserved_for_prefills() -> None:
    cache = manager(FullAttentionSpec(), num_blocks=10)  # 9 blocks
    first = Asked("first", list(range(100, 124)))  # 6 blocks, 2 of them now
    run(cache, first, 8)
    coming = cache.coordinator.get_num_blocks_to_allocate
    needs = coming(request_id="first", num_tokens=24, num_encoder_tokens=0, apply_admission_cap=True)
    assert needs == 4
    assert coming(request_id="nobody", num_tokens=24, num_encoder_tokens=0) == 0
    second = Asked("second", PROMPT)
    assert admit_load(cache, second, 13, reserved_blocks=needs) is None
    assert admit_load(cache, second, 12, reserved_blocks=needs) is not None
    cache.cache.check()


def test_vllm_manager_loaded_state_reserves_the_block_of_the_next_state() -> None:
    """Else three loads fill the cache, and none of their requests can run."""
    cache = manager(MambaSpec(), num_blocks=4)

    def to_come(tokens: int = 14) -> list[int]:
        asked = {"num_tokens": tokens, "num_encoder_tokens": 0}
        return [cache.coordinator.get_num_blocks_to_allocate(request_id=name, **asked) for name in "ab"]

    admitted = []
    for name in "abc":
        with cache.step():
            got = cache.allocate_slots(
                Asked(name, [ord(name), *PROMPT[1:]]),
                0,
                num_external_computed_tokens=12,
                delay_cache_blocks=True,
                full_sequence_must_fit=True,
                reserved_blocks=sum(to_come()),
                has_scheduled_reqs=False,
            )
        admitted += [] if got is None else [name]
    assert admitted == ["a", "b"]
    assert to_come() == [1, 1]
    assert to_come(12) == [0, 0], "it has its last state"


def test_vllm_manager_connector_with_fewer_tokens_shortens_the_hit() -> None:
    """As ExampleConnector says it: 12 tokens are here, it has 4, so it brings -8."""
    cache = manager(FullAttentionSpec())
    run(cache, Asked("a", PROMPT), len(PROMPT))
    for has, took in ((4, 1), (0, 0)):
        request = Asked(f"has {has}", PROMPT)
        blocks, hit, _ = cache.get_computed_blocks(request)
        asked: dict[str, Any] = {"num_new_computed_tokens": hit, "new_computed_blocks": blocks}
        assert cache.allocate_slots(request, 14 - has, num_external_computed_tokens=has - hit, **asked) is not None
        shared = set(cache.get_block_ids("a")[0]) & set(cache.get_block_ids(request.request_id)[0])
        assert len(shared) == took
        cache.cache.check()
    windows = manager(SlidingWindowSpec())
    run(windows, Asked("a", PROMPT), len(PROMPT))
    request = Asked("b", PROMPT)
    blocks, hit, _ = windows.get_computed_blocks(request)
    with pytest.raises(ConfigError, match="needs a hit cut to 4 tokens"):
        windows.allocate_slots(
            request, 10, num_new_computed_tokens=hit, new_computed_blocks=blocks, num_external_computed_tokens=4 - hit
        )


def test_vllm_manager_does_not_clear_blocks_a_transfer_writes() -> None:
    cache = manager(FullAttentionSpec())
    admit_load(cache, Asked("a", PROMPT), 8, skip_zeroing_group_ids=(0,))
    assert cache.take_new_block_ids() == []
    admit_load(cache, Asked("b", [3] * 9), 8)
    assert len(cache.take_new_block_ids()) == 2


def test_vllm_manager_blocks_with_failed_load_are_not_hit() -> None:
    cache = manager(FullAttentionSpec())
    request = Asked("a", PROMPT)
    run(cache, request, len(PROMPT))
    cache.evict_blocks(set(cache.get_block_ids("a")[0][1:]))
    assert other_hits(cache) == 4
    cache.cache.check()


@pytest.mark.parametrize(("external", "hits"), [(13, 0), (12, 12)])
def test_vllm_manager_resumes_at_a_loaded_state(external: int, hits: int) -> None:
    """Others hit the state at a block boundary, after the load has ended."""
    cache = manager(FullAttentionSpec(), MambaSpec())
    request = Asked("a", PROMPT)
    assert admit_load(cache, request, external) is not None
    attention, states = cache.get_block_ids("a")
    assert len(attention) == len(states)
    assert [bool(one) for one in states] == [False] * (len(states) - 1) + [True]
    assert other_hits(cache) == 0
    cache.cache_blocks(request, external)
    assert request.num_computed_tokens == external
    assert other_hits(cache) == hits
    assert run(cache, request, len(PROMPT) - external) is not None
    cache.free(request)
    assert cache.usage == 0
    cache.cache.check()


@pytest.mark.parametrize("windowed", [False, True])
def test_vllm_manager_connector_that_brings_states_needs_fewer_blocks(*, windowed: bool) -> None:
    """Attention blocks after the last state are hit too, and the connector brings the state and the other blocks."""
    specs = (FullAttentionSpec(), MambaSpec(), *((SlidingWindowSpec(),) if windowed else ()))
    cache = manager(*specs)
    run(cache, Asked("a", PROMPT), len(PROMPT))  # its only state follows the whole prompt
    request = Asked("b", PROMPT)
    assert cache.get_computed_blocks(request)[1] == 0
    blocks, hit, _, diverged = cache.get_computed_blocks_for_connector(request)
    assert (hit, diverged) == (12, True)
    assert [len(ids) for ids in blocks.held.blocks] == [3] * len(specs)
    assert blocks.held.blocks[1] == [0, 0, 0]
    with cache.step():
        assert cache.allocate_slots(
            request,
            0,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            num_external_computed_tokens=1,
            delay_cache_blocks=True,
        )
    attention, states, *_ = cache.get_block_ids("b")
    assert attention[:3] == cache.get_block_ids("a")[0][:3]
    assert [bool(one) for one in states] == [False, False, False, True]
    unhashed = cache.get_blocks("b").get_unhashed_block_ids_all_groups()
    assert [unhashed[0], unhashed[1]] == [attention[3:], states[3:]]
    request.num_computed_tokens = 13
    cache.cache_blocks(request, 13)
    assert run(cache, request, 1) is not None
    cache.free(request)
    cache.cache.check()


def test_vllm_manager_hits_of_all_groups_do_not_diverge() -> None:
    for cache in (manager(FullAttentionSpec()), manager(FullAttentionSpec(), MambaSpec())):
        run(cache, Asked("a", PROMPT[:12]), 12)  # a state follows the block boundary
        found = cache.get_computed_blocks_for_connector(Asked("b", PROMPT))
        assert found[1:] == (12, 0, False)
        assert cache.get_computed_blocks_for_connector(Asked("c", [9, *PROMPT]))[1:] == (0, 0, False)
    off = manager(FullAttentionSpec(), MambaSpec(mamba_cache_mode="none"), enable_caching=False)
    assert off.get_computed_blocks_for_connector(Asked("d", PROMPT)) == (off.empty_kv_cache_blocks, 0, 0, False)


def test_vllm_manager_state_after_evicted_attention_does_not_diverge() -> None:
    """As in vLLM, the hit that all groups agree on counts then."""
    cache = manager(FullAttentionSpec(), MambaSpec())
    run(cache, Asked("a", PROMPT[:12]), 12)
    cache.evict_blocks({cache.get_block_ids("a")[0][2]})
    found = cache.get_computed_blocks_for_connector(Asked("b", PROMPT))
    assert found[1:] == (0, 8, False)
    assert found[1:3] == cache.get_computed_blocks(Asked("c", PROMPT))[1:]


def test_vllm_manager_partly_loaded_state_is_not_hit() -> None:
    cache = manager(FullAttentionSpec(), MambaSpec())
    request = Asked("a", PROMPT)
    assert admit_load(cache, request, 13) is not None
    cache.cache_blocks(request, 12)
    assert request.num_computed_tokens == 0
    assert cache.get_block_ids("a") == ([], [])
    assert other_hits(cache) == 0
    assert admit_load(cache, request, 13) is not None  # and may come once more
    cache.free(request)
    assert cache.usage == 0
    cache.cache.check()


def test_vllm_manager_state_after_the_whole_prompt_is_not_resumed() -> None:
    """The request starts again, and a load of all tokens but the last is accepted."""
    cache = manager(FullAttentionSpec(), MambaSpec())
    request = Asked("a", PROMPT)
    assert admit_load(cache, request, 14) is not None
    cache.cache_blocks(request, 14)
    assert request.num_computed_tokens == 0
    assert cache.get_block_ids("a") == ([], [])
    assert other_hits(cache) == 0
    with pytest.raises(ConfigError, match="all tokens but the last"):
        admit_load(cache, request, 14)
    assert admit_load(cache, request, 13) is not None
    cache.cache_blocks(request, 13)
    assert request.num_computed_tokens == 13
    cache.free(request)
    assert admit_load(cache, Asked("a", PROMPT), 14) is not None
    cache.cache.check()


@pytest.mark.parametrize(
    ("external", "new", "mode", "fits"),
    [(9, 3, "align", True), (9, 4, "align", False), (8, 1, "align", False), (8, 6, "none", True)],
)
def test_vllm_manager_load_of_a_copied_state_in_a_step_is_rejected(
    external: int, new: int, mode: str, *, fits: bool
) -> None:
    """vLLM's worker copies a row's state to the column where its step ends, and lets the connector load thereafter."""
    cache = manager(FullAttentionSpec(), MambaSpec(mamba_cache_mode=mode), enable_caching=mode == "align")
    request = Asked("a", PROMPT)
    with cache.step():
        if not fits:
            with pytest.raises(ConfigError, match="let it load asynchronously"):
                cache.allocate_slots(request, new, num_external_computed_tokens=external)
        else:
            assert cache.allocate_slots(request, new, num_external_computed_tokens=external) is not None
    cache.cache.check()


def test_vllm_manager_finished_request_hands_over_its_final_state() -> None:
    """The connector also gets the blocks that the windows still hold."""
    cache = manager(FullAttentionSpec(), SlidingWindowSpec(), MambaSpec())
    request = Asked("a", PROMPT)
    run(cache, request, 12)
    run(cache, request, 2)
    cache.remove_skipped_blocks("a", 14, num_prompt_tokens=14)
    tables = cache.get_block_ids_for_computed_tokens("a", 14)
    assert [[bool(one) for one in table] for table in tables] == [
        [True] * 4,
        [False] * 2 + [True] * 2,
        [False] * 3 + [True],
    ]
    held = cache.usage
    with cache.step():  # it has ended; a transfer reads its blocks
        cache.allocate_slots(Asked("b", [5] * 9), 9)
    assert cache.usage > held
    assert not {*chain(*cache.get_block_ids("b"))} & {*chain(*tables)} - {0}
    cache.free(request)
    cache.cache.check()


def test_vllm_manager_hands_each_state_over_once_in_the_step_that_publishes_it() -> None:
    """Loaded states, states of other requests, and states that retention leaves out are not handed over."""
    cache = manager(FullAttentionSpec(), MambaSpec(), MambaSpec(), num_blocks=40, retention=0)
    request = Asked("a", PROMPT)

    def handed(asked: Asked, tokens: int, **more: Any) -> dict[str, list[tuple[int, int, int]]]:  # noqa: ANN401 - vLLM's
        with cache.step():
            cache.allocate_slots(asked, tokens, **more)
            found = cache.take_boundary_state_offloads()
        asked.num_computed_tokens += tokens + more.get("num_new_computed_tokens", 0)
        return found

    def states(column: int, name: str = "a") -> list[tuple[int, int, int]]:
        return [(group, cache.get_block_ids(name)[group][column], 4 * (column + 1)) for group in (1, 2)]

    assert handed(request, 4) == {}, "retention keeps the last boundary before the prompt's end only"
    assert handed(request, 3) == {}, "the state follows 7 tokens"
    assert handed(request, 5) == {"a": states(2)}
    assert handed(request, 2) == {}
    request.append(7, 8)
    assert handed(request, 1) == {}
    other = Asked("b", PROMPT)
    blocks, hits, _ = cache.get_computed_blocks(other)
    assert hits == 12
    assert handed(other, 2, num_new_computed_tokens=12, new_computed_blocks=blocks) == {}, "known already"
    loaded = Asked("c", [9, *PROMPT])
    assert handed(loaded, 0, num_external_computed_tokens=12, delay_cache_blocks=True) == {}
    loaded.num_computed_tokens = 12
    with cache.step():
        cache.cache_blocks(loaded, 12)
        assert cache.take_boundary_state_offloads() == {}
    gone = Asked("d", [8, *PROMPT])
    with cache.step():
        cache.allocate_slots(gone, 12)
        assert list(cache.take_boundary_state_offloads()) == ["d"]
        cache.free(gone)
        assert cache.take_boundary_state_offloads() == {}, "preempted: another request may get its blocks"
    cache.cache.check()


@pytest.mark.parametrize(
    ("states", "tokens"),
    [
        ([(544 * 64 * 2,)], 544),  # 278,528 bytes, those of a page of attention
        ([(3, 768), (8, 64, 128)], 488),  # 271,360 bytes: 7,168 are lost, the values of 56 tokens in a head
        ([(8, 64, 128)], 416),  # 262,144 bytes: 16,384 are lost, 128 tokens
        ([(64, 64)], 0),  # more is lost than a head has
    ],
)
def test_copied_tokens_leave_out_those_after_the_bytes_of_a_state(states: list[tuple[int, ...]], tokens: int) -> None:
    attention = FullAttentionSpec(544, num_kv_heads=2, head_size=32)
    state = MambaSpec(544, shapes=tuple(states), dtypes=("torch.float32",) * len(states), page_size_padded=278_528)
    assert copied_tokens(Config([Group(state), Group(attention)])) == tokens


@pytest.mark.parametrize(
    ("prompt", "branch", "computed", "asked", "given", "tokens"),
    [
        (300, 0, 0, 300, 288, 288),  # all of it is copied
        (530, 0, 0, 530, 512, 480),  # 488 tokens are copied
        (530, 0, 0, 470, 470, 470),
        (530, 0, 480, 50, 32, 50),  # no hit ends at 512
        (530, 0, 480, 40, 32, 32),  # vLLM ends chunks, too, where the step has no more tokens
        (530, 140, 0, 530, 512, 128),
        (530, 140, 128, 402, 384, 352),
        (1100, 0, 1088, 12, 12, 12),
        (1100, 700, 544, 556, 544, 128),  # at 672
        (1100, 544, 0, 1100, 1088, 544),
    ],
)
def test_vllm_manager_ends_chunks_at_resume_points(  # noqa: PLR0917 - a table
    prompt: int, branch: int, computed: int, asked: int, given: int, tokens: int
) -> None:
    attention = FullAttentionSpec(544, num_kv_heads=2, head_size=32)
    state = MambaSpec(544, shapes=((3, 768), (8, 64, 128)), dtypes=("torch.float32",) * 2, page_size_padded=278_528)
    cache = manager(state, attention, hit_unit=32, hash_block_size=32, max_model_len=2_000)
    request = Asked("a", [1] * prompt)
    cache.mirror(request).branch_tokens = branch
    assert cache.to_resume_point(request, computed, asked, given) == tokens
    whole = manager(state, attention, hash_block_size=544, max_model_len=2_000)
    assert whole.to_resume_point(request, computed, asked, given) == given


@pytest.mark.parametrize(("more_bytes", "tokens"), [(0, 544), (8_704, 0)])
def test_no_token_counts_as_copied_where_scales_follow_the_bytes_of_a_state(more_bytes: int, tokens: int) -> None:
    attention = FullAttentionSpec(544, num_kv_heads=2, head_size=32, more_bytes=more_bytes)
    state = MambaSpec(544, shapes=((544 * 64 * 2,),), page_size_padded=attention.real_page_size_bytes)
    assert copied_tokens(Config([Group(state), Group(attention)])) == tokens


def test_no_token_counts_as_copied_where_states_differ_in_size() -> None:
    states = [MambaSpec(8, shapes=((size,),)) for size in (64, 128)]
    assert copied_tokens(Config([Group(one) for one in (*states, FullAttentionSpec(8))])) == 0
