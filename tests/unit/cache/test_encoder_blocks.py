"""Cross attention in the natural layout: blocks found under the encoder input's digest, all of them or none."""

from itertools import count

import numpy as np
import pytest

from hybridkv.cache import CacheOptions, KVCacheManager, SlotPlan
from hybridkv.cache.placement import EndsPlacement
from hybridkv.errors import CacheError, ConfigError
from hybridkv.eviction import HAZARD
from hybridkv.extra_keys import EncoderInput, LoraAdapter
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec
from hybridkv.planner.natural import natural_config, slab_layout
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Csr, EncoderRead, NewRow, Step, StepResult
from hybridkv.testing.configs import full_spec
from kinds_support import cross

B = 4
AUDIO, OTHER = EncoderInput("audio", 10), EncoderInput("other", 10)
PROMPT = list(range(100, 110))


def config_of(*specs: KVCacheSpec, slabs: int = 24) -> KVCacheConfig:
    """A class for each kind: three blocks of decoder tokens, two of the encoder's, in a slab."""
    groups = tuple(KVCacheGroupSpec((f"layer{g}",), spec) for g, spec in enumerate(specs))
    ks = tuple(2 if spec == cross(B) else 3 for spec in specs)
    return natural_config(groups, slab_layout(1536, slabs + 1, ks, (1,) * len(ks)))


NATURAL = config_of(full_spec(B), cross(B))


class Loop:
    """A scheduler whose worker samples 7 for ever."""

    def __init__(self, config: KVCacheConfig = NATURAL, **limits: object) -> None:
        placement = None if config.slabs is None else EndsPlacement()
        eviction = None if config.slabs is None else HAZARD
        options = CacheOptions(placement=placement, eviction=eviction, clock=map(float, count()).__next__)
        self.cache = KVCacheManager(config, 200, enable_kv_cache_events=True, options=options)
        self.scheduler = Scheduler(self.cache, SchedulerLimits(**limits), clock=lambda: 0.0)  # type: ignore[arg-type]  # by name
        self.results: list[StepResult] = []

    def add(self, name: str, encoder: EncoderInput | None = AUDIO, prompt: list[int] = PROMPT, **known: object) -> None:
        """n, max_tokens: of its sampling; others: of the request."""
        sampling = SamplingParams(max_tokens=known.pop("max_tokens", 1), n=known.pop("n", 1))  # type: ignore[arg-type]  # by name
        request = Request(name, prompt, sampling, hasher=self.cache.hasher, encoder=encoder, **known)  # type: ignore[arg-type]  # same
        self.scheduler.add(request)

    def schedule(self) -> Step:
        step = self.scheduler.schedule()
        sampled = [[7] if samples else [] for samples in step.samples.tolist()]
        self.results.append(StepResult(step.id, Csr.from_lists(sampled)))
        return step

    def update(self) -> None:
        self.scheduler.update(self.results.pop(0))
        self.scheduler.check()

    def step(self) -> Step:
        step = self.schedule()
        self.update()
        return step

    def run(self) -> list[NewRow]:
        """To the end of all: rows that began."""
        begun: list[NewRow] = []
        while not self.scheduler.drained:
            begun += self.step().new_rows
        return begun

    def encoded(self, name: str, group: int = 1) -> list[int]:
        return self.cache.get_block_ids(name)[group]


def encodes(rows: list[NewRow] | tuple[NewRow, ...]) -> dict[str, bool]:
    return {row.request_id: row.encoder is not None and row.encoder.encodes for row in rows}


def test_encoder_input_shared_by_prompts_is_encoded_once() -> None:
    loop = Loop()
    loop.add("first")
    loop.add("same step", prompt=[1])
    loop.add("another input", OTHER)
    step = loop.schedule()
    assert encodes(step.new_rows) == {"first": True, "same step": False, "another input": True}
    assert [row.encoder for row in step.new_rows][1] == EncoderRead("audio", 10, encodes=False)
    assert loop.encoded("first") == loop.encoded("same step") != loop.encoded("another input")
    assert len(loop.encoded("first")) == 3
    loop.update()
    loop.run()
    assert loop.cache.usage == 0
    loop.add("later", prompt=[2, 3])
    assert encodes(loop.run()) == {"later": False}


@pytest.mark.parametrize(
    "changed", [{"cache_salt": "tenant"}, {"lora": LoraAdapter("sql", "/sql")}, {"encoder": EncoderInput(b"audio", 10)},
                {"encoder": EncoderInput("audio", 9), "cache_salt": "tenant"}]
)  # fmt: skip
def test_encoder_input_with_other_extras_is_encoded_again(changed: dict[str, object]) -> None:
    loop = Loop()
    loop.add("a")
    loop.run()
    loop.add("b", **({"encoder": AUDIO} | changed))  # type: ignore[arg-type]  # by name
    assert encodes(loop.run()) == {"b": True}


def test_encoder_keys_do_not_block_truncation_of_outputs() -> None:
    """So its output may be cut back to what it has computed, however long the encoder's is."""
    cache = KVCacheManager(NATURAL, 200, options=CacheOptions(placement=EndsPlacement()))
    request = Request("a", PROMPT[:2], hasher=cache.hasher, encoder=EncoderInput("long", 40))
    plan = cache.plan_slots(request, 2, num_encoder_tokens=40)
    assert isinstance(plan, SlotPlan)
    assert plan.encodes
    cache.commit(plan)
    request.num_computed_tokens = 2
    for token in range(5):
        request.append(token)
    request.truncate(3)
    cache.check()
    with pytest.raises(ConfigError, match="is 39, but its encoder input has 40"):
        cache.plan_slots(request, 2, num_encoder_tokens=39)


def test_check_reports_key_of_another_encoder_input() -> None:
    loop = Loop()
    loop.add("a", max_tokens=4)
    loop.step()
    group, pool = loop.cache.groups[1], loop.cache.block_pool
    block = int(group.rows.ids(0)[0])
    pool.evict_blocks(np.array([block], np.int32))
    wrong = Request("x", [1], hasher=loop.cache.hasher, encoder=OTHER).encoder_keys(B)[0]
    pool.publish(group.number, [block], [wrong])
    with pytest.raises(CacheError, match=r"column 0 of .*, has another key than its encoder input"):
        loop.cache.check()


def test_encoder_output_leaves_with_the_resume_points_that_need_it() -> None:
    """So what can be resumed needs no encoder, and an input that comes again and again is encoded once."""
    loop = Loop()
    known: dict[str, Request] = {}
    encoded = list[str]()
    for turn in range(30):
        once = EncoderInput(f"once {turn}", 10)
        asked = [] if turn else [("first to hear it", AUDIO, [99] * 10)]
        for name, encoder, prompt in (*asked, ("often", AUDIO, PROMPT), (f"once {turn}", once, [turn] * 10)):
            loop.add(f"{name}, turn {turn}", encoder, prompt)
            encoded += [name for needs in encodes(loop.run()).values() if needs]
            known[name] = Request(name, prompt, hasher=loop.cache.hasher, encoder=encoder)
            kept = [one for one in known.values() if loop.cache.eviction_policy.copy_at(one, len(PROMPT) - 1)]
            assert [one.request_id for one in kept if not loop.cache.engine.encoder_blocks(one)] == []
        assert known["often"] in kept
        for tokens in (len(PROMPT) - 1, len(PROMPT)):
            loop.cache.eviction_policy.give_up(known["first to hear it"], tokens)
    assert known["first to hear it"] not in kept
    assert encoded.count("first to hear it") == 1
    assert "often" not in encoded
