"""Requests whose tokens, and hashes, stay an engine's own; a step, and rows, that a loop keeps itself."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from hybridkv import KVCacheManager, Request, Scheduler, SchedulerLimits
from hybridkv.cache import BlockStored, EngineHashes
from hybridkv.errors import CacheError, ConfigError, HashError
from hybridkv.planner import KVCacheConfig
from hybridkv.request import Lent, SamplingParams
from hybridkv.request_rows import append_tokens
from hybridkv.testing.configs import full_spec, model_config, natural_model_config, state_spec, window_spec

BLOCK = 4
REFERENCE = model_config(60, (full_spec(BLOCK), window_spec(BLOCK, 6)))
STATES = model_config(60, (full_spec(BLOCK), state_spec(BLOCK)))
NATURAL = natural_model_config(40, (full_spec(BLOCK), state_spec(BLOCK)), [2, 2])
every_layout = pytest.mark.parametrize("config", [REFERENCE, STATES, NATURAL], ids=["windows", "states", "natural"])


@dataclass
class Engines:
    """An engine's request. hashed: it hashes its blocks itself."""

    all_token_ids: list[int]
    hashes: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def grow(self, *tokens: int) -> None:
        self.all_token_ids += tokens
        for end in range((len(self.hashes) + 1) * BLOCK, self.num_tokens + 1, BLOCK):
            self.hashes.append(repr(self.all_token_ids[:end]).encode())


def lent(cache: KVCacheManager, name: str, tokens: list[int]) -> tuple[Request, Engines]:
    """Hashed by the engine where the cache's hasher hashes nothing."""
    theirs = Engines([])
    theirs.grow(*tokens)
    hashes = theirs.hashes if isinstance(cache.hasher, EngineHashes) else None
    return Request(name, Lent(theirs, len(tokens), hashes), hasher=cache.hasher), theirs


def sync(cache: KVCacheManager, one: Request, theirs: Engines, computed: int, in_flight: int = 0) -> None:
    counts = [np.array([count]) for count in (theirs.num_tokens, computed, in_flight)]
    cache.engine.synchronise(np.array([one.row]), num_tokens=counts[0], num_computed=counts[1], in_flight=counts[2])


@every_layout
@pytest.mark.parametrize("engine_hashes", [False, True])
def test_lent_tokens_give_the_same_results_as_copied_tokens(config: KVCacheConfig, *, engine_hashes: bool) -> None:
    """Two caches, call for call: one has the tokens, the other reads an engine's."""
    copied = KVCacheManager(config, 200, enable_kv_cache_events=True)
    hasher = EngineHashes(copied.hasher.block_size) if engine_hashes and copied.hasher else None
    borrowed = KVCacheManager(config, 200, enable_kv_cache_events=True, hasher=hasher)
    told: list[list[tuple[int, ...]]] = [[], []]
    prompt: list[int] = []
    for turn in range(3):
        prompt = [*prompt, *(7 * place % 50 for place in range(13 + turn))]
        mine = Request(f"r{turn}", prompt, hasher=copied.hasher)
        other, theirs = lent(borrowed, f"r{turn}", prompt)
        for cache, one in ((copied, mine), (borrowed, other)):
            blocks, hit = cache.get_computed_blocks(one)
            assert cache.allocate_slots(one, one.num_tokens - hit, hit, blocks) is not None
            one.num_computed_tokens = hit
            cache.fields.take_transfers()
        assert mine.num_computed_tokens == other.num_computed_tokens
        assert turn == 0 or mine.num_computed_tokens > 0
        computed = mine.num_tokens
        for token in range(100, 111):
            mine.num_computed_tokens = computed
            mine.append(token)
            theirs.grow(token)
            sync(borrowed, other, theirs, computed)
            for cache, one in ((copied, mine), (borrowed, other)):
                assert cache.allocate_slots(one, 1) is not None
                cache.check()
            computed += 1
            assert np.array_equal(mine.token_ids(), other.token_ids())
            assert mine.token_bytes(3, 9) == other.token_bytes(3, 9)
        prompt += range(100, 111)
        assert copied.get_block_ids(mine.request_id) == borrowed.get_block_ids(other.request_id)
        for at, (cache, one) in enumerate(((copied, mine), (borrowed, other))):
            one.num_computed_tokens = computed
            cache.keep_resume_point(one)
            cache.fields.take_transfers()
            cache.free(one)
            cache.check()
            events = [event for event in cache.take_events() if isinstance(event, BlockStored)]
            told[at] += [event.token_ids for event in events]
    assert told[0] == told[1] != []


