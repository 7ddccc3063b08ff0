"""Traces and generated workloads, run through the real scheduler and cache manager; only time is modelled.

TraceFile | Workload  ->  TraceRequest  ->  replay(source, plan)  ->  ReplayReport

formats, trace, tokens    the readers, and token ids out of pieces
workloads                 generators
described                 what requests share, what a source holds, and any as a token-exact trace
cost, hardware            modelled time, the bytes of the cache in it, and machines
loop, report              the loop, what came of it
fleet                     several replicas behind a router
sweep, tune               many settings over one source, each a file, and the cheapest of them that keeps the aims
setup                     plan, manager, scheduler and loop put together
"""

from hybridkv.simulator.cost import CacheTraffic, StepCost
from hybridkv.simulator.described import TraceDescription, convert, describe
from hybridkv.simulator.fleet import FleetReport, replay_replicas
from hybridkv.simulator.formats import FORMATS, TraceRequest
from hybridkv.simulator.hardware import H100, H100_UNBOUNDED, HARDWARE, Hardware, hardware_named
from hybridkv.simulator.loop import Progress, SimulatedClock, Simulation, Speculation, replay_through
from hybridkv.simulator.report import GroupReport, ReplayReport
from hybridkv.simulator.setup import ReplaySettings, plan_for_trace, plan_with_length, replay, simulation_of
from hybridkv.simulator.sweep import Cell, Swept, processes, sweep
from hybridkv.simulator.tokens import Pieces
from hybridkv.simulator.trace import RequestSource, TraceFile, TraceSummary
from hybridkv.simulator.tune import Tried, tune
from hybridkv.simulator.workloads import WORKLOADS, UniformWorkload, Workload

__all__ = [
    "FORMATS",
    "H100",
    "H100_UNBOUNDED",
    "HARDWARE",
    "WORKLOADS",
    "CacheTraffic",
    "Cell",
    "FleetReport",
    "GroupReport",
    "Hardware",
    "Pieces",
    "Progress",
    "ReplayReport",
    "ReplaySettings",
    "RequestSource",
    "SimulatedClock",
    "Simulation",
    "Speculation",
    "StepCost",
    "Swept",
    "TraceDescription",
    "TraceFile",
    "TraceRequest",
    "TraceSummary",
    "Tried",
    "UniformWorkload",
    "Workload",
    "convert",
    "describe",
    "hardware_named",
    "plan_for_trace",
    "plan_with_length",
    "processes",
    "replay",
    "replay_replicas",
    "replay_through",
    "simulation_of",
    "sweep",
    "tune",
]
