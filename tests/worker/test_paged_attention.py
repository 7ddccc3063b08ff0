"""Paged attention against one softmax a query and head, in float64, over pages that hold NaN wherever nothing is."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from attention_support import CASE, DEVICES, Case, Scene, assert_close, cases, sunk
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker import (
    WHOLE,
    AttentionMask,
    ContextShare,
    KVPages,
    PageOrder,
    combine_over_ranks,
    combine_partial,
    paged_attention,
    paged_batch,
    with_sink,
)

MORE = settings(max_examples=2 * settings().max_examples)

SMALL = replace(CASE, requests=((9, 4), (0, 5), (20, 1)), shared=0, block_size=4, widths=(8, 6), seed=7)


def attended(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    case = scene.case
    return paged_attention(
        scene.query,
        scene.pages(WHOLE),
        scene.batch(),
        case.scale,
        mask=case.mask,
        softcap=case.softcap,
        sink_logits=scene.sinks,
    )


@MORE
@given(cases())
def test_paged_attention_reads_visible_keys_only(case: Case) -> None:
    scene = Scene(case)
    assert_close(attended(scene), sunk(*scene.expected(), scene.sinks))


@MORE
@given(cases(ranks=(2, 3, 4)))
def test_paged_attention_of_ranks_combines(case: Case) -> None:
    scene = Scene(case)
    parts = []
    for share in case.shares:
        part = paged_attention(
            scene.query, scene.pages(share), scene.batch(share), case.scale, mask=case.mask, softcap=case.softcap
        )
        assert_close(part, scene.expected(share))
        parts.append(part)
    whole = combine_partial(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
    assert_close(whole, scene.expected())
    if scene.sinks is not None:
        assert_close(with_sink(*whole, scene.sinks), sunk(*scene.expected(), scene.sinks))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(window=5), AttentionMask(chunk=6)])
def test_paged_attention_on_every_device_matches(
    device: str, order: PageOrder, dtype: torch.dtype, mask: AttentionMask
) -> None:
    scene = Scene(replace(SMALL, device=device, order=order, dtype=dtype, mask=mask, sinks=True))
    assert_close(attended(scene), sunk(*scene.expected(), scene.sinks))


def test_paged_attention_of_bfloat16_sums_in_float32() -> None:
    scene = Scene(replace(SMALL, dtype=torch.bfloat16, requests=((1500, 1),)))
    out, lse = attended(scene)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    assert_close((out, lse), scene.expected())


@pytest.mark.parametrize(
    ("mask", "position", "seen", "first"),
    [
        (AttentionMask(), 5, [0, 1, 2, 3, 4, 5], 0),
        (AttentionMask(window=3), 5, [3, 4, 5], 3),
        (AttentionMask(window=1), 5, [5], 5),
        (AttentionMask(window=9), 5, [0, 1, 2, 3, 4, 5], 0),
        (AttentionMask(chunk=4), 5, [4, 5], 4),
        (AttentionMask(chunk=4), 4, [4], 4),
        (AttentionMask(chunk=4), 3, [0, 1, 2, 3], 0),
        (AttentionMask(chunk=4, window=2), 7, [6, 7], 6),
        (AttentionMask(causal=False), 2, [0, 1, 2, 3, 4, 5, 6, 7], 0),
    ],
)
def test_attention_mask_by_position_matches(mask: AttentionMask, position: int, seen: list[int], first: int) -> None:
    sees = mask.sees(torch.tensor([position])[:, None], torch.arange(8)[None])
    assert torch.nonzero(sees[0]).flatten().tolist() == seen
    assert mask.first_seen(np.array(position)) == first


def latent_scene() -> tuple[torch.Tensor, ...]:
    """A DeepSeek-like layer: queries (content, rotary), latents, rotary keys, projections to keys and to values."""
    rng = torch.Generator().manual_seed(3)
    shapes = ((3, 4, 6), (3, 4, 2), (11, 8), (11, 2), (4, 6, 8), (4, 5, 8))
    return tuple(torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes)


def test_paged_attention_of_absorbed_latents_matches_expanded_keys() -> None:
    """DeepSeek-V2 (arXiv 2405.04434), section 2.1: q W_UK reads latents as keys, W_UV comes behind the attention."""
    content, rotary, latents, rotary_keys, up_keys, up_values = latent_scene()
    pages = torch.full((5, 4, 10), torch.nan, dtype=torch.float64)
    pages[[3, 1, 4]] = 0
    pages[[3, 1, 4]] = torch.cat((torch.cat((latents, rotary_keys), 1), torch.zeros(1, 10))).view(3, 4, 10).double()
    batch = paged_batch([0, 3], [11], torch.tensor([[3, 1, 4]]), block_size=4, num_blocks=5)
    absorbed = torch.cat((torch.einsum("thn,hnr->thr", content, up_keys), rotary), -1)
    out, lse = paged_attention(absorbed, KVPages.of_latent(pages, 8), batch, 0.3)
    assert out.shape == (3, 4, 8)
    keys = torch.cat((torch.einsum("mr,hnr->mhn", latents, up_keys), rotary_keys[:, None].expand(11, 4, 2)), -1)
    scores = torch.einsum("thw,mhw->thm", torch.cat((content, rotary), -1), keys) * 0.3
    hidden = torch.arange(11) > torch.arange(8, 11)[:, None]
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    expanded = torch.einsum("thm,mr,hvr->thv", scores.softmax(-1), latents, up_values)
    torch.testing.assert_close(torch.einsum("thr,hvr->thv", out, up_values), expanded, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_paged_attention_with_sink_tokens_combines_them() -> None:
    """SinkFullAttentionSpec: keys and values that belong to the layer, in blocks of their own, before every request."""
    scene = Scene(replace(SMALL, requests=((9, 4),)))
    sinks = KVPages(torch.randn(2, 4, 2, 8, generator=scene.rng), torch.randn(2, 4, 2, 6, generator=scene.rng))
    layers = paged_batch([0, 4], [7], torch.tensor([[1, 0]]), block_size=4, num_blocks=2)
    parts = [
        paged_attention(scene.query, scene.pages(WHOLE), scene.batch(), 0.4),
        paged_attention(scene.query, sinks, layers, 0.4, mask=AttentionMask(causal=False)),
    ]
    got = combine_partial(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
    # the same as a request that begins with the sink's 7 tokens
    whole = Scene(replace(scene.case, requests=((16, 4),)))
    whole.query = scene.query
    whole.keys = [torch.cat((sinks.keys[[1, 0]].flatten(0, 1)[:7], scene.keys[0]))]
    whole.values = [torch.cat((sinks.values[[1, 0]].flatten(0, 1)[:7], scene.values[0]))]
    expected = paged_attention(whole.query, whole.pages(WHOLE), whole.batch(), 0.4)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_paged_cross_attention_with_any_lengths_matches() -> None:
    scene = Scene(replace(SMALL, requests=((0, 3),), mask=AttentionMask(causal=False)))
    pages = scene.pages(WHOLE)
    query = torch.randn(9, 4, 8, generator=scene.rng)
    rows = torch.tensor([scene.table[0], scene.table[0]])
    batch = paged_batch([0, 8, 9], [3, 0], rows, block_size=4, num_blocks=scene.num_blocks)
    out, lse = paged_attention(query, pages, batch, 0.4, mask=AttentionMask(causal=False))
    scores = torch.einsum("tkgw,mkw->tkgm", query.view(9, 2, 2, 8)[:8], scene.keys[0]) * 0.4
    torch.testing.assert_close(lse[:8], scores.logsumexp(-1).view(8, 4))
    assert (lse[8] == -torch.inf).all()
    assert not out[8].any()


@given(cases(ranks=(1, 2)))
def test_paged_attention_of_float8_applies_scales(case: Case) -> None:
    scene, share = Scene(replace(case, dtype=torch.float32)), ContextShare(case.ranks, 0, case.interleave)
    pages = scene.pages(share)
    eights = KVPages(pages.keys.to(torch.float8_e4m3fn), pages.values.to(torch.float8_e4m3fn), 0.75, 3.0)
    meant = KVPages(eights.keys.float() * 0.75, eights.values.float() * 3.0)
    got, expected = (
        paged_attention(scene.query, held, scene.batch(share), case.scale, mask=case.mask, softcap=case.softcap)
        for held in (eights, meant)
    )
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


# -- parts


def test_paged_attention_with_large_scores_does_not_overflow() -> None:
    out = torch.tensor([[[[1.0]]], [[[3.0]]], [[[5.0]]]])
    lse = torch.tensor([[[800.0]], [[800.0]], [[-900.0]]])
    combined, total = combine_partial(out, lse)
    assert combined.item() == 2.0
    assert total.item() == pytest.approx(800 + np.log(2))
    sunk_out, sunk_lse = with_sink(combined, total, torch.tensor([800.0]))
    assert sunk_out.item() == pytest.approx(4 / 3, rel=1e-4)  # float32 knows lse to 6e-5 here
    assert sunk_lse.item() == pytest.approx(800 + np.log(3))


def test_paged_attention_part_without_keys_has_no_weight() -> None:
    nothing = torch.full((1, 1), -torch.inf)
    out, lse = combine_partial(
        torch.tensor([[[[torch.nan, 9.0]]], [[[2.0, 4.0]]]]), torch.stack((nothing, torch.zeros(1, 1)))
    )
    assert (out.tolist(), lse.tolist()) == ([[[2.0, 4.0]]], [[0.0]])
    out, lse = combine_partial(torch.full((2, 1, 1, 2), torch.nan), torch.stack((nothing, nothing)))
    assert (out.tolist(), lse.tolist()) == ([[[0.0, 0.0]]], [[-np.inf]])
    out, lse = with_sink(torch.zeros(1, 1, 2), nothing, torch.tensor([-torch.inf]))
    assert (out.tolist(), lse.tolist()) == ([[[0.0, 0.0]]], [[-np.inf]])


@given(st.sampled_from((1, 2, 4)), st.integers(1, 4), st.sampled_from((1, 2, 4)))
def test_context_parallel_block_is_spread_over_all_ranks(interleave: int, size: int, turns: int) -> None:
    block_size = interleave * turns
    dealt = [ContextShare(size, rank, interleave).tokens_of_block(block_size).tolist() for rank in range(size)]
    assert sorted(token for tokens in dealt for token in tokens) == list(range(block_size * size))
    assert all((token // interleave) % size == rank for rank, tokens in enumerate(dealt) for token in tokens)
    assert all(tokens == sorted(tokens) for tokens in dealt)


# -- bad input


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: ContextShare(0), "size must be at least 1"),
        (lambda: ContextShare(2, 2), "rank 2 does not exist"),
        (lambda: ContextShare(2, 0, 0), "interleave must be at least 1"),
        (lambda: ContextShare.of_ranks(dcp_size=2, dcp_rank=2), "dcp rank 2 of 2"),
        (lambda: ContextShare.of_ranks(dcp_size=2, pcp_rank=-1), "pcp rank -1 of 1"),
        (lambda: AttentionMask(window=0), "window must be at least 1"),
        (lambda: AttentionMask(chunk=-1), "chunk must be at least 1"),
        (lambda: AttentionMask(causal=False, window=3), "give causal=True"),
        (lambda: KVPages(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 2, 8)), "pages of keys"),
        (lambda: KVPages(torch.zeros(2, 4, 8), torch.zeros(2, 4, 8)), "pages of keys"),
        (lambda: KVPages(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), 0.0), "key_scale must be a positive"),
        (lambda: KVPages(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), 1.0, math.nan), "value_scale must be a pos"),
        (lambda: KVPages.of_views((torch.zeros(2, 4, 8),)), "not keys and values"),
        (lambda: KVPages.of_latent(torch.zeros(2, 4, 8), 9), "not hold latents of rank 9"),
    ],
)
def test_paged_attention_with_invalid_values_is_rejected(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong()


TABLE = torch.tensor([[1, 2], [3, 0]])


@pytest.mark.parametrize(
    ("starts", "lengths", "table", "share", "message"),
    [
        ([0, 1], [1, 1], TABLE, WHOLE, "give a length and a row"),
        ([0, 1, 2], [1, 1], TABLE[0], WHOLE, "give a length and a row"),
        ([1, 1, 2], [1, 1], TABLE, WHOLE, "must begin with 0"),
        ([0, 2, 1], [2, 2], TABLE, WHOLE, "never fall"),
        ([0, 1, 2], [1, 9], TABLE, WHOLE, "0 .. 8"),
        ([0, 1, 2], [-1, 8], TABLE, WHOLE, "0 .. 8"),
        ([0, 1, 2], [1, 17], TABLE, ContextShare(2, 0, 4), "0 .. 16"),
        ([0, 1, 2], [1, 1], TABLE, ContextShare(2, 0, 3), "interleave of 3"),
        ([0, 1, 2], [1, 1], TABLE + 2, WHOLE, "0 .. 4, got 2 .. 5"),
        ([0, 1, 2], [1, 1], TABLE - 1, WHOLE, "0 .. 4, got -1 .. 2"),
    ],
)
def test_paged_batch_that_does_not_fit_is_rejected(
    starts: list[int], lengths: list[int], table: torch.Tensor, share: ContextShare, message: str
) -> None:
    with pytest.raises(WorkerError, match=message):
        paged_batch(starts, lengths, table, block_size=4, num_blocks=5, share=share)


def test_paged_attention_call_that_does_not_fit_is_rejected() -> None:
    scene = Scene(SMALL)
    query, pages, batch = scene.query, scene.pages(WHOLE), scene.batch()
    wrong: tuple[tuple[Any, dict[str, Any], str], ...] = (
        ((query[1:], pages, batch), {}, "10 tokens"),
        ((query[:, :3], pages, batch), {}, "a multiple of 2 heads"),
        ((query[..., :4], pages, batch), {}, "a width of 8"),
        ((query, KVPages(pages.keys[1:], pages.values[1:]), batch), {}, "blocks of 4 tokens, the pages have"),
        ((query, pages, replace(batch, block_size=2)), {}, "blocks of 2 tokens, the pages have"),
        ((query, pages, replace(batch, seq_lens=(3, 5, 21))), {}, "request 0 has 4 queries but 3 tokens"),
        ((query, pages, batch), {"softcap": 0.0}, "softcap must be positive"),
        ((query, pages, batch), {"sink_logits": torch.zeros(3)}, "one logit for each head"),
        ((query, pages, replace(batch, share=ContextShare(2))), {"sink_logits": torch.zeros(4)}, "call with_sink"),
    )
    for (one, held, read), options, message in wrong:
        with pytest.raises(WorkerError, match=message):
            paged_attention(one, held, read, 1.0, **options)
    with pytest.raises(WorkerError, match="partial results of shapes"):
        combine_partial(torch.zeros(2, 3, 4, 5), torch.zeros(2, 3))
    nobody = cast("Any", None)
    with pytest.raises(WorkerError, match="partial results of shapes"):
        combine_over_ranks(torch.zeros(3, 2, 4), torch.zeros(3, 4), nobody)
    with pytest.raises(WorkerError, match="of one dtype"):
        combine_over_ranks(torch.zeros(3, 2, 4), torch.zeros(3, 2).double(), nobody)
