"""Where prefill chunks end: docs/contracts.md, 6."""

from functools import partial

import pytest

from hybridkv.extra_keys import MultimodalItem
from hybridkv.request import Request
from hybridkv.schedule.builder import split_at_blocks, split_at_items, split_at_resume_points


def share(prompt: int, computed: int, asked: int, *, drops: bool = False) -> int:
    return split_at_blocks(Request("a", range(prompt)), computed, asked, size=16, largest=64, drops=drops)


@pytest.mark.parametrize(
    ("prompt", "computed", "asked", "given"),
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
def test_prefill_chunks_match_measurements(prompt: int, computed: int, asked: int, given: int) -> None:
    assert share(prompt, computed, asked) == given


@pytest.mark.parametrize(
    ("prompt", "computed", "asked", "given"),
    [(100, 0, 100, 80), (100, 64, 36, 16), (97, 0, 97, 80), (33, 0, 33, 16), (17, 0, 17, 17)],
)
def test_prefill_chunks_with_eagle_match_measurements(prompt: int, computed: int, asked: int, given: int) -> None:
    assert share(prompt, computed, asked, drops=True) == given


@pytest.mark.parametrize(
    ("computed", "asked", "given"),
    [
        (0, 20, 20),  # up to an item
        (0, 25, 20),  # not into it
        (20, 9, 0),  # a larger budget has it whole
        (20, 10, 10),
        (20, 12, 12),
        (0, 40, 40),
        (0, 45, 40),  # nor into the second one
        (24, 5, 0),  # behind a hit that ends inside: all the rest
        (24, 6, 6),
        (24, 20, 16),
        (60, 1, 1),
    ],
)
def test_prefill_chunk_keeps_indivisible_items_whole(computed: int, asked: int, given: int) -> None:
    request = Request("a", range(60), multimodal=[MultimodalItem("x", 20, 10), MultimodalItem("y", 40, 10)])
    assert split_at_items(request, computed, asked, other=None) == given


def test_prefill_chunk_cuts_indivisible_items_at_checkpoints() -> None:
    request = Request("a", range(100), multimodal=[MultimodalItem("x", 50, 20)])
    at_blocks = partial(split_at_blocks, size=16, largest=64, drops=False)
    assert [split_at_items(request, at, 64, other=at_blocks) for at in (0, 64)] == [50, 32]


def test_prefill_chunk_smaller_than_a_block_stays() -> None:
    request = Request("a", range(100))
    assert split_at_blocks(request, 0, 32, size=80, largest=32, drops=False) == 32
    assert split_at_blocks(request, 64, 32, size=80, largest=32, drops=False) == 16  # to the end of the block
    assert split_at_blocks(request, 0, 32, size=80, largest=80, drops=False) == 0


@pytest.mark.parametrize(
    ("computed", "asked", "given"),
    [
        (0, 64, 20),  # to a branch point
        (20, 64, 12),  # to the end of the block
        (32, 64, 62),  # to the last resume point
        (80, 20, 14),
        (94, 6, 2),  # to the last block boundary
        (96, 4, 4),
        (100, 1, 1),  # decodes
        (0, 10, 0),  # waits for a whole block
    ],
)
def test_prefill_chunk_ends_at_resume_points_inside_blocks(computed: int, asked: int, given: int) -> None:
    request = Request("a", range(100))
    at_blocks = partial(split_at_blocks, size=16, largest=64, drops=False)
    split = partial(split_at_resume_points, points=lambda _: [20, 94], other=at_blocks)
    assert split(request, computed, asked) == given
