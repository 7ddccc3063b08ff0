"""Prompts whose outputs are not sent back: ranked eviction must see that requests resume at ends of prompts."""

from __future__ import annotations

from hybridkv.models import read_model
from hybridkv.simulator import H100_UNBOUNDED, ReplaySettings, Workload, plan_for_trace, simulation_of


def test_ranked_eviction_finds_no_less_than_lru_where_thoughts_are_dropped() -> None:
    """The next turn leaves out what the model thought, so no request resumes at the end of the one before."""
    source = Workload("think", limit=400)
    summary = source.summary()
    plan = plan_for_trace(summary, read_model("llama-3-70b"), "40GiB", layout="reference")
    found = {}
    for eviction in ("lru", "hazard"):
        settings = ReplaySettings(eviction=eviction, hardware=H100_UNBOUNDED)
        found[eviction] = simulation_of(plan, settings).run(source, summary=summary).hit_rate or 0.0
    assert found["hazard"] >= found["lru"] > 0.7
