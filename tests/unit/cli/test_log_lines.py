"""What is logged of a request stands in one line, whatever the request is called."""

import pytest

from hybridkv import Csr, KVCacheManager, Request, SamplingParams, Scheduler, SchedulerLimits, StepResult
from hybridkv.testing import attention_config


def test_log_line_of_request_id_with_newline_stays_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    cache = KVCacheManager(attention_config(7, (4,)), 24)
    sched = Scheduler(cache, SchedulerLimits())
    for name in "abc":
        sched.add(Request(f"{name}\nforged", [ord(name)] * 8, SamplingParams(max_tokens=12), hasher=cache.hasher))
    while not sched.drained:
        step = sched.schedule()
        sched.update(StepResult(step.id, Csr.from_lists([[1] if samples else [] for samples in step.samples])))
    for said in ("is preempted", "is not admitted"):
        assert any(said in line for line in caplog.messages), said
    assert not any("\n" in line for line in caplog.messages)
