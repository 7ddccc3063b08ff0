"""The oracle itself against numbers measured on the reference (dense publishing, hits on block edges)."""

import pytest

from hybridkv.specs import KVCacheSpec
from hybridkv.testing.configs import chunk_spec as chunk
from hybridkv.testing.configs import cross_spec as cross
from hybridkv.testing.configs import encoder_only_spec as encoder_only
from hybridkv.testing.configs import full_spec as full
from hybridkv.testing.configs import sink_spec as sink
from hybridkv.testing.configs import state_spec as state
from hybridkv.testing.configs import window_spec as window
from oracles.cache import OracleCache, OracleRequest
from oracles.pool import OraclePool
from oracles.steps import split_chunk


class Driver:
    """An OracleCache and requests of tokens 1, 2, 3 ..."""

    def __init__(self, *specs: KVCacheSpec, num_blocks: int = 200, eagle: bool = False, caching: bool = True) -> None:
        self.cache = OracleCache(specs, num_blocks, 4096, eagle=eagle, caching=caching)
        self.published: list[set[int]] = [set() for _ in specs]

    def new(self, tokens: int) -> OracleRequest:
        return OracleRequest("r", list(range(1, tokens + 1)), tokens)

    def hit(self, tokens: int) -> int:
        return self.cache.hit(range(1, tokens + 1)).tokens

    def uncached(self, tokens: int) -> int:
        return self.cache.hit(range(1, tokens + 1)).uncached

    def tables(self, tokens: int) -> list[list[int]]:
        return self.cache.hit(range(1, tokens + 1)).tables

    def chunk(self, request: OracleRequest, new: int, lookahead: int = 0) -> list[list[int]]:
        """One chunk computed; the tables."""
        hit = None if request.rows else self.cache.hit(request.tokens)
        assert self.cache.allocate(request, new, hit, lookahead=lookahead) is not None
        request.computed += new + (hit.tokens if hit else 0)
        for group, (table, published) in enumerate(zip(request.tables, self.published, strict=True)):
            published.update(
                column
                for column, block in enumerate(table)
                if block in self.cache.pool.prefix and self.cache.pool.prefix[block][0] == group
            )
        return request.tables

    def run(self, tokens: int, *chunks: int) -> OracleRequest:
        request = self.new(tokens)
        for new in chunks or (tokens,):
            self.chunk(request, new)
        return request


# -- docs/contracts.md, 2: the free order


def test_free_order_of_hashed_and_empty_blocks() -> None:
    pool = OraclePool(8)
    assert pool.take(4) == [1, 2, 3, 4]
    for block in (1, 2, 3):
        pool.publish(0, block, (None, (block,)), None)
    pool.release([4, 3, 2, 1])
    assert pool.free == [4, 5, 6, 7, 3, 2, 1]
    pool.touch([2])
    assert pool.free == [4, 5, 6, 7, 3, 1]
    pool.release([2])
    assert pool.free == [4, 5, 6, 7, 3, 1, 2]
    assert pool.take(5) == [4, 5, 6, 7, 3]
    assert [pool.find(0, (None, (block,))) for block in (1, 2, 3)] == [1, 2, None]


@pytest.mark.parametrize(
    ("hashed", "order"), [((1, 2, 3), [6, 5, 4, 7, 8, 9, 3, 2, 1]), ((), [6, 5, 4, 3, 2, 1, 7, 8, 9])]
)
def test_blocks_are_freed_last_first(hashed: tuple[int, ...], order: list[int]) -> None:
    pool = OraclePool(10)
    pool.take(6)
    for block in hashed:
        pool.publish(0, block, (None, (block,)), None)
    pool.release([6, 5, 4, 3, 2, 1])
    assert pool.free == order


def test_duplicates_are_kept_and_the_first_is_found() -> None:
    pool = OraclePool(8)
    pool.take(2)
    pool.publish(0, 1, (None, (7,)), None)
    pool.publish(0, 2, (None, (7,)), None)
    assert pool.find(0, (None, (7,))) == 1
    pool.forget(1)
    assert pool.find(0, (None, (7,))) == 2


def test_a_pool_of_one_block() -> None:
    pool = OraclePool(1)
    assert (pool.free, pool.usage, pool.reset()) == ([], 0.0, True)


