"""examples/context_parallel.py: two ranks say what a dense forward says; left out, each of its parts is missed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "context_parallel.py"


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - our own example
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # threads of a tiny model wait for each other on a busy machine
    )


def test_two_ranks_say_what_a_dense_forward_says() -> None:
    done = run(EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "14KiB a rank: room for 136 tokens, on one rank for 68",
        "2 ranks: 8 outputs, 0 tokens other than a dense forward's, 212 of 292 prompt tokens hit, 2 preemptions",
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("combine_over_ranks(*found, self.group)[0]", "found[0]"),
        ("write_latent(batch.groups[0].slots, pages, latents, rotary)", "pass"),
        ("dcp_rank=rank", "dcp_rank=0"),
        ("self.copier.execute_before(step)", "pass"),
    ],
)
def test_nothing_of_it_can_be_left_out(part: str, instead: str, tmp_path: Path) -> None:
    source = EXAMPLE.read_text("utf-8")
    assert source.count(part) == 1
    (tmp_path / "example.py").write_text(source.replace(part, instead), "utf-8")
    assert run(tmp_path / "example.py").returncode
