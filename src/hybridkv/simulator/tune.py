"""Search for the cheapest setting that meets latency aims. Optuna chooses settings; cells of a sweep evaluate them.

    DIR/study.jsonl     Optuna's journal of the tried settings; a second run resumes there
    DIR/cells/...       the cells, as in a sweep; a cell with a file is not run again

    ttft-p99=1s,tpot-p99=50ms    aims: mean, p50, p90 or p99 of the time to first token (ttft) or of the time per output
                                 token (tpot), in s, ms or us
    h100=2.5/h,l4=0.8/h          prices of one machine per hour (h), day (d) or month of 730 hours (mo), in one currency

If the grid has at most ``trials`` settings, all are tried. Otherwise Optuna's sampler (TPE) selects them. Settings that
meet all aims are ranked by price. The others follow, ranked by the aim that they miss by the largest factor.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError, SweepError
from hybridkv.simulator.hardware import hardware_named
from hybridkv.simulator.sweep import Cell, Swept, sweep
from hybridkv.simulator.trace import RequestSource
from hybridkv.units import shown

_TIMES: Final = {"ttft": "time_to_first_token_s", "tpot": "time_per_output_token_s"}
_STATISTICS: Final = ("mean", "p50", "p90", "p99")
_SECONDS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_HOURS: Final = {"h": 1.0, "d": 24.0, "mo": 730.0}
_NUMBER: Final = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)"


@dataclass(frozen=True, slots=True)
class Aim:
    """A limit on one statistic of a latency over all requests.

    Attributes:
        time: ``ttft`` (time to first token) or ``tpot`` (time per output token).
        statistic: ``mean``, ``p50``, ``p90`` or ``p99``.
        most_s: the limit in seconds.
    """

    time: str
    statistic: str
    most_s: float

    @property
    def name(self) -> str:
        """The aim's name on the command line."""
        return f"{self.time}-{self.statistic}"

    def reached(self, report: Mapping[str, Any]) -> float:
        """Return the statistic in seconds.

        Args:
            report: the document of a replay.
        """
        return float(report[_TIMES[self.time]][self.statistic])


def parse_aims(given: str) -> tuple[Aim, ...]:
    """Parse latency aims.

    Args:
        given: aims separated by commas, for example ``ttft-p99=1s,tpot-p99=50ms``.

    Raises:
        ConfigError: for an invalid aim, and for two limits of one statistic.
    """
    aims: dict[str, Aim] = {}
    for one in given.split(","):
        found = re.fullmatch(rf"\s*([a-z]+)-([a-z0-9]+)\s*=\s*{_NUMBER}\s*([a-z]*)\s*", one)
        if found is None or found[1] not in _TIMES or found[2] not in _STATISTICS:
            raise ConfigError(
                f"--slo {shown(one)} is not an aim: write ttft or tpot, one of {', '.join(_STATISTICS)}, and a limit, "
                "for example ttft-p99=1s,tpot-p99=50ms"
            )
        if found[4] not in _SECONDS:
            raise ConfigError(f"--slo {shown(one)} has no unit of time: use s, ms or us, for example ttft-p99=1s")
        aim = Aim(found[1], found[2], float(found[3]) * _SECONDS[found[4]])
        if not aim.most_s:
            raise ConfigError(f"the limit of --slo {shown(one)} must be above 0: every request takes some time")
        if aim.name in aims:
            raise ConfigError(f"--slo has two limits of {aim.name}: give one")
        aims[aim.name] = aim
    return tuple(aims.values())


def parse_prices(given: str) -> dict[str, float]:
    """Parse prices of machines.

    Args:
        given: prices separated by commas, for example ``h100=2.5/h,l4=0.8/h``.

    Returns:
        The price of one machine per hour, by the name of the hardware.

    Raises:
        ConfigError: for an invalid price, a price without a unit of time, and unknown hardware.
    """
    prices: dict[str, float] = {}
    for one in given.split(","):
        name, mark, price = (part.strip() for part in one.partition("="))
        found = re.fullmatch(rf"{_NUMBER}\s*(?:/\s*([a-z]+))?", price)
        if not mark or found is None:
            raise ConfigError(f"--price {shown(one)} is not a price: write it as h100=2.5/h")
        if found[2] not in _HOURS:
            raise ConfigError(f"--price {shown(one)} has no unit of time: use /h, /d or /mo, for example h100=2.5/h")
        hardware_named(name)
        if not float(found[1]):
            raise ConfigError(f"the price of --price {shown(one)} must be above 0: a free machine needs no tuning")
        prices[name] = float(found[1]) / _HOURS[found[2]]
    return prices


