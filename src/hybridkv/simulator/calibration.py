"""Fit a machine's rates to measured times of an engine on that machine.

    Shape (rows x prompt + output) -> steps_of: its Steps -> measured seconds -> fitted: Hardware

The modelled seconds of a step are ``max(a * operations of weights + b * operations of attention, c * bytes) + d * rows
+ e * rows of several tokens + f`` (hybridkv.simulator.cost). The fit finds ``a`` to ``f``. The larger side of the
maximum depends on these rates, so the fit alternates. With the side of each step fixed, the rest is linear. Least
squares of relative errors solve it, with every rate at least 0; the new rates then choose the sides. The search starts
once for each of several ridges (Williams et al., CACM 52(4), 2009): at first, steps with fewer operations per byte than
the ridge are bound by memory. The rates with the smallest error are the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
"""Most alternations of sides and rates from one start; a start ends early when no side changes. Chosen by hand."""
_RIDGES: Final = tuple(n / 12 for n in range(1, 12))
"""Starts of the search: the share of all steps that are bound by memory at first."""
_FASTEST: Final = 1e21
"""Upper limit of a fitted rate, for work that limits no measured step. Its time is negligible at this rate."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests that start at the same time and share no tokens.

    Attributes:
        rows: number of requests.
        prompt: prompt tokens of each request.
        output: output tokens of each request.
    """

    rows: int
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.prompt} + {self.output}"

    @property
    def tokens(self) -> int:
        """Prompt and output tokens of one request."""
        return self.prompt + self.output

    def scaled(self, times: int) -> Shape:
        """Return the shape with longer prompts.

        Args:
            times: factor of the prompt tokens.
        """
        return Shape(self.rows, self.prompt * times, self.output)


FITTED: Final = (
    *(Shape(1, prompt, 1) for prompt in (16, 64, 256, 512, 1024, 1536)),
    *(Shape(rows, 128, 1) for rows in (2, 4, 8, 16)),
    *(Shape(1, prompt, 24) for prompt in (16, 256, 1024)),
    *(Shape(4, prompt, 24) for prompt in (16, 256, 768)),
    *(Shape(16, prompt, 16) for prompt in (16, 128, 384)),
    Shape(32, 32, 16),
)
"""Shapes from which rates are fitted."""

HELD_BACK: Final = (
    *(Shape(1, prompt, 1) for prompt in (128, 384, 1280)),
    *(Shape(rows, 200, 1) for rows in (3, 12)),
    *(Shape(1, prompt, 32) for prompt in (100, 600)),
    *(Shape(rows, 100, 32) for rows in (2, 8, 24)),
    *(Shape(rows, 500, 20) for rows in (3, 10)),
)
"""Shapes that the fitted rates are tested with; FITTED holds no shape of these."""


class Measured(NamedTuple):
    """A measured shape.

    Attributes:
        shape: the requests.
        steps: the steps that an engine runs for them.
        seconds: measured seconds of all steps together.
    """

    shape: Shape
    steps: tuple[Step, ...]
    seconds: float


def shapes_within(shapes: Iterable[Shape], plan: Plan) -> tuple[Shape, ...]:
    """Return the shapes that run without a preemption: all their requests fit into the cache.

    Args:
        shapes: shapes to select from.
        plan: the plan of model and cache.

    Raises:
        ConfigError: if fewer than half of the shapes fit.
    """
    every = tuple(shapes)
    fit = plan.capacity.tokens_that_fit
    some = tuple(
        one
        for one in every
        if one.tokens <= plan.max_model_len and (fit is None or one.rows * (one.tokens + plan.model.block_size) <= fit)
    )
    if 2 * len(some) < len(every):
        raise ConfigError(
            f"only {len(some)} of {len(every)} shapes fit: the plan allows {plan.max_model_len} tokens for each request"
            f"{'' if fit is None else f' and {fit} for all together'}: raise the memory (--memory), or lower --scale"
        )
    return some


def steps_of(plan: Plan, limits: SchedulerLimits, shape: Shape) -> tuple[Step, ...]:
    """Return the Steps that an engine runs for a shape; token ids are arbitrary. O(steps * rows).

    Args:
        plan: the plan of model and cache.
        limits: limits of the engine's scheduler.
        shape: the requests.
    """
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
        offsets = np.concatenate(([0], np.cumsum(step.samples)))
        scheduler.update(StepResult(step.id, Csr(offsets, np.zeros(offsets[-1], np.int32))))
    return tuple(step for step in steps if len(step))


def fitted(measured: Sequence[Measured], cost: StepCost, name: str) -> Hardware:
    """Fit a machine to measured shapes. Its rates are reached rates, so its efficiencies are 1.

    Args:
        measured: at least six shapes.
        cost: the cost of the measured model; its hardware does not matter.
        name: name of the machine.

    Raises:
        ConfigError: for fewer than six shapes, and for a shape without seconds.
    """
    work = [np.array([_work(step, cost) for step in one.steps]) for one in measured]
    seconds = np.array([one.seconds for one in measured])
    if len(measured) < 6:
        raise ConfigError(f"{len(measured)} shapes do not determine 6 rates: measure at least 6 shapes")
    if not (seconds > 0).all():
        fastest = measured[int(seconds.argmin())]
        raise ConfigError(f"shape {fastest.shape} took {fastest.seconds:g} s, not above 0 s: measure it again")
    best, least = np.zeros(6), float("inf")
    intensity = [one[:, :2].sum(axis=1) / one[:, 2] for one in work]  # operations per byte
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
    row_s, prompt_row_s, overhead_s = best[3:].tolist()
    return Hardware(
        name,
        flops_per_s=1 / weights,
        bytes_per_s=1 / moved,
        compute_efficiency=1.0,
        memory_efficiency=1.0,
        overhead_s=overhead_s,
        attention_efficiency=weights / attention,
        row_s=row_s,
        prompt_row_s=prompt_row_s,
    )


def predicted(one: Measured, cost: StepCost) -> float:
    """Return the modelled seconds of a measured shape.

    Args:
        one: the measured shape.
        cost: the cost model.
    """
    return sum(cost.seconds(step) for step in one.steps)


def relative_errors(measured: Iterable[Measured], cost: StepCost) -> NDArray[np.float64]:
    """Return (modelled - measured) / measured seconds of each shape, float64[shapes].

    Args:
        measured: the measured shapes.
        cost: the cost model.
    """
    return np.array([predicted(one, cost) / one.seconds - 1 for one in measured])


_FITTED_FIELDS: Final = (
    *("flops_per_s", "bytes_per_s", "compute_efficiency", "memory_efficiency", "attention_efficiency"),
    *("overhead_s", "row_s", "prompt_row_s"),
)


def toml_of(hardware: Hardware, comments: Sequence[str] = ()) -> str:
    """Return the text of a TOML file that hardware_named reads.

    Args:
        hardware: the machine.
        comments: lines of the comment at the top of the file.
    """
    name = hardware.name.replace("\\", "\\\\").replace('"', '\\"')
    rates = (f"{rate} = {getattr(hardware, rate)!r}" for rate in _FITTED_FIELDS)
    return "\n".join([*(f"# {line}" for line in comments), f'name = "{name}"', *rates, ""])


def _work(step: Step, cost: StepCost) -> tuple[float, float, float, float, float, float]:
    """Return one step's operations of weights and of attention, bytes, rows, rows of several tokens, and a 1."""
    computed, scheduled = step.num_computed.astype(np.int64), step.num_scheduled.astype(np.int64)
    flops, weight_bytes = cost.work(step.num_tokens, encoded_tokens(step))
    moved = weight_bytes + cost.traffic.bytes_of(step)
    return flops, cost.operations.of_rows(computed, scheduled), moved, len(step), int((scheduled > 1).sum()), 1


