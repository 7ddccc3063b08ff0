"""The cheapest setting that keeps the aims: Optuna asks, cells of a sweep answer.

    DIR/study.jsonl     Optuna's journal: what was tried in which order; started again, the search goes on
    DIR/cells/...       as a sweep's, so that nothing is run twice

    ttft-p99=1s,tpot-p99=50ms    mean, p50, p90 or p99 of the time to the first token, and of that per token after it
    h100=2.5/h,l4=0.8/h          of one machine, per hour (h), day (d) or month of 730 hours (mo), in any one currency

Few settings are all tried; of many, those that Optuna's sampler (TPE) thinks best. What keeps all aims is worth its
price; what does not ranks behind all of these, by how far it is off.
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
    """A limit on one time of all requests: at most ``most_s``. time: ttft or tpot. statistic: mean, p50, p90 or p99."""

    time: str
    statistic: str
    most_s: float

    @property
    def name(self) -> str:
        """The aim's name on the command line."""
        return f"{self.time}-{self.statistic}"

    def reached(self, report: Mapping[str, Any]) -> float:
        """Return the seconds in a replay's document."""
        return float(report[_TIMES[self.time]][self.statistic])


def parse_aims(given: str) -> tuple[Aim, ...]:
    """Return aims separated by commas. Raises ConfigError for an invalid or repeated aim."""
    aims: dict[str, Aim] = {}
    for one in given.split(","):
        found = re.fullmatch(rf"\s*([a-z]+)-([a-z0-9]+)\s*=\s*{_NUMBER}\s*([a-z]*)\s*", one)
        if found is None or found[1] not in _TIMES or found[2] not in _STATISTICS:
            raise ConfigError(
                f"--slo {shown(one)} is no aim: say ttft or tpot, one of {', '.join(_STATISTICS)}, and a time, as "
                "ttft-p99=1s,tpot-p99=50ms"
            )
        if found[4] not in _SECONDS:
            raise ConfigError(f"--slo {shown(one)} has no unit of time: say s, ms or us, as ttft-p99=1s")
        aim = Aim(found[1], found[2], float(found[3]) * _SECONDS[found[4]])
        if not aim.most_s:
            raise ConfigError(f"--slo {shown(one)}: nothing takes no time")
        if aim.name in aims:
            raise ConfigError(f"--slo says {aim.name} twice")
        aims[aim.name] = aim
    return tuple(aims.values())


def parse_prices(given: str) -> dict[str, float]:
    """Return prices per hour, by name of the hardware. Raises ConfigError for an invalid price or a missing unit."""
    prices: dict[str, float] = {}
    for one in given.split(","):
        name, mark, price = (part.strip() for part in one.partition("="))
        found = re.fullmatch(rf"{_NUMBER}\s*(?:/\s*([a-z]+))?", price)
        if not mark or found is None:
            raise ConfigError(f"--price {shown(one)} is no price: say it as h100=2.5/h")
        if found[2] not in _HOURS:
            raise ConfigError(f"--price {shown(one)} has no unit of time: say /h, /d or /mo, as h100=2.5/h")
        hardware_named(name)
        if not float(found[1]):
            raise ConfigError(f"--price {shown(one)}: what costs nothing needs no tuning")
        prices[name] = float(found[1]) / _HOURS[found[2]]
    return prices


def worst(aims: tuple[Aim, ...], report: Mapping[str, Any]) -> tuple[Aim, float]:
    """Return the aim that uses the largest part of its limit, and that part; up to 1 it is met."""
    return max(((aim, aim.reached(report) / aim.most_s) for aim in aims), key=lambda of: of[1])


def of_requests(aims: tuple[Aim, ...], time: str) -> float:
    """Return the least limit among aims of ``time``, for single requests; infinity if there is none."""
    return min((aim.most_s for aim in aims if aim.time == time), default=math.inf)


