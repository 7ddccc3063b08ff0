"""examples/borrowed_requests.py: a loop that keeps requests, counts and hashes itself, and loads beside its steps."""

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "borrowed_requests.py"
HEAD = list(range(96))


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def engine_of(example: dict[str, Any]) -> tuple[Any, list[tuple[Any, list[int]]]]:
    """Two questions behind one head, whose blocks come from elsewhere; the second is let in before they are there."""
    planned = example["plan"](example["read_model"]("llama-3-8b"), "60MiB", max_model_len=400, layout="reference")
    prompts = [[*HEAD, 500 + n, 600] for n in range(2)]
    engine = example["Engine"](planned, {tuple(prompts[0]): 96})
    return engine, [(engine.add(str(n), prompt), prompt) for n, prompt in enumerate(prompts)]


def run(example: dict[str, Any], engine: Any, asked: list[tuple[Any, list[int]]]) -> None:  # noqa: ANN401 - of the example
    while engine.waiting or engine.running or engine.loads:
        engine.step()
        engine.cache.check()
    for request, prompt in asked:
        assert request.all_token_ids[len(prompt) :] == example["plain"](prompt)


def test_borrowed_requests_example_gives_outputs_of_no_cache(
    example: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    example["main"]()
    told = capsys.readouterr().out
    assert "12 outputs as without a cache, 0% of the memory in use" in told
    for happened in (
        "blocks published when known",
        "calls saved",
        "loads that brought half",
        "preemptions",
        "tokens hit",
    ):
        assert f"{happened}: 0" not in told
        assert f"{happened}: " in told


def test_request_during_a_transfer_computes_its_prompt(example: dict[str, Any]) -> None:
    engine, asked = engine_of(example)
    run(example, engine, asked)
    assert engine.counts["loads"] == 1
    assert engine.counts["tokens hit"] == 0
