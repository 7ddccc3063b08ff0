"""What is published: docs/contracts.md, 4, and what vLLM 0.32 was measured to publish with EAGLE and retention."""

from typing import Any

import numpy as np
import pytest
from kinds_support import cache_of, full, grow, hit_tokens, published, start, state, window

from hybridkv.cache import KVCacheManager
from hybridkv.cache.policies import PublishRule
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.specs import KVCacheSpec

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


def test_up_to_the_common_alignment() -> None:
    specs = (full(4), window(8, 8))
    assert columns(specs, (60,), 0) == list(range(14))
    assert columns(specs, (60,), 1) == list(range(7))


def test_the_columns_of_a_window_before_each_edge() -> None:
    specs = (full(16), window(8, 4))
    assert columns(specs, (60,), 0) == [0, 1, 2]
    assert columns(specs, (60,), 1) == [2, 3, 6, 7, 10, 11]
    assert columns(specs, (7, 30, 23), 1)[-4:] == [6, 7, 10, 11]  # whatever the chunks


def test_eagle_goes_one_block_past_each_edge() -> None:
    specs = (full(16), window(8, 4))
    assert columns(specs, (60,), 1, use_eagle=True) == [2, 3, 4, 6, 7, 8, 10, 11, 12]
    assert columns(specs, (64,), 1, use_eagle=True) == [2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15]
    assert columns(specs, (68,), 1, use_eagle=True)[-3:] == [14, 15, 16]
    assert columns(specs, (68,), 0, use_eagle=True) == [0, 1, 2, 3]


def test_alone_every_full_block() -> None:
    assert columns((full(4),), (61,), 0) == list(range(15))
    assert columns((window(8, 4),), (61,), 0) == list(range(15))


def test_nothing_below_the_first_edge() -> None:
    assert columns((full(16), window(8, 4)), (15,), 1) == []
    assert columns((full(16), window(8, 4)), (15,), 1, use_eagle=True) == []


def test_full_attention_under_eagle_publishes_nothing_below_the_first_edge_either() -> None:
    specs = (full(4), window(16, 16))
    assert columns(specs, (15,), 0, use_eagle=True) == []
    assert columns(specs, (16,), 0, use_eagle=True) == [0, 1, 2, 3]
    assert columns(specs, (19,), 0, use_eagle=True) == [0, 1, 2, 3]
    assert columns(specs, (24,), 0, use_eagle=True) == [0, 1, 2, 3, 4]  # one block past the edge, no more


@pytest.mark.parametrize("specs", [(full(4),), (window(8),), (full(4), window(8)), (full(4), full(8), state(4))])
@pytest.mark.parametrize("eagle", [False, True])
def test_every_block_is_published_by_the_call_that_fills_it(specs: tuple[KVCacheSpec, ...], *, eagle: bool) -> None:
    """Token by token: the fast path must not pass over what can be published; A is 4 or 8."""
    cache = cache_of(*specs, use_eagle=eagle)
    request = start(cache, PROMPT[:1], (1,))
    align = 8 if len(specs) == 3 else 4
    for n in range(2, 40):
        request.append(n)
        grow(cache, request, 1)
        past = 4 if eagle and len(specs) == 3 and n >= align and n % align >= 4 else 0
        assert published(cache, request) == list(range((n // align * align + past) // 4))


# -- retention: the numbers of vLLM 0.32, driven on the same prompts


@pytest.mark.parametrize("chunks", [(61,), (20, 20, 21)])
@pytest.mark.parametrize(
    ("retention", "expected"),
    [
        (None, list(range(15))),
        (0, [13, 14]),
        (16, [2, 3, 6, 7, 10, 11, 13, 14]),
        (4, list(range(15))),
    ],
)
def test_windows_kept(chunks: tuple[int, ...], retention: int | None, expected: list[int]) -> None:
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
def test_windows_kept_of_other_sizes(
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
def test_states_kept(
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
def test_kept_while_decoding(
    specs: tuple[KVCacheSpec, ...], retention: int | None, expected: list[int], *, batch: bool
) -> None:
    """A prompt of 32 tokens and 40 more."""
    cache = cache_of(*specs, retention=retention)
    request = start(cache, PROMPT[:32], (32,))
    for token in range(40):
        request.append(token)
        allocate_one(cache, request, batch=batch)
    assert published(cache, request, 1) == expected


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("steps", [3, 6])
def test_states_of_tokens_that_are_known_later(steps: int, drafts: int, *, batch: bool) -> None:
    """Steps in flight: where one ends at a boundary, its state is named when the tokens before it are known."""
    cache = cache_of(full(4), state(4, drafts))
    request = start(cache, PROMPT[:6], (6,))
    named = []
    for step in range(steps + 6):
        if step >= steps:
            request.append(step)
        cache.rows.in_flight[request.row] = min(step, steps)
        allocate_one(cache, request, batch=batch)
        named.append(published(cache, request, 1))
    assert named == [[]] * (steps + 1) + [[1]] * 4 + [[1, 2]]


def test_hits_follow_what_is_kept() -> None:
    cache = cache_of(full(4), window(8, 4), retention=0)
    start(cache, PROMPT[:61], (61,))
    assert [hit_tokens(cache, PROMPT[:n]) for n in (61, 58)] == [60, 0]
    cache = cache_of(full(4), window(8, 4), retention=16)
    start(cache, PROMPT[:61], (61,))
    assert [hit_tokens(cache, PROMPT[:n]) for n in (61, 57)] == [60, 48]


def test_where_others_branched_off_is_kept() -> None:
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
def test_retention_is_a_multiple_of_the_alignment(retention: int) -> None:
    with pytest.raises(ConfigError, match="a multiple of the common alignment of 16 tokens"):
        cache_of(full(16), window(8, 4), retention=retention)


def test_of_one_column_the_rule_says_the_same_as_of_many() -> None:
    cases = [
        PublishRule(4, alignment, need, past, interval)
        for alignment in (4, 12)
        for need in (None, 1, 2, 3)
        for past in (0, 1)
        for interval in (None, 0, 12, 24)
    ]
    for rule in cases:
        for edges in ((), (13,), (40, 25), (3,)):
            mask = rule.mask(np.arange(30), edges).tolist()
            assert [rule.keeps(column, edges) for column in range(30)] == mask, (rule, edges)
    assert len({tuple(rule.mask(np.arange(30), (13,)).tolist()) for rule in cases}) > 8
