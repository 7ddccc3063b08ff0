"""Which formula the attention of a module is: read from what it hands over, proven on noise against its own function.

A modelling file brings an eager attention of its own, which need not be softmax(scale * q . k) . v: it caps scores
(Gemma 2), has a sink beside the keys (gpt-oss), adds a bias (T5), or does what was not foreseen. A form is taken for a
module when both give the same for scores so large that a cap, a sink or a wrong scale shows; where none does, the
module's own function runs.

    out = softmax(softcap(scale * query . key) + mask) . value        lse = log of the sum of all exponentials

``dense_attention`` computes this over dense keys. Query heads share KV heads without a copy of the keys for each: where
all queries see the same keys, those of the heads that share a KV head are queries of that one head. On a CPU torch's
flash kernel runs, which reads strided keys and makes no scores of its own size; elsewhere, and for soft caps, plain
products do.

Attention that reads pages where they lie: kernels of the worker stand in for the attention function of transformers.

    StepCache.update    writes the step's keys and values into their slots, and hands them on as they are
    attend              a kernel reads the pages of the layer that was updated last

A layer runs this way whose formula is known and whose keys reach its attention as they were cached; one that makes
others of them first (some expand latents) is handed gathered contexts, whatever backend was asked for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.runner.states.continuation import difference
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
    with_sink,
    write_kv,
    write_slots,
)
from hybridkv.worker.triton_attention import LayerShape, triton_batch, triton_paged_attention

_TOLERANCE: Final = 1e-4
"""Largest difference in float32, as a share of the largest value."""
_LOUD: Final = 6.0
"""Noise of this spread in queries: weights far from even, scores beyond what a cap leaves alone."""
_QUERIES: Final = 5
_PAST: Final = 6
_KNOWN: Final = {"position_ids", "cache_position", "s_aux"}
"""Tensors that a form accounts for; with any other handed over, the module's own function runs."""
_FLASH: Final[Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What scaled_dot_product_attention calls on a CPU, which throws the log-sum-exp away."""

Eager = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""eager(module, query, key, value, mask, **kwargs): out [rows, queries, heads, width], and weights or None."""


class Attended(NamedTuple):
    """What a layer attends with: query [rows, heads, queries, width]; key, value [rows, KV heads, keys, width]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def eager_function(module: torch.nn.Module) -> Eager:
    """Return the eager attention of the modelling file of ``module``. Raises UnsupportedModelError if it has none."""
    found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise UnsupportedModelError(
            f"{type(module).__module__} has no eager_attention_forward: its attention cannot run on gathered contexts"
        )
    function: Eager = found
    return function


def attention_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Return the modules of ``model`` that attend, layer by layer, as transformers marks them."""
    return (module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal"))


def dense_attention(
    states: Attended,
    scale: float,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of ``states``, whose heads are a multiple of the KV heads: neighbouring ones share one.

    mask: added to the scores, of their dtype, [rows or 1, 1, queries, keys]; every query sees some key. causal: as many
    queries as keys, each of which sees the keys up to its own place; no mask then.
    out: [rows, heads, queries, width of a value], of the query's dtype. lse: [rows, heads, queries], of float32
    (float64 for float64). O(queries * keys).
    """
    query, key, value = states
    rows, heads, queries, width = query.shape
    shared = heads // key.shape[1]
    together = shared > 1 and not causal and (mask is None or queries == 1)
    if together:
        query = query.reshape(rows, key.shape[1], shared * queries, width)
    grouped = Attended(query, key, value)
    if softcap is None and query.device.type == "cpu" and value.shape[3] <= width:
        out, lse = _flash(grouped, scale, mask, causal=causal)
    else:
        out, lse = _products(grouped, scale, mask, causal=causal, softcap=softcap)
    return out.reshape(rows, heads, queries, -1), lse.reshape(rows, heads, queries)


def _flash(
    states: Attended, scale: float, mask: torch.Tensor | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values narrower than keys (MLA) are made as wide: the kernel knows one width."""
    query, key, value = states
    width = value.shape[3]
    wide = value if width == key.shape[3] else F.pad(value, (0, key.shape[3] - width))
    out, lse = _FLASH(query, key, wide, 0.0, causal, attn_mask=mask, scale=scale)
    return out[..., :width], lse


def _products(
    states: Attended, scale: float, mask: torch.Tensor | None, *, causal: bool, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and sums in float32 at least."""
    query, key, value = states
    rows, heads, queries, width = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], queries, width)
    scores = torch.matmul(grouped, key.transpose(2, 3).unsqueeze(2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask.unsqueeze(2)
    if causal:
        hidden = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).to(value.dtype)
    out = torch.matmul(weights, value.unsqueeze(2))
    return out.reshape(rows, heads, queries, -1), lse.reshape(rows, heads, queries)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionForm:
    """``scale`` of the scores, ``softcap`` of the scaled scores, and one logit a head as ``sinks``.

    None for no cap or sink.
    """

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def form_of(module: torch.nn.Module, eager: Eager, states: Attended, handed: Mapping[str, Any]) -> AttentionForm | None:
    """Return the form of ``module``, which passed ``handed`` to its attention; None if no form is proven.

    states: of such a call; their shapes count, and their dtype not: the comparison is made in float32. One short call
    of ``eager``, and one of dense_attention for each form that comes into question.
    """
    if any(isinstance(one, torch.Tensor) and name not in _KNOWN for name, one in handed.items()):
        return None
    generator = torch.Generator().manual_seed(0)
    keys, device = _PAST + _QUERIES, states.query.device
    query, key, value = (
        torch.randn(2, one.shape[1], tokens, one.shape[3], generator=generator).to(device)
        for one, tokens in zip(states, (_QUERIES, keys, keys), strict=True)
    )
    noise = Attended(query * _LOUD, key, value)
    mask = torch.full((_QUERIES, keys), torch.finfo(torch.float32).min, device=device).triu(_PAST + 1)[None, None]
    with torch.inference_mode():
        try:
            wanted = eager(module, *noise, mask, **handed)[0].float()
        except Exception:  # noqa: BLE001 - whatever it wants that it was not given here
            return None
        asked = _forms(module, query.shape[3], handed)
        return next((one for one in asked if _same(one, noise, mask, wanted)), None)


def _forms(module: torch.nn.Module, width: int, handed: Mapping[str, Any]) -> list[AttentionForm]:
    """Those that ``module`` could mean, the plainest first."""
    scaling = handed.get("scaling")
    softcaps = (handed.get("softcap"), getattr(module, "attn_logit_softcapping", None))
    scale = width**-0.5 if scaling is None else float(scaling)
    forms = [AttentionForm(scale), *(AttentionForm(scale, float(one)) for one in softcaps if one is not None)]
    sinks = handed.get("s_aux", getattr(module, "sinks", None))
    if isinstance(sinks, torch.Tensor):
        forms += [replace(one, sinks=sinks.detach()) for one in forms]
    return forms


def _same(form: AttentionForm, noise: Attended, mask: torch.Tensor, wanted: torch.Tensor) -> bool:
    out, lse = (one.transpose(1, 2) for one in dense_attention(noise, form.scale, mask=mask, softcap=form.softcap))
    found = out.flatten(0, 1)
    if form.sinks is not None:
        if form.sinks.shape != found.shape[1:2]:
            return False
        found, _ = with_sink(found, lse.flatten(0, 1), form.sinks)
    return wanted.shape == out.shape and difference(found.view(out.shape), wanted) <= _TOLERANCE


# -- attention that reads pages


class AttentionBackend(StrEnum):
    """How attention over pages runs.

    - gather: contexts are copied out of their pages, and dense kernels run on them.
    - eager: the same, with the function of the model's own modelling file.
    - triton: a kernel of this library reads the pages (a GPU, or Triton's interpreter).
    - torch: a plain formula reads them, request by request. It is slow, and the reference for the kernel.
    """

    GATHER = "gather"
    EAGER = "eager"
    TRITON = "triton"
    TORCH = "torch"


def attention_backend(name: str, value: object) -> AttentionBackend:
    """Return ``value`` as an AttentionBackend. Raises ConfigError, with all names, for any other value."""
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
    """How a layer reads: its group, its mask, and whether its context must be in one piece (``whole``).

    ``heads`` is set for a layer that a kernel reads from pages, None for one with gathered contexts.
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
        """Return the attention of queries [1, heads, tokens, width]: [1, tokens, heads, width of a value]."""
        return self.attend(query[0].transpose(0, 1), self.pages[layer], form).to(query.dtype)[None]


def attending(attention: Callable[..., tuple[torch.Tensor, torch.Tensor]], batch: PagedBatch | TritonBatch) -> Attend:
    """Return a function that reads ``batch`` with a kernel of the worker."""

    def attend(query: torch.Tensor, pages: KVPages, form: AttentionForm) -> torch.Tensor:
        return attention(query, pages, batch, form.scale, softcap=form.softcap, sink_logits=form.sinks)[0]

    return attend


def _torch(reads: PagedBatch, mask: AttentionMask, _heads: LayerShape, _pages: KVPages) -> Attend:
    return attending(functools.partial(paged_attention, mask=mask), reads)


def _triton(reads: PagedBatch, mask: AttentionMask, heads: LayerShape, pages: KVPages) -> Attend:
    made = triton_batch(reads, mask, num_heads=heads.num_heads, pages=pages, dtype=heads.query)
    return attending(triton_paged_attention, made)


def kernel_of(backend: AttentionBackend, device: torch.device) -> Prepare | None:
    """Return the kernel of ``backend`` on ``device``; None if it gathers. Raises ConfigError if it cannot run there."""
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
