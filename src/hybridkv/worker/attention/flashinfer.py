"""Paged attention by FlashInfer, where flashinfer-python is installed: its two wrappers behind our own arguments.

    step      FlashInfer.batch(reads, mask, pages)      the list of pages, and nothing else yet
    layer     flashinfer_paged_attention                plans once for its scale and cap, then every layer runs

Steps that only decode run its decode kernels, all others its prefill kernels. Both give log-sum-exps, so that sinks
are put in behind them (``with_sink``), whatever kernels of theirs know of sinks.
Written for flashinfer-python 0.7, whose FA2 kernels have all that is asked for on every GPU since Ampere.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker.attention.attention_mask import CAUSAL, AttentionMask
from hybridkv.worker.attention.paged_attention import PagedBatch, check_layer, paged_attention
from hybridkv.worker.attention.paged_index import PagedIndex, paged_index
from hybridkv.worker.attention.partial_attention import with_sink
from hybridkv.worker.pages.kv_pages import KVPages

_DEVICES: Final = ("cuda",)
_QUERIES: Final = (torch.bfloat16, torch.float16)
_WIDTHS: Final = (64, 128, 256)
"""Columns of a head for which its kernels are compiled."""
_ALIGNED: Final = 16
"""Bytes that its kernels load at a time."""
_WORKSPACE_BYTES: Final = 128 << 20
"""What its documentation recommends; all wrappers share it, since their kernels run one after the other."""
_TENSOR_CORE_GROUP: Final = 4
"""Query heads of a KV head from which tensor cores decode faster; others have kernels for 1 to 3."""


def flashinfer_refusal(pages: KVPages, num_heads: int, dtype: torch.dtype, mask: AttentionMask = CAUSAL) -> str | None:
    """Why FlashInfer cannot run a layer of ``num_heads`` query heads of ``dtype`` over ``pages``; None where it can."""
    keys, values = pages.keys, pages.values
    width, stored = keys.shape[3], (dtype, torch.float8_e4m3fn)
    steps = (keys.data_ptr(), values.data_ptr(), *(keys.element_size() * one for one in keys.stride()[:3]))
    alike = keys.stride() == values.stride() and keys.stride(3) == 1
    found = (
        (dtype not in _QUERIES, f"queries of {dtype}: it takes float16 and bfloat16"),
        (
            keys.dtype not in stored or values.dtype != keys.dtype,
            f"pages of {keys.dtype} under queries of {dtype}: it takes the same, or float8_e4m3fn",
        ),
        (
            width not in _WIDTHS or values.shape[3] != width,
            f"keys of {width} and values of {values.shape[3]} columns: it takes both of one of {_WIDTHS}",
        ),
        (num_heads % pages.num_kv_heads, f"{num_heads} query heads, no multiple of {pages.num_kv_heads} KV heads"),
        (
            not alike or any(step % _ALIGNED for step in steps),
            f"pages whose keys and values do not lie alike, or not at multiples of {_ALIGNED} bytes",
        ),
        (mask.first_tokens, f"{mask.first_tokens} tokens at the beginning that are seen besides"),
        (
            (mask.chunk or 0) % pages.block_size,
            f"chunks of {mask.chunk} tokens, no multiple of the {pages.block_size} of a page",
        ),
    )
    return next((why for wrong, why in found if wrong), None)


class _Plan(NamedTuple):
    """What layers have in common that run one plan, beside the pages' list."""

    decodes: bool
    num_heads: int
    scale: float
    softcap: float | None


