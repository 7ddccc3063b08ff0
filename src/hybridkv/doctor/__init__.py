"""Diagnose a plan, a trace in a given memory, or a running server: problems and remedies (docs/doctor.md).

Each check returns a figure and, if it finds a problem, a finding. The checks of a plan need no trace: where hits may
end, the bytes of states, how many states fit, and whether windows are kept as windows. For a trace, the doctor replays
the trace and then each remedy, which proves the remedy. For a server, it reads only the metrics.
"""

from hybridkv.doctor.findings import Diagnosis, Finding, Proof
from hybridkv.doctor.plans import (
    examine_plan,
    examine_trace,
    has_windows,
    hit_interval,
    planned_again,
    states_that_fit,
    windows_are_full,
)
from hybridkv.doctor.servers import Figures, examine_server

__all__ = [
    "Diagnosis",
    "Figures",
    "Finding",
    "Proof",
    "examine_plan",
    "examine_server",
    "examine_trace",
    "has_windows",
    "hit_interval",
    "planned_again",
    "states_that_fit",
    "windows_are_full",
]
