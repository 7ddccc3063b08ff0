"""Calls of the Triton kernel beside the same calls of ``paged_attention``, over pages of NaN wherever nothing is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from attention_support import Case, Scene
from hypothesis import strategies as st

from hybridkv.worker import (
    AttentionMask,
    ContextShare,
    KVPages,
    PagedBatch,
    PageOrder,
    TritonBatch,
    paged_attention,
    triton_batch,
    triton_paged_attention,
)

FP8 = torch.float8_e4m3fn
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class KernelCase:
    """case: without fp8 and query dtype; its dtype is of the pages but for fp8. latent: values lie in the keys."""

    case: Case
    query: torch.dtype = torch.float32
    fp8: bool = False
    latent: bool = False
    splits: int | None = None
    keys_of_a_tile: int = 16

    def on(self, device: str) -> KernelCase:
        return replace(self, case=replace(self.case, device=device))


CASE = Case(
    requests=((30, 4), (0, 5), (20, 1)),
    shared=1,
    block_size=16,
    kv_heads=2,
    group=2,
    widths=(16, 16),
    order=PageOrder.NHD,
    dtype=torch.float32,
    mask=AttentionMask(),
    softcap=None,
    sinks=False,
    ranks=1,
    interleave=1,
    seed=11,
)
ONE = replace(CASE, requests=((37, 3),), shared=0, kv_heads=1)

WIDTHS = ((16, 16), (8, 6), (40, 40), (80, 80), (96, 64), (24, 16))

# what the issue names, one or two at a time: the rest is drawn
MATRIX = {
    "mixed step": KernelCase(CASE),
    "split": KernelCase(CASE, splits=3),
    "window": KernelCase(replace(CASE, mask=AttentionMask(window=7)), splits=2),
    "window of one": KernelCase(replace(ONE, mask=AttentionMask(window=1))),
    "chunks": KernelCase(replace(CASE, mask=AttentionMask(chunk=16))),
    "across chunks": KernelCase(replace(ONE, mask=AttentionMask(chunk=13))),
    "window in chunks": KernelCase(replace(ONE, mask=AttentionMask(chunk=20, window=6))),
    "cross attention": KernelCase(replace(ONE, mask=AttentionMask(causal=False)), splits=2),
    "learned sinks": KernelCase(replace(CASE, sinks=True)),
    "learned sinks split": KernelCase(replace(ONE, sinks=True), splits=2),
    "more splits than are combined at a time": KernelCase(replace(ONE, requests=((310, 2),), sinks=True), splits=20),
    "soft cap": KernelCase(replace(ONE, softcap=1.5)),
    "one head each": KernelCase(replace(ONE, group=1, kv_heads=3)),
    "tiles cut a query": KernelCase(replace(ONE, requests=((20, 9),), group=5)),
    "many rows": KernelCase(replace(ONE, requests=((20, 30), (3, 1)), group=3)),
    "HND": KernelCase(replace(CASE, order=PageOrder.HND)),
    "blocks of 48": KernelCase(replace(CASE, requests=((70, 2), (90, 1)), block_size=48)),
    "blocks of 3": KernelCase(replace(ONE, block_size=3)),
    "width 80": KernelCase(replace(ONE, widths=(80, 80))),
    "width 96": KernelCase(replace(ONE, widths=(96, 96), order=PageOrder.HND)),
    "width 192, values 128": KernelCase(replace(ONE, widths=(192, 128))),
    "width 16, values 80": KernelCase(replace(ONE, widths=(16, 80)), splits=2),
    "MLA": KernelCase(replace(ONE, requests=((17, 1),), group=16, widths=(576, 512)), latent=True),
    "MLA split": KernelCase(replace(ONE, group=4, widths=(40, 32)), latent=True, splits=2),
    "MLA of odd width": KernelCase(replace(ONE, widths=(32, 24)), latent=True),
    "fp8": KernelCase(CASE, fp8=True),
    "fp8, bfloat16": KernelCase(ONE, query=torch.bfloat16, fp8=True, splits=2),
    "fp8 MLA": KernelCase(replace(ONE, widths=(40, 32)), fp8=True, latent=True),
    "bfloat16": KernelCase(replace(CASE, dtype=torch.bfloat16), query=torch.bfloat16),
    "float16": KernelCase(replace(CASE, dtype=torch.float16), query=torch.float16),
    "float32 over bfloat16": KernelCase(replace(CASE, dtype=torch.bfloat16)),
    "ranks": KernelCase(replace(ONE, ranks=2, interleave=4, mask=AttentionMask(window=9))),
    "large tiles": KernelCase(replace(CASE, requests=((100, 4), (9, 1))), keys_of_a_tile=64),
}


@st.composite
def kernel_cases(draw: st.DrawFn) -> KernelCase:
    ranks = draw(st.sampled_from((1, 1, 1, 2)))
    block_size = draw(st.sampled_from((4, 16, 16, 32, 48)))
    bounds = st.one_of(
        st.just(AttentionMask()),
        st.builds(AttentionMask, window=st.integers(1, 40)),
        st.builds(AttentionMask, chunk=st.integers(1, 40)),
        st.builds(AttentionMask, window=st.integers(1, 30), chunk=st.integers(2, 40)),
        st.just(AttentionMask(causal=False)),
    )
    case = Case(
        requests=tuple(draw(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), min_size=1, max_size=2))),
        shared=draw(st.integers(0, 2)),
        block_size=block_size,
        kv_heads=draw(st.sampled_from((1, 1, 2))),
        group=draw(st.integers(1, 6)),
        widths=draw(st.sampled_from(WIDTHS)),
        order=draw(st.sampled_from(list(PageOrder))),
        dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16))),
        mask=draw(bounds),
        softcap=draw(st.sampled_from((None, None, 2.0))),
        sinks=draw(st.booleans()) and ranks == 1,
        ranks=ranks,
        interleave=draw(st.sampled_from((1, 2, 4))) if ranks > 1 else 1,
        seed=draw(st.integers(0, 1 << 20)),
    )
    return KernelCase(
        case,
        query=draw(st.sampled_from((torch.float32, case.dtype))),
        fp8=draw(st.integers(0, 3)) == 0,
        latent=draw(st.integers(0, 3)) == 0,
        splits=draw(st.sampled_from((None, None, 2, 5))),
    )


class Call:
    """What both are called with: on one rank, the last."""

    def __init__(self, case: KernelCase) -> None:
        self.case, one = case, case.case
        scene, share = Scene(one), ContextShare(one.ranks, one.ranks - 1, one.interleave)
        pages = scene.pages(share)
        if case.fp8:
            pages = KVPages(pages.keys.to(FP8), pages.values.to(FP8), key_scale=0.75, value_scale=1.5)
        if case.latent:
            pages = replace(pages, values=pages.keys[..., : one.widths[1]])
        self.pages: KVPages = pages
        self.query = scene.query.to(case.query)
        self.batch: PagedBatch = scene.batch(share)
        self.sinks = scene.sinks

    def prepared(self) -> TritonBatch:
        made = triton_batch(
            self.batch,
            self.case.case.mask,
            num_heads=self.query.shape[1],
            pages=self.pages,
            dtype=self.query.dtype,
            splits=self.case.splits,
        )
        return replace(made, tiles=replace(made.tiles, keys=self.case.keys_of_a_tile))

    def attended(self, batch: TritonBatch | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        one = self.case.case
        return triton_paged_attention(
            self.query,
            self.pages,
            self.prepared() if batch is None else batch,
            one.scale,
            softcap=one.softcap,
            sink_logits=self.sinks,
        )

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        one = self.case.case
        return paged_attention(
            self.query, self.pages, self.batch, one.scale, mask=one.mask, softcap=one.softcap, sink_logits=self.sinks
        )

    def check(self, batch: TritonBatch | None = None) -> None:
        tolerance = TOLERANCES[self.query.dtype]
        if self.query.is_cuda:  # tensor cores: a float32 in three parts
            tolerance *= 4
        for got, expected in zip(self.attended(batch), self.expected(), strict=True):
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
