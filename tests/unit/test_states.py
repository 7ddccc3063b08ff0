"""Recurrent states in the cache: docs/contracts.md, 4, and labels (8, last lines)."""

import numpy as np
import pytest
from kinds_support import cache_of, full, grow, hit_tokens, published, start, state, table

from hybridkv.cache import SlotPlan
from hybridkv.request import Request

PROMPT = list(range(100))


# -- tables


def test_tables_of_a_prompt_in_chunks() -> None:
    cache = cache_of(full(16), state())
    request = Request("a", PROMPT, hasher=cache.hasher)
    tables = []
    for chunk in (64, 32, 4):
        grow(cache, request, chunk)
        tables.append(table(cache, 1))
    assert tables == [[0, 0, 0, 5], [0, 0, 0, 5, 0, 8], [0, 0, 0, 0, 0, 8, 10]]
    request.append(7)
    grow(cache, request, 1)
    assert table(cache, 1) == [0, 0, 0, 0, 0, 0, 10]


def test_without_dense_publishing_the_dropped_state_is_taken_at_once() -> None:
    cache = cache_of(full(16), state(), retention=0)
    start(cache, PROMPT, (64, 32, 4))
    assert table(cache, 1) == [0, 0, 0, 0, 0, 8, 9]


def test_states_alone() -> None:
    cache = cache_of(state())
    start(cache, PROMPT, (64, 32))
    assert table(cache) == [0, 0, 0, 1, 0, 2]
    start(cache_of(state()), PROMPT, (64, 32, 4))
    request = cache.resident_requests()[0]
    grow(cache, request, 4)
    assert table(cache) == [0, 0, 0, 0, 0, 2, 3]


def test_a_chunk_appends_its_columns_all_null_but_the_last() -> None:
    cache = cache_of(full(16), state())
    request = Request("a", PROMPT, hasher=cache.hasher)
    assert grow(cache, request, 64) == [[1, 2, 3, 4], [0, 0, 0, 5]]
    assert grow(cache, request, 32) == [[6, 7], [0, 8]]


def test_speculative_blocks_are_relocated() -> None:
    cache = cache_of(full(16), state(drafts=2), use_eagle=True)
    request = Request("a", PROMPT[:60], hasher=cache.hasher)
    grow(cache, request, 32, num_lookahead_tokens=2)
    assert table(cache, 1) == [0, 4, 5, 6]
    new = grow(cache, request, 28, num_lookahead_tokens=2)
    assert table(cache, 1) == [0, 4, 0, 6, 5, 8]
    assert new is not None
    assert new[1] == [5, 8]
    tables = []
    for computed in (60, 63, 66):
        while request.num_tokens <= computed:
            request.append(1)
        request.num_computed_tokens = computed
        cache.allocate_slots(request, 3)
        tables.append(table(cache, 1))
    assert tables == [[0, 0, 0, 6, 5, 8], [0, 0, 0, 6, 5, 8, 10], [0, 0, 0, 0, 5, 8, 10]]
    cache.check()


@pytest.mark.parametrize(
    ("drafts", "chunks", "expected"),
    [
        (
            0,
            (16, 16, 48, 16, 64),
            [
                ([1], [1]),
                ([2], [1, 2]),
                ([0, 0, 3], [0, 2, 0, 0, 3]),
                ([4], [0, 0, 0, 0, 3, 4]),
                ([0, 0, 0, 5], [0, 0, 0, 0, 0, 4, 0, 0, 0, 5]),
            ],
        ),
        (
            1,
            (16, 16, 48, 16, 64, 40),
            [
                ([1, 2], [1, 2]),
                ([3], [1, 2, 3]),
                ([0, 3, 4], [0, 2, 0, 0, 3, 4]),
                ([5], [0, 0, 0, 0, 3, 4, 5]),
                ([0, 0, 5, 6], [0, 0, 0, 0, 0, 4, 0, 0, 0, 5, 6]),
                ([0, 6, 7], [0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 6, 7]),
            ],
        ),
        (
            2,
            (16, 32, 32, 32, 48, 40),
            [
                ([1, 2, 3], [1, 2, 3]),
                ([2, 4], [1, 0, 3, 2, 4]),
                ([2, 5], [0, 0, 3, 0, 4, 2, 5]),
                ([2, 6], [0, 0, 0, 0, 4, 0, 5, 2, 6]),
                ([2, 6, 7], [0, 0, 0, 0, 0, 0, 5, 0, 0, 2, 6, 7]),
                ([6, 7, 8], [0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 6, 7, 8]),
            ],
        ),
        (
            3,
            (16, 32, 48, 64, 16, 80, 44),
            [
                ([1, 2, 3, 4], [1, 2, 3, 4]),
                ([2, 5], [1, 0, 3, 4, 2, 5]),
                ([4, 2, 6], [0, 0, 3, 0, 0, 5, 4, 2, 6]),
                ([4, 2, 6, 7], [0, 0, 0, 0, 0, 5, 0, 0, 0, 4, 2, 6, 7]),
                ([8], [0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 2, 6, 7, 8]),
                ([0, 6, 7, 8, 9], [0] * 10 + [2, 0, 0, 0, 0, 6, 7, 8, 9]),
                ([7, 8, 10], [0] * 15 + [6, 0, 0, 9, 7, 8, 10]),
            ],
        ),
    ],
)
def test_rows_of_chunks(drafts: int, chunks: tuple[int, ...], expected: list[tuple[list[int], list[int]]]) -> None:
    """New columns and the row after each chunk, as measured on vLLM 0.32 (P = 300, blocks of 16)."""
    cache = cache_of(state(drafts=drafts))
    request = Request("a", range(300), hasher=cache.hasher)
    rows = []
    for chunk in chunks:
        (new,) = grow(cache, request, chunk) or ([],)
        rows.append((new, table(cache)))
    assert rows == expected


