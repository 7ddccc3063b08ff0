"""Requests of random lengths in dirty pages, and attention one query and one head at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    paged_batch,
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
