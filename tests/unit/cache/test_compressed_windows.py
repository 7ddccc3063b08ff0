"""Windows that keep tokens before those that are read (``extra_retained_tokens``): blocks are freed later."""

from dataclasses import replace

import pytest

from kinds_support import cache_of, evict, full, hit_tokens, start, table, window

TOKENS = list(range(100, 200))


def kept_columns(retained: int, chunks: tuple[int, ...]) -> list[int]:
    """Columns that a request of a window of 8 tokens holds when its next step begins."""
    cache = cache_of(replace(window(8, 4), extra_retained_tokens=retained), full(4))
    start(cache, TOKENS, (*chunks, 1))
    return [column for column, block in enumerate(table(cache)) if block]


@pytest.mark.parametrize(
    ("retained", "first"),
    # 32 tokens are processed: the next one reads 25 .. 31, and ``retained`` tokens before 25 stay
    [(0, 6), (1, 6), (2, 5), (5, 5), (6, 4), (25, 0), (80, 0)],
)
@pytest.mark.parametrize("chunks", [(32,), (8, 8, 8, 8), (1,) * 32])
def test_window_keeps_retained_tokens(retained: int, first: int, chunks: tuple[int, ...]) -> None:
    assert kept_columns(retained, chunks) == list(range(first, 9))


def test_hit_needs_the_window_only() -> None:
    cache = cache_of(replace(window(8, 4), extra_retained_tokens=9), full(4))
    request = start(cache, TOKENS[:33], (33,))
    for column in range(6):  # the window before token 32 is in columns 6 and 7
        evict(cache, request, 0, column)
    assert hit_tokens(cache, TOKENS[:34]) == 32
    evict(cache, request, 0, 6)
    assert hit_tokens(cache, TOKENS[:34]) == 0
