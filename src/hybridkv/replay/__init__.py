"""Traces and generated workloads, run through the real scheduler and cache manager; only time is modelled.

TraceFile | Workload  ->  TraceRequest  ->  replay(source, scheduler, cost)  ->  ReplayReport

    formats, trace, tokens    the readers, and token ids out of pieces
    workloads, uniform        generators
    cost, traffic             modelled time, and the bytes of the cache in it
    loop, report              the loop, what came of it
    setup                     plan, manager, scheduler and loop put together
"""

from hybridkv.replay.cost import H100, Hardware, StepCost
from hybridkv.replay.formats import TraceRequest
from hybridkv.replay.loop import Progress, SimulatedClock, replay
from hybridkv.replay.report import GroupReport, ReplayReport
from hybridkv.replay.setup import (
    ReplaySettings,
    Simulation,
    plan_for,
    plan_with_length,
    run_replay,
    simulation_of,
)
from hybridkv.replay.tokens import Pieces
from hybridkv.replay.trace import RequestSource, TraceFile, TraceSummary
from hybridkv.replay.traffic import CacheTraffic
from hybridkv.replay.uniform import UniformWorkload
from hybridkv.replay.workloads import WORKLOADS, Workload

__all__ = [
    "H100",
    "WORKLOADS",
    "CacheTraffic",
    "GroupReport",
    "Hardware",
    "Pieces",
    "Progress",
    "ReplayReport",
    "ReplaySettings",
    "RequestSource",
    "SimulatedClock",
    "Simulation",
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
    "simulation_of",
]
