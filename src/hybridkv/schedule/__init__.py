"""What runs next: queues, limits and the scheduler."""

from hybridkv.schedule.limits import Finished, FinishReason, Outcome, SchedulerLimits, SchedulerStatistics
from hybridkv.schedule.scheduler import Scheduler
from hybridkv.schedule.strides import Choose, Stride, StrideTimes, Uniform
from hybridkv.schedule.waiting import Wait, WaitReason

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
