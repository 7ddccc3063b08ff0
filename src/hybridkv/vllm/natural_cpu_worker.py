"""vLLM's worker for CPUs in the natural layout; see natural_worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.worker.cpu_worker import CPUWorker

from hybridkv.vllm.natural_layout import NaturalLayout

if TYPE_CHECKING:
    from vllm.v1.kv_cache_layout import KVCacheLayout


class NaturalCPUWorker(NaturalLayout, CPUWorker):  # type: ignore[misc] # vLLM is not typed here
    """vLLM's worker for CPUs."""

    @staticmethod
    def packs(layout: KVCacheLayout) -> bool:
        """Kernels for CPUs name the order inside a page alone, and go from block to block by strides."""
        return bool(layout.is_block_compact)