def worst(aims: tuple[Aim, ...], report: Mapping[str, Any]) -> tuple[Aim, float]:
    """Find the aim that uses the largest part of its limit.

    Args:
        aims: the aims.
        report: the document of a replay.

    Returns:
        The aim, and its statistic divided by its limit. All aims are met if this is at most 1.
    """
    return max(((aim, aim.reached(report) / aim.most_s) for aim in aims), key=lambda pair: pair[1])


def request_limit(aims: tuple[Aim, ...], time: str) -> float:
    """Return the lowest limit of one latency, in seconds; infinity without a limit. Each request is compared with it.

    Args:
        aims: the aims.
        time: ``ttft`` or ``tpot``.
    """
    return min((aim.most_s for aim in aims if aim.time == time), default=math.inf)


_STUDY: Final = "study.jsonl"
_REFUSED: Final = 1e9
"""Used part of the worst aim for a setting that cannot serve the trace; above any real part. Chosen by hand."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A setting and its results.

    Attributes:
        cell: the setting.
        price_per_h: price of all its machines per hour.
        refused: the reason why it cannot serve the trace, or ``None``.
        reached: the statistic of each aim in seconds, by the name of the aim; ``None`` if refused.
        worst: name of the aim that uses the largest part of its limit, and that part.
        goodput_per_s: requests per second that meet the aims by their own times.
        tokens: output tokens for one unit of the currency.
    """

    cell: Cell
    price_per_h: float
    refused: str | None = None
    reached: Mapping[str, float] | None = None
    worst: tuple[str, float] = ("", _REFUSED)
    goodput_per_s: float = 0.0
    tokens: float = 0.0

    @property
    def keeps_aims(self) -> bool:
        """Whether the setting meets all aims."""
        return self.worst[1] <= 1

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort key, best first: price and used part of the worst aim, or the reverse if an aim is missed."""
        return (False, self.price_per_h, self.worst[1]) if self.keeps_aims else (True, self.worst[1], self.price_per_h)


def tune(
    source: RequestSource,
    axes: Mapping[str, Sequence[object]],
    aims: tuple[Aim, ...],
    prices: Mapping[str, float],
    folder: str | Path,
    *,
    executor: Executor,
    trials: int = 50,
    at_once: int = 1,
    on_done: Callable[[Tried], None] | None = None,
) -> list[Tried]:
    """Search for the cheapest setting that meets the aims; return the tried settings, best first.

    Args:
        source: the trace or workload.
        axes: values to try, by the name of an option of ``Cell.of``.
        aims: limits that a setting must meet.
        prices: price of one machine per hour, by the name of the hardware.
        folder: folder of the cells and the study; a second run resumes there.
        executor: runs the replays.
        trials: most settings to try, including the settings of earlier runs.
        at_once: settings to choose before the first of their results is known.
        on_done: called with each tried setting.

    Raises:
        ConfigError: for hardware without a price, an unknown model, and a folder that holds cells of another trace.
        SweepError: if a file cannot be written or a worker process is lost.
        ModuleNotFoundError: without Optuna.
    """
    integer("trials", trials, 1)
    unpriced = [str(one) for one in axes["hardware"] if one not in prices]
    if unpriced:
        raise ConfigError(f"no price for {', '.join(unpriced)}: add it, for example --price {unpriced[0]}=2.5/h")
    single: dict[str, Any] = {"first_token_s": request_limit(aims, "ttft"), "per_token_s": request_limit(aims, "tpot")}
    about = json.dumps([[asdict(one) for one in aims], prices], sort_keys=True)
    search = _Search(axes, Path(folder), trials, about)
    tried: dict[Cell, Tried] = {}
    dearest = max(prices.values()) * max(map(_number, axes["tp"])) * max(map(_number, axes["replicas"]))
    while asked := search.ask(at_once):
        cells = [Cell.of(**values, **single) for values in asked]
        for swept in sweep(source, _new(cells, tried), folder, executor):
            tried[swept.cell] = one = _tried(swept, aims, prices)
            if on_done is not None:
                on_done(one)
        search.tell([_value(tried[cell], dearest) for cell in cells])
    if earlier := _new([Cell.of(**values, **single) for values in search.known()], tried):
        tried |= {swept.cell: _tried(swept, aims, prices) for swept in sweep(source, earlier, folder, executor)}
    return sorted(tried.values(), key=lambda one: one.rank)


def _new(cells: Sequence[Cell], tried: Mapping[Cell, Tried]) -> list[Cell]:
    """Return the distinct cells that are not tried yet."""
    return [cell for cell in dict.fromkeys(cells) if cell not in tried]


def _number(value: object) -> int:
    return value if isinstance(value, int) else 1


def _tried(swept: Swept, aims: tuple[Aim, ...], prices: Mapping[str, float]) -> Tried:
    cell = swept.cell
    price_per_h = prices[cell.hardware] * cell.tp * cell.replicas
    report: Any = swept.document.get("report")
    if report is None:
        return Tried(cell, price_per_h, refused=str(swept.document["refused"]))
    aim, taken = worst(aims, report)
    seconds = report["simulated_s"] or 1.0
    return Tried(
        cell,
        price_per_h,
        reached={one.name: one.reached(report) for one in aims},
        worst=(aim.name, taken),
        goodput_per_s=report["requests_within_aims"] / seconds,
        tokens=report["output_tokens"] / (price_per_h * seconds / 3600),
    )


def _value(tried: Tried, dearest: float) -> float:
    """Return the value that Optuna minimises: the price, or a value above every price if an aim is missed."""
    return tried.price_per_h if tried.keeps_aims else dearest * min(1 + tried.worst[1], _REFUSED)


class _Search:
    """The choice of settings, by an Optuna study in a file."""

    def __init__(self, axes: Mapping[str, Sequence[object]], folder: Path, trials: int, about: str) -> None:
        """Open or create the study of ``axes`` and ``about``, a text of everything else that results depend on."""
        import optuna  # noqa: PLC0415  # an extra
        from optuna.storages.journal import JournalFileBackend  # noqa: PLC0415

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._texts = {name: [json.dumps(one) for one in values] for name, values in axes.items()}
        self._choices = {
            name: optuna.distributions.CategoricalDistribution(texts) for name, texts in self._texts.items()
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / _STUDY)))
            self._study = optuna.create_study(
                study_name=f"{json.dumps(self._texts, sort_keys=True)} {about}",
                storage=storage,
                load_if_exists=True,
                sampler=optuna.samplers.TPESampler(seed=0),
                direction="minimize",
            )
        except OSError as error:
            raise SweepError(f"cannot write to {folder} ({error.strerror}): name another folder (--out)") from error
        done = [dict(trial.params) for trial in self._finished()]
        self._left = trials - len(done)
        every = itertools.islice(itertools.product(*self._texts.values()), trials + 1)
        named = [dict(zip(self._texts, one, strict=True)) for one in every]
        self._all = [one for one in named if one not in done] if len(named) <= trials else None
        self._open: list[Any] = []

    def _finished(self) -> list[Any]:
        return [trial for trial in self._study.get_trials(deepcopy=False) if trial.state.is_finished()]

    def ask(self, most: int) -> list[dict[str, Any]]:
        """Return at most ``most`` further settings; an empty list ends the search."""
        count = min(most, self._left if self._all is None else len(self._all))
        for _ in range(count):
            if self._all is not None:
                self._study.enqueue_trial(self._all.pop(0))
            self._open.append(self._study.ask(self._choices))
            self._left -= 1
        return [self._values(trial.params) for trial in self._open]

    def tell(self, values: Sequence[float]) -> None:
        """Report the values of the settings that ``ask`` returned last, in their order."""
        for trial, value in zip(self._open, values, strict=True):
            self._study.tell(trial, value)
        self._open = []

    def known(self) -> list[dict[str, Any]]:
        """Return all tried settings, including the settings of earlier runs."""
        return [self._values(trial.params) for trial in self._finished()]

    def _values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {name: json.loads(text) for name, text in params.items()}
