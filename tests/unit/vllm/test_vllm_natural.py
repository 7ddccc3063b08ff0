"""The natural layout inside vLLM, without vLLM: an engine in its manner, whose tokens say what was read."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from natural_faults import FAULTS

from engine_groups import SIZE, Asked, Config, FullAttentionSpec, Group, MambaSpec, Sampling, SlidingWindowSpec
from hybridkv.cache import BlockRemoved, BlockStored, KVCacheManager
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.eviction import HAZARD, LRU
from hybridkv.observe.prefixes import without_resume_points
from hybridkv.planner import Plan
from hybridkv.request import Request
from hybridkv.vllm.manager import CacheManager
from hybridkv.vllm.natural import (
    NaturalStep,
    Options,
    ReferenceOptions,
    StepWriter,
    default_block_size,
    natural_cache,
    natural_plan,
)
from hybridkv.vllm.specs import Settings, refuse_natural
from natural_engine import Connector, Engine, Output

LENGTH, OUTPUTS = 128, 16


FULL = FullAttentionSpec(2 * SIZE, page_size_padded=4096)
WINDOW = SlidingWindowSpec(2 * SIZE, page_size_padded=4096, sliding_window=10)
STATE = MambaSpec(
    LENGTH,
    shapes=((3, 60), (4, 8)),
    dtypes=("torch.float32", "torch.float32"),
    mamba_cache_mode="none",
    num_prefill_checkpoint_blocks=1,
    page_size_padded=4096,
)
HYBRID, WINDOWS = (STATE, FULL), (FULL, WINDOW)
LARGE, SMALL = 1 << 20, 40 << 10
OPTIONS = Options(SIZE)


def config(memory: int, specs: Sequence[object]) -> Config:
    groups = [Group(spec, (f"layer{2 * number}", f"layer{2 * number + 1}")) for number, spec in enumerate(specs)]
    return Config(groups, 1, [SimpleNamespace(size=memory)])


def planned(
    memory: int, specs: Sequence[object], options: Options, *, events: bool, tiered: bool = False
) -> tuple[Plan, CacheManager]:
    """Return the plan of the layers in vLLM's memory, and its manager. tiered: a host tier comes behind it."""
    given = config(memory, specs)
    settings = Settings(
        max_model_len=LENGTH,
        max_in_flight_tokens=48,
        hash_block_size=SIZE,
        enable_caching=True,
        use_eagle=False,
        enable_events=events,
    )
    made = natural_plan(given, options, name="tiny", max_model_len=LENGTH, max_in_flight_tokens=48)
    groups = [Group(group.spec, group.layer_names) for group in made.config.groups]
    return made, CacheManager(natural_cache(made, options, settings, tiered=tiered), Config(groups), settings)


def manager(
    memory: int = LARGE, specs: Sequence[object] = HYBRID, options: Options = OPTIONS, *, events: bool = False
) -> CacheManager:
    return planned(memory, specs, options, events=events)[1]


def play(engine: Engine) -> tuple[int, int]:
    """Questions behind two heads, three times, then second turns; prompts that are hit, and wrong outputs."""
    heads = [[1] * 21, [2] * 30]
    prompts = [heads[i % 2] + [3 + i + j for j in range(5 + 4 * i)] for i in range(6)]
    asked, wrong = [], 0
    for turn in range(3):
        asked += [engine.add(f"{turn}.{i}", prompt, OUTPUTS) for i, prompt in enumerate(prompts)]
        engine.run()
    for i, first in enumerate(asked[:6]):
        asked.append(engine.add(f"second.{i}", [*first.all_token_ids, 40, 41, 42], OUTPUTS))
    engine.run()
    for request in asked:
        prompt = request.all_token_ids[: request.num_prompt_tokens]
        wrong += request.all_token_ids[len(prompt) :] != engine.kept.plain(prompt, OUTPUTS)
    assert engine.manager.usage == 0
    return sum(hit > 0 for hit in engine.hits.values()), wrong


