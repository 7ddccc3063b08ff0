"""The pictures of a replay in a terminal say what its report says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cli_support import run
from hybridkv.cli.replay import OverTime
from hybridkv.simulator import Progress


def looks(count: int, seconds: float) -> list[Progress]:
    """The first half runs four at once and finds nothing; the second waits and finds all."""
    return [
        Progress(
            requests=at,
            steps=at * 64,
            running=4 if at < count // 2 else 2,
            waiting=0 if at < count // 2 else 3,
            time_s=seconds * (at + 1) / count,
            prompt_tokens=10 * (at + 1),
            hit_tokens=10 * max(0, at + 1 - count // 2),
            usage=0.5,
            most_at_once=5,
        )
        for at in range(count)
    ]


@pytest.mark.parametrize("count", [96, 9600])
def test_over_time_chart_has_a_character_per_interval(count: int) -> None:
    pictures = OverTime()
    for one in looks(count, 480.0):
        pictures.add(one)
    time, *drawn = pictures.lines()
    assert time.endswith("0 .. 480.0 s")
    named = {line[:17].strip(): line[18:64] for line in drawn}
    assert named["hit rate"][:22] == " " * 22
    assert named["hit rate"][24:] == "█" * 22
    assert named["running"][:22] == "█" * 22
    assert named["running"][24:] == "▄" * 22
    assert named["waiting"][24:] == "█" * 22
    assert named["memory in use"] == "▄" * 46
    said = {line[:17].strip(): line[64:].strip() for line in drawn}
    assert said == {
        "hit rate": "50.00% overall",
        "running": "█ is 4",
        "waiting": "█ is 3",
        "memory in use": "█ is all of it",
    }


@pytest.mark.parametrize("count", [4096, 4097, 9601])
def test_over_time_chart_keeps_the_last_sample(count: int) -> None:
    pictures = OverTime()
    seen = looks(count, 480.0)
    for one in seen:
        pictures.add(one)
    time, rate, *_ = pictures.lines()
    assert time.endswith("0 .. 480.0 s")
    assert rate.endswith(f"{seen[-1].hit_tokens / seen[-1].prompt_tokens:.2%} overall")
    end = replace(seen[-1], time_s=1000.0)
    pictures.add(end)
    assert next(pictures.lines()).endswith("0 .. 1,000.0 s")


def test_over_time_chart_repeats_the_last_value_in_a_gap() -> None:
    pictures = OverTime()
    for one in looks(12, 480.0):
        pictures.add(one)
    running = next(line for line in pictures.lines() if line.startswith("running"))[18:64]
    assert running.lstrip(" ") == "█" * running.count("█") + "▄" * running.count("▄")
    assert running.count(" ") <= 4


def test_over_time_chart_of_short_replay_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("replay", "workload:chat", "--hours", "0.03", "--model", "llama-3-8b", "--memory", "2GiB")
    lines = run(*asked).stdout.splitlines()
    rate = next(line.split()[-1] for line in lines if line.startswith(" hit rate"))
    (drawn,) = (line for line in lines if line.startswith("hit rate"))
    assert drawn.endswith(f"{rate} overall")
    assert not any(line.startswith("hit rate") for line in run(*asked, "--limit", "2").stdout.splitlines())
    pictures = OverTime()
    for one in looks(7, 10.0):
        pictures.add(one)
    pictures.show()
    assert capsys.readouterr().out == ""