def test_lent_tokens_added_while_waiting_are_hashed_at_look_up() -> None:
    cache = KVCacheManager(REFERENCE, 200)
    first, _ = lent(cache, "first", list(range(13)))
    cache.allocate_slots(first, 13)
    waiting, theirs = lent(cache, "waiting", list(range(5)))
    theirs.grow(*range(5, 14))
    assert cache.find_hit(waiting).tokens == 12


@every_layout
def test_lent_tokens_computed_ahead_are_published_when_known(config: KVCacheConfig) -> None:
    """A step ahead: 6 tokens have slots, and are computed, before any of them is drawn; known, they are published."""
    cache = KVCacheManager(config, 200, hasher=EngineHashes(BLOCK))
    one, theirs = lent(cache, "r", list(range(9)))
    assert cache.allocate_slots(one, 9) is not None
    for computed in range(9, 15):
        sync(cache, one, theirs, computed, in_flight=computed - 9)
        assert cache.allocate_batch(np.array([one.row]), 1).accepted == 1
        cache.check()
    sync(cache, one, theirs, 15, in_flight=6)
    edge = cache.engine.publish_boundaries(np.array([one.row])).item()
    assert edge == 12
    longer = [*range(9), *range(100, 106), 1, 2]
    hit = cache.find_hit(lent(cache, "look", longer)[0])
    assert max(hit.tokens, hit.branch_tokens) == 8  # tokens are there; a state behind them may not be
    theirs.grow(*range(100, 106))
    sync(cache, one, theirs, 15)
    cache.cache_blocks(one, 15)
    cache.check()
    hit = cache.find_hit(lent(cache, "look", longer)[0])
    assert max(hit.tokens, hit.branch_tokens) == 12  # tokens are there; a state behind them may not be
    assert cache.engine.publish_boundaries(np.array([one.row])).item() == 16


def test_lent_request_keeps_blocks_that_steps_in_flight_read() -> None:
    cache = KVCacheManager(REFERENCE, 200, hasher=EngineHashes(BLOCK))
    one, theirs = lent(cache, "r", list(range(15)))
    assert cache.allocate_slots(one, 15) is not None
    dropped = []
    for in_flight in (6, 0):
        sync(cache, one, theirs, 15, in_flight)
        cache.engine.drop_skipped(one)
        dropped.append(cache.get_block_ids("r")[1].count(0))
    assert dropped == [1, 2]  # of a window of 6: the next token of 9, or of 15, reads from 4, or 10, on


def test_lent_counts_set_singly_or_by_row_agree() -> None:
    """Each of two requests grows by a token at a time, and by many; one is told by itself, the other as a row."""
    cache = KVCacheManager(REFERENCE, 200)
    (one, mine), (other, theirs) = (lent(cache, name, list(range(5))) for name in ("one", "other"))
    cache.engine.synchronise_one(one, 0)
    for known in (one, other):
        assert cache.allocate_slots(known, 5) is not None
    for more in (1, 1, 1, 1, 9, 0):
        mine.grow(*range(more))
        theirs.grow(*range(more))
        cache.engine.synchronise_one(one, mine.num_tokens - 1, 1)
        sync(cache, other, theirs, theirs.num_tokens - 1, 1)
        assert one.num_tokens == other.num_tokens == mine.num_tokens
        assert one.num_computed_tokens == other.num_computed_tokens
        assert one.hashes == other.hashes
        assert cache.rows.in_flight[[one.row, other.row]].tolist() == [1, 1]
    mine.all_token_ids.pop()
    with pytest.raises(ConfigError, match="cannot have"):
        cache.engine.synchronise_one(one, 3)
    with pytest.raises(ConfigError, match="num_in_flight_tokens"):
        cache.engine.synchronise_one(other, 3, 4)
    with pytest.raises(ConfigError, match="are its own"):
        cache.engine.synchronise_one(Request("r", [1], hasher=cache.hasher), 0)


@every_layout
def test_lent_request_below_its_next_event_needs_no_call(config: KVCacheConfig) -> None:
    cache = KVCacheManager(config, 200, hasher=EngineHashes(BLOCK))
    known = [lent(cache, f"r{n}", list(range(100 * n, 100 * n + 5 + n))) for n in range(4)]
    for one, _ in known:
        assert cache.allocate_slots(one, one.num_tokens) is not None
        one.num_computed_tokens = one.num_tokens
    rows = np.array([one.row for one, _ in known])
    for _ in range(9):
        for _, theirs in known:
            theirs.grow(3)
        counts = np.array([theirs.num_tokens for _, theirs in known])
        cache.engine.synchronise(rows, num_tokens=counts, num_computed=counts - 1)
        below = cache.engine.next_events(rows) > counts
        took = cache.allocate_batch(rows, 1)
        assert took.accepted == 4
        assert not set(took.owner.tolist()) & set(np.flatnonzero(below).tolist())
        cache.check()