# -- docs/contracts.md, 4: one request, one group


def test_full_attention() -> None:
    driver = Driver(full(4))
    driver.run(14)
    assert driver.hit(14) == 12


@pytest.mark.parametrize(("prompt", "hit"), [(25, 20), (24, 16), (5, 0), (16, 8), (20, 12), (33, 20)])
def test_full_attention_with_eagle(prompt: int, hit: int) -> None:
    driver = Driver(full(4), eagle=True)
    driver.run(24)
    assert driver.hit(prompt) == hit


def test_a_window() -> None:
    driver = Driver(window(4, 8))
    request = driver.new(24)
    for _ in range(2):
        driver.chunk(request, 8)
    assert driver.chunk(request, 8) == [[0, 0, 3, 4, 5, 6]]
    hits = {25: (24, [0, 0, 0, 0, 5, 6]), 24: (20, [0, 0, 0, 4, 5]), 13: (12, [0, 2, 3]), 5: (4, [1])}
    for prompt, (tokens, table) in hits.items():
        assert (driver.hit(prompt), driver.tables(prompt)) == (tokens, [table])
    request.tokens.append(25)
    assert driver.chunk(request, 1) == [[0, 0, 0, 0, 5, 6, 7]]


@pytest.mark.parametrize(("prompt", "hit"), [(25, 20), (24, 16), (20, 12), (13, 8)])
def test_a_window_with_eagle(prompt: int, hit: int) -> None:
    driver = Driver(window(4, 8), eagle=True)
    driver.run(24, 8, 8, 8)
    assert driver.hit(prompt) == hit


@pytest.mark.parametrize(("computed", "skipped"), [(7, 0), (8, 1), (9, 2), (12, 5)])
def test_tokens_before_a_window(computed: int, skipped: int) -> None:
    assert Driver(window(4, 8)).cache.groups[0].first_live(computed) == skipped


@pytest.mark.parametrize(("computed", "skipped"), [(13, 8), (8, 8), (7, 0)])
def test_tokens_before_a_chunk(computed: int, skipped: int) -> None:
    assert Driver(chunk(4, 8)).cache.groups[0].first_live(computed) == skipped


def test_chunks_beside_full_attention() -> None:
    driver = Driver(full(4), chunk(4, 8))
    driver.run(32)
    assert driver.tables(16) == [[1, 2, 3], [0, 0, 11]]
    assert driver.tables(17) == [[1, 2, 3, 4], [0, 0, 0, 0]]


def test_chunks_alone_must_have_seen_the_prefix() -> None:
    driver = Driver(chunk(4, 8))
    assert driver.hit(33) == 0
    driver.run(20)
    assert (driver.hit(33), driver.tables(33)) == (20, [[0, 0, 0, 0, 5]])
    assert (driver.hit(17), driver.tables(17)) == (16, [[0, 0, 0, 0]])
    assert driver.cache.hit([9] * 33).tokens == 0


def test_states_beside_full_attention() -> None:
    driver = Driver(full(16), state(16))
    request = driver.new(100)
    assert driver.chunk(request, 64)[1] == [0, 0, 0, 5]
    assert driver.chunk(request, 32)[1] == [0, 0, 0, 5, 0, 8]
    assert driver.chunk(request, 4)[1] == [0, 0, 0, 0, 0, 8, 10]
    request.tokens.append(101)
    assert driver.chunk(request, 1)[1] == [0, 0, 0, 0, 0, 0, 10]
    assert driver.published[1] == {3, 5}


def test_states_alone() -> None:
    driver = Driver(state(16))
    request = driver.new(100)
    assert driver.chunk(request, 64) == [[0, 0, 0, 1]]
    assert driver.chunk(request, 32) == [[0, 0, 0, 1, 0, 2]]
    assert driver.chunk(request, 4) == [[0, 0, 0, 0, 0, 2, 3]]