@pytest.mark.parametrize(
    ("drafts", "new", "expected"),
    [
        (0, 4, [False, True]),
        (2, 4, [False, True, True, True]),
        (2, 54, [False, False, False, False, True, True, True]),
    ],
)
def test_rows_behind_a_hit(drafts: int, new: int, expected: list[bool]) -> None:
    """The shared state in column 5, and behind it the row's own: the state's column moves, the drafts' come once."""
    cache = cache_of(full(16), state(drafts=drafts))
    cache.free(start(cache, range(200), (96, 4), "first"))
    request = Request("a", range(200), hasher=cache.hasher)
    blocks, tokens = cache.get_computed_blocks(request)
    assert tokens == 96
    cache.allocate_slots(request, new, tokens, blocks)
    row = table(cache, 1)
    assert row[:5] == [0] * 5
    assert row[5] == blocks.blocks[1][5]
    assert [block > 0 for block in row[6:]] == expected[1:]
    assert row[5] not in row[6:]


def drafted(accepted: int, steps: int) -> tuple[list[list[int]], Request, list[int]]:
    """Rows of a request of 8 tokens that runs one token and two drafts a step; blocks of 4."""
    cache = cache_of(state(4, 2))
    request = start(cache, PROMPT[:8], (8,))
    rows = [table(cache)]
    for _ in range(steps):
        request.append(1)
        cache.allocate_slots(request, 3)
        cache.check()
        rows.append(table(cache))
        request.num_computed_tokens += accepted
        for _ in range(accepted - 1):
            request.append(1)
    return rows, request, published(cache, request)


def test_rejected_drafts_shrink_no_row() -> None:
    rows, _, columns = drafted(1, 6)
    assert rows == [
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 0, 2, 3, 4],
        [0, 0, 2, 3, 4, 5],
        [0, 0, 2, 3, 4, 5],
        [0, 0, 2, 3, 4, 5],
        [0, 0, 0, 3, 4, 5],
    ]
    assert columns == [1, 2]


def test_accepted_drafts() -> None:
    """12 was known when its step began, 20 is where a draft ended; 16 was dropped before anybody could name it."""
    rows, _, columns = drafted(3, 5)
    assert [[block > 0 for block in row] for row in rows[1:]] == [
        [False] + [True] * 4,
        [False] * 2 + [True] * 4,
        [False] * 3 + [True] * 4,
        [False] * 4 + [True] * 3,
        [False] * 4 + [True] * 4,
    ]
    assert columns == [1, 2, 4]


def test_unaligned_chunks_with_speculative_blocks() -> None:
    cache = cache_of(state(drafts=2))
    request = Request("a", PROMPT, hasher=cache.hasher)
    tables = []
    for chunk in (10, 30, 20, 40):
        grow(cache, request, chunk)
        tables.append(table(cache))
    assert tables[:3] == [[1, 2, 3], [1, 0, 3, 2, 4], [0, 0, 3, 2, 4, 1]]
    assert [block > 0 for block in tables[3]] == [False] * 3 + [True] + [False] * 2 + [True] * 3
    assert published(cache, request) == []  # no chunk ended at a multiple of 16


def test_none_has_its_blocks_once_and_no_hits() -> None:
    cache = cache_of(full(16), state(64, 2, "none"))
    assert not cache.enable_caching
    request = Request("a", PROMPT, hasher=cache.hasher)
    grow(cache, request, 64)
    assert table(cache, 1) == [5, 6, 7]
    for _ in range(36):
        grow(cache, request, 1)
    assert table(cache, 1) == [5, 6, 7]
    assert hit_tokens(cache, PROMPT) == 0


