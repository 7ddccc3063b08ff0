"""What becomes of drafts, in plain Python: which are accepted, and which state goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hybridkv.testing.model import DigestModel
from oracles.groups import OracleGroup, ScratchStateGroup
from oracles.steps import Entry, OracleStep


def verdict(model: DigestModel, entry: Entry, counts: Counter[str]) -> list[int]:
    """The accepted drafts of a row and the token that the model draws behind them; nothing for a row without drafts.

    counts: "drafted" and "accepted" by position.
    """
    tokens, sampled = list(entry.request.tokens), list[int]()
    for place in range(len(entry.drafts)):
        counts[f"drafted {place}"] += 1
    for draft in entry.drafts:
        sampled.append(model.next_token(tokens, entry.request.digest))
        if sampled[-1] != draft:
            return sampled
        counts[f"accepted {len(sampled) - 1}"] += 1
        tokens.append(draft)
    return [*sampled, model.next_token(tokens, entry.request.digest)] if entry.drafts else []


def tell(groups: Sequence[OracleGroup], step: OracleStep) -> None:
    """The worker hears of states that changed places, of the rows that run."""
    for group in groups:
        for i, entry in enumerate(step.entries):
            row = entry.request.rows[group.number]
            if row.rotated:
                step.rotated += [(group.number, i, column, row.table[column]) for column in (0, row.rotated)]
                row.rotated = 0


def keep_drafts(groups: Sequence[OracleGroup], entry: Entry, kept: int) -> None:
    """Only the first ``kept`` drafts of a row were ever computed; its states go on from the last of them."""
    entry.request.computed -= len(entry.drafts) - kept
    for group, row in zip(groups, entry.request.rows, strict=True):
        if group.recurrent:
            row.accept(entry.places[group.number][kept], in_place=isinstance(group, ScratchStateGroup))