class FlashInfer:
    """The wrappers on one device. Raises ConfigError where FlashInfer is not installed or the device is no GPU.

    A wrapper holds one plan at a time: layers that read alike share one. The pages of one of them stand for all, the
    same KVPages in every step.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = _flashinfer()
        if device.type not in _DEVICES:
            raise ConfigError(f"FlashInfer runs on CUDA GPUs, not on {device}: use attention=gather")
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[KVPages, _Plan], Any] = {}
        self._sent: dict[Any, torch.cuda.Event] = {}

    def batch(self, batch: PagedBatch, mask: AttentionMask, pages: KVPages) -> FlashInferBatch:
        """``batch`` under ``mask`` for layers that read like the one of ``pages``. Made once a step; the last one ends.

        Raises WorkerError as ``paged_index`` does. O(requests + pages).
        """
        return FlashInferBatch(self, batch, mask, pages, paged_index(batch, mask))

    def wrapper_of(self, batch: FlashInferBatch, plan: _Plan) -> Any:  # noqa: ANN401 - FlashInfer's, either of two
        """The one that holds ``plan`` of layers like those of ``batch``, to be planned anew."""
        key = (batch.pages, plan)
        if key not in self._wrappers:
            self._wrappers[key] = self._made(plan, plan.num_heads // batch.pages.num_kv_heads)
        return self._wrappers[key]

    def _made(self, plan: _Plan, group: int) -> Any:  # noqa: ANN401 - as above
        if not plan.decodes:
            return self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="NHD", backend="fa2")
        return self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, kv_layout="NHD", use_tensor_cores=group >= _TENSOR_CORE_GROUP, backend="fa2"
        )

    def wait_for_plan(self, wrapper: object) -> None:
        """Until the last plan of ``wrapper`` has left the host memory that the next one writes: seldom at all."""
        if wrapper in self._sent:
            self._sent[wrapper].synchronize()

    def planned(self, wrapper: object) -> None:
        """``wrapper`` has a new plan, which is on its way."""
        if self._workspace.is_cuda:
            self._sent[wrapper] = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own is not typed
            self._sent[wrapper].record()


@dataclass(slots=True, eq=False)
class FlashInferBatch:
    """A PagedBatch under one mask as a list of pages; planned when the first layer of a scale and cap runs.

    pages: of the layer that stands for all that are read with it.
    """

    owner: FlashInfer
    batch: PagedBatch
    mask: AttentionMask
    pages: KVPages
    index: PagedIndex
    ready: dict[_Plan, Any] = field(default_factory=dict)

    def wrapper(self, query: torch.Tensor, pages: KVPages, scale: float, softcap: float | None) -> Any:  # noqa: ANN401
        """Planned for a layer like this. WorkerError for one that FlashInfer cannot run."""
        plan = _Plan(self.index.one_query_each, query.shape[1], scale, softcap)
        if plan in self.ready:
            return self.ready[plan]
        why = flashinfer_refusal(pages, query.shape[1], query.dtype, self.mask)
        if why is not None:
            raise WorkerError(f"FlashInfer cannot run a layer with {why}; use paged_attention")
        wrapper, index = self.owner.wrapper_of(self, plan), self.index
        self.owner.wait_for_plan(wrapper)
        listed = (index.indptr, index.indices, index.last_page_len)
        shape = (query.shape[1], pages.num_kv_heads, pages.keys.shape[3], pages.block_size)
        kept = {
            "sm_scale": scale,
            "window_left": -1 if self.mask.window is None else self.mask.window - 1,
            "logits_soft_cap": softcap,
            "q_data_type": query.dtype,
            "kv_data_type": pages.keys.dtype,
        }
        if plan.decodes:
            wrapper.plan(*listed, *shape, **kept)
        else:
            wrapper.plan(index.query_indptr, *listed, *shape, causal=self.mask.causal, **kept)
        self.owner.planned(wrapper)
        self.ready[plan] = wrapper
        return wrapper


def flashinfer_paged_attention(
    query: torch.Tensor,
    pages: KVPages,
    batch: FlashInferBatch,
    scale: float,
    *,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``paged_attention`` gives, the output rounded to the dtype of the query before it is given as float32.

    query, pages, scale, softcap, sink_logits: as there. Raises WorkerError for shapes that do not match, and for
    layers that FlashInfer cannot run. Never waits for the device, but for a plan of two steps ago on its way there.
    """
    check_layer(query, pages, batch.batch, softcap=softcap, sink_logits=sink_logits)
    if not len(query):
        return paged_attention(query, pages, batch.batch, scale, mask=batch.mask)
    scales = {"k_scale": pages.key_scale, "v_scale": pages.value_scale}
    asked = {name: one for name, one in scales.items() if one != 1.0}
    wrapper = batch.wrapper(query, pages, scale, softcap)
    made, sums = wrapper.run(query, (pages.keys, pages.values), return_lse=True, **asked)
    out, lse = made.to(torch.float32), sums * math.log(2.0)  # theirs are of base 2
    return (out, lse) if sink_logits is None else with_sink(out, lse, sink_logits)


def _flashinfer() -> ModuleType:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            "attention=flashinfer needs FlashInfer: pip install flashinfer-python, or use triton or gather"
        ) from error