@pytest.mark.parametrize("specs", [HYBRID, WINDOWS])
@pytest.mark.parametrize("memory", [SMALL, LARGE])
def test_vllm_natural_events_name_the_tokens_of_cached_blocks(memory: int, specs: Sequence[object]) -> None:
    """Keys are those of hybridkv. Blocks that were stored and not removed can be hit."""
    engine = Engine(manager(memory, specs, events=True))
    play(engine)
    cache, known = engine.manager.cache, Counter[tuple[int, bytes]]()
    tokens_of: dict[tuple[int, bytes], list[int]] = {}
    for event in without_resume_points(engine.manager.take_events()):
        if isinstance(event, BlockRemoved):
            known.subtract((event.group_idx, key) for key in event.block_hashes)
            continue
        assert isinstance(event, BlockStored)
        parent = event.parent_block_hash
        before = [] if parent is None else tokens_of[event.group_idx, parent]
        for number, key in enumerate(event.block_hashes):
            before = [*before, *event.token_ids[number * SIZE : (number + 1) * SIZE]]
            tokens_of[event.group_idx, key] = before
            known[event.group_idx, key] += 1
    states = {number for number, spec in enumerate(specs) if spec in HYBRID[:1]}
    assert not states & {group for group, _ in known}
    assert min(known.values()) >= 0
    assert (0 in known.values()) is (memory == SMALL)
    texts = {request.request_id: request.all_token_ids for request in engine.asked}
    assert all(any(ids[: len(found)] == found for ids in texts.values()) for found in tokens_of.values())
    keys = cache.block_pool.keys.indexes
    assert all((keys[group].get(key) is not None) is (count > 0) for (group, key), count in known.items())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("specs", "memory", "placement"),
    [
        (HYBRID, LARGE, None),
        (HYBRID, SMALL, None),
        (HYBRID, SMALL, "interval:16"),
        (WINDOWS, LARGE, None),
        (WINDOWS, SMALL, None),
        ((STATE,), SMALL, "align:16"),
    ],
)
def test_vllm_natural_tokens_match_no_cache(
    specs: Sequence[object], memory: int, placement: str | None, *, ahead: bool
) -> None:
    engine = Engine(manager(memory, specs, Options(SIZE, placement)), ahead=ahead)
    hits, wrong = play(engine)
    assert not wrong
    assert hits >= (12 if memory == LARGE else 1)
    if memory == LARGE:  # all that a first turn computed is there for the second
        computed = [len(engine.worker.tokens[f"0.{i}"]) - 1 for i in range(6)]
        assert all(engine.hits[f"second.{i}"] >= tokens for i, tokens in enumerate(computed))
    assert (engine.preemptions > 0) is (memory == SMALL and len(specs) > 1)


@pytest.mark.parametrize(("ahead", "tears"), [(False, 2), (True, 0)])
@pytest.mark.parametrize(
    ("specs", "memory", "delay"),
    [
        (HYBRID, LARGE, 2),
        (HYBRID, SMALL, 2),
        (HYBRID, 30 << 10, 20),
        (HYBRID, 50 << 10, 8),
        (WINDOWS, LARGE, 2),
        (WINDOWS, SMALL, 2),
        ((STATE,), SMALL, 2),
    ],
)
def test_vllm_natural_connector_loads_and_reads_computed_tokens(
    specs: Sequence[object], memory: int, delay: int, tears: int, *, ahead: bool
) -> None:
    """Steps move other blocks meanwhile. Blocks of a load or a read stay where the connector expects them."""
    connector = Connector(every=2, delay=delay, tears=tears)
    engine = Engine(manager(memory, specs, Options(SIZE, "interval:16")), ahead=ahead, connector=connector)
    _, wrong = play(engine)
    assert not wrong
    assert connector.brought >= 6
    assert len(connector.sent) >= 6
    for name, read in connector.sent.items():
        tokens = engine.worker.tokens[name][:-1]
        assert read == engine.kept.left(tokens, 1), name


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("specs", [HYBRID, WINDOWS])
def test_vllm_natural_by_priority_preempts_requests_with_slots(specs: Sequence[object], *, ahead: bool) -> None:
    engine = Engine(manager(SMALL, specs), ahead=ahead, by_priority=True)
    assert play(engine)[1] == 0
    assert engine.preempted_late