def _summed(work: NDArray[np.float64], bound_by_bytes: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the work of all steps of a shape, float64[6].

    Steps that are bound by memory count without operations, other steps without bytes.

    Args:
        work: work of each step, float64[steps, 6], as _work returns it.
        bound_by_bytes: the steps that are bound by memory, bool[steps].
    """
    counted = work.copy()
    counted[bound_by_bytes, :2] = 0
    counted[~bound_by_bytes, 2] = 0
    summed: NDArray[np.float64] = counted.sum(axis=0)
    return summed


def _seconds(work: Sequence[NDArray[np.float64]], rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the modelled seconds of each shape, float64[shapes], with ``rates`` in seconds per unit, float64[6]."""
    return np.array([_step_seconds(one, rates).sum() for one in work])


def _step_seconds(work: NDArray[np.float64], rates: NDArray[np.float64]) -> NDArray[np.float64]:
    compute_s, memory_s = work[:, :2] @ rates[:2], work[:, 2] * rates[2]
    seconds: NDArray[np.float64] = np.maximum(compute_s, memory_s) + work[:, 3:] @ rates[3:]
    return seconds


def _solved(work: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds per unit of each kind of work, float64[6], by least squares of relative errors.

    While a solution has kinds below 0, the lowest kind is fixed at 0 and the rest is solved again.

    Args:
        work: work of each shape, float64[shapes, 6].
        seconds: measured seconds of each shape, float64[shapes].
    """
    scaled = work / seconds[:, None]
    size = np.where(scaled.any(axis=0), np.abs(scaled).max(axis=0), 1)
    kept: NDArray[np.bool_] = np.array(scaled.any(axis=0), ndmin=1)
    found = np.zeros(scaled.shape[1])
    while kept.any():
        solution = np.linalg.lstsq(scaled[:, kept] / size[kept], np.ones(len(seconds)), rcond=None)[0]
        if (solution >= 0).all():
            found[kept] = solution / size[kept]
            break
        worst = np.flatnonzero(kept)[int(solution.argmin())]
        kept[worst] = False
    return found
