"""What runs next: queues, limits and the scheduler."""

from hybridkv.schedule.fast_forward import Choose, Stride, StrideTimes, Uniform
from hybridkv.schedule.limits import Finished, FinishReason, Outcome, SchedulerLimits, SchedulerStatistics
from hybridkv.schedule.queue import Wait, WaitReason
from hybridkv.schedule.scheduler import Scheduler

__all__ = [
    "Choose",
    "FinishReason",
    "Finished",
    "Outcome",
    "Scheduler",
    "SchedulerLimits",
    "SchedulerStatistics",
    "Stride",
    "StrideTimes",
    "Uniform",
    "Wait",
    "WaitReason",
]
