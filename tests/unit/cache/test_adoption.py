"""What is handed over is looked at before it is adopted: hits of other requests, and names that mean two contents."""

from collections.abc import Sequence

import pytest

from hybridkv.cache import KVCacheBlocks, KVCacheManager
from hybridkv.cache.residents import MOST_NAMES, ContentNames
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import EncoderInput, MultimodalItem
from hybridkv.planner.config import KVCacheConfig
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler
from hybridkv.step import Csr, StepResult
from hybridkv.testing.configs import cross_spec, full_spec, model_config, natural_model_config, state_spec, window_spec

B = 4
FULL = natural_model_config(40, (full_spec(B),), [2])
WINDOW = natural_model_config(40, (full_spec(B), window_spec(B, 6)), [2, 2])
STATES = natural_model_config(40, (full_spec(B), state_spec(B, mode="none")), [2, 2])
REFERENCE = model_config(40, (full_spec(B), state_spec(8)))

ONE, OTHER = list(range(100, 130)), list(range(200, 230))


def sharing(tokens: int) -> list[int]:
    """A prompt that parts from ONE behind ``tokens`` tokens."""
    return ONE[:tokens] + OTHER[tokens:]


def ran(cache: KVCacheManager, prompt: Sequence[int], name: str) -> None:
    """A request that has come and gone, and left all of its prompt resumable."""
    sched = Scheduler(cache)
    sched.add(Request(name, prompt, SamplingParams(max_tokens=1), hasher=cache.hasher))
    while not sched.drained:
        step = sched.schedule()
        sched.update(StepResult(step.id, Csr.from_lists([[7] if one else [] for one in step.samples.tolist()])))
    cache.check()


def found(cache: KVCacheManager, prompt: Sequence[int]) -> tuple[KVCacheBlocks, int]:
    return cache.get_computed_blocks(Request("probe", prompt, hasher=cache.hasher))


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (FULL, 3),
        (FULL, 9),
        (FULL, 8),
        (WINDOW, 3),
        (WINDOW, 10),
        (STATES, 3),
        (STATES, 10),
        (STATES, 8),
        (REFERENCE, 8),
    ],
    ids=lambda one: one if isinstance(one, int) else f"{len(one.groups)} groups",
)
@pytest.mark.parametrize("shared", [0, 4, 8])
def test_hit_of_another_request_is_rejected(config: KVCacheConfig, tokens: int, shared: int) -> None:
    """Whole blocks, a last block in part, or a state: whatever of it is of other tokens."""
    cache = KVCacheManager(config, 100)
    ran(cache, ONE[:tokens], "one")
    blocks, hit = found(cache, ONE)
    assert hit == tokens
    other = Request("other", sharing(min(shared, tokens - 1)), hasher=cache.hasher)
    with pytest.raises(ConfigError, match="the hit passed in for 'other' holds other tokens"):
        cache.allocate_slots(other, 4, hit, blocks)
    cache.check()
    assert cache.get_block_ids("other") == ([],) * len(config.groups)
    assert cache.usage == 0
    same = Request("same", ONE, hasher=cache.hasher)
    assert cache.allocate_slots(same, 4, hit, blocks) is not None
    same.num_computed_tokens = hit
    cache.fields.take_transfers()
    cache.check()


def test_hit_without_its_copy_sources_is_rejected() -> None:
    cache = KVCacheManager(STATES, 100)
    ran(cache, ONE[:10], "one")
    blocks, hit = found(cache, ONE)
    assert (hit, all(blocks.sources)) == (10, True)
    for sources in ((), (0, 0), (blocks.sources[0], 0), (0, blocks.sources[1]), blocks.sources[::-1]):
        wrong = KVCacheBlocks(blocks.ids, blocks.pool, blocks.evictions, sources)
        with pytest.raises(ConfigError, match="holds other tokens"):
            cache.allocate_slots(Request("same", ONE, hasher=cache.hasher), 4, hit, wrong)
        cache.check()


def test_hit_on_a_duplicate_block_is_adopted() -> None:
    """A look-up names one block of several; whoever kept an earlier answer may go on with it."""
    cache = KVCacheManager(FULL, 100)
    ran(cache, ONE[:3], "short")
    before, hit = found(cache, ONE)
    assert hit == 3
    ran(cache, ONE[:9], "long")
    assert found(cache, ONE[:4])[0].sources != before.sources
    request = Request("a", ONE, hasher=cache.hasher)
    assert cache.allocate_slots(request, 4, hit, before) is not None
    request.num_computed_tokens = hit
    cache.fields.take_transfers()
    cache.check()


