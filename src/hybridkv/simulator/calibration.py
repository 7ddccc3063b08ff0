"""Fit a machine's rates to the times of its engine: shapes of requests, their steps, and the fit.

    Shape (rows x prompt + output) -> steps_of: its Steps, of the real scheduler -> measured seconds -> fitted: Hardware

A step takes ``max(a * operations of weights + b * operations of attention, c * bytes) + d * rows + e``
(hybridkv.simulator.cost). The side of the maximum depends on the rates, so both are found in turn. With each step's
side fixed, the rest is linear and solved by least squares of relative errors, none of the five below zero. The search
starts from several guesses: steps with fewer operations per byte than some ridge (Williams et al.) wait for bytes. The
best result counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.planner import Plan
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.simulator.cost import StepCost, encoded_tokens
from hybridkv.simulator.hardware import Hardware
from hybridkv.step import Csr, Step, StepResult

_TURNS: Final = 50
_RIDGES: Final = tuple(n / 12 for n in range(1, 12))
"""Where the search begins: which share of the steps waits for bytes."""
_FASTEST: Final = 1e21
"""A rate that takes no time worth telling: of what nothing that was measured waits for."""


@dataclass(frozen=True, slots=True)
class Shape:
    """``rows`` requests at once, each of ``prompt`` tokens of its own, and ``output`` tokens after them."""

    rows: int
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.prompt} + {self.output}"

    @property
    def tokens(self) -> int:
        """Tokens of one request, prompt and output."""
        return self.prompt + self.output

    def scaled(self, times: int) -> Shape:
        """Return the shape with a prompt that is ``times`` as long."""
        return Shape(self.rows, self.prompt * times, self.output)


FITTED: Final = (
    *(Shape(1, prompt, 1) for prompt in (16, 64, 256, 512, 1024, 1536)),
    *(Shape(rows, 128, 1) for rows in (2, 4, 8, 16)),
    *(Shape(1, prompt, 24) for prompt in (16, 256, 1024)),
    *(Shape(4, prompt, 24) for prompt in (16, 256, 768)),
    *(Shape(16, prompt, 16) for prompt in (16, 128, 384)),
    Shape(32, 32, 16),
)
"""What rates are found from."""

HELD_BACK: Final = (
    *(Shape(1, prompt, 1) for prompt in (128, 384, 1280)),
    *(Shape(rows, 200, 1) for rows in (3, 12)),
    *(Shape(1, prompt, 32) for prompt in (100, 600)),
    *(Shape(rows, 100, 32) for rows in (2, 8, 24)),
    *(Shape(rows, 500, 20) for rows in (3, 10)),
)
"""What they are held against; none of these is in FITTED."""


class Measured(NamedTuple):
    """A shape's steps, and the seconds in which an engine took all of them."""

    shape: Shape
    steps: tuple[Step, ...]
    seconds: float


def shapes_within(shapes: Iterable[Shape], plan: Plan) -> tuple[Shape, ...]:
    """Return the shapes that ``plan`` holds without a preemption. Raises ConfigError if fewer than half of them fit."""
    every = tuple(shapes)
    fit = plan.capacity.tokens_that_fit
    some = tuple(
        one
        for one in every
        if one.tokens <= plan.max_model_len and (fit is None or one.rows * (one.tokens + plan.model.block_size) <= fit)
    )
    if 2 * len(some) < len(every):
        raise ConfigError(
            f"only {len(some)} of {len(every)} shapes fit: requests of at most {plan.max_model_len} tokens"
            f"{'' if fit is None else f', {fit} in all'}: raise the memory (--memory), or lower --scale"
        )
    return some


def steps_of(plan: Plan, limits: SchedulerLimits, shape: Shape) -> tuple[Step, ...]:
    """Return the Steps that an engine of ``plan`` runs for ``shape``; tokens do not matter. O(steps * rows)."""
    cache = KVCacheManager(plan)
    scheduler = Scheduler(cache, limits)
    sampling = SamplingParams(max_tokens=shape.output, ignore_eos=True)
    for row in range(shape.rows):
        prompt = np.arange(shape.prompt) + row * shape.prompt
        scheduler.add(Request(str(row), prompt.astype(np.int32), sampling, hasher=cache.hasher))
    steps: list[Step] = []
    while not scheduler.drained:
        step = scheduler.schedule()
        steps.append(step)
        said = np.concatenate(([0], np.cumsum(step.samples)))
        scheduler.update(StepResult(step.id, Csr(said, np.zeros(said[-1], np.int32))))
    return tuple(step for step in steps if len(step))


