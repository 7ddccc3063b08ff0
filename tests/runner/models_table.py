"""Write two tables from the results of the tests of equality and of drafts.

results.jsonl has a line for each test, model and seed.

    HYBRIDKV_MODELS=results.jsonl pytest tests/runner/test_equality.py tests/runner/test_speculation.py
    python tests/runner/models_table.py results.jsonl docs/data      models-equality.csv and models-drafts.csv

`make test-all` does both.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from csv_table import Row, write

from hybridkv.models import Layer
from hybridkv.runner import LoadedModel
from hybridkv.runner.attention.compressors import keeps_states
from hybridkv.runner.probe import is_indexer, planner_model

HEADER = (
    "model",
    "layers",
    "regimes",
    "seeds",
    "tokens",
    "near-ties",
    "largest logit difference",
    "resumes a state",
    "known limits",
)
DRAFTS_HEADER = ("model", "seeds", "layouts", "tokens", "drafted", "accepted", "largest logit difference")
_KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "SlidingWindowMLASpec": "window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MLAAttentionSpec": "MLA",
    "MambaSpec": "state",
    "CrossAttentionSpec": "cross",
}

_END = "<!-- end -->"
_SEEDS = 3
"""Of each model; what has fewer is not done, and says so."""
_SUPERPOSITION = "superposition"
_CLAMPED = "bounds its step size in calls of several tokens only (off here)"
LIMITS = {"llama4": "chunks of 32 tokens here, 8,192 in published models", "nemotron_h": _CLAMPED, "zamba2": _CLAMPED}
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


@dataclass(frozen=True, slots=True)
class DraftResult:
    """One model and seed with drafts. tokens: compared with a run without. largest: as in ModelResult."""

    name: str
    seed: int
    layout: str
    tokens: int
    drafted: int
    accepted: int
    largest: float


Result = TypeVar("Result", ModelResult, DraftResult)


def layers_of(loaded: LoadedModel) -> tuple[str, ...]:
    """Kinds of layers, each with how many there are."""
    planned = planner_model(loaded.model, block_size=16)
    kinds = Counter(map(_kind, planned.layers))
    return tuple(f"{count} {kind}" for kind, count in kinds.items())


def _kind(layer: Layer) -> str:
    if is_indexer(layer):
        return "indexer"
    return "compressed" if keeps_states(layer) else _KINDS[type(layer.spec).__name__]


def note_model(result: ModelResult | DraftResult) -> None:
    """Write it down where the environment says."""
    if path := os.environ.get("HYBRIDKV_MODELS"):
        with Path(path).open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(result)) + "\n")


def table(results: list[ModelResult]) -> Iterator[Row]:
    """Yield a row for each model."""
    for name, mine in _by_name(results):
        yield (
            f"tiny:{name}",
            ", ".join(mine[0].layers),
            len(mine[0].regimes),
            _seeds(mine),
            f"{sum(one.tokens for one in mine):,}",
            sum(one.near_ties for one in mine),
            f"{max(one.largest for one in mine):.1e}",
            ", ".join(mine[0].continues) or "-",
            _limits(mine[0]),
        )


def draft_table(results: list[DraftResult]) -> Iterator[Row]:
    """Yield a row for each model that ran with drafts."""
    for name, mine in _by_name(results):
        counts = (f"{sum(getattr(one, which) for one in mine):,}" for which in ("tokens", "drafted", "accepted"))
        layouts = ", ".join(sorted({one.layout for one in mine}))
        yield f"tiny:{name}", _seeds(mine), layouts, *counts, f"{max(one.largest for one in mine):.1e}"


def _by_name(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    for name in dict.fromkeys(one.name for one in sorted(results, key=lambda one: one.name)):
        yield name, [one for one in results if one.name == name]


def _seeds(mine: Sequence[ModelResult] | Sequence[DraftResult]) -> str:
    """Return the number of seeds, marked as unfinished where some are missing."""
    count = len({one.seed for one in mine})
    return str(count) if count >= _SEEDS else f"unfinished: {count} of {_SEEDS}"


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


def main(lines: str, folder: str) -> None:
    """Write both tables of ``lines`` into ``folder``; a table without a line stays as it is."""
    found = [json.loads(line) for line in Path(lines).read_text("utf-8").splitlines()]
    if equal := [_read(line) for line in found if "regimes" in line]:
        write(Path(folder) / "models-equality.csv", HEADER, table(equal))
    if drafted := [DraftResult(**line) for line in found if "drafted" in line]:
        write(Path(folder) / "models-drafts.csv", DRAFTS_HEADER, draft_table(drafted))


def put(text: str, begin: str, lines: Iterator[str]) -> str:
    """Return ``text`` with ``lines`` between the mark ``begin`` and the next mark of an end."""
    before, rest = text.split(begin)
    _, after = rest.split(_END, 1)
    return f"{before}{begin}\n" + "\n".join(lines) + f"\n{_END}{after}"


if __name__ == "__main__":
    main(*sys.argv[1:])