def test_lent_request_without_caching_has_no_boundary_or_hash() -> None:
    cache = KVCacheManager(REFERENCE, 200, enable_caching=False)
    one, theirs = lent(cache, "r", list(range(9)))
    assert cache.allocate_slots(one, 9) is not None
    theirs.grow(*range(9, 14))
    sync(cache, one, theirs, 9)
    assert one.hashes == []
    assert cache.engine.publish_boundaries(np.array([one.row])).item() >= 1 << 40
    cache.check()


# -- steps


def test_lent_step_without_with_block_is_settled() -> None:
    cache = KVCacheManager(STATES, 200, hasher=EngineHashes(BLOCK))
    for step in range(3):
        cache.engine.begin_step(step)
        with pytest.raises(CacheError, match="end that one first"):
            cache.engine.begin_step(step + 1)
        one, _ = lent(cache, str(step), list(range(100 * step, 100 * step + 8)))
        assert cache.allocate_slots(one, 8) is not None
        cache.engine.end_step()
    assert cache.statistics().unwritten_blocks == 9
    cache.engine.settle(1)
    assert cache.statistics().unwritten_blocks == 3
    cache.engine.settle(1)
    cache.revoke(2)
    assert cache.statistics().unwritten_blocks == 0
    cache.engine.settle(5)
    cache.check()


# -- refused


def test_lent_tokens_changed_on_the_request_are_rejected() -> None:
    cache = KVCacheManager(REFERENCE, 200, hasher=EngineHashes(BLOCK))
    one, theirs = lent(cache, "r", list(range(9)))
    copied = Request("copied", list(range(9)), hasher=None)
    with pytest.raises(ConfigError, match="engine's"):
        one.append(3)
    with pytest.raises(ConfigError, match="engine's"):
        one.truncate(9)
    assert cache.allocate_slots(one, 9) is not None
    with pytest.raises(ConfigError, match="engine's"):
        append_tokens([one], [3])
    theirs.all_token_ids.pop()
    with pytest.raises(ConfigError, match="has 9 tokens, and cannot have 8"):
        sync(cache, one, theirs, 8)
    theirs.all_token_ids += [8, 9, 10, 11]
    with pytest.raises(ConfigError, match="hashed 2 blocks of 4: hash first"):
        sync(cache, one, theirs, 9)
    with pytest.raises(ConfigError, match="hashed 2 blocks of 4: hash first"):
        cache.engine.synchronise_one(one, 9)
    assert (one.num_tokens, one.num_computed_tokens) == (9, 0)
    theirs.grow()
    sync(cache, one, theirs, 9)
    with pytest.raises(ConfigError, match="at most its computed tokens in flight"):
        sync(cache, one, theirs, 9, in_flight=10)
    cache.free(one)
    uncached = KVCacheManager(REFERENCE, 200, enable_caching=False)
    assert uncached.allocate_slots(copied, 9) is not None
    with pytest.raises(ConfigError, match="others are appended"):
        uncached.engine.synchronise(np.array([copied.row]), num_tokens=np.array([10]))
    with pytest.raises(ConfigError, match="2 entries for 1 rows"):
        uncached.engine.synchronise(np.array([copied.row]), num_computed=np.array([1, 2]))
    with pytest.raises(CacheError, match="belongs to no request"):
        uncached.engine.synchronise(np.array([7]), num_computed=np.array([1]))
    cache.check()


def test_lent_request_with_invalid_hash_source_is_rejected() -> None:
    with pytest.raises(HashError, match="lend theirs with their hashes"):
        Request("r", list(range(9)), hasher=EngineHashes(BLOCK))
    assert EngineHashes(BLOCK).hash_chain(None, np.arange(3, dtype=np.int32)) == []
    with pytest.raises(ConfigError, match="block_size"):
        EngineHashes(0)
    theirs = Engines(list(range(9)))
    for wrong in ((object(), 1), (theirs, 0), (theirs, 3, (b"x",))):
        with pytest.raises(ConfigError):
            Lent(*wrong)


def test_lent_request_in_our_scheduler_is_rejected() -> None:
    cache = KVCacheManager(REFERENCE, 200)
    one, _ = lent(cache, "r", list(range(9)))
    with pytest.raises(ConfigError, match="of another engine"):
        Scheduler(cache, SchedulerLimits(2, 16)).add(one)
    branch = one.branch("b", SamplingParams())
    assert not branch.is_lent
    branch.append(9)
    assert branch.token_ids().tolist() == list(range(10))
    assert branch.hashes == one.hashes
    assert branch.hashes is not one.hashes
