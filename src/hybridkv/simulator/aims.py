"""What a deployment should keep, and what it costs.

ttft-p99=1s,tpot-p99=50ms    mean, p50, p90 or p99 of the time to the first token, and of that per token after it
h100=2.5/h,l4=0.8/h          of one machine, per hour (h), day (d) or month of 730 hours (mo), in any one currency
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hybridkv.errors import ConfigError
from hybridkv.simulator.hardware import hardware_named
from hybridkv.units import shown

_TIMES: Final = {"ttft": "time_to_first_token_s", "tpot": "time_per_output_token_s"}
_STATISTICS: Final = ("mean", "p50", "p90", "p99")
_SECONDS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_HOURS: Final = {"h": 1.0, "d": 24.0, "mo": 730.0}
_NUMBER: Final = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)"


@dataclass(frozen=True, slots=True)
class Aim:
    """One time of all requests that is to be at most ``most_s``. time: ttft or tpot. statistic: mean, p50, p90, p99."""

    time: str
    statistic: str
    most_s: float

    @property
    def name(self) -> str:
        """As it is said."""
        return f"{self.time}-{self.statistic}"

    def reached(self, report: Mapping[str, Any]) -> float:
        """Seconds in a replay's document."""
        return float(report[_TIMES[self.time]][self.statistic])


def parse_aims(given: str) -> tuple[Aim, ...]:
    """Aims separated by commas. ConfigError for what is none, and for one that is said twice."""
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
    """Per hour, by the name of the hardware. ConfigError for what is none, and for a price without a unit."""
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
    """The aim that is missed most, or kept most barely, and how much of it is taken: up to 1 it is kept."""
    return max(((aim, aim.reached(report) / aim.most_s) for aim in aims), key=lambda of: of[1])


def of_requests(aims: tuple[Aim, ...], time: str) -> float:
    """The least limit among aims of ``time``, which single requests are measured with; infinity where there is none."""
    return min((aim.most_s for aim in aims if aim.time == time), default=math.inf)
