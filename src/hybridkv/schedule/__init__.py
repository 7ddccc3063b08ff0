"""Scheduling: the queue, the limits of a step, and the Scheduler that makes Steps."""

from hybridkv.schedule.fast_forward import Choose, FastForward, FastForwardClock, UniformSteps
from hybridkv.schedule.limits import Finished, FinishReason, Outcome, SchedulerLimits, SchedulerStatistics
from hybridkv.schedule.queue import Wait, WaitReason
from hybridkv.schedule.scheduler import Scheduler

__all__ = [
    "Choose",
    "FastForward",
    "FastForwardClock",
    "FinishReason",
    "Finished",
    "Outcome",
    "Scheduler",
    "SchedulerLimits",
    "SchedulerStatistics",
    "UniformSteps",
    "Wait",
    "WaitReason",
]
