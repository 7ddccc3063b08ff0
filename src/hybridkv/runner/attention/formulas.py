"""Find the formula of a module's attention, and run it on dense keys or on pages.

A modelling file has an eager attention function of its own, which may be more than softmax(scale * q . k) . v: it may
cap scores (Gemma 2), have a sink next to the keys (gpt-oss), or add a bias (T5). The arguments of the call suggest
forms. A form is used if it gives the same result as the module's function on noise, with scores so large that a cap, a
sink or a wrong scale shows. If no form does, the module's own function runs.

    out = softmax(softcap(scale * query . key) + mask) . value        lse = log of the sum of all exponentials

``dense_attention`` computes this over dense keys, without a copy of the keys for each query head. If all queries see
the same keys, the query heads that share a KV head become queries of that one head. On a CPU torch's flash kernel runs,
which reads strided keys and stores no scores. On other devices, and for soft caps, plain products run.

Kernels of the worker can replace the attention function of transformers and read the pages themselves:

    StepCache.update    writes the step's keys and values into their slots, and returns them unchanged
    attend              a kernel reads the pages of the layer that was updated last

This needs a known formula, and keys that reach the attention as they were cached. Some layers change their keys first
(they expand latents): these always get gathered contexts.
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
"""Standard deviation of the noise in queries: weights become uneven, and scores exceed a cap. Chosen by hand."""
_QUERIES: Final = 5
_PAST: Final = 6
"""Queries of the noise, and keys before them; chosen by hand."""
_KNOWN: Final = {"position_ids", "cache_position", "s_aux"}
"""Tensors that a form accounts for. If a module passes any other tensor, its own function runs."""
_FLASH: Final[Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The kernel of scaled_dot_product_attention on a CPU, called directly for its log-sum-exp."""

Eager = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""eager(module, query, key, value, mask, **kwargs): out [rows, queries, heads, width], and weights or None."""


class Attended(NamedTuple):
    """The inputs of attention: query [rows, heads, queries, width]; key, value [rows, KV heads, keys, width]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def eager_function(module: torch.nn.Module) -> Eager:
    """Return the eager attention of the modelling file of ``module``. Raises UnsupportedModelError if it has none."""
    found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise UnsupportedModelError(
            f"{type(module).__module__} has no eager_attention_forward, so its attention cannot run on gathered "
            "contexts: run this model with plain transformers"
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
    """Return (out, lse) of attention over ``states``. O(queries * keys).

    Args:
        states: the heads are a multiple of the KV heads, and neighbouring heads share one.
        scale: factor of the scores.
        mask: added to the scores, in their dtype, [rows or 1, 1, queries, keys]; every query sees some key.
        causal: each of as many queries as keys sees the keys up to its own place; without a mask.
        softcap: cap of the scaled scores.

    Returns:
        out [rows, heads, queries, width of a value] in the query's dtype, and lse [rows, heads, queries] in float32
        (float64 for float64).
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
    """Run torch's flash kernel. Values narrower than keys (MLA) are padded, because the kernel knows one width."""
    query, key, value = states
    width = value.shape[3]
    wide = value if width == key.shape[3] else F.pad(value, (0, key.shape[3] - width))
    out, lse = _FLASH(query, key, wide, 0.0, causal, attn_mask=mask, scale=scale)
    return out[..., :width], lse


def _products(
    states: Attended, scale: float, mask: torch.Tensor | None, *, causal: bool, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run plain products, with scores and sums in float32 at least."""
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
    """The formula of a module's attention.

    Attributes:
        scale: factor of the scores.
        softcap: cap of the scaled scores, if there is one.
        sinks: a logit for each head, if there are sinks.
    """

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def form_of(module: torch.nn.Module, eager: Eager, states: Attended, handed: Mapping[str, Any]) -> AttentionForm | None:
    """Return the form of ``module``, which passed ``handed`` to its attention; None if no form gives the same result.

    It takes one short call of ``eager``, and one of dense_attention for each possible form. states: the inputs of a
    call, of which only the shapes count; the comparison runs in float32.
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
        except Exception:  # noqa: BLE001 - the function needs other arguments, so that no form fits
            return None
        asked = _forms(module, query.shape[3], handed)
        return next((one for one in asked if _same(one, noise, mask, wanted)), None)


def _forms(module: torch.nn.Module, width: int, handed: Mapping[str, Any]) -> list[AttentionForm]:
    """Return the forms that ``module`` may have, the simplest first."""
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
        return AttentionBackend(value)  # type: ignore[arg-type]  # the enumeration rejects all other values
    except ValueError as error:
        raise ConfigError(f"{name} must be one of {', '.join(AttentionBackend)}, got {shown(value)}") from error


Attend = Callable[[torch.Tensor, KVPages, AttentionForm], torch.Tensor]
"""Attends with queries [tokens, heads, width] over the pages of a layer: [tokens, heads, width of a value]."""
Prepare = Callable[[PagedBatch, AttentionMask, LayerShape, KVPages], Attend]
"""Prepares a Step's reads under a mask, for all layers with pages like the given ones."""
Write = Callable[[KVPages, torch.Tensor, torch.Tensor], None]
"""Writes the keys and values of a Step's tokens, [tokens, heads, width] each, into the pages of a layer."""


@dataclass(frozen=True, slots=True)
class LayerRead:
    """The reads of a layer.

    Attributes:
        group: number of its group.
        mask: the tokens that it sees.
        whole: whether its context must be in one piece.
        heads: its shape, if a kernel reads its pages; None for gathered contexts.
    """

    group: int
    mask: AttentionMask
    whole: bool = True
    heads: LayerShape | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """A Step in layers with equal reads.

    Attributes:
        write_kv: writes keys and values into the slots of the Step's tokens.
        pages: pages of each layer, by index.
        attend: attends over pages.
    """

    write_kv: Write
    pages: Mapping[int, KVPages]
    attend: Attend

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the keys and values of the step's tokens, [1, heads, tokens, width]."""
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
    """Return a function that writes into the first ``tokens`` slots that ``table`` has committed.

    With Triton or on a GPU it is one kernel launch. Otherwise torch runs, which checks the slots first and waits for
    the device. Raises WorkerError as ``write_slots``.
    """
    slots = table.slot_mapping[:tokens]
    if backend is AttentionBackend.TRITON or copy_kernels(table.device) is not TORCH:
        return functools.partial(triton_write_kv, slots)
    blocks = table.id_limit * table.blocks_per_kv_block
    return functools.partial(write_kv, write_slots(slots, blocks, table.block_size))
