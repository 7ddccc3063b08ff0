"""Of pytest, for vLLM's own tests: its schedulers are ours where JUDGE_OURS is set; outcomes go to JUDGE_OUT, as JSON.

Loaded by ``judge.py``. vLLM is imported before the tests are: its sources may lie beside them.
"""

import json
import os
from pathlib import Path

import judge_views
import pytest
from vllm.v1.core.sched import async_scheduler, scheduler

from hybridkv.vllm import AsyncScheduler, Scheduler
from hybridkv.vllm.manager import CacheManager

OURS, OUT = "JUDGE_OURS", "JUDGE_OUT"

found = dict[str, str]()
"""By test: "" for one that passed, or the last line of what it says."""

if os.environ.get(OURS):
    _made = CacheManager.__init__

    def _made_and_viewed(self: CacheManager, *arguments: object, **options: object) -> None:
        _made(self, *arguments, **options)  # type: ignore[arg-type]  # as they came
        judge_views.viewed(self)

    CacheManager.__init__ = _made_and_viewed  # type: ignore[method-assign]  # what tests look into
    scheduler.Scheduler, async_scheduler.AsyncScheduler = Scheduler, AsyncScheduler


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test that fails in its setup or teardown has failed; one that was skipped is left out."""
    name = report.nodeid.partition("tests/")[2]
    if report.failed:
        said = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)
        found[name] = (said.partition("\n")[0] or "failed")[-300:]
    elif report.when == "call" and report.passed:
        found.setdefault(name, "")


def pytest_sessionfinish() -> None:
    Path(os.environ[OUT]).write_text(json.dumps(found), "utf-8")