@pytest.mark.parametrize("specs", [HYBRID, WINDOWS])
def test_vllm_natural_blocks_of_a_request_freed_in_its_step_are_not_hit(specs: Sequence[object]) -> None:
    """The request gets slots for 16 tokens after 8, and is preempted in the same step."""
    cache, writer = (made := manager(specs=specs)), StepWriter(made)
    first, second = Asked("first", list(range(1, 25))), Asked("second", list(range(1, 25)))
    for tokens in (8, 16):
        with cache.step():
            assert cache.allocate_slots(first, tokens) is not None
            if tokens == 16:
                cache.free(first)
            output = Output()
            writer.write(output)
        cache.scheduled(output)
        cache.executed(output)
        first.num_computed_tokens += tokens
    assert cache.get_computed_blocks(second)[1] == 8
    cache.cache.check()


@pytest.mark.parametrize("memory", [SMALL, LARGE])
def test_vllm_natural_resume_point_at_the_end_is_at_most_one_token_back(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two steps in flight the last step runs a token that an earlier step sampled."""
    ahead = Counter[int]()
    keep_resume_point = KVCacheManager.keep_resume_point

    def counted(cache: KVCacheManager, request: Request) -> None:
        ahead[request.num_computed_tokens - request.num_tokens] += 1
        keep_resume_point(cache, request)

    monkeypatch.setattr(KVCacheManager, "keep_resume_point", counted)
    play(Engine(manager(memory), ahead=True))
    assert set(ahead) == {-1, 0}


def test_vllm_natural_without_kept_state_has_no_hit() -> None:
    engine = Engine(manager(options=Options(SIZE, "none")))
    assert play(engine) == (0, 0)
    assert not engine.worker.counts


def test_vllm_natural_keeps_slabs_free_for_running_requests() -> None:
    full, columns = FullAttentionSpec(), LENGTH // SIZE
    cache = manager((columns + 2) * 2 * full.real_page_size_bytes, [full])
    assert cache.cache.bounds.usable_blocks == columns + 1
    assert cache.allocate_slots(Asked("a", [1, 2, 3]), 3) is not None
    second = Asked("b", [one % 250 for one in range(columns * SIZE)])
    assert cache.allocate_slots(second, second.num_tokens) is None
    assert cache.allocate_slots(second, second.num_tokens, has_scheduled_reqs=False) is not None


def test_vllm_natural_keeps_states_at_checkpoints_while_decoding() -> None:
    """The state needs no new block there."""
    engine = Engine(manager(specs=[STATE], options=Options(SIZE, "interval:6")))
    request = engine.add("a", [3] * 10, OUTPUTS)
    engine.run()
    assert request.num_tokens == 10 + OUTPUTS
    assert engine.decodes == OUTPUTS - 1
    assert engine.manager.cache.checkpoints.stored == len([6, 12, 18, 24])
    for stop in (6, 12, 18, 24):
        assert engine.manager.get_computed_blocks(Asked(f"to {stop}", request.all_token_ids[: stop + 1]))[1] == stop


@pytest.mark.parametrize(("specs", "cleared"), [(HYBRID, True), (WINDOWS, False)])
def test_vllm_natural_clears_blocks_if_the_model_has_states(specs: Sequence[object], *, cleared: bool) -> None:
    zeroed = list[int]()

    def seen(step: NaturalStep) -> NaturalStep:
        zeroed.append(len(step.zero))
        return step

    play(Engine(manager(specs=specs), change=seen))
    assert any(zeroed) == cleared


def test_vllm_natural_moved_blocks_are_hit() -> None:
    engine = Engine(manager(SMALL))
    play(engine)
    assert engine.worker.counts["moved"]
    assert engine.worker.counts["copied"]
    assert engine.worker.counts["kept"]


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "a class one block off"])
def test_vllm_natural_faults_are_detected(fault: str) -> None:
    engine = Engine(manager(SMALL), change=FAULTS[fault]())
    assert play(engine)[1]


def hit_behind(head: int, **wishes: Any) -> int:  # noqa: ANN401 - whatever callers send
    """What a prompt finds that shares ``head`` tokens with one that was played with ``wishes``."""
    engine = Engine(manager())
    first = engine.add("first", [*range(1, head + 1), 40, 41, 42, 43], 2)
    first.sampling_params = Sampling({f"hybridkv_{name}": value for name, value in wishes.items()})
    engine.run()
    engine.add("second", [*range(1, head + 1), 50, 51], 2)
    engine.run()
    return engine.hits["second"]


def test_vllm_natural_keeps_states_at_resume_marks() -> None:
    assert hit_behind(19) == 0
    assert hit_behind(19, marks=[19]) == 19
    assert hit_behind(19, hints={"shared_tokens": 18}) == 18
    assert hit_behind(19, marks=[19], hints='{"secret": true}') == 0


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"marks": 19}, "hybridkv_marks must be a list"),
        ({"tenant": 7}, "hybridkv_tenant must be text"),
        ({"hints": "{"}, "an invalid hybridkv_hints"),
    ],
)
def test_vllm_natural_invalid_hints_are_reported_and_ignored(
    wishes: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert hit_behind(19, **wishes) == 0
    assert "request first has" in caplog.text
    assert message in caplog.text


def test_vllm_natural_prompts_of_embeddings_share_no_hits() -> None:
    """vLLM has the same token for each of them."""
    engine = Engine(manager())
    for name in "ab":
        engine.add(name, [0] * 20, 2).prompt_embeds = object()
        engine.run()
    assert engine.hits == {"a": 0, "b": 0}


def test_vllm_natural_default_block_size_is_that_of_the_kernel() -> None:
    """vLLM's are larger, to fill the page of a state."""
    assert default_block_size(config(LARGE, HYBRID)) == 2 * SIZE
    assert default_block_size(config(LARGE, [replace(FULL, block_size=400)])) == 32
    assert default_block_size(config(LARGE, [STATE])) == 32


def test_vllm_natural_plan_fills_the_vllm_memory() -> None:
    found = manager(SMALL).cache.config
    assert found.slabs is not None
    assert SMALL - found.slabs.slab_bytes < found.slabs.arena_bytes <= SMALL
    assert {group.spec.page_size_padded for group in found.groups} == {None}
    with pytest.raises(CapacityError, match="too small"):
        manager(8 << 10)


def test_vllm_natural_options_are_read_from_additional_config() -> None:
    asked = {"placement": "interval:64", "eviction": "lru", "block_size": 16}
    assert Options.of({"hybridkv": asked}, 32) == Options(16, "interval:64", "lru")
    assert Options.of({}, 32) == Options(32)
    assert manager(options=Options(SIZE, eviction="lru")).cache.eviction.name == "lru"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("ends", "additional-config: Expected `object`, got `str`"),
        ({"placements": "ends"}, "unknown field `placements`"),
        ({"placement": 64}, r"Expected `str \| null`, got `int` - at `\$\.placement`"),
        ({"placement": "edges"}, "unknown placement"),
        ({"eviction": "fifo"}, "fifo"),
        ({"block_size": 0}, r"Expected `int` >= 1 - at `\$\.block_size`"),
        ({"max_overtaken": -1}, r"Expected `int` >= 0 - at `\$\.max_overtaken`"),
    ],
)
def test_vllm_natural_invalid_option_is_rejected(asked: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options.of({"hybridkv": asked}, 32)


def test_vllm_natural_compressed_caches_are_rejected() -> None:
    with pytest.raises(ConfigError, match="the natural layout in vLLM does not support several tokens in one state"):
        manager(specs=[replace(FULL, tokens_per_state=4)])


def test_vllm_natural_unknown_page_sizes_are_rejected() -> None:
    """Such as those of quantized keys with their scales."""
    spec = replace(FULL, more_bytes=8)
    with pytest.raises(ConfigError, match="a page of layer0 has 520 bytes"):
        manager(specs=[spec])
    several = config(LARGE, HYBRID)
    several.kv_cache_tensors = [SimpleNamespace(size=1), SimpleNamespace(size=2)]
    with pytest.raises(ConfigError, match="allocations of"):
        natural_plan(several, OPTIONS, name="tiny", max_model_len=LENGTH, max_in_flight_tokens=48)


def started(**changed: Any) -> SimpleNamespace:  # noqa: ANN401 - of vLLM's kinds
    """A VllmConfig that is supported, but for what is ``changed``: by the name of its part, then of its field."""
    parts: dict[str, Any] = {
        "parallel_config": {
            "worker_cls": "hybridkv.vllm.NaturalWorker",
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "decode_context_parallel_size": 1,
        },
        "cache_config": {"enable_prefix_caching": False},
        "model_config": {"is_encoder_decoder": False},
    }
    whole = dict.fromkeys(("kv_transfer_config", "ec_transfer_config", "speculative_config"))
    for part, fields in changed.items():
        if isinstance(fields, dict):
            parts[part] = parts.get(part, {}) | fields
        else:
            whole[part] = fields
    return SimpleNamespace(**(whole | {part: SimpleNamespace(**fields) for part, fields in parts.items()}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parallel_config": {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}}, "needs --worker-cls hybridkv"),
        ({"cache_config": {"enable_prefix_caching": True}}, "--no-enable-prefix-caching"),
        ({"parallel_config": {"data_parallel_size": 2}}, "data_parallel_size 2"),
        ({"parallel_config": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size 2"),
        ({"ec_transfer_config": object()}, "ec_transfer_config"),
        ({"model_config": {"is_encoder_decoder": True}}, "an encoder and a decoder"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config for models with recurrent states"),
    ],
)
def test_vllm_natural_unsupported_vllm_settings_are_rejected(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"NaturalScheduler .*{message}"):
        refuse_natural(started(**changed), config(LARGE, HYBRID), None)


def test_vllm_natural_connector_without_layout_support_is_rejected() -> None:
    supported = SimpleNamespace(supports_natural_layout=True)
    for accepted in (supported, SimpleNamespace(sub_connectors=[supported, supported])):
        refuse_natural(started(), config(LARGE, HYBRID), accepted)
    for rejected in (object(), SimpleNamespace(sub_connectors=[supported, object()])):
        with pytest.raises(ConfigError, match="connector object, whose class does not say supports_natural_layout"):
            refuse_natural(started(), config(LARGE, HYBRID), rejected)
    tiered = SimpleNamespace(supports_natural_layout=True, start_natural=None)
    for accepted in (tiered, SimpleNamespace(sub_connectors=[supported, tiered])):
        refuse_natural(started(), config(LARGE, HYBRID), accepted)
    with pytest.raises(ConfigError, match="several TierConnectors each want their own: leave all but one out"):
        refuse_natural(started(), config(LARGE, HYBRID), SimpleNamespace(sub_connectors=[tiered, tiered]))


def test_vllm_natural_supported_vllm_settings_are_accepted() -> None:
    refuse_natural(started(), config(LARGE, HYBRID), None)
    refuse_natural(started(speculative_config={"method": "ngram"}), config(LARGE, WINDOWS), None)
    with pytest.raises(ConfigError, match="another method than ngram"):
        refuse_natural(started(speculative_config={"method": "eagle"}), config(LARGE, WINDOWS), None)


def test_vllm_reference_eviction_is_read_from_additional_config() -> None:
    hybrid, dense = config(LARGE, HYBRID), config(LARGE, (FULL,))
    assert ReferenceOptions.of({}).chosen(hybrid, use_eagle=False) == HAZARD
    assert ReferenceOptions.of({"hybridkv": {"eviction": "lru"}}).chosen(hybrid, use_eagle=False) == LRU
    assert ReferenceOptions.of({}).chosen(hybrid, use_eagle=True) == LRU
    assert ReferenceOptions.of({}).chosen(dense, use_eagle=True) == HAZARD
    with pytest.raises(ConfigError, match="unknown field `placement`"):
        ReferenceOptions.of({"hybridkv": {"placement": "ends"}})
    with pytest.raises(ConfigError, match="unknown eviction 'fifo'"):
        ReferenceOptions.of({"hybridkv": {"eviction": "fifo"}}).chosen(hybrid, use_eagle=False)


def test_vllm_natural_lru_keeps_the_last_partial_block_without_states() -> None:
    """Without evictions both policies hit the same tokens, to the last one."""
    found = []
    for eviction in ("lru", "hazard"):
        engine = Engine(manager(specs=(FULL,), options=Options(SIZE, eviction=eviction)))
        assert play(engine)[1] == 0
        found.append(sum(engine.hits.values()))
    assert found[0] == found[1] == 870
