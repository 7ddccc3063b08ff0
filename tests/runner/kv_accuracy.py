"""docs/models.md: perplexity of a trained model with keys and values in bfloat16, and quantized in the page.

    python tests/runner/kv_accuracy.py MODEL [docs/models.md]

The text is the beginning of Alice's Adventures in Wonderland (Lewis Carroll, 1865). An engine reads it in steps of 256
tokens, so later steps read what earlier ones wrote into pages. `make test-real` fetches the model first. One thread.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from models_table import put

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, Stored, load, plan_for
from hybridkv.runner.probe import AS_COMPUTED
from hybridkv.spec_fields import Quantization

MARK = "<!-- of quantized pages, written by make test-real -->"
TEXT = Path(__file__).with_name("accuracy_text.txt")
STEP = 256


def main(model: str, document: str | None = None) -> None:
    """Measure every form, print the table, and put it into ``document``."""
    torch.set_num_threads(1)
    loaded = load(model)
    loaded.model.to(torch.bfloat16)
    tokens = loaded.tokenizer.encode(TEXT.read_text("utf-8"))
    found = []
    for form in (AS_COMPUTED, *map(Stored, Quantization)):
        plan = plan_for(loaded, [len(tokens) + 1], stored=form)
        with Engine(loaded, plan, EngineOptions(token_budget=STEP)) as engine:
            (done,) = engine.generate([tokens], SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0))
        said = [one.logprob for one in done.prompt_logprobs or ()]
        if len(said) != len(tokens) - 1:
            raise ValueError(f"{len(said)} log probabilities of {len(tokens)} tokens")
        perplexity = math.exp(-math.fsum(said) / len(said))
        found.append((form.kv_dtype or "bf16", int(plan.model.kv_bytes_per_token), perplexity))
        sys.stderr.write(f"{found[-1]}\n")
    lines = list(table(found, len(tokens)))
    sys.stdout.write("\n".join([*lines, ""]))
    if document is not None:
        path = Path(document)
        path.write_text(put(path.read_text("utf-8"), MARK, iter(lines)), "utf-8")


def table(found: list[tuple[str, int, float]], tokens: int) -> Iterator[str]:
    """In Markdown, a form a line. The first is the one to compare with."""
    _, whole, least = found[0]
    yield f"| `--kv-dtype` | bytes a token | perplexity, {tokens} tokens | |"
    yield "|---|--:|--:|--:|"
    for name, size, perplexity in found:
        yield f"| {name} | {size:,} ({size / whole:.0%}) | {perplexity:.3f} | {perplexity / least - 1:+.2%} |"


if __name__ == "__main__":
    main(*sys.argv[1:])
