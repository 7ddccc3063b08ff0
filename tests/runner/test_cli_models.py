"""`hybridkv generate` with models of several architectures that were saved to a folder."""

from pathlib import Path

import pytest
from checked_engine import models

from cli_support import document
from hybridkv.runner import load


@pytest.mark.parametrize("name", models("gemma3", "deepseek_v3", "mamba", "qwen3_next"))
def test_saved_model_as_its_own_draft_model_has_every_draft_accepted(name: str, tmp_path: Path) -> None:
    """Cold, then warm; each token is compared with plain transformers."""
    tiny = load(f"tiny:{name}")
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    arguments = ("--model", str(tmp_path), "--speculate", f"draft:{tmp_path}:3", "--max-new-tokens", "12")
    found = document("generate", *arguments, "--repeat", "2", "--check")
    assert found["check"] | {"near_ties": 0} == {
        "ok": True, "requests": 8, "tokens": 96, "near_ties": 0, "differences": [], "wrong_ends": [],
    }  # fmt: skip
    assert min(one["hit_tokens"] for one in found["requests"][-4:]) > 0  # of the second round
    drafted, accepted = (sum(one[f"{what}_tokens"] for one in found["requests"]) for what in ("drafted", "accepted"))
    assert drafted == accepted > 4 * 6
