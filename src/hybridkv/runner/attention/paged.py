"""Attention that reads pages where they lie: kernels of the worker behind the attention function of transformers.

    StepCache.update    writes the step's keys and values into their slots, and hands them on as they are
    attend              a kernel reads the pages of the layer that was updated last

A layer runs this way whose formula is known and whose keys reach its attention as they were cached; one that makes
others of them first (some expand latents) is handed gathered contexts, whatever backend was asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from hybridkv.errors import ConfigError
from hybridkv.runner.attention.attention_form import AttentionForm
from hybridkv.units import shown
from hybridkv.worker import (
    TORCH,
    AttentionMask,
    BlockTable,
    KVPages,
    PagedBatch,
    TritonBatch,
    copy_kernels,
    paged_attention,
    triton_write_kv,
    write_kv,
    write_slots,
)
from hybridkv.worker.triton_attention import LayerShape, triton_batch, triton_paged_attention


class AttentionBackend(StrEnum):
    """What runs the attention of a model on pages.

    gather: contexts are copied out of their pages, dense kernels run on them. eager: the same, by the function of the
    model's own modelling file. triton: a kernel of this library reads the pages (a GPU, or Triton's interpreter).
    torch: the plain formula reads them, request by request. It is slow, and the reference for the kernel.
    """

    GATHER = "gather"
    EAGER = "eager"
    TRITON = "triton"
    TORCH = "torch"


def attention_backend(name: str, value: object) -> AttentionBackend:
    """``value`` as one of them; ConfigError, which names them, for any other."""
    try:
        return AttentionBackend(value)  # type: ignore[arg-type]  # whatever it is, the enumeration judges it
    except ValueError as error:
        raise ConfigError(f"{name} must be one of {', '.join(AttentionBackend)}, got {shown(value)}") from error


Attend = Callable[[torch.Tensor, KVPages, AttentionForm], torch.Tensor]
"""Queries [tokens, heads, width] over the pages of a layer: [tokens, heads, width of a value]."""
Prepare = Callable[[PagedBatch, AttentionMask, LayerShape, KVPages], Attend]
"""For a Step's reads under a mask, in layers like that of the pages."""
Write = Callable[[KVPages, torch.Tensor, torch.Tensor], None]
"""The pages of a layer, and the keys and values of a Step's tokens, [tokens, heads, width] each."""


@dataclass(frozen=True, slots=True)
class LayerRead:
    """How a layer reads: through which group, under which mask, and whether its context must come in one piece.

    heads: of a layer that a kernel reads from pages, None of one whose contexts are gathered.
    """

    group: int
    mask: AttentionMask
    whole: bool = True
    heads: LayerShape | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """A Step in layers that read alike. write_kv: into its tokens' slots. pages: by layer index. attend: reads them."""

    write_kv: Write
    pages: Mapping[int, KVPages]
    attend: Attend

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keys and values [1, heads, tokens, width] of the step's tokens."""
        self.write_kv(self.pages[layer], key[0].transpose(0, 1), value[0].transpose(0, 1))

    def read(self, layer: int, query: torch.Tensor, form: AttentionForm) -> torch.Tensor:
        """What queries [1, heads, tokens, width] attend to: [1, tokens, heads, width of a value]."""
        return self.attend(query[0].transpose(0, 1), self.pages[layer], form).to(query.dtype)[None]


def attending(attention: Callable[..., tuple[torch.Tensor, torch.Tensor]], batch: PagedBatch | TritonBatch) -> Attend:
    """Make what reads ``batch`` with a kernel of the worker."""

    def attend(query: torch.Tensor, pages: KVPages, form: AttentionForm) -> torch.Tensor:
        return attention(query, pages, batch, form.scale, softcap=form.softcap, sink_logits=form.sinks)[0]

    return attend


def _torch(reads: PagedBatch, mask: AttentionMask, _heads: LayerShape, _pages: KVPages) -> Attend:
    return attending(functools.partial(paged_attention, mask=mask), reads)


def _triton(reads: PagedBatch, mask: AttentionMask, heads: LayerShape, pages: KVPages) -> Attend:
    made = triton_batch(reads, mask, num_heads=heads.num_heads, pages=pages, dtype=heads.query)
    return attending(triton_paged_attention, made)


def kernel_of(backend: AttentionBackend, device: torch.device) -> Prepare | None:
    """Of ``backend`` on ``device``; None for what gathers. ConfigError where it cannot run there."""
    if backend is AttentionBackend.TORCH:
        return _torch
    if backend is not AttentionBackend.TRITON:
        return None
    try:
        import triton  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigError("attention=triton needs Triton: pip install 'hybridkv[gpu]', or use gather") from error
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise ConfigError("Triton has no compiler for CPUs: use attention=gather, or set TRITON_INTERPRET=1")
    return _triton


def write_of(backend: AttentionBackend, table: BlockTable, tokens: int) -> Write:
    """Into the first ``tokens`` slots that ``table`` has committed: one launch where Triton runs anyway, or on a GPU.

    Else by torch, which looks at them first and waits for the device. WorkerError as ``write_slots``.
    """
    slots = table.slot_mapping[:tokens]
    if backend is AttentionBackend.TRITON or copy_kernels(table.device) is not TORCH:
        return functools.partial(triton_write_kv, slots)
    blocks = table.id_limit * table.blocks_per_kv_block
    return functools.partial(write_kv, write_slots(slots, blocks, table.block_size))