def test_parent_blocks_are_adopted_by_its_branches_only() -> None:
    cache = KVCacheManager(STATES, 100)
    parent = Request("parent", ONE, hasher=cache.hasher)
    assert cache.allocate_slots(parent, 29) is not None
    parent.num_computed_tokens = 29
    cache.fields.take_transfers()
    shared, tokens = cache.engine.blocks_to_share(parent)
    assert tokens == 29
    for wrong in (
        Request("other", OTHER, hasher=cache.hasher),
        Request("other", sharing(28), hasher=cache.hasher),
        Request("other", ONE, hasher=cache.hasher, cache_salt="tenant"),
    ):
        with pytest.raises(ConfigError, match="holds other tokens"):
            cache.allocate_slots(wrong, 1, tokens, shared)
        cache.check()
    child = parent.branch("child", SamplingParams())
    assert cache.allocate_slots(child, 1, tokens, shared) is not None
    child.num_computed_tokens = tokens
    cache.fields.take_transfers()
    cache.check()


# -- names that mean two contents


def items(*known: tuple[str, int, int]) -> list[MultimodalItem]:
    return [MultimodalItem(*one) for one in known]


def test_item_id_with_two_lengths_in_a_request_is_rejected() -> None:
    with pytest.raises(ConfigError, match="multimodal item 'cat' has 3 tokens here and 2 elsewhere"):
        Request("a", range(20), multimodal=items(("cat", 0, 2), ("cat", 5, 3)))
    Request("a", range(20), multimodal=items(("cat", 0, 2), ("cat", 5, 2)))


@pytest.mark.parametrize("layout", ["natural", "reference"])
def test_item_id_with_another_length_is_rejected_while_cached(layout: str) -> None:
    cache = KVCacheManager(FULL if layout == "natural" else model_config(40, (full_spec(B),)), 100)
    sched = Scheduler(cache)

    def request(name: str, length: int, salt: str | None = None) -> Request:
        known = items(("cat", 2, length))
        return Request(
            name, range(20), SamplingParams(max_tokens=1), hasher=cache.hasher, multimodal=known, cache_salt=salt
        )

    sched.add(request("a", 5))
    sched.add(request("b", 9))  # nothing is kept of either yet
    step = sched.schedule()
    assert [row.request_id for row in step.new_rows] == ["a"]
    sched.update(StepResult(step.id, Csr.from_lists([[7]])))
    sched.check()
    assert sched.drained
    with pytest.raises(ConfigError, match="multimodal item 'cat' of request 'c' has 9 tokens, it had 5 before"):
        sched.add(request("c", 9))
    with pytest.raises(ConfigError, match="it had 5 before"):
        cache.get_computed_blocks(request("c", 9))
    sched.add(request("c", 9, salt="another tenant's cat"))
    assert cache.reset_prefix_cache()
    sched.add(request("d", 9))


def test_encoder_digest_with_another_length_is_rejected() -> None:
    cache = KVCacheManager(natural_model_config(40, (full_spec(B), cross_spec(B)), [2, 2]), 100)

    def request(name: str, tokens: int) -> Request:
        return Request(name, range(6), hasher=cache.hasher, encoder=EncoderInput("sound", tokens))

    first = request("a", 9)
    assert cache.allocate_slots(first, 6, num_encoder_tokens=9) is not None
    with pytest.raises(ConfigError, match="encoder input 'sound' of request 'b' has 8 tokens, it had 9 before"):
        cache.allocate_slots(request("b", 8), 6, num_encoder_tokens=8)
    assert cache.allocate_slots(request("b", 9), 6, num_encoder_tokens=9) is not None
    cache.check()


def test_content_names_beyond_the_limit_are_forgotten() -> None:
    names = ContentNames()
    for i in range(MOST_NAMES + 1):
        names.know(Request("a", [1], encoder=EncoderInput(str(i), 3)))
        names.know(Request("a", [1], encoder=EncoderInput("0", 3))) if i == 5 else None
    names.refuse(Request("a", [1], encoder=EncoderInput("1", 4)))  # the one not seen for longest
    for known in ("0", "2", str(MOST_NAMES)):
        with pytest.raises(ConfigError, match="it had 3 before"):
            names.refuse(Request("a", [1], encoder=EncoderInput(known, 4)))
