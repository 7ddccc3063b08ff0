"""Steps that only decode as CUDA graphs of a few sizes: captured once, then replayed over the same memory.

    rows of a step   [ a | b | c ]     as a graph of four   [ a | b | c | . ]
    the fourth       token 0 at position 0, with no slot and one token of the null block to read: computed for nothing

A replay reads tokens, positions, slots and what each way of reading pages needs from where they lay when the graph was
captured; nothing else of a Step comes in. So a row has one token and no draft, keys are written and read by the kernels
of ``attention=triton``, and no layer keeps states. Where a model is otherwise, or cannot be captured, its steps run as
ever, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.runner.attention.formulas import AttentionBackend, LayerRead, PagedStep, attending
from hybridkv.step import Step
from hybridkv.units import ceil_div, shown
from hybridkv.worker import (
    KVPages,
    MultiGroupBlockTable,
    TritonBatch,
    paged_batch,
    triton_batch,
    triton_paged_attention,
    triton_write_kv,
)

logger = logging.getLogger(__name__)

Int64 = NDArray[np.int64]
DECODE: Final = "decode"
"""What EngineOptions.compile asks for."""
Forward = Callable[[torch.Tensor, torch.Tensor, Mapping[int, PagedStep]], torch.Tensor]
"""Tokens and their positions, int64[n] each, and how each layer attends: logits behind every token, [n, vocabulary]."""
Run = Callable[[], torch.Tensor]


def compile_option(name: str, value: object) -> str | None:
    """None or DECODE; ConfigError for anything else."""
    if value is not None and (not isinstance(value, str) or value != DECODE):
        raise ConfigError(f"{name} must be {DECODE!r}, or None for nothing compiled, got {shown(value)}")
    return None if value is None else DECODE


def _captured(run: Run) -> Run:
    """A CUDA graph of ``run``, which warms up first: kernels are compiled, workspaces taken."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own is not typed
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread may hold another model
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


RECORDERS: Final[Mapping[str, Callable[[Run], Run]]] = {"cuda": _captured}
"""By type of device: what makes of a run one that does the same over the same memory."""


def refusal(
    device: torch.device, attention: AttentionBackend, reads: Mapping[int, LayerRead], *, other: str | None
) -> str | None:
    """Why steps of a model cannot be captured; None where they might. other: what else is in the way."""
    if device.type not in RECORDERS:
        return f"graphs are captured on CUDA, the model is on {device}"
    if attention is not AttentionBackend.TRITON:
        return f"attention={attention} makes tensors of other shapes in every step: use attention=triton"
    gathered = [layer for layer, read in reads.items() if read.heads is None]
    return other or (f"contexts of layer {gathered[0]} are gathered" if gathered else None)


class DecodeGraphs:
    """The graphs of one runner, each made when the first step of its size comes.

    forward: of the model. reads, pages: by layer index, of all its layers. tables: of its groups. max_model_len: tokens
    of the longest request. name: of the model, for the log.
    """

    def __init__(
        self,
        forward: Forward,
        reads: Mapping[int, LayerRead],
        pages: Mapping[int, KVPages],
        tables: MultiGroupBlockTable,
        *,
        max_model_len: int,
        name: str,
    ) -> None:
        self.forward, self.reads, self.pages, self.tables = forward, reads, pages, tables
        self.max_model_len, self._name = max_model_len, name
        self._graphs = dict[int, _Graph]()
        self._failed = False

    @torch.inference_mode()  # as its tensors are, wherever it is called
    def logits(self, step: Step, tokens: Int64, positions: Int64) -> torch.Tensor | None:
        """Behind every token of ``step``, [R, vocabulary]; None for one that is not only decoding, or once one failed.

        tokens, positions: int64[R]. The tables have applied the Step and hold its slots on the host.
        """
        rows = len(step)
        if self._failed or len(step.drafts.values) or len(tokens) != rows:
            return None
        size = 1 << (rows - 1).bit_length()
        if size in self._graphs:
            self._graphs[size].fill(step, tokens, positions)
        else:
            try:
                graph = _Graph(self, size)
                graph.fill(step, tokens, positions)
                graph.record()
            except RuntimeError as error:
                self._failed = True
                why = str(error).partition("\n")[0]
                logger.warning("%s: its steps cannot be captured, and run as they are: %s", self._name, why)
                return None
            self._graphs[size] = graph
        return self._graphs[size].run()[:rows].clone()


class _Graph:
    """Of ``size`` rows of ``owner``. run: the forward over its numbers; once recorded, a replay of it."""

    def __init__(self, owner: DecodeGraphs, size: int) -> None:
        self._size, self._tables = size, owner.tables
        groups = sorted({read.group for read in owner.reads.values()})
        self._device = self._tables[groups[0]].device
        # tokens, positions, then the slots of each group: sent at once
        self._numbers = torch.zeros(2 + len(groups), size, dtype=torch.int64, device=self._device)
        self._slots = {group: self._numbers[2 + place] for place, group in enumerate(groups)}
        self._batches = dict[LayerRead, TritonBatch]()
        attention = dict[int, PagedStep]()
        for layer, read in owner.reads.items():
            if read not in self._batches:
                self._batches[read] = self._longest(read, owner.pages[layer], owner.max_model_len)
            write = partial(triton_write_kv, self._slots[read.group])
            attention[layer] = PagedStep(write, owner.pages, attending(triton_paged_attention, self._batches[read]))
        self.run: Run = partial(owner.forward, self._numbers[0], self._numbers[1], attention)

    def record(self) -> None:
        """Capture what runs."""
        self.run = RECORDERS[self._device.type](self.run)

    def _longest(self, read: LayerRead, pages: KVPages, max_model_len: int) -> TritonBatch:
        """For requests of any length up to the longest, of one query each."""
        assert read.heads is not None  # noqa: S101 - refusal has looked at every layer
        table = self._tables[read.group]
        widest = torch.zeros(self._size, table.get_device_tensor().shape[1], dtype=torch.int32, device=self._device)
        batch = paged_batch(
            range(self._size + 1),
            [max_model_len] * self._size,
            widest,
            block_size=table.block_size,
            num_blocks=pages.num_blocks,
        )
        return triton_batch(batch, read.mask, num_heads=read.heads.num_heads, pages=pages, dtype=read.heads.query)

    def fill(self, step: Step, tokens: Int64, positions: Int64) -> None:
        """Send what this step's rows read and write to where the graph reads it; the rows behind them have no slot."""
        rows = len(step)
        staged = torch.zeros(self._numbers.shape, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        numbers = staged.numpy()
        numbers[0, :rows], numbers[1, :rows] = tokens, positions
        numbers[2:] = -1
        for place, group in enumerate(self._slots):
            numbers[2 + place, :rows] = self._tables[group].slot_mapping_np[:rows]
        self._numbers.copy_(staged, non_blocking=True)
        lengths = (*(positions + 1).tolist(), *(1 for _ in range(self._size - rows)))
        held = {group: self._cells(step, group, max(lengths)) for group in self._slots}
        for read, made in self._batches.items():
            made.refill(replace(made.batch, seq_lens=lengths, block_table=held[read.group]))

    def _cells(self, step: Step, group: int, longest: int) -> torch.Tensor:
        """int32[size, columns]: of the step's rows, then null blocks."""
        table = self._tables[group]
        rows = torch.from_numpy(step.rows.astype(np.int64)).to(self._device, non_blocking=True)
        cells = table.get_device_tensor()[rows, : ceil_div(longest, table.block_size)]
        return torch.cat((cells, cells.new_zeros(self._size - len(step), cells.shape[1])))
