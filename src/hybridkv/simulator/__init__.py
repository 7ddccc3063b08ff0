"""Traces and generated workloads, run through the real scheduler and cache manager; only time is modelled.

TraceFile | Workload  ->  TraceRequest  ->  replay(source, plan)  ->  ReplayReport

formats, records, trace, tokens    the readers, and token ids out of pieces
workloads, uniform        generators
prefixes, described, converted    what requests share, what a source holds, and any as a token-exact trace
cost, traffic, hardware             modelled time, and the bytes of the cache in it
machine                   whether a machine holds weights and cache, and its name in reports
loop, report              the loop, what came of it
fleet, routing            several replicas behind a router
aims, tune                the cheapest of many settings that keeps the aims
cells, sweep              many settings over one source, each a file
setup                     plan, manager, scheduler and loop put together
"""

from hybridkv.simulator.cells import Cell
from hybridkv.simulator.converted import convert
from hybridkv.simulator.cost import StepCost
from hybridkv.simulator.described import TraceDescription, describe
from hybridkv.simulator.fleet import FleetReport, replay_replicas
from hybridkv.simulator.formats import FORMATS, TraceRequest
from hybridkv.simulator.hardware import H100, H100_UNBOUNDED, HARDWARE, Hardware, hardware_named
from hybridkv.simulator.loop import Progress, SimulatedClock, replay_through
from hybridkv.simulator.report import GroupReport, ReplayReport
from hybridkv.simulator.setup import ReplaySettings, Simulation, plan_for_trace, plan_with_length, replay, simulation_of
from hybridkv.simulator.speculation import Speculation
from hybridkv.simulator.sweep import Swept, processes, sweep
from hybridkv.simulator.tokens import Pieces
from hybridkv.simulator.trace import RequestSource, TraceFile, TraceSummary
from hybridkv.simulator.traffic import CacheTraffic
from hybridkv.simulator.tune import Tried, tune
from hybridkv.simulator.uniform import UniformWorkload
from hybridkv.simulator.workloads import WORKLOADS, Workload

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
