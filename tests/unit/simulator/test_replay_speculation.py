"""Drafts in a replay: how many come true, what that does to steps and time, and that nothing else changes."""

from dataclasses import asdict

import numpy as np
import pytest

from cli_support import error, run
from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.planner import Plan
from hybridkv.simulator import (
    H100_UNBOUNDED,
    ReplayReport,
    ReplaySettings,
    Speculation,
    Workload,
    plan_for_trace,
    replay,
)

CHAT = Workload("chat", limit=4)


def planned(name: str, memory: str, drafts: int, layout: str = "natural") -> Plan:
    return plan_for_trace(CHAT.summary(), read_model(name, num_speculative_tokens=drafts), memory, layout=layout)


def made(plan: Plan, speculation: Speculation | None = None) -> ReplayReport:
    return replay(CHAT, plan, ReplaySettings(hardware=H100_UNBOUNDED, speculation=speculation))


@pytest.mark.parametrize(("drafts", "acceptance"), [(1, 0.5), (4, 0.7), (8, 0.9), (3, 0.05)])
def test_speculation_accepts_at_the_given_rate(drafts: int, acceptance: float) -> None:
    draw = np.random.default_rng(1)
    starts, positions = draw.integers(0, 1 << 63, 100_000).astype(np.uint64), np.arange(100_000).astype(np.uint64)
    accepted = Speculation(drafts, acceptance).accepted(starts, positions)
    assert accepted.min() >= 0
    assert accepted.max() <= drafts
    for place in range(drafts):
        share = (accepted > place).mean()
        assert share == pytest.approx(acceptance ** (place + 1), abs=0.01)
    again = Speculation(drafts, acceptance).accepted(starts[::-1], positions[::-1])
    assert (again[::-1] == accepted).all()


def test_speculation_rate_holds_along_one_output() -> None:
    positions = np.arange(50_000).astype(np.uint64)
    accepted = Speculation(4, 0.6).accepted(np.full(50_000, 12345, np.uint64), positions)
    assert (accepted > 0).mean() == pytest.approx(0.6, abs=0.02)
    assert np.corrcoef(accepted[:-1], accepted[1:])[0, 1] == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("layout", ["natural", "reference"])
@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-1b", "qwen3-next-80b-a3b"])
def test_speculation_of_all_or_no_drafts_bounds_the_time(name: str, layout: str) -> None:
    plan = planned(name, "30GiB", 3, layout)
    without, every, none = made(plan), made(plan, Speculation(3, 1.0)), made(plan, Speculation(3, 0.0))
    for one in (every, none):
        assert (one.requests, one.output_tokens) == (without.requests, without.output_tokens)
        # which ends are kept when another turn comes depends on how long steps take
        assert one.hit_tokens == pytest.approx(without.hit_tokens, rel=0.02 if name.startswith("qwen") else 0)
    assert every.accepted_tokens == every.drafted_tokens > 0
    assert every.steps < without.steps / 2
    assert none.accepted_tokens == 0 < none.drafted_tokens
    more = none.computed_tokens + (none.hit_tokens or 0) - without.computed_tokens - (without.hit_tokens or 0)
    assert none.drafted_tokens == more
    assert none.time_per_output_token_s.mean >= without.time_per_output_token_s.mean
    assert (without.drafted_tokens, without.accepted_tokens) == (0, 0)


def test_speculation_under_pressure_is_reproducible() -> None:
    plan = planned("qwen3-next-80b-a3b", "300MiB", 4)
    one, other = made(plan, Speculation(4, 0.7)), made(plan, Speculation(4, 0.7))
    assert asdict(one) == asdict(other)
    assert one.requests == made(plan).requests
    assert 0.3 < one.accepted_tokens / one.drafted_tokens < 0.6


def test_speculation_with_states_needs_speculative_blocks() -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        made(planned("qwen3-next-80b-a3b", "4GiB", 0), Speculation(2, 0.5))


@pytest.mark.parametrize(
    ("drafts", "acceptance", "message"),
    [
        (0, 0.5, "drafts"),
        (65, 0.5, "drafts"),
        (2, 1.5, "acceptance .* 0 .. 1, such as 0.7, got 1.5"),
        (2, float("nan"), "acceptance"),
    ],
)
def test_speculation_with_invalid_values_is_rejected(drafts: int, acceptance: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Speculation(drafts, acceptance)
    with pytest.raises(ConfigError, match="speculation"):
        ReplaySettings(hardware=H100_UNBOUNDED, speculation=4)  # type: ignore[arg-type]  # what is tested


def test_speculation_options_work_on_the_command_line() -> None:
    given = ("replay", "workload:chat", "--limit", "5", "--model", "jamba-1.5-mini", "--memory", "4GiB", "--tp", "2")
    told = run(*given, "--drafts", "3", "--acceptance", "0.8")
    assert "drafts accepted" in told.stdout
    assert "drafts accepted" not in run(*given).stdout
    assert "acceptance" in error(*given, "--drafts", "3", "--acceptance", "2")
    assert "give --drafts N too" in error(*given, "--acceptance", "0.8")
    assert (
        run(*given, "--drafts", "3", "--json").stdout
        == run(*given, "--drafts", "3", "--acceptance", "0.7", "--json").stdout
    )
