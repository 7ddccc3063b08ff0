"""The same prompts through vLLM and through Engine: ``make test-vllm-generate VLLM_PYTHON=...``.

Tokens must be equal but for near-ties, and every prompt must hit at least as many tokens as in vLLM, but for one kind
of prompt that ``explained`` names. Prints a table in Markdown; see docs/differential.md.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import generators
import torch
from generation import Comparison, Difference, FewerHits, Round, make_rounds
from generators import GRID_WAY, NATURAL_WAY, REFERENCE_WAY, Plain, VllmError, Way, our_answers

from hybridkv.runner import tiny_model, wrap

SEED = 0
COLUMNS = ("model", "round", "prompts", "prompt tokens", "tokens compared", "near-ties", "hit tokens: vLLM")
WAYS = (REFERENCE_WAY, NATURAL_WAY, GRID_WAY)


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A tiny model that both run. fields: sizes that vLLM's kernels take. options: of vllm.LLM. ways: of Engine."""

    name: str
    fields: Mapping[str, Any]
    options: Mapping[str, Any]
    ways: tuple[Way, ...] = (REFERENCE_WAY, NATURAL_WAY)


MATCHES = (
    # heads of vLLM's attention on CPUs have at least 32 elements, tiny models have 16
    Match("llama", {"head_dim": 32}, {}),
    Match("gemma3", {"head_dim": 32, "query_pre_attn_scalar": 32}, {}),
    Match(
        "granite_hybrid",
        # where there are several groups of states, vLLM normalises each of them alone, transformers all together
        {"hidden_size": 128, "attention_multiplier": 32**-0.5, "mamba_n_groups": 1},
        # a step of at most one block of states: asked for a state inside a chunk, vLLM's scan on CPUs fails
        {"max_num_batched_tokens": 64},
        ways=WAYS,
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Of the table: a round of one model. compared: by name of the way."""

    match: Match
    round: Round
    compared: Mapping[str, Comparison]

    def cells(self) -> Iterator[str]:
        every = self.compared.values()
        yield f"tiny:{self.match.name}"
        yield self.round.name
        yield str(len(self.round.prompts))
        yield f"{sum(len(prompt) for prompt in self.round.prompts):,}"
        yield f"{sum(one.tokens for one in every):,}"
        yield str(sum(one.near_ties for one in every))
        yield f"{next(iter(every)).theirs:,}"
        yield from (f"{self.compared[way.name].ours:,}" if way.name in self.compared else "-" for way in WAYS)

    def faults(self) -> Iterator[tuple[str, Difference | FewerHits]]:
        """With the name of the way."""
        for name, compared in self.compared.items():
            yield from ((name, fault) for fault in compared.faults if not self.explained(name, fault))

    def explained(self, name: str, fault: Difference | FewerHits) -> bool:
        """Whether there was no state to find: by default, natural keeps none where nobody has parted yet.

        vLLM keeps one at the last block edge of every prompt, wherever that is.
        """
        keeps_states = GRID_WAY in self.match.ways
        return isinstance(fault, FewerHits) and self.round.parting and keeps_states and name == NATURAL_WAY.name


def play(match: Match, options: Mapping[str, Any]) -> list[Row]:
    """All rounds of one model, vLLM's answers beside those of Engine. Raises VllmError where vLLM has none."""
    model = tiny_model(match.name, SEED, match.fields)
    loaded = wrap(model, name=f"tiny:{match.name}")
    plain = Plain(loaded)
    rounds = make_rounds(SEED, plain.generate)
    with TemporaryDirectory() as folder:
        saved = Path(folder) / "model"
        model.save_pretrained(saved)
        version, theirs = generators.their_answers(saved, rounds, {**match.options, **options})
    say(f"tiny:{match.name} ran in vLLM {version}")
    ours = {way.name: our_answers(loaded, rounds, way) for way in match.ways}
    return [
        Row(
            match,
            one,
            {name: Comparison.of(one.prompts, theirs[i], found[i], plain.gap) for name, found in ours.items()},
        )
        for i, one in enumerate(rounds)
    ]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def tell(rows: Sequence[Row]) -> int:
    """The table and what nothing explains; how much of that there is."""
    head = [*COLUMNS, *(way.name for way in WAYS)]
    say(f"| {' | '.join(head)} |")
    say("|---|---|" + "--:|" * (len(head) - 2))
    for row in rows:
        say(f"| {' | '.join(row.cells())} |")
    faults = [f"{row.match.name}, {row.round.name}, {name}: {fault}" for row in rows for name, fault in row.faults()]
    for line in faults:
        say(line)
    return len(faults)


def main(arguments: Sequence[str] | None = None) -> int:
    names = [match.name for match in MATCHES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--options", type=json.loads, default={}, help="further options of vllm.LLM, a JSON object")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    refused = 0
    for match in (match for match in MATCHES if match.name in asked.models):
        try:
            rows += play(match, asked.options)
        except VllmError as error:
            say(f"tiny:{match.name} does not run in vLLM: {error}")
            refused += 1
    return int(tell(rows) + refused > 0)


if __name__ == "__main__":
    sys.exit(main())
