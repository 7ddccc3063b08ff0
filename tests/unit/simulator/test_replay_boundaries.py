"""Prompts with hits inside blocks: their last block boundaries are a class of their own for the ranking."""

from __future__ import annotations

from hybridkv.models import read_model
from hybridkv.simulator import H100_UNBOUNDED, ReplaySettings, Workload, plan_for_trace, simulation_of


def test_last_boundaries_of_long_documents_outlive_ends_of_chunks() -> None:
    """The second question on a document resumes at its last boundary; no request resumes where earlier chunks ended."""
    source = Workload("documents", limit=400, hours=0.1)
    summary = source.summary()
    plan = plan_for_trace(summary, read_model("qwen3.5-35b-a3b"), "40GiB", layout="reference")
    settings = ReplaySettings(eviction="hazard", hardware=H100_UNBOUNDED, prefix_match_unit=32)
    report = simulation_of(plan, settings).run(source, summary=summary)
    ends = {one.kind: one for one in report.ends}
    assert ends["boundary"].hits > 20
    assert ends["grid"].made > 100
    assert ends["grid"].hits == 0
    assert ends["grid"].kept < 10 < ends["boundary"].kept
