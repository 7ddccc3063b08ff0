"""A forward that runs beside whoever schedules the next Step.

    engine    [ schedule n + 1 ] [ update n, text ] [ schedule n + 2 ] ..
    thread    [   forward n    ]                    [ forward n + 1  ]

Nothing runs between two calls of an engine: models, requests and observers are then the caller's. What a forward waits
for, kernels of a CPU or the copy of tokens from another device, leaves Python to the scheduler.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hybridkv.runner.runner import ModelRunner
    from hybridkv.step import Step, StepResult


class ForwardThread:
    """Runs Steps of ``runner``, one at a time. Its thread begins with the first that does not run at once."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hybridkv-forward")
        self._running: Future[StepResult] | None = None
        self.seconds = 0.0
        """Of the forward that ran last."""

    def begin(self, step: Step) -> None:
        """``step`` runs in the thread from now on, if it does not yet; ``result`` is to be asked for it next."""
        if self._running is None:
            self._running = self._thread.submit(self._execute, step, inference=torch.is_inference_mode_enabled())

    def _execute(self, step: Step, *, inference: bool) -> StepResult:
        """In the thread, which has a device and an inference mode of its own."""
        device = self._runner.model.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode(inference):
            return self._timed(step)

    def wait(self) -> None:
        """Until nothing runs, however it ended."""
        if self._running is not None:
            wait([self._running])

    def result(self, step: Step) -> StepResult:
        """Of ``step``: it has run, or runs here and now. Raises what its forward raised."""
        running, self._running = self._running, None
        return self._timed(step) if running is None else running.result()

    def _timed(self, step: Step) -> StepResult:
        began = time.perf_counter()
        result = self._runner.execute(step)
        self.seconds = time.perf_counter() - began
        return result

    def close(self) -> None:
        """Wait for what runs; the thread ends."""
        self._thread.shutdown()
