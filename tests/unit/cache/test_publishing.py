"""What is published: docs/contracts.md, 4, and what vLLM 0.32 was measured to publish with EAGLE and retention."""

from typing import Any

import numpy as np
import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.specs import KVCacheSpec
from kinds_support import cache_of, full, published, start, state, window

PROMPT = list(range(200))


def columns(
    specs: tuple[KVCacheSpec, ...],
    chunks: tuple[int, ...],
    group: int,
    prompt: int | None = None,
    **known: Any,  # noqa: ANN401 - as cache_of
) -> list[int]:
    cache = cache_of(*specs, **known)
    return published(cache, start(cache, PROMPT[: prompt or sum(chunks)], chunks), group)


# -- several groups: what a hit can reach


def test_window_publishes_columns_before_each_boundary() -> None:
    specs = (full(16), window(8, 4))
    assert columns(specs, (60,), 0) == [0, 1, 2]
    assert columns(specs, (60,), 1) == [2, 3, 6, 7, 10, 11]
    assert columns(specs, (7, 30, 23), 1)[-4:] == [6, 7, 10, 11]  # whatever the chunks


def test_window_with_eagle_publishes_one_block_past_each_boundary() -> None:
    specs = (full(16), window(8, 4))
    assert columns(specs, (60,), 1, use_eagle=True) == [2, 3, 4, 6, 7, 8, 10, 11, 12]
    assert columns(specs, (64,), 1, use_eagle=True) == [2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15]
    assert columns(specs, (68,), 1, use_eagle=True)[-3:] == [14, 15, 16]
    assert columns(specs, (68,), 0, use_eagle=True) == [0, 1, 2, 3]


# -- retention: the numbers of vLLM 0.32, driven on the same prompts


@pytest.mark.parametrize("chunks", [(61,), (20, 20, 21)])
@pytest.mark.parametrize(
    ("retention", "expected"),
    [(None, list(range(15))), (0, [13, 14]), (16, [2, 3, 6, 7, 10, 11, 13, 14]), (4, list(range(15)))],
)
def test_window_columns_with_retention_match_measurements(
    chunks: tuple[int, ...], retention: int | None, expected: list[int]
) -> None:
    assert columns((full(4), window(8, 4)), chunks, 1, retention=retention) == expected
    assert columns((full(4), window(8, 4)), chunks, 0, retention=retention) == list(range(15))


@pytest.mark.parametrize(
    ("specs", "prompt", "retention", "expected"),
    [
        ((full(4), window(8, 8)), 60, 0, [6]),
        ((full(4), window(8, 8)), 60, 16, [1, 3, 5, 6]),
        ((full(4), window(8, 8)), 64, 16, [1, 3, 5, 6, 7]),
        ((full(16), window(8, 4)), 64, 0, [10, 11]),
        ((full(16), window(8, 4)), 64, 32, [6, 7, 10, 11, 14, 15]),
        ((full(16), window(8, 4)), 70, 0, [14, 15]),
        ((full(16), window(14, 4)), 64, 0, [8, 9, 10, 11]),
        ((full(16), window(14, 4)), 64, 32, list(range(4, 16))),
        ((full(16), window(40, 4)), 64, 0, list(range(2, 12))),
        ((full(16), window(40, 4)), 64, 32, list(range(16))),
        ((full(16), window(40, 4)), 70, 0, list(range(6, 16))),
    ],
)
def test_window_columns_of_other_sizes_match_measurements(
    specs: tuple[KVCacheSpec, ...], prompt: int, retention: int, expected: list[int]
) -> None:
    assert columns(specs, (prompt,), 1, retention=retention) == expected


@pytest.mark.parametrize("specs", [(full(16), state()), (state(),)])
@pytest.mark.parametrize(
    ("chunks", "retention", "expected"),
    [
        ((64, 32, 4), None, [3, 5]),
        ((64, 32, 4), 0, [5]),
        ((64, 32, 4), 32, [3, 5]),
        ((80, 16), None, [4, 5]),
        ((80, 16), 0, [4]),
        ((80, 16), 32, [4, 5]),
        ((16,) * 6, None, [0, 1, 2, 3, 4, 5]),
        ((16,) * 6, 0, [4]),
        ((16,) * 6, 32, [1, 3, 4, 5]),
        ((100,), None, []),
        ((*(16,) * 6, 4), 0, [5]),
        ((*(16,) * 6, 4), 32, [1, 3, 5]),
    ],
)
def test_state_columns_with_retention_match_measurements(
    specs: tuple[KVCacheSpec, ...], chunks: tuple[int, ...], retention: int | None, expected: list[int]
) -> None:
    assert columns(specs, chunks, len(specs) - 1, retention=retention) == expected


def allocate_one(cache: KVCacheManager, request: Request, *, batch: bool) -> None:
    """Slots for a token, alone or as a row of a step."""
    if batch:
        assert cache.allocate_batch(np.array([request.row]), 1).accepted == 1
    else:
        assert cache.allocate_slots(request, 1) is not None
    request.num_computed_tokens += 1


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("specs", "retention", "expected"),
    [
        ((full(16), state()), None, [1, 2, 3]),
        ((full(16), state()), 0, []),
        ((full(16), state()), 32, [1, 3]),
        ((full(4), window(8)), None, list(range(18))),
        ((full(4), window(8)), 0, [5, 6]),
        ((full(4), window(8)), 32, [5, 6, 7, 14, 15]),
    ],
)
def test_published_columns_while_decoding_match_measurements(
    specs: tuple[KVCacheSpec, ...], retention: int | None, expected: list[int], *, batch: bool
) -> None:
    """A prompt of 32 tokens and 40 more."""
    cache = cache_of(*specs, retention=retention)
    request = start(cache, PROMPT[:32], (32,))
    for token in range(40):
        request.append(token)
        allocate_one(cache, request, batch=batch)
    assert published(cache, request, 1) == expected


def test_branch_point_state_is_published() -> None:
    cache = cache_of(full(16), state(), retention=0)
    request = start(cache, PROMPT[:100], (48,))
    request.branch_tokens = 50
    cache.allocate_slots(request, 16)
    assert published(cache, request, 1) == []
    second = cache_of(full(16), state(), retention=0)
    other = start(second, PROMPT[:100], ())
    other.branch_tokens = 50
    second.allocate_slots(other, 48)
    assert published(second, other, 1) == [2]


@pytest.mark.parametrize("retention", [-16, 8, 24])
def test_retention_off_the_alignment_is_rejected(retention: int) -> None:
    with pytest.raises(ConfigError, match="a multiple of the common alignment of 16 tokens"):
        cache_of(full(16), window(8, 4), retention=retention)