def test_states_with_drafts() -> None:
    driver = Driver(full(16), state(16, drafts=2), eagle=True)
    request = driver.new(60)
    assert driver.chunk(request, 32, lookahead=2)[1] == [0, 4, 5, 6]
    hit_before = len(request.tables[1])
    assert driver.chunk(request, 28, lookahead=2)[1] == [0, 4, 0, 6, 5, 8]
    assert request.tables[1][hit_before:] == [5, 8]
    request.tokens.append(61)
    assert driver.chunk(request, 3)[1] == [0, 0, 0, 6, 5, 8]
    request.tokens += [62, 63, 64]
    assert driver.chunk(request, 3)[1] == [0, 0, 0, 6, 5, 8, 10]
    request.tokens += [65, 66, 67]
    assert driver.chunk(request, 3)[1] == [0, 0, 0, 0, 5, 8, 10]


def test_a_state_rewritten_in_place() -> None:
    driver = Driver(full(4), state(4, drafts=1, mode="none"))
    request = driver.new(9)
    assert driver.chunk(request, 5) == [[1, 2], [3, 4]]
    assert driver.chunk(request, 4) == [[1, 2, 5], [3, 4]]
    assert (driver.published[1], driver.hit(9)) == (set(), 0)


@pytest.mark.parametrize(
    ("chunks", "published"),
    [((64, 32, 4), {3, 5}), ((16,) * 6 + (4,), set(range(6))), ((100,), set()), ((80, 20), {4}), ((96, 4), {5})],
)
def test_states_are_published_where_chunks_end(chunks: tuple[int, ...], published: set[int]) -> None:
    driver = Driver(full(16), state(16))
    driver.run(100, *chunks)
    assert driver.published[1] == published


def test_decoding_stores_states_at_edges() -> None:
    driver = Driver(full(16), state(16))
    request = driver.run(32)
    for token in range(33, 73):
        request.tokens.append(token)
        driver.chunk(request, 1)
    assert driver.published[1] == {1, 2, 3}


@pytest.mark.parametrize(("accepted", "published"), [(1, [1]), (2, [1]), (3, [])])
def test_drafts_store_a_state_where_the_accepted_ones_end(accepted: int, published: list[int]) -> None:
    """Token 31 and 2 drafts ran: with 3 accepted the state at 32 is dropped before it could be published."""
    driver = Driver(full(16), state(16, drafts=2))
    request = driver.run(30, 20, 10)
    request.tokens.append(31)
    driver.chunk(request, 3)
    request.computed = 30 + accepted
    request.tokens += range(32, 32 + accepted)
    driver.cache.allocate(request, 1)
    assert [c for c, block in enumerate(request.tables[1]) if block in driver.cache.pool.prefix] == published


def test_a_state_that_no_chunk_ended_at_is_not_published() -> None:
    """Chunks that ignore the state's block (D1): the state at 10 must not pass for the one at 16."""
    driver = Driver(state(16, drafts=2))
    request = driver.new(100)
    assert driver.chunk(request, 10) == [[1, 2, 3]]
    assert driver.chunk(request, 30) == [[1, 0, 3, 2, 4]]
    assert driver.chunk(request, 20) == [[0, 0, 3, 2, 4, 1]]
    assert driver.chunk(request, 40) == [[0, 0, 0, 2, 0, 0, 4, 1, 3]]
    assert driver.published == [set()]


def test_drafts_move_to_the_end() -> None:
    driver = Driver(state(4, drafts=2))
    request = driver.run(8)
    seen = []
    for computed in range(8, 27, 3):
        request.tokens += range(100 + computed, 103 + computed)
        seen.append((driver.chunk(request, 3), computed)[0][0][:])
    assert seen[:3] == [[0, 1, 2, 3, 4], [0, 0, 2, 3, 4, 5], [0, 0, 0, 3, 4, 5, 2]]
    assert seen[3] == [0, 0, 0, 0, 4, 5, 2]
    assert all(3 <= sum(map(bool, table)) <= 4 for table in seen)


def test_cross_attention_and_encoders() -> None:
    driver = Driver(full(4), cross(4), encoder_only(4))
    request = driver.new(9)
    request.encoder = 10
    cells = driver.cache.allocate(request, 9)
    assert (request.tables, len(cells or [])) == ([[1, 2, 3], [4, 5, 6], []], 6)
    request.computed = 9
    request.tokens.append(10)
    driver.cache.allocate(request, 1)
    assert request.tables == [[1, 2, 3], [4, 5, 6], []]
    assert driver.hit(9) == 0
    driver.cache.free(request)
    assert driver.cache.pool.usage == 0


