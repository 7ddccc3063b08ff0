"""vLLM's workers in the natural layout: ``--worker-cls hybridkv.vllm.NaturalWorker``, whatever the platform."""

from __future__ import annotations

from importlib import import_module

from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from hybridkv.errors import ConfigError
from hybridkv.vllm.natural_layout import NaturalLayout


class NaturalGPUWorker(NaturalLayout, Worker):  # type: ignore[misc] # vLLM is not typed here
    """vLLM's worker for GPUs (CUDA, ROCm)."""


def _worker() -> type[NaturalLayout]:
    """Of this platform."""
    if current_platform.is_cpu():
        # importing vLLM's worker for CPUs changes torch
        return import_module("hybridkv.vllm.natural_cpu_worker").NaturalCPUWorker  # type: ignore[no-any-return]
    if not current_platform.is_cuda_alike():
        raise ConfigError("NaturalWorker runs on CPUs and on GPUs of CUDA and ROCm: leave --worker-cls out")
    return NaturalGPUWorker


NaturalWorker = _worker()
