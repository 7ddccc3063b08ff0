"""CUDA graphs of steps that only decode. Each is captured once for a number of rows, and then replayed.

    rows of a step   [ a | b | c ]     in a graph of four rows   [ a | b | c | . ]
    the fourth row   token 0 at position 0, without a slot; it reads one token of the null block, and its result is
    dropped

A replay reads all its inputs from fixed memory: tokens, positions, slots, and the block tables of each kind of read.
Nothing else of a Step can change. So every row has one token and no draft, the kernels of ``attention=triton`` write
and read the keys, and no layer keeps recurrent states. Any other model runs its steps as usual, and so does a model
that cannot be captured; the log says why.
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
"""The one value of EngineOptions.compile."""
Forward = Callable[[torch.Tensor, torch.Tensor, Mapping[int, PagedStep]], torch.Tensor]
"""(tokens, positions, how each layer attends) -> logits after every token, [n, vocabulary].

Both inputs are int64[n].
"""
Run = Callable[[], torch.Tensor]


def compile_option(name: str, value: object) -> str | None:
    """Return ``value`` if it is None or DECODE. Raises ConfigError for anything else."""
    if value is not None and (not isinstance(value, str) or value != DECODE):
        raise ConfigError(f"{name} must be {DECODE!r}, or None for no compilation, got {shown(value)}")
    return None if value is None else DECODE


def _captured(run: Run) -> Run:
    """Return a CUDA graph of ``run``, captured after two runs that compile kernels and allocate workspaces."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own is not typed
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread may run another model
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


RECORDERS: Final[Mapping[str, Callable[[Run], Run]]] = {"cuda": _captured}
"""For each type of device: converts a run to a replay of it over the same memory."""


def refusal(
    device: torch.device, attention: AttentionBackend, reads: Mapping[int, LayerRead], *, other: str | None
) -> str | None:
    """Return why steps of a model cannot be captured; None if they can. ``other``: a reason that the caller knows."""
    if device.type not in RECORDERS:
        return f"graphs are captured on CUDA devices, but the model is on {device}"
    if attention is not AttentionBackend.TRITON:
        return f"attention={attention} makes tensors of different shapes in every step: use attention=triton"
    gathered = [layer for layer, read in reads.items() if read.heads is None]
    return other or (f"the contexts of layer {gathered[0]} are gathered" if gathered else None)


class DecodeGraphs:
    """The graphs of one runner. Each is made when the first step of its size arrives.

    ``reads`` and ``pages`` have all layers, by index. ``max_model_len`` is the length of the longest request; ``name``
    is the model's name in the log.
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

    @torch.inference_mode()  # a graph's tensors are inference tensors, which only this mode may change
    def logits(self, step: Step, tokens: Int64, positions: Int64) -> torch.Tensor | None:
        """Return the logits after every token of ``step``, [R, vocabulary].

        Returns None for a step that does more than decode, and once a capture has failed. ``tokens``, ``positions``:
        int64[R]. The tables must have applied the Step and computed its slots on the host.
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
                logger.warning("%s: its steps run without CUDA graphs, because capturing failed: %s", self._name, why)
                return None
            self._graphs[size] = graph
        return self._graphs[size].run()[:rows].clone()


class _Graph:
    """A graph of ``size`` rows. ``run`` is the forward over its fixed memory; after ``record`` it is a replay."""

    def __init__(self, owner: DecodeGraphs, size: int) -> None:
        self._size, self._tables = size, owner.tables
        groups = sorted({read.group for read in owner.reads.values()})
        self._device = self._tables[groups[0]].device
        # tokens, positions, then the slots of each group: one copy to the device for all
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
        """Capture ``run``."""
        self.run = RECORDERS[self._device.type](self.run)

    def _longest(self, read: LayerRead, pages: KVPages, max_model_len: int) -> TritonBatch:
        """Make a batch for ``size`` requests of one query each, of any length up to the longest."""
        assert read.heads is not None  # noqa: S101 - refusal has checked every layer
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
        """Copy this step's inputs to the memory that the graph reads. Rows after the step's own get no slot."""
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
        """Return the block tables of the step's rows, then null blocks for the other rows: int32[size, columns]."""
        table = self._tables[group]
        rows = torch.from_numpy(step.rows.astype(np.int64)).to(self._device, non_blocking=True)
        cells = table.get_device_tensor()[rows, : ceil_div(longest, table.block_size)]
        return torch.cat((cells, cells.new_zeros(self._size - len(step), cells.shape[1])))