# -- labels: a state is published under its own token count only


def test_d1_a_boundary_inside_a_chunk_is_not_published() -> None:
    cache = cache_of(full(16), state(32))
    request = start(cache, PROMPT, (48, 48))  # 32 and 64 lie inside the chunks
    assert published(cache, request, 1) == [2]  # 96: the second ended there
    assert hit_tokens(cache, PROMPT) == 96
    evicted = start(cache_of(full(16), state(32)), PROMPT, (48, 16, 32), "b")
    assert evicted.num_computed_tokens == 96


@pytest.mark.parametrize("batch", [False, True])
def test_d1_chunks_inside_blocks(*, batch: bool) -> None:
    """Chunks of 3, states of 4: of 4, 8 and 12 only the last is where a chunk ends."""
    cache = cache_of(state(4))
    request = start(cache, PROMPT, (3,))
    for _ in range(3):
        if batch:
            cache.allocate_batch(np.array([request.row]), 3)
            request.num_computed_tokens += 3
        else:
            grow(cache, request, 3)
    assert published(cache, request) == [2]


def test_d1_a_state_from_inside_a_block_is_not_published_while_steps_are_in_flight() -> None:
    """The column of tokens 0 .. 15 holds the state at 10; the next chunk jumps over 16 and keeps it to be read."""
    cache = cache_of(state())
    request = start(cache, PROMPT, (10, 10))
    cache.rows.in_flight[request.row] = 10
    cache.allocate_slots(request, 12)
    assert table(cache)[0] != 0
    assert published(cache, request) == [1]  # 32, where this chunk ends


def test_drafts_over_several_blocks_publish_nothing_ahead() -> None:
    """Drafts that reach over two boundaries: only one of the states will be stored, and nobody knows which."""
    cache = cache_of(state(2, 3))
    request = start(cache, PROMPT[:5], (4,))
    request.append(1)
    cache.allocate_slots(request, 5)  # tokens 4 and 5 are known, three are drafts
    assert published(cache, request) == [1]


def test_drafts_over_several_blocks_do_not_name_the_state_that_is_read() -> None:
    """The column of tokens 4 and 5 holds the state at 5, and keeps it if all drafts are accepted."""
    cache = cache_of(state(2, 3))
    request = start(cache, PROMPT[:5], (5,))
    request.append(1)
    cache.allocate_slots(request, 4)  # to 9, 6 of them known
    assert table(cache)[2] != 0
    assert published(cache, request) == []


def test_d1_a_delayed_boundary_inside_a_chunk_is_not_published() -> None:
    """Chunks of 10: the column of tokens 0 .. 15 holds the state at 10."""
    cache = cache_of(state())
    request = Request("a", PROMPT, hasher=cache.hasher)
    for _ in range(2):
        cache.allocate_slots(request, 10, delay_cache_blocks=True)
        request.num_computed_tokens += 10
    assert all(table(cache))
    cache.cache_blocks(request, 20)
    assert published(cache, request) == []


def test_delayed_states_of_steps_in_flight_are_all_published() -> None:
    cache = cache_of(state(8))
    request = Request("a", PROMPT[:33], hasher=cache.hasher)
    for chunk in (8, 16, 8):
        cache.allocate_slots(request, chunk, delay_cache_blocks=True)
        request.num_computed_tokens += chunk
        cache.rows.in_flight[request.row] += chunk
    cache.cache_blocks(request, 32)
    assert published(cache, request) == [0, 2, 3]


def test_a_state_that_went_on_inside_its_block_is_published_where_it_ends() -> None:
    cache = cache_of(state())
    request = start(cache, PROMPT, (10, 6, 5, 20))
    assert published(cache, request) == [0]
    grow(cache, request, 7)
    assert published(cache, request) == [0, 2]


def decode(drafts: int, accepted: tuple[int, ...]) -> tuple[list[int], Request]:
    """A request of 14 tokens that runs one token and ``drafts`` drafts a step; columns published in the end."""
    cache = cache_of(state(drafts=drafts), full(16))
    request = start(cache, PROMPT[:14], (14,))
    for count in accepted:
        request.append(1)
        cache.allocate_slots(request, 1 + drafts)
        cache.check()
        request.num_computed_tokens += count
        for _ in range(count - 1):
            request.append(1)
    return published(cache, request), request


@pytest.mark.parametrize(
    ("accepted", "columns"),
    [
        ((1, 1, 1), [0]),  # 15, 16: the state at 16 is that of a step's own token
        ((2, 1), [0]),  # 16 reached by a draft that was accepted
        ((3, 1), []),  # 17: the state at 16 was dropped with its column before anybody could name it
        ((1, 3, 1), [0]),  # 15 -> 18: token 16 was known when the step began
    ],
)
def test_drafts_across_a_boundary(accepted: tuple[int, ...], columns: list[int]) -> None:
    assert decode(2, accepted)[0] == columns


