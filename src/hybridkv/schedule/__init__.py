"""What runs next: queues, limits and the scheduler."""

from hybridkv.schedule.limits import Finished, FinishReason, Outcome, SchedulerLimits, SchedulerStatistics
from hybridkv.schedule.scheduler import Scheduler

__all__ = ["FinishReason", "Finished", "Outcome", "Scheduler", "SchedulerLimits", "SchedulerStatistics"]