def test_a_sink_belongs_to_nobody() -> None:
    driver = Driver(sink(4, 6), num_blocks=10)
    assert driver.cache.pool.usable == 7
    request = driver.run(9)
    assert request.tables == [[3, 4, 5]]
    assert driver.cache.pool.usage == pytest.approx(3 / 7)
    assert driver.hit(9) == 8
    driver.cache.free(request)
    assert driver.cache.pool.reset()


def test_a_refusal_only_drops() -> None:
    driver = Driver(window(4, 8), num_blocks=5)
    request = driver.run(16, 16)
    request.tokens += range(17, 40)
    assert driver.cache.allocate(request, 16) is None
    assert (request.tables, driver.cache.pool.free) == ([[0, 0, 3, 4]], [2, 1])


# -- docs/contracts.md, 5: all groups together


def published_by(*specs: KVCacheSpec, tokens: int, eagle: bool = False) -> list[list[int]]:
    driver = Driver(*specs, eagle=eagle)
    driver.run(tokens)
    return [sorted(columns) for columns in driver.published]


def test_only_what_a_hit_can_reach_is_published() -> None:
    assert [len(columns) for columns in published_by(full(4), window(8, 8), tokens=60)] == [14, 7]
    assert published_by(full(16), window(4, 8), tokens=60) == [[0, 1, 2], [2, 3, 6, 7, 10, 11]]
    assert published_by(full(16), window(4, 8), tokens=64)[1] == [2, 3, 6, 7, 10, 11, 14, 15]


@pytest.mark.parametrize(
    ("tokens", "columns"),
    [
        (60, [2, 3, 4, 6, 7, 8, 10, 11, 12]),
        (67, [2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15]),
        (68, [2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16]),
        (72, [2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16]),
    ],
)
def test_eagle_publishes_one_column_past_the_edge(tokens: int, columns: list[int]) -> None:
    assert published_by(full(16), window(4, 8), tokens=tokens, eagle=True)[1] == columns


def test_eagle_publishes_full_attention_past_the_edge() -> None:
    assert published_by(full(4), window(8, 8), tokens=28, eagle=True) == [list(range(7)), [0, 1, 2]]


@pytest.mark.parametrize(
    ("specs", "cached", "hits"),
    [
        ((full(4), window(4, 8)), 24, {16: 12, 20: 16, 23: 16, 24: 20, 25: 20, 29: 20}),
        ((full(4), window(8, 8)), 28, {20: 8, 24: 16, 27: 16, 28: 16, 33: 16}),
        ((full(16), window(4, 8)), 72, {33: 16, 48: 32, 52: 32, 63: 32, 64: 48, 80: 48, 81: 48}),
        ((full(8), window(4, 8)), 60, {41: 32, 48: 40, 53: 40, 56: 48, 65: 48}),
        ((full(4), window(4, 8), window(4, 16)), 64, {56: 52, 60: 56, 63: 56, 64: 60, 73: 60}),
        ((full(16), window(4, 8), window(4, 16)), 72, {33: 16, 48: 32, 64: 48, 80: 48}),
        ((window(4, 8), window(8, 16)), 64, {56: 48, 60: 48, 63: 48, 64: 56, 84: 56}),
    ],
)
def test_hits_with_eagle(specs: tuple[KVCacheSpec, ...], cached: int, hits: dict[int, int]) -> None:
    driver = Driver(*specs, eagle=True)
    driver.run(cached)
    assert {prompt: driver.hit(prompt) for prompt in hits} == hits


def test_the_candidate_falls_until_all_agree() -> None:
    driver = Driver(full(4), window(4, 8), window(4, 16))
    request = driver.run(64)
    assert driver.hit(65) == 64
    for group, column, hit in ((1, 14, 56), (2, 11, 44), (0, 9, 36)):
        driver.cache.pool.forget(request.tables[group][column])
        assert driver.hit(65) == hit


@pytest.mark.parametrize(("prompt", "hit"), [(61, 56), (57, 56), (56, 48)])
def test_hits_end_on_the_common_alignment(prompt: int, hit: int) -> None:
    driver = Driver(full(4), window(8, 8))
    driver.run(60)
    assert driver.hit(prompt) == hit


