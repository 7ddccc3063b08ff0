"""Traces and generated workloads, run through the real scheduler and cache manager; only time is modelled.

TraceFile | Workload  ->  TraceRequest  ->  replay(source, scheduler, cost)  ->  ReplayReport

    formats, trace, tokens    the readers, and token ids out of pieces
    workloads, uniform        generators
    cost, loop, report        modelled time, the loop, what came of it
    setup                     plan, manager, scheduler and loop put together
"""

from hybridkv.replay.cost import H100, Hardware, StepCost
from hybridkv.replay.formats import TraceRequest
from hybridkv.replay.loop import Progress, replay
from hybridkv.replay.report import ReplayReport
from hybridkv.replay.setup import ReplaySettings, plan_for, plan_with_length, run_replay
from hybridkv.replay.tokens import Pieces
from hybridkv.replay.trace import RequestSource, TraceFile, TraceSummary
from hybridkv.replay.uniform import UniformWorkload
from hybridkv.replay.workloads import WORKLOADS, Workload

__all__ = [
    "H100",
    "WORKLOADS",
    "Hardware",
    "Pieces",
    "Progress",
    "ReplayReport",
    "ReplaySettings",
    "RequestSource",
    "StepCost",
    "TraceFile",
    "TraceRequest",
    "TraceSummary",
    "UniformWorkload",
    "Workload",
    "plan_for",
    "plan_with_length",
    "replay",
    "run_replay",
]
