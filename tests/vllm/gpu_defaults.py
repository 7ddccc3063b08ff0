"""What vllm_engine.py changes in its process so that engines on GPUs and on CPUs can be compared.

``schedule_ahead``         async scheduling on CPUs: AsyncScheduler, two batches in the engine's queue, the async runner
``prefer_second_runner``   model runner V2 where it is not set by hand, as where Triton compiles
``tune_nothing``           one config of each autotuned kernel
``count_replays``          captured graphs that ran
"""

from collections import Counter, deque
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from vllm.config import vllm as config
from vllm.platforms.cpu import CpuPlatform


class Done:
    """A stream or an event of a device whose work is done when a call returns, as that of a CPU is."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - methods that wait, and return nothing
        if name not in {"record", "synchronize", "wait", "wait_event", "wait_stream"}:
            raise AttributeError(name)
        return lambda *_, **__: None


class Counted(deque[Any]):
    """The queue of batches of an engine. longest: most batches that it held."""

    longest = 0

    def appendleft(self, batch: Any) -> None:  # noqa: ANN401 - vLLM's
        super().appendleft(batch)
        self.longest = max(self.longest, len(self))


def schedule_ahead() -> None:
    """Let the CPU platform keep the async scheduling that is asked for, and let its runner do without CUDA."""
    if torch.cuda.is_available():  # vLLM does it itself
        return
    check = CpuPlatform.check_and_update_config.__func__

    def keep(cls: type[CpuPlatform], vllm_config: Any) -> None:  # noqa: ANN401 - vLLM's
        asked = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(keep)
    torch.cuda.Stream = torch.cuda.Event = Done  # type: ignore[assignment, misc]
    torch.cuda.stream = nullcontext  # type: ignore[assignment]
    torch.cuda.current_stream = Done  # type: ignore[assignment]


def tune_nothing() -> None:
    """Give autotuned kernels their smallest config. Which one is fastest depends on the moment, and rounding on it."""
    if not torch.cuda.is_available():  # Triton compiles nothing
        return
    from triton.runtime.autotuner import Autotuner  # noqa: PLC0415 - not where vLLM has no Triton

    run = Autotuner.run

    def smallest(config: Any) -> int:  # noqa: ANN401 - Triton's
        return int(config.num_stages * prod(config.kwargs.values()))

    def untuned(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - Triton's
        self.configs = [min(self.configs, key=smallest)]
        return run(self, *args, **kwargs)

    Autotuner.run = untuned


def count_replays() -> Counter[str]:
    """Return counts of which ``"replays"`` grows with every captured graph that runs from now on."""
    counts, replay = Counter[str](), torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        counts["replays"] += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[assignment]
    return counts


def prefer_second_runner() -> None:
    """Let vLLM choose model runner V2 as on a GPU. Whether a CPU can run it is another question."""
    config.HAS_TRITON = True
