"""examples/context_parallel.py: two ranks say what a dense forward says; left out, each of its parts is missed."""

from pathlib import Path

import pytest

from examples_run import run_example

EXAMPLE = Path(__file__).parents[2] / "examples" / "context_parallel.py"


def test_context_parallel_example_matches_a_dense_forward() -> None:
    done = run_example(EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "14KiB a rank: room for 136 tokens, on one rank for 68",
        "2 ranks: 8 outputs, 0 tokens other than a dense forward's, 214 of 292 prompt tokens hit, 2 preemptions",
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
def test_context_parallel_example_without_a_part_fails(part: str, instead: str, tmp_path: Path) -> None:
    source = EXAMPLE.read_text("utf-8")
    assert source.count(part) == 1
    (tmp_path / "example.py").write_text(source.replace(part, instead), "utf-8")
    assert run_example(tmp_path / "example.py").returncode
