"""docs/models.md from what the equality tests found: one line of JSON for each model and seed.

    HYBRIDKV_MODELS=results.jsonl pytest tests/runner/test_equality.py
    python tests/runner/models_table.py results.jsonl docs/models.md

`make test-all` does both.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridkv.runner import LoadedModel
from hybridkv.runner.probe import planner_model

_BEGIN, _END = "<!-- written by make test-all -->", "<!-- end -->"
_KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MLAAttentionSpec": "MLA",
    "MambaSpec": "state",
}

_SEEDS = 3
"""Of each model; what has fewer is not done, and says so."""
_SUPERPOSITION = "superposition"
_CLAMPED = "bounds its step size in calls of several tokens only (off here)"
LIMITS = {
    "llama4": "chunks of 32 tokens here, 8,192 in published models",
    "nemotron_h": _CLAMPED,
    "zamba2": _CLAMPED,
}
"""What a reader of a model's row should know of it."""


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One model and seed. layers: kinds in order. tokens, near_ties: of all regimes. largest: share of the range."""

    name: str
    seed: int
    layers: tuple[str, ...]
    regimes: tuple[str, ...]
    tokens: int
    near_ties: int
    largest: float
    continues: tuple[str, ...]


def layers_of(loaded: LoadedModel) -> tuple[str, ...]:
    """Kinds of layers, each with how many there are."""
    planned = planner_model(loaded.model, block_size=16)
    kinds = Counter(_KINDS[type(layer.spec).__name__] for layer in planned.layers)
    return tuple(f"{count} {kind}" for kind, count in kinds.items())


def note_model(result: ModelResult) -> None:
    """Write it down where the environment says."""
    if path := os.environ.get("HYBRIDKV_MODELS"):
        with Path(path).open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(result)) + "\n")


def table(results: list[ModelResult]) -> Iterator[str]:
    """In Markdown, a model a line; which of them have fewer seeds than they should."""
    yield (
        "| model | layers | regimes | seeds | tokens | near-ties | largest logit difference | goes on from a state | "
        "known limits |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|---|---|"
    unfinished = []
    for name in dict.fromkeys(one.name for one in sorted(results, key=lambda one: one.name)):
        mine = [one for one in results if one.name == name]
        seeds = len({one.seed for one in mine})
        if seeds < _SEEDS:
            unfinished.append(f"tiny:{name}")
        yield (
            f"| tiny:{name} | {', '.join(mine[0].layers)} | {len(mine[0].regimes)} | "
            f"{seeds if seeds >= _SEEDS else f'**{seeds} of {_SEEDS}**'} | "
            f"{sum(one.tokens for one in mine):,} | {sum(one.near_ties for one in mine)} | "
            f"{max(one.largest for one in mine):.1e} | {', '.join(mine[0].continues) or '-'} | {_limits(mine[0])} |"
        )
    if unfinished:
        yield ""
        yield f"**Not finished: fewer than {_SEEDS} seeds so far of {', '.join(unfinished)}.**"


def _limits(result: ModelResult) -> str:
    found = [LIMITS[result.name]] if result.name in LIMITS else []
    if _SUPERPOSITION in result.continues:
        found.append("its own scan starts from zero whatever it is given")
    return "; ".join(found) or "-"


def _read(line: dict[str, Any]) -> ModelResult:
    return ModelResult(
        name=line["name"],
        seed=line["seed"],
        layers=tuple(line["layers"]),
        regimes=tuple(line["regimes"]),
        tokens=line["tokens"],
        near_ties=line["near_ties"],
        largest=line["largest"],
        continues=tuple(line["continues"]),
    )


def main(lines: str, document: str) -> None:
    """Put the table of ``lines`` between the marks in ``document``."""
    results = [_read(json.loads(line)) for line in Path(lines).read_text("utf-8").splitlines()]
    path = Path(document)
    before, rest = path.read_text("utf-8").split(_BEGIN)
    _, after = rest.split(_END)
    path.write_text(f"{before}{_BEGIN}\n" + "\n".join(table(results)) + f"\n{_END}{after}", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
