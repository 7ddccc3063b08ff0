"""Fit a replay to the times of the engine whose requests were recorded.

    recorded trace, with the time that each request took -> fitted_time_scale -> time scale of replays

A replay predicts other settings well if its machine is as busy as the real one. The modelled duration of a step has a
relative error that depends on the model, the kernels and other load on the machine. The fit removes its mean.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from hybridkv.errors import ConfigError
from hybridkv.planner import Plan
from hybridkv.simulator.loop import run_replicas
from hybridkv.simulator.setup import ReplaySettings, simulation_of
from hybridkv.simulator.trace import RequestSource

_TURNS: Final = 12
"""Replays of a fit. Each halves the interval of the logarithm, from a factor of 4,096 to one of .2 %."""
_WIDEST: Final = 64.0
"""Largest and, inverted, smallest factor to the time scale of the settings."""


def fitted_time_scale(source: RequestSource, plan: Plan, settings: ReplaySettings) -> float:
    """Return the time scale with which requests take as long in a replay as in the engine that was recorded.

    O(12 replays).

    Args:
        source: a recorded trace.
        plan: the plan of the engine that was recorded.
        settings: how that engine ran; the fit begins with its time scale.

    Raises:
        ConfigError: the settings have time scale 0, the trace does not say how long its requests took, or no time
            scale fits.
    """
    took = [one.took_s for one in source]
    known = [one for one in took if one is not None]
    if not settings.time_scale:
        raise ConfigError("a time scale of 0 cannot be fitted to times: leave out --time-scale 0")
    if len(known) < len(took) or not sum(known):
        raise ConfigError(
            f"{source.name} does not say how long its requests took: record it with `hybridkv trace record --requests`"
        )
    least, most = -math.log(_WIDEST), math.log(_WIDEST)
    for _ in range(_TURNS):
        middle = (least + most) / 2
        scale = settings.time_scale * math.exp(middle)
        replica = simulation_of(plan, replace(settings, time_scale=scale)).replica()
        run_replicas(source, [replica], lambda _request, _now_s: 0)
        if replica.request_s < sum(known):
            least = middle
        else:
            most = middle
    if -least == math.log(_WIDEST) or most == math.log(_WIDEST):  # an end of the interval never moved
        raise ConfigError(
            f"no time scale within a factor of {_WIDEST:g} gives the recorded times: calibrate the machine "
            "(hybridkv calibrate), and give its file as --hardware"
        )
    return scale
