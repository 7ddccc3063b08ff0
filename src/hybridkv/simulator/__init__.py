"""Replays of traces and generated workloads through the real scheduler and cache manager. Only time is modelled.

TraceFile | Workload  ->  TraceRequest  ->  replay(source, plan)  ->  ReplayReport

formats, trace, tokens    read traces; make token ids
workloads                 generate requests
described                 describe a source (lengths, rates, shared prefixes); convert it to a token-exact trace
cost, hardware            model the time of a step on a machine
transfers                 model the time of transfers to and from host memory
calibration               fit a machine's rates to measured times
setup                     build manager, scheduler and cost model from a plan
loop, outputs, report     run the replay, with its output tokens and drafts; report and record its results
fleet                     replay through several replicas and a router
sweep, tune               replay many settings, one file each; find the cheapest setting that meets latency aims
ray_executor              run a sweep on a Ray cluster
"""

from hybridkv.simulator.cost import CacheTraffic, StepCost
from hybridkv.simulator.described import TraceDescription, convert, describe
from hybridkv.simulator.fleet import FleetReport, replay_replicas
from hybridkv.simulator.formats import FORMATS, TraceRequest
from hybridkv.simulator.hardware import H100, H100_UNBOUNDED, HARDWARE, Hardware, hardware_named
from hybridkv.simulator.loop import Progress, SimulatedClock, Simulation, replay_through
from hybridkv.simulator.outputs import Speculation
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