def fitted(measured: Sequence[Measured], cost: StepCost, name: str) -> Hardware:
    """Return the machine on which ``measured`` took their seconds, named ``name``; ``cost`` is of the model that ran.

    Rates are the reached ones, so efficiencies are 1. Raises ConfigError if the fit fails, for example with too few
    shapes.
    """
    work = [np.array([_work(step, cost) for step in one.steps]) for one in measured]
    seconds = np.array([one.seconds for one in measured])
    if len(measured) < 5 or not (seconds > 0).all():
        raise ConfigError(
            f"{len(measured)} shapes do not say what a machine does: measure at least five, each above 0 s"
        )
    best, least = np.zeros(5), float("inf")
    intensity = [one[:, :2].sum(axis=1) / one[:, 2] for one in work]  # operations a byte
    for ridge in (0.0, *np.quantile(np.concatenate(intensity), _RIDGES).tolist(), float("inf")):
        bound = [one < ridge for one in intensity]
        for _ in range(_TURNS):
            rates = _solved(np.array([_summed(one, side) for one, side in zip(work, bound, strict=True)]), seconds)
            error = float(np.square(np.log(_seconds(work, rates) / seconds)).mean())
            if error < least:
                best, least = rates, error
            now = [one[:, :2] @ rates[:2] < one[:, 2] * rates[2] for one in work]
            if all((one == other).all() for one, other in zip(now, bound, strict=True)):
                break
            bound = now
    weights, attention, moved = np.maximum(best[:3], 1 / _FASTEST).tolist()
    row_s, overhead_s = best[3:].tolist()
    return Hardware(
        name,
        flops_per_s=1 / weights,
        bytes_per_s=1 / moved,
        compute_efficiency=1.0,
        memory_efficiency=1.0,
        overhead_s=overhead_s,
        attention_efficiency=weights / attention,
        row_s=row_s,
    )


def predicted(one: Measured, cost: StepCost) -> float:
    """Return the modelled seconds of its steps."""
    return sum(cost.seconds(step) for step in one.steps)


def relative_errors(measured: Iterable[Measured], cost: StepCost) -> NDArray[np.float64]:
    """Return the error of ``cost`` for each shape, as a share of the measured seconds."""
    return np.array([predicted(one, cost) / one.seconds - 1 for one in measured])


def toml_of(hardware: Hardware, comments: Sequence[str] = ()) -> str:
    """Return the text of a file that hardware_named reads."""
    said = {
        "name": '"' + hardware.name.replace("\\", "\\\\").replace('"', '\\"') + '"',
        **{
            name: repr(getattr(hardware, name))
            for name in (
                *("flops_per_s", "bytes_per_s", "compute_efficiency", "memory_efficiency", "attention_efficiency"),
                *("overhead_s", "row_s"),
            )
        },
    }
    return "\n".join(
        chain((f"# {line}" for line in comments), (f"{name} = {value}" for name, value in said.items()), ("",))
    )


def _work(step: Step, cost: StepCost) -> tuple[float, float, float, float, float]:
    """Return the work of one step: operations of weights, of attention, bytes, rows, and 1 for the step."""
    computed, scheduled = step.num_computed.astype(np.int64), step.num_scheduled.astype(np.int64)
    flops, weight_bytes = cost.work(step.num_tokens, encoded_tokens(step))
    moved = weight_bytes + cost.traffic.bytes_of(step)
    return flops, cost.operations.of_rows(computed, scheduled), moved, len(step), 1


def _summed(work: NDArray[np.float64], bound_by_bytes: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the work of all steps of a shape, float64[5], without the side of the maximum that does not count."""
    counted = work.copy()
    counted[bound_by_bytes, :2] = 0
    counted[~bound_by_bytes, 2] = 0
    summed: NDArray[np.float64] = counted.sum(axis=0)
    return summed


def _seconds(work: Sequence[NDArray[np.float64]], rates: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([_of_steps(one, rates).sum() for one in work])


def _of_steps(work: NDArray[np.float64], rates: NDArray[np.float64]) -> NDArray[np.float64]:
    compute_s, memory_s = work[:, :2] @ rates[:2], work[:, 2] * rates[2]
    seconds: NDArray[np.float64] = np.maximum(compute_s, memory_s) + work[:, 3:] @ rates[3:]
    return seconds


def _solved(work: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return seconds of each kind of work by least squares of relative errors, without kinds below 0."""
    scaled = work / seconds[:, None]
    size = np.where(scaled.any(axis=0), np.abs(scaled).max(axis=0), 1)
    kept: NDArray[np.bool_] = np.array(scaled.any(axis=0), ndmin=1)
    found = np.zeros(scaled.shape[1])
    while kept.any():
        some = np.linalg.lstsq(scaled[:, kept] / size[kept], np.ones(len(seconds)), rcond=None)[0]
        if (some >= 0).all():
            found[kept] = some / size[kept]
            break
        worst = np.flatnonzero(kept)[int(some.argmin())]
        kept[worst] = False
    return found
