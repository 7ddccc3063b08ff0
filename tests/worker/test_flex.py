"""FlexAttention over pages: what the reference gives, and a list of blocks that leaves nothing out."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_support import Case, Scene, assert_close, cases, sunk
from hypothesis import given, settings
from torch.nn.attention.flex_attention import create_mask, flex_attention

from hybridkv.worker import WHOLE, AttentionMask, ContextShare, KVPages, PageOrder, paged_attention, paged_batch
from hybridkv.worker.attention.flex import flex_batch, flex_paged_attention

SUNK = Case(
    requests=((9, 4), (0, 5)),
    shared=0,
    block_size=4,
    kv_heads=2,
    group=2,
    widths=(8, 8),
    order=PageOrder.HND,
    dtype=torch.bfloat16,
    mask=AttentionMask(window=6),
    softcap=None,
    sinks=True,
    ranks=1,
    interleave=1,
    seed=3,
)

FEWER = settings(max_examples=settings().max_examples // 4)


@pytest.fixture(scope="module")
def operation_by_operation() -> Iterator[None]:
    """What torch's warning advises for a look inside: no tracing, which would take a second a case."""
    flex_module = sys.modules[flex_attention.__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield


@pytest.mark.usefixtures("operation_by_operation")
@FEWER
@given(cases(ranks=(1, 2)))
def test_flex_gives_what_one_softmax_a_query_gives(case: Case) -> None:
    if case.dtype == torch.bfloat16:
        case = replace(case, dtype=torch.float32)
    scene, share = Scene(case), ContextShare(case.ranks, case.ranks - 1, case.interleave)
    batch = flex_batch(scene.batch(share), case.mask)
    got = flex_paged_attention(scene.query, scene.pages(share), batch, case.scale, softcap=case.softcap)
    assert_close(got, scene.expected(share))


@pytest.mark.usefixtures("operation_by_operation")
def test_float8_pages_times_their_scales() -> None:
    scene = Scene(replace(SUNK, dtype=torch.float32))
    held = scene.pages(WHOLE)
    pages = KVPages(held.keys.to(torch.float8_e4m3fn), held.values.to(torch.float8_e4m3fn), 0.75, 3.0)
    batch = scene.batch()
    got = flex_paged_attention(
        scene.query, pages, flex_batch(batch, SUNK.mask), SUNK.scale, softcap=2.0, sink_logits=scene.sinks
    )
    expected = paged_attention(
        scene.query, pages, batch, SUNK.scale, mask=SUNK.mask, softcap=2.0, sink_logits=scene.sinks
    )
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@FEWER
@given(cases(ranks=(1, 2)))
def test_every_slot_that_is_seen_lies_in_a_listed_block(case: Case) -> None:
    scene = Scene(replace(case, requests=(*case.requests, (3, 130), (9, 2))))
    batch = flex_batch(scene.batch(ContextShare(case.ranks, 0, case.interleave)), case.mask)
    mask = batch.block_mask
    assert mask is not None
    queries, slots = mask.seq_lengths
    seen = create_mask(mask.mask_mod, 1, 1, queries, slots, device="cpu")[0, 0]
    listed = mask.to_dense()[0, 0].bool()
    within = listed.repeat_interleave(128, dim=0)[:queries].repeat_interleave(case.block_size, dim=1)
    assert not (seen & ~within).any()
    assert seen.any()


def test_blocks_that_requests_share_are_gathered_once() -> None:
    table = torch.tensor([[7, 3, 0], [7, 5, 2]])
    batch = flex_batch(paged_batch([0, 1, 2], [8, 10], table, block_size=4, num_blocks=8))
    assert batch.blocks.tolist() == [2, 3, 5, 7]
    assert batch.stale.tolist() == [[False, False, True, True], *([[False] * 4] * 3)]
    assert batch.block_mask is not None
    assert batch.block_mask.kv_num_blocks.tolist() == [[[4]]]


@pytest.mark.usefixtures("operation_by_operation")
def test_sinks_bfloat16_and_nothing_to_read() -> None:
    case = SUNK
    scene = Scene(case)
    pages, batch = scene.pages(ContextShare()), flex_batch(scene.batch(), case.mask)
    out, lse = flex_paged_attention(scene.query, pages, batch, case.scale, sink_logits=scene.sinks)
    expected_out, expected_lse = sunk(*scene.expected(), scene.sinks)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(out.double(), torch.from_numpy(expected_out), rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.double(), torch.from_numpy(expected_lse), rtol=0.01, atol=0.01)
    nobody = flex_batch(paged_batch([0], [], torch.empty(0, 3), block_size=4, num_blocks=pages.num_blocks))
    out, lse = flex_paged_attention(scene.query[:0], pages, nobody, 1.0)
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))


if torch.cuda.is_available():

    @pytest.mark.gpu
    @pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(window=40), AttentionMask(chunk=64)])
    def test_compiled_on_a_gpu(mask: AttentionMask) -> None:
        case = Case(
            requests=((100, 70), (300, 1), (0, 200)),
            shared=2,
            block_size=32,
            kv_heads=2,
            group=4,
            widths=(64, 64),
            order=PageOrder.NHD,
            dtype=torch.bfloat16,
            mask=mask,
            softcap=None,
            sinks=True,
            ranks=1,
            interleave=1,
            seed=3,
            device="cuda",
        )
        scene = Scene(case)
        pages, batch = scene.pages(ContextShare()), scene.batch()
        compiled = torch.compile(flex_attention)
        got = flex_paged_attention(
            scene.query, pages, flex_batch(batch, mask), case.scale, sink_logits=scene.sinks, kernel=compiled
        )
        expected = paged_attention(scene.query, pages, batch, case.scale, mask=mask, sink_logits=scene.sinks)
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
