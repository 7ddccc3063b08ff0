"""What FlashInfer documents of its two wrappers, in plain torch: stands for the package where there is no GPU.

Names and order of arguments are those of flashinfer-python 0.7.2 (``plan`` and ``run``, what hybridkv hands over);
tests/worker/test_flashinfer.py holds them against the package where it is installed. As its kernels do, pages are read
whole: keys that a window hides weigh 0, and 0 times what is no number is none. What lies behind ``last_page_len`` is
never read.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import pytest
import torch

from hybridkv.worker.attention import flashinfer

LIMITS = {name: getattr(flashinfer, name) for name in ("_DEVICES", "_QUERIES", "_WIDTHS", "_ALIGNED")}
GROUPS_WITHOUT_TENSOR_CORES = (1, 2, 3, 4, 6, 8, 16)


@dataclass(frozen=True)
class _Planned:
    queries: list[int]
    pages: list[int]
    indices: torch.Tensor
    last: list[int]
    shape: tuple[int, int, int, int]
    causal: bool
    scale: float
    window_left: int
    softcap: float
    dtypes: tuple[torch.dtype, torch.dtype]


def _checked(name: str, values: torch.Tensor, length: int | None = None) -> list[int]:
    assert values.dtype == torch.int32, f"{name} must be int32, got {values.dtype}"
    assert values.dim() == 1, name
    assert length is None or len(values) == length, f"{name} has {len(values)} numbers, not {length}"
    return values.tolist()


class _Wrapper:
    """Both."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, backend: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        assert backend in ("auto", "fa2", "fa3")
        self._planned: _Planned | None = None
        self.plans = 0

    def _plan(
        self,
        queries: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        shape: tuple[int, int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype | None],
        *,
        causal: bool,
        sm_scale: float | None,
        window_left: int,
        logits_soft_cap: float | None,
    ) -> None:
        starts = _checked("qo_indptr", queries)
        indptr = _checked("paged_kv_indptr", pages[0], len(starts))
        _checked("paged_kv_indices", pages[1], indptr[-1])
        last = _checked("paged_kv_last_page_len", pages[2], len(starts) - 1)
        assert all(1 <= one <= shape[3] for one in last), f"1 <= last_page_len <= {shape[3]}, got {last}"
        assert starts[0] == indptr[0] == 0
        assert shape[0] % shape[1] == 0
        self.plans += 1
        self._planned = _Planned(
            starts,
            indptr,
            pages[1],
            last,
            shape,
            causal,
            1 / math.sqrt(shape[2]) if sm_scale is None else sm_scale,
            window_left,
            logits_soft_cap or 0.0,
            (dtypes[0], dtypes[0] if dtypes[1] is None else dtypes[1]),
        )

    def _run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        k_scale: float | None,
        v_scale: float | None,
        *,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        plan = self._planned
        assert plan is not None, "run before plan"
        keys, values = paged_kv_cache
        heads, kv_heads, width, size = plan.shape
        assert (q.dtype, keys.dtype) == plan.dtypes, f"planned for {plan.dtypes}"
        assert q.shape == (plan.queries[-1], heads, width)
        assert keys.shape[1:] == values.shape[1:] == (size, kv_heads, width)
        assert keys.stride() == values.stride(), "K/V strides differ"
        # in float32 or more: rounding is the kernels' own affair
        exact = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=exact, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=exact, device=q.device)
        for piece, last in enumerate(plan.last):
            mine = slice(plan.queries[piece], plan.queries[piece + 1])
            ids = plan.indices[plan.pages[piece] : plan.pages[piece + 1]].long()
            tokens = size * (len(ids) - 1) + last
            k, v = (one[ids].flatten(0, 1)[:tokens].to(exact) for one in (keys, values))
            k, v = (one.repeat_interleave(heads // kv_heads, dim=1) for one in (k, v))
            scores = torch.einsum("qhw,khw->hqk", q[mine].to(exact), k) * plan.scale * (k_scale or 1.0)
            if plan.softcap > 0:
                scores = plan.softcap * torch.tanh(scores / plan.softcap)
            count = mine.stop - mine.start
            at, key = torch.arange(count)[:, None] + tokens - count, torch.arange(tokens)[None]
            seen = torch.ones(count, tokens, dtype=torch.bool)
            if plan.causal:
                seen &= key <= at
            if plan.window_left >= 0:
                seen &= key + plan.window_left >= at
            scores = scores.masked_fill(~seen.to(q.device), -torch.inf)
            lse[mine] = torch.logsumexp(scores, -1).T
            out[mine] = torch.einsum("hqk,khw->qhw", torch.softmax(scores, -1), v) * (v_scale or 1.0)
        made = out.to(q.dtype)
        return (made, lse.float() * math.log2(math.e)) if return_lse else made


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Requests of any number of queries, which are the last of their tokens."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(  # noqa: PLR0917 - as there
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        """Of one batch, for every layer alike."""
        self._plan(
            qo_indptr,
            (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            (q_data_type, kv_data_type),
            causal=causal,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Out, and log-sum-exps of base 2."""
        return self._run(q, paged_kv_cache, k_scale, v_scale, return_lse=return_lse)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """Requests of one query each: their last token."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self._tensor_cores = use_tensor_cores

    def plan(  # noqa: PLR0917 - as there
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        """Of one batch, for every layer alike."""
        group = num_qo_heads // num_kv_heads
        assert self._tensor_cores or group in GROUPS_WITHOUT_TENSOR_CORES, f"Unsupported group_size: {group}"
        self._plan(
            torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            (indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            (q_data_type, kv_data_type),
            causal=False,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As that of the other."""
        return self._run(q, paged_kv_cache, k_scale, v_scale, return_lse=return_lse)


def install(patch: pytest.MonkeyPatch) -> None:
    """This module as the package, and heads of any width and dtype on any device."""
    patch.setitem(sys.modules, "flashinfer", sys.modules[__name__])
    patch.setattr(flashinfer, "_DEVICES", ("cpu", "cuda"))
    patch.setattr(flashinfer, "_QUERIES", (torch.float32, torch.float64, torch.bfloat16, torch.float16))
    patch.setattr(flashinfer, "_WIDTHS", range(1, 1 << 10))
    patch.setattr(flashinfer, "_ALIGNED", 1)
    patch.setattr(flashinfer, "_WORKSPACE_BYTES", 1 << 10)


def as_documented(patch: pytest.MonkeyPatch) -> None:
    """Its own limits again, within a test that runs under ``install``."""
    for name, value in LIMITS.items():
        patch.setattr(flashinfer, name, value)