@pytest.mark.parametrize(
    ("chunks", "hits"),
    [
        ((64, 16, 20), {100: (80, 0), 81: (64, 0), 82: (64, 0)}),
        ((80, 20), {100: (80, 0), 81: (0, 64), 82: (0, 64)}),
        ((96, 4), {100: (0, 80), 81: (0, 64), 97: (0, 80)}),
    ],
)
def test_states_and_eagle(chunks: tuple[int, ...], hits: dict[int, tuple[int, int]]) -> None:
    driver = Driver(full(16), state(16), eagle=True)
    driver.run(100, *chunks)
    assert {prompt: (driver.hit(prompt), driver.uncached(prompt)) for prompt in hits} == hits


def test_states_and_eagle_between_windows() -> None:
    driver = Driver(full(16), state(16), window(16, 20), eagle=True)
    driver.run(100, 64, 16, 20)
    assert [(driver.hit(prompt), driver.uncached(prompt)) for prompt in (65, 80, 96, 113)] == [
        (0, 48),
        (64, 0),
        (80, 0),
        (80, 0),
    ]


def test_groups_without_keys_allow_no_hit() -> None:
    driver = Driver(full(16), state(16, mode="none"), encoder_only(16))
    driver.run(100)
    assert (driver.hit(100), driver.published[0]) == (0, set())
    driver = Driver(full(16), encoder_only(16))
    driver.run(100)
    assert driver.hit(100) == 96


def test_all_groups_touch_before_any_takes() -> None:
    driver = Driver(full(4), window(4, 8), num_blocks=9)
    driver.cache.free(driver.run(16))
    assert driver.cache.pool.free == [4, 3, 2, 1, 8, 7, 6, 5]
    request = driver.new(17)
    request.tokens[12:] = [99] * 5
    hit = driver.cache.hit(request.tokens)
    assert hit.tables == [[1, 2, 3], [0, 6, 7]]
    assert driver.cache.allocate(request, 5, hit) is None  # 2 new ones in each group, 3 are free
    assert driver.cache.allocate(request, 1, hit) == [
        (0, 0, 1),
        (0, 1, 2),
        (0, 2, 3),
        (0, 3, 4),
        (1, 1, 6),
        (1, 2, 7),
        (1, 3, 8),
    ]


# -- docs/contracts.md, 6: where chunks end


def split(
    prompt: int, computed: int, count: int, *, outputs: int = 0, branch: int = 0, eagle: bool = False, largest: int = 64
) -> int:
    request = OracleRequest("r", [0] * (prompt + outputs), prompt, branch=branch)
    return split_chunk(request, computed, count, 16, largest, eagle=eagle)


@pytest.mark.parametrize(
    ("prompt", "computed", "count", "given"),
    [
        (100, 0, 64, 64),
        (100, 64, 36, 32),
        (100, 96, 4, 4),
        (100, 0, 100, 96),
        (100, 0, 50, 48),
        (100, 0, 10, 0),
        (100, 10, 54, 6),
        (96, 0, 96, 80),
        (96, 80, 16, 16),
        (97, 0, 97, 96),
        (17, 0, 17, 16),
        (16, 0, 16, 16),
        (10, 0, 10, 10),
    ],
)
def test_chunks_end_where_states_are_kept(prompt: int, computed: int, count: int, given: int) -> None:
    assert split(prompt, computed, count) == given


@pytest.mark.parametrize(
    ("prompt", "computed", "count", "given"),
    [(100, 0, 100, 80), (100, 64, 36, 16), (97, 0, 97, 80), (33, 0, 33, 16), (17, 0, 17, 17)],
)
def test_chunks_with_eagle(prompt: int, computed: int, count: int, given: int) -> None:
    assert split(prompt, computed, count, eagle=True) == given


def test_other_chunks() -> None:
    assert split(100, 0, 64, branch=40) == 32
    assert [split(40, 0, 64, outputs=30), split(40, 64, 6, outputs=30)] == [64, 6]
    assert split(100, 0, 10, largest=10) == 10  # a block is larger than any chunk
    assert split(40, 40, 3, outputs=1) == 3  # decoding