_STUDY: Final = "study.jsonl"
_REFUSED: Final = 1e9
"""How far a setting is off that cannot serve the trace."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A setting and its results. price_per_h: of all its machines.

    refused: the reason why it cannot serve the trace. reached: seconds by aim. worst: the aim that uses the largest
    part of its limit, and that part. goodput_per_s: requests per second whose own times meet the aims. tokens: output
    tokens for one unit of the currency.
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
        """Whether it meets all aims."""
        return self.worst[1] <= 1

    @property
    def rank(self) -> tuple[bool, float, float]:
        """The rank, less is better: the price, then the used part of the worst aim."""
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
        axes: values to try, by the options of Cell.of.
        aims: limits that a setting must meet.
        prices: per hour of one machine, by name of the hardware.
        folder: where cells and the study are kept; a second run resumes there.
        executor: runs the replays.
        trials: most settings to try, including those of earlier runs.
        at_once: settings that are asked for before the first result is known.
        on_done: called with each tried setting.

    Raises:
        ConfigError: as sweep, and for hardware without a price.
        ModuleNotFoundError: without Optuna.
    """
    integer("trials", trials, 1)
    unpriced = [str(one) for one in axes["hardware"] if one not in prices]
    if unpriced:
        raise ConfigError(f"no price for {', '.join(unpriced)}: say --price {unpriced[0]}=2.5/h")
    single = {"first_token_s": of_requests(aims, "ttft"), "per_token_s": of_requests(aims, "tpot")}
    about = json.dumps([[asdict(one) for one in aims], prices], sort_keys=True)
    search = _Search(axes, Path(folder), trials, about)
    tried: dict[Cell, Tried] = {}
    dearest = max(prices.values()) * max(map(_number, axes["tp"])) * max(map(_number, axes["replicas"]))
    while asked := search.ask(at_once):
        cells = [_cell(values, single) for values in asked]
        for swept in sweep(source, _new(cells, tried), folder, executor):
            tried[swept.cell] = one = _tried(swept, aims, prices)
            if on_done is not None:
                on_done(one)
        search.tell([_value(tried[cell], dearest) for cell in cells])
    if earlier := _new([_cell(values, single) for values in search.known()], tried):
        tried |= {swept.cell: _tried(swept, aims, prices) for swept in sweep(source, earlier, folder, executor)}
    return sorted(tried.values(), key=lambda one: one.rank)


def _new(cells: Sequence[Cell], tried: Mapping[Cell, Tried]) -> list[Cell]:
    """Return the cells that were not tried, each once."""
    return [cell for cell in dict.fromkeys(cells) if cell not in tried]


def _number(value: object) -> int:
    return value if isinstance(value, int) else 1


def _cell(values: Mapping[str, Any], single: Mapping[str, Any]) -> Cell:
    return Cell.of(**values, **single)


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
    """Return the value that Optuna minimises."""
    return tried.price_per_h if tried.keeps_aims else dearest * min(1 + tried.worst[1], _REFUSED)


class _Search:
    """The settings to try, kept in a file. about: everything else on which results depend."""

    def __init__(self, axes: Mapping[str, Sequence[object]], folder: Path, trials: int, about: str) -> None:
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
                study_name=f"{json.dumps(self._texts, sort_keys=True)} {about}",  # others are another search
                storage=storage,
                load_if_exists=True,
                sampler=optuna.samplers.TPESampler(seed=0),
                direction="minimize",
            )
        except OSError as error:
            raise SweepError(f"{folder}: cannot write: {error.strerror}; name another folder (--out)") from error
        done = [dict(trial.params) for trial in self._finished()]
        self._left = trials - len(done)
        every = itertools.islice(itertools.product(*self._texts.values()), trials + 1)
        named = [dict(zip(self._texts, one, strict=True)) for one in every]
        self._all = [one for one in named if one not in done] if len(named) <= trials else None
        self._open: list[Any] = []

    def _finished(self) -> list[Any]:
        return [trial for trial in self._study.get_trials(deepcopy=False) if trial.state.is_finished()]

    def ask(self, most: int) -> list[dict[str, Any]]:
        """Return the next settings; an empty list when enough were tried."""
        count = min(most, self._left if self._all is None else len(self._all))
        for _ in range(count):
            if self._all is not None:
                self._study.enqueue_trial(self._all.pop(0))
            self._open.append(self._study.ask(self._choices))
            self._left -= 1
        return [self._values(trial.params) for trial in self._open]

    def tell(self, values: Sequence[float]) -> None:
        """Report the values of the settings that were asked for last."""
        for trial, value in zip(self._open, values, strict=True):
            self._study.tell(trial, value)
        self._open = []

    def known(self) -> list[dict[str, Any]]:
        """Return all tried settings, including those of earlier runs."""
        return [self._values(trial.params) for trial in self._finished()]

    def _values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {name: json.loads(text) for name, text in params.items()}
