"""Requests of random lengths in dirty pages, and attention one query and one head at a time, in float64.

Calls of the Triton kernel stand beside the same calls of ``paged_attention``, over pages of NaN wherever nothing is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridkv.worker import (
    WHOLE,
    AttentionMask,
    ContextShare,
    KVPages,
    PagedBatch,
    PageOrder,
    TritonBatch,
    paged_attention,
    paged_batch,
    triton_batch,
    triton_paged_attention,
    write_kv,
    write_slots,
)

Float64 = NDArray[np.float64]

torch.set_num_threads(1)  # small tensors: threads only wait for each other

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


def local_slot(blocks: Sequence[int], position: int, block_size: int, share: ContextShare) -> int:
    """The formula of docs/contracts.md, 7, one token at a time."""
    cp, i = share.size, share.interleave
    column, o = divmod(position, block_size * cp)
    if (o // i) % cp != share.rank:
        return -1
    return blocks[column] * block_size + o // (cp * i) * i + o % i


@dataclass(frozen=True)
class Case:
    """What a call is made of. requests: (computed tokens, queries) of each; shared: leading columns of request 1 that
    are those of request 0."""

    requests: tuple[tuple[int, int], ...]
    shared: int
    block_size: int
    kv_heads: int
    group: int
    widths: tuple[int, int]
    order: PageOrder
    dtype: torch.dtype
    mask: AttentionMask
    softcap: float | None
    sinks: bool
    ranks: int
    interleave: int
    seed: int
    device: str = "cpu"

    @property
    def shares(self) -> list[ContextShare]:
        return [ContextShare(self.ranks, rank, self.interleave) for rank in range(self.ranks)]

    @property
    def covered(self) -> int:
        return self.block_size * self.ranks

    @property
    def scale(self) -> float:
        return 1.3 / math.sqrt(self.widths[0])


WINDOWS = st.one_of(
    st.just(AttentionMask()),
    st.builds(AttentionMask, window=st.integers(1, 12)),
    st.builds(AttentionMask, chunk=st.integers(1, 9)),
    st.builds(AttentionMask, window=st.integers(1, 9), chunk=st.integers(2, 9)),
    st.just(AttentionMask(causal=False)),
)


@st.composite
def cases(draw: st.DrawFn, ranks: tuple[int, ...] = (1,)) -> Case:
    block_size = draw(st.sampled_from((1, 2, 3, 4, 8)))
    dividing = [i for i in range(1, block_size + 1) if block_size % i == 0]
    size = draw(st.sampled_from(ranks))
    return Case(
        requests=tuple(draw(st.lists(st.tuples(st.integers(0, 22), st.integers(1, 6)), min_size=1, max_size=3))),
        shared=draw(st.integers(0, 3)),
        block_size=block_size,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        widths=draw(st.sampled_from(((4, 4), (4, 6), (8, 3)))),
        order=draw(st.sampled_from(list(PageOrder))),
        dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float64))),
        mask=draw(WINDOWS),
        softcap=draw(st.sampled_from((None, None, 2.0))),
        sinks=draw(st.booleans()),
        ranks=size,
        interleave=draw(st.sampled_from(dividing)) if size > 1 else 1,
        seed=draw(st.integers(0, 1 << 20)),
    )


class Scene:
    """The tensors of a case: every request's keys and values, its queries, and its blocks in pages full of NaN."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = torch.Generator().manual_seed(case.seed)
        self.lengths = [computed + new for computed, new in case.requests]
        self.counts = [new for _, new in case.requests]
        self.keys = [self._random(n, case.kv_heads, case.widths[0]) for n in self.lengths]
        self.values = [self._random(n, case.kv_heads, case.widths[1]) for n in self.lengths]
        self.query = self._random(sum(self.counts), case.kv_heads * case.group, case.widths[0])
        self.sinks = self._random(case.kv_heads * case.group).float() if case.sinks else None
        self.starts = [0, *np.cumsum(self.counts).tolist()]
        self.columns = max(-(-n // case.covered) for n in self.lengths)
        self.num_blocks = 1 + len(self.lengths) * self.columns
        self.table = self._table()

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.rng).to(self.case.dtype).to(self.case.device)

    def _table(self) -> list[list[int]]:
        """Distinct blocks in any order but for a shared prefix; columns that nobody sees are null."""
        ids = (torch.randperm(self.num_blocks - 1, generator=self.rng) + 1).tolist()
        table = [ids[r * self.columns : (r + 1) * self.columns] for r in range(len(self.lengths))]
        if len(table) > 1:
            # a shared block was written before: not by this step's tokens, of either request
            whole = min(computed // self.case.covered for computed, _ in self.case.requests[:2])
            n = min(self.case.shared, whole)
            table[1][:n] = table[0][:n]
            tokens = n * self.case.covered
            for states in (self.keys, self.values):
                states[1][:tokens] = states[0][:tokens]
        return table

    def seen(self, request: int, query: int) -> list[int]:
        """The tokens that a request's ``query``-th query sees, by the words of docs/contracts.md, 4."""
        mask, p = self.case.mask, self.lengths[request] - self.counts[request] + query
        if not mask.causal:
            return list(range(self.lengths[request]))
        window = p + 1 if mask.window is None else mask.window
        chunk = p + 1 if mask.chunk is None else mask.chunk
        return [j for j in range(self.lengths[request]) if p - window + 1 <= j <= p and j >= p // chunk * chunk]

    def rows(self) -> list[list[int]]:
        """The table, null where no query of the request sees anything."""
        dropped = []
        for r, blocks in enumerate(self.table):
            live = {j // self.case.covered for q in range(self.counts[r]) for j in self.seen(r, q)}
            dropped.append([block if column in live else 0 for column, block in enumerate(blocks)])
        return dropped

    def pages(self, share: ContextShare) -> KVPages:
        """This rank's pages, every request's tokens written by ``write_kv``, NaN wherever nothing was."""
        case = self.case
        heads, size = case.kv_heads, case.block_size
        views = []
        for width in case.widths:
            inner = (heads, size, width) if case.order is PageOrder.HND else (size, heads, width)
            # blocks as in an arena: something else lies behind each
            arena = torch.full((self.num_blocks, heads * size * width + 5), torch.nan, dtype=case.dtype)
            arena = arena.to(case.device)
            strides = [int(np.prod(inner[i + 1 :])) for i in range(3)]
            views.append(arena.as_strided((self.num_blocks, *inner), (arena.shape[1], *strides)))
        pages = KVPages.of_views((views[0], views[1]), case.order)
        rows = self.rows()
        for r, length in enumerate(self.lengths):
            slots = [local_slot(rows[r], p, size, share) for p in range(length)]
            kept = [slot if slot >= size else -1 for slot in slots]  # nothing goes to the null block
            there = write_slots(torch.tensor(kept, device=case.device), self.num_blocks, size)
            write_kv(there, pages, self.keys[r], self.values[r])
        return pages

    def batch(self, share: ContextShare = WHOLE) -> PagedBatch:
        return paged_batch(
            self.starts,
            self.lengths,
            torch.tensor(self.rows(), dtype=torch.int32, device=self.case.device),
            block_size=self.case.block_size,
            num_blocks=self.num_blocks,
            share=share,
        )

    def expected(self, share: ContextShare | None = None) -> tuple[Float64, Float64]:
        """Output and log-sum-exp of every query, over all tokens or over those of one rank; without sinks."""
        case = self.case
        heads = case.kv_heads * case.group
        out = np.zeros((len(self.query), heads, case.widths[1]))
        lse = np.full((len(self.query), heads), -np.inf)
        for r, q, token in self._queries():
            mine = [j for j in self.seen(r, q) if share is None or local_slot([0] * 99, j, case.block_size, share) >= 0]
            for head in range(heads) if mine else ():
                query = _float64(self.query[token, head])
                keys = _float64(self.keys[r][mine, head // case.group])
                values = _float64(self.values[r][mine, head // case.group])
                scores = keys @ query * case.scale
                if case.softcap is not None:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                largest = scores.max()
                weights = np.exp(scores - largest)
                out[token, head] = weights @ values / weights.sum()
                lse[token, head] = largest + np.log(weights.sum())
        return out, lse

    def _queries(self) -> Iterator[tuple[int, int, int]]:
        """(request, its query, token of the step)."""
        for r, count in enumerate(self.counts):
            for q in range(count):
                yield r, q, self.starts[r] + q


def sunk(out: Float64, lse: Float64, sinks: torch.Tensor | None) -> tuple[Float64, Float64]:
    """With one more exponential in each denominator."""
    if sinks is None:
        return out, lse
    logits = _float64(sinks)
    total = np.exp(lse) + np.exp(logits)
    return out * (np.exp(lse) / total)[..., None], np.log(total)


def assert_close(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[Float64, Float64]) -> None:
    tolerance = 1e-12 if got[0].dtype == torch.float64 else 2e-5
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(_float64(one), other, rtol=tolerance, atol=tolerance)


def _float64(values: torch.Tensor) -> Float64:
    return values.double().cpu().numpy()


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
