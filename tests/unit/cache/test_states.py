"""Recurrent states in the cache: docs/contracts.md, 4, and labels (8, last lines)."""

import pytest

from hybridkv.request import Request
from kinds_support import cache_of, full, grow, hit_tokens, published, start, state, table

PROMPT = list(range(100))


# -- tables


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
def test_state_rows_after_chunks_match_measurements(
    drafts: int, chunks: tuple[int, ...], expected: list[tuple[list[int], list[int]]]
) -> None:
    """New columns and the row after each chunk, as measured on vLLM 0.32 (P = 300, blocks of 16)."""
    cache = cache_of(state(drafts=drafts))
    request = Request("a", range(300), hasher=cache.hasher)
    rows = []
    for chunk in chunks:
        (new,) = grow(cache, request, chunk) or ([],)
        rows.append((new, table(cache)))
    assert rows == expected


def test_state_mode_none_reuses_its_blocks_and_has_no_hits() -> None:
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


def test_delayed_state_inside_a_chunk_is_not_published() -> None:
    """Chunks of 10: the column of tokens 0 .. 15 holds the state at 10."""
    cache = cache_of(state())
    request = Request("a", PROMPT, hasher=cache.hasher)
    for _ in range(2):
        cache.allocate_slots(request, 10, delay_cache_blocks=True)
        request.num_computed_tokens += 10
    assert all(table(cache))
    cache.cache_blocks(request, 20)
    assert published(cache, request) == []


def test_delayed_states_are_published_after_the_transfer() -> None:
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


def test_external_load_after_a_hit_does_not_hold_the_hit_state() -> None:
    cache = cache_of(state())
    cache.free(start(cache, PROMPT[:40], (16, 16, 8)))
    request = Request("b", PROMPT, hasher=cache.hasher)
    blocks, tokens = cache.get_computed_blocks(request)
    assert tokens == 32
    cache.allocate_slots(request, 8, tokens, blocks, num_external_computed_tokens=17)
    assert [block > 0 for block in table(cache, 0, "b")] == [False, False, False, True]
    request.num_computed_tokens = 57
    cache.check()