def test_draft_tokens_are_never_published() -> None:
    cache = cache_of(full(4), state(16, 3))
    request = start(cache, PROMPT[:12], (12,))
    request.append(5)
    cache.allocate_slots(request, 4)  # tokens 12 .. 15, of which 13 .. 15 are drafts
    assert published(cache, request, 0) == []  # up to the common alignment of 16
    assert published(cache, request, 1) == []


def test_delayed_states_are_published_when_the_transfer_is_done() -> None:
    cache = cache_of(full(8), state(8))
    request = Request("a", PROMPT[:41], hasher=cache.hasher)
    for chunk in (16, 8, 8):
        cache.allocate_slots(request, chunk, delay_cache_blocks=True)
        request.num_computed_tokens += chunk
        # the states at 16 and 24 are read by the next step and then dropped
    assert published(cache, request, 1) == []
    cache.cache_blocks(request, 32)
    assert published(cache, request, 0) == [0, 1, 2, 3]
    assert published(cache, request, 1) == [2, 3]
    cache.check()


def test_d2_an_external_load_takes_exactly_what_was_planned() -> None:
    """The state that is loaded and the one that the step leaves: two blocks."""
    cache = cache_of(state(), full(16))
    request = Request("a", PROMPT[:60], hasher=cache.hasher)
    before = cache.block_pool.get_num_free_blocks()
    plan = cache.plan_slots(request, 16, num_external_computed_tokens=32)
    assert isinstance(plan, SlotPlan)
    promised = sum(part.take for part in plan.groups)
    cache.commit(plan)
    assert before - cache.block_pool.get_num_free_blocks() == promised == 2 + 3
    assert [block > 0 for block in table(cache)] == [False, True, True]
    request.num_computed_tokens = 48
    cache.check()
    assert published(cache, request) == [1, 2]
    assert hit_tokens(cache, PROMPT[:60]) == 48


def test_an_external_load_behind_a_hit_does_not_hold_the_state_of_the_hit() -> None:
    cache = cache_of(state())
    cache.free(start(cache, PROMPT[:40], (16, 16, 8)))
    request = Request("b", PROMPT, hasher=cache.hasher)
    blocks, tokens = cache.get_computed_blocks(request)
    assert tokens == 32
    cache.allocate_slots(request, 8, tokens, blocks, num_external_computed_tokens=17)
    assert [block > 0 for block in table(cache, 0, "b")] == [False, False, False, True]
    request.num_computed_tokens = 57
    cache.check()


def test_d2_where_only_the_predicted_number_is_free() -> None:
    cache = cache_of(state(), num_blocks=2)
    request = Request("a", PROMPT[:60], hasher=cache.hasher)
    refused = cache.plan_slots(request, 16, num_external_computed_tokens=32)
    assert not isinstance(refused, SlotPlan)
    assert (refused.needed_blocks, refused.free_blocks) == (2, 1)
    assert cache.allocate_slots(request, 16, num_external_computed_tokens=32) is None


# -- hits


def test_the_right_most_state_is_hit() -> None:
    cache = cache_of(full(16), state())
    start(cache, PROMPT, (64, 32, 4))
    assert [hit_tokens(cache, PROMPT[:n]) for n in (100, 97, 96, 65, 64)] == [96, 96, 64, 64, 0]


def test_a_hit_row_holds_the_shared_state_until_it_has_its_own() -> None:
    cache = cache_of(full(16), state())
    start(cache, PROMPT, (64, 32, 4))
    shared = table(cache, 1)[5]
    again = Request("b", PROMPT, hasher=cache.hasher)
    blocks, tokens = cache.get_computed_blocks(again)
    new = cache.allocate_slots(again, 4, tokens, blocks)
    assert new is not None
    assert table(cache, 1, "b")[5] == shared
    assert table(cache, 1, "b")[6] not in {shared, table(cache, 1)[6]}
    again.num_computed_tokens = 100
    again.append(3)
    grow(cache, again, 1)
    assert table(cache, 1, "b")[5] == 0


def test_a_refused_request_gives_its_old_state_back() -> None:
    cache = cache_of(state(), num_blocks=4)
    request = start(cache, [*PROMPT, *PROMPT], (64, 32))
    other = start(cache, PROMPT[:10], (10,), "b")
    assert other.row >= 0
    assert table(cache) == [0, 0, 0, 1, 0, 2]
    cache.allocate_slots(request, 96)
    assert table(cache)[:4] == [0, 0, 0, 0]
