"""vLLM's workers in the natural layout: ``--worker-cls hybridkv.vllm.NaturalWorker``, whatever the platform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from hybridkv.errors import ConfigError
from hybridkv.vllm.natural_layout import NaturalLayout

if TYPE_CHECKING:
    from vllm.v1.kv_cache_layout import KVCacheLayout


class NaturalGPUWorker(NaturalLayout, Worker):  # type: ignore[misc] # vLLM is not typed here
    """vLLM's worker for GPUs (CUDA, ROCm)."""


def _worker() -> type[NaturalLayout]:
    """Return the worker of this platform."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: PLC0415 - importing it changes torch

        class NaturalCPUWorker(NaturalLayout, CPUWorker):  # type: ignore[misc] # as above
            """vLLM's worker for CPUs."""

            @staticmethod
            def packs(layout: KVCacheLayout) -> bool:
                """Kernels for CPUs name the order inside a page alone, and go from block to block by strides."""
                return bool(layout.is_block_compact)

        return NaturalCPUWorker
    if not current_platform.is_cuda_alike():
        raise ConfigError("NaturalWorker runs on CPUs and on GPUs of CUDA and ROCm: leave --worker-cls out")
    return NaturalGPUWorker


NaturalWorker = _worker()
