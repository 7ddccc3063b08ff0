"""`hybridkv calibrate`: measure how fast this machine runs a model, as a hardware file for replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from hybridkv.cli.engine_options import ModelOptions, attention_option, checking
from hybridkv.cli.options import cache_option, output_option, run_option
from hybridkv.cli.output import console, progress_bar, table
from hybridkv.errors import ConfigError
from hybridkv.request import SamplingParams
from hybridkv.simulator.calibration import (
    FITTED,
    HELD_BACK,
    Measured,
    Shape,
    fitted,
    predicted,
    relative_errors,
    shapes_within,
    steps_of,
    toml_of,
)
from hybridkv.simulator.cost import StepCost
from hybridkv.simulator.hardware import BF16, FP32
from hybridkv.units import MOST_COUNT, format_count

if TYPE_CHECKING:  # it needs torch, which is loaded once the command runs
    from hybridkv.runner.engine import Engine
    from hybridkv.runner.load import LoadedModel

_LONGEST: Final = 2048


def calibrate_command(
    *,
    model: ModelOptions,
    out: Path = output_option("Hardware file to write, in TOML.", metavar="FILE", default=Path("machine.toml")),
    memory: str = cache_option("Cache memory: 8GiB, or a number of bytes.", default="2GiB"),
    repeat: int = run_option("Runs of each request shape; the fastest counts.", min=1, max=MOST_COUNT, default=3),
    scale: int = run_option(
        "Factor that multiplies prompt lengths; a GPU needs long prompts to be busy.", min=1, max=1024, default=1
    ),
    attention: str = attention_option(),
) -> None:
    """Measure how fast this machine runs a model.

    The command writes a file for `replay --hardware FILE`, and prints the error of replays on shapes it did not fit.
    """
    if out.suffix != ".toml":
        raise ConfigError(f"--out {out} must end in .toml: --hardware recognises files by that suffix")
    loaded = model.load()
    from hybridkv.runner.engine import Engine  # noqa: PLC0415  # see ModelOptions.load
    from hybridkv.runner.options import EngineOptions  # noqa: PLC0415  # same

    options = EngineOptions(attention=attention)
    longest = _longest(loaded, scale)
    with checking(loaded.name):
        opened = Engine(loaded, options=options, memory=memory, max_model_len=longest)
    with opened as engine:
        weights = _weights(loaded)
        cost = StepCost.of(engine.plan, weights=weights)
        asked = [shapes_within((one.scaled(scale) for one in shapes), engine.plan) for shapes in (FITTED, HELD_BACK)]
        with progress_bar("measuring", repeat * sum(map(len, asked)), "runs") as advance:
            spent = _spent(engine, [one for shapes in asked for one in shapes], repeat, advance)
        limits = engine.scheduler.limits
        seen, held_back = (
            [Measured(one, steps_of(engine.plan, limits, one), spent[one]) for one in shapes] for shapes in asked
        )
    machine = replace(cost, hardware=fitted(seen, cost, name=f"measured with {loaded.name}"))
    off = relative_errors(held_back, machine)
    median, worst = f"{np.median(np.abs(off)):.1%}", f"{np.abs(off).max():.1%}"
    said = f"{len(seen)} shapes; relative error of {len(held_back)} others: median {median}, worst {worst}"
    out.write_text(toml_of(machine.hardware, [f"hybridkv calibrate: {said}", f"weights: {weights}"]), "utf-8")
    _print(held_back, machine, off.tolist())
    console().print(f"\nrelative error: median {median}, worst {worst}; written to {out}:\n", soft_wrap=True)
    console().print(f"  hybridkv replay TRACE --model ... --hardware {out} --weights {weights}", soft_wrap=True)


def _longest(loaded: LoadedModel, scale: int) -> int:
    """Return the tokens of the longest request that shapes may have."""
    most = getattr(loaded.model.config, "max_position_embeddings", None)
    return min(_LONGEST * scale, most) if isinstance(most, int) and most > 0 else _LONGEST * scale


def _weights(loaded: LoadedModel) -> str:
    """Return the format of the model's weights, as the cost model names it."""
    import torch  # noqa: PLC0415  # see ModelOptions.load

    return FP32 if next(loaded.model.parameters()).dtype == torch.float32 else BF16


def _spent(engine: Engine, shapes: Sequence[Shape], repeat: int, advance: Callable[[], None]) -> dict[Shape, float]:
    """Return the seconds of each shape: the minimum of ``repeat`` runs, because other load only makes a run longer.

    Each round runs every shape once. A slow minute then affects one run of many shapes, not all runs of one shape.
    """
    draw = np.random.default_rng(0)
    spent: dict[Shape, float] = {}
    for _ in range(repeat):
        for shape in shapes:
            engine.reset_prefix_cache()
            prompts = draw.integers(0, engine.plan.model.vocab_size, (shape.rows, shape.prompt)).tolist()
            begun = time.perf_counter()
            engine.generate(prompts, SamplingParams(max_tokens=shape.output, ignore_eos=True))
            spent[shape] = min(time.perf_counter() - begun, spent.get(shape, float("inf")))
            advance()
    return spent


def _print(measured: Sequence[Measured], cost: StepCost, off: Sequence[float]) -> None:
    rows = table("requests x prompt + output", "steps", "measured", "replayed", "error")
    for one, by in zip(measured, off, strict=True):
        seconds = f"{one.seconds:.3f} s", f"{predicted(one, cost):.3f} s"
        rows.add_row(str(one.shape), format_count(len(one.steps)), *seconds, f"{by:+.1%}")
    console().print(rows)
