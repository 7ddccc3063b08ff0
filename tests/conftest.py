"""Hypothesis profiles: ci, all (`make test-all`), by hand long (20,000 examples) and thorough; a line about the GPU."""

import triton_here  # isort: skip  # noqa: F401 - before anything that imports Triton, as transformers does

import gc
import logging
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from few import few_are_many

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that is no folder is looked up on the hub: not by tests

torch.set_num_threads(1)  # such models are done before threads have met; `make test` has a process for each core
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same in processes that tests start

# looking through all that transformers and thousands of tests made takes a tenth of a second
gc.set_threshold(20_000, 20, 50)

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

# the same examples in every run: CI fails for what changed, not by chance
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=20, suppress_health_check=SLOW)
settings.register_profile("all", deadline=None, derandomize=True, max_examples=100, suppress_health_check=SLOW)
settings.register_profile("long", deadline=None, max_examples=600, suppress_health_check=SLOW)
settings.register_profile("thorough", deadline=None, max_examples=3000, suppress_health_check=SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests of a GPU ran: where there is none, they are skipped, and nothing else says so loudly."""
    ran = [one for kind in ("passed", "failed") for one in terminalreporter.getreports(kind) if "gpu" in one.keywords]
    reports = terminalreporter.getreports("skipped")
    skipped = [one for one in reports if "gpu" in getattr(one, "keywords", ())]  # whole modules have no keywords
    if ran or skipped:
        terminalreporter.write_line(f"gpu tests: {len(ran)} ran, {len(skipped)} skipped for want of a GPU")


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """For tests that fail steps on purpose, thousands of times: their warnings would fill the report."""
    logger = logging.getLogger("hybridkv")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def short_runs() -> Iterator[None]:
    """Few are many, see there."""
    with few_are_many():
        yield
