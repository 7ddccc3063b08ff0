"""examples/bare_engine.py: what it says is what a dense forward of the same weights says, whatever the cache does."""

import ast
from pathlib import Path

import bare_engine
import pytest
from bare_support import LAYOUTS, REGIMES, run

SOURCE = Path(bare_engine.__file__).read_text("utf-8")


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_a_dense_forward(layout: str, regime: str) -> None:
    conditions = REGIMES[regime]
    came = run(layout, conditions)
    assert came.wrong == 0
    counts = came.counts
    assert counts.requests_finished == (8 if conditions.hits else 6)
    if regime in {"hits", "ahead"}:
        assert counts.hit_tokens > 100
    if regime in {"preemption", "all"}:
        assert counts.preemptions > 0
    if conditions.drafts:
        assert 0.2 < counts.accepted_tokens / counts.drafted_tokens < 0.9


def test_it_says_so_itself(capsys: pytest.CaptureFixture[str]) -> None:
    bare_engine.main()
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == ["natural, Named", "reference, Named", "reference, InPlace"]
    assert all("12 outputs as dense" in line and " 0 preemptions" not in line and " 0 of " not in line for line in told)


def test_it_is_short_and_stands_alone() -> None:
    assert len(SOURCE.splitlines()) <= 400
    imported = {
        name
        for node in ast.walk(ast.parse(SOURCE))
        for name in (
            [one.name for one in node.names] if isinstance(node, ast.Import) else
            [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }
    assert {"hybridkv", "hybridkv.worker"} <= imported
    assert not [name for name in imported if name.startswith(("hybridkv.runner", "transformers"))]
    taken = {name for name in ("ModelRunner", "Engine", "AsyncEngine", "load") if hasattr(bare_engine, name)}
    assert taken == set()
