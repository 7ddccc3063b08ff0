"""What a look at something says: findings, each with the figure that shows it, and all figures that were looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

BLOCKS: Final = "blocks_and_prefixes"
STATES_READ: Final = "states_read_again"
WINDOWS: Final = "windows"
STATES_FIT: Final = "states_and_requests"
SALTS: Final = "salts"
FOUND: Final = "found"


@dataclass(frozen=True, slots=True)
class Proof:
    """A replay, or a plan, under ``change``. figure: what was compared, ``before`` and ``after``."""

    change: str
    figure: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Finding:
    """name: of what was looked at. said: what is wrong. figure: that shows it. remedy: what to change."""

    name: str
    said: str
    figure: str
    remedy: str
    proof: Proof | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """subject: what was looked at. figures: of all that was, wrong or not, by name; nothing of what cannot be told."""

    subject: str
    findings: tuple[Finding, ...]
    figures: Mapping[str, str]

    @classmethod
    def of(cls, subject: str, looks: Iterable[tuple[str, str, Finding | None]]) -> Diagnosis:
        """looks: name, figure, and what is wrong with it."""
        figures, findings = {}, []
        for name, figure, finding in looks:
            figures[name] = figure
            findings += [] if finding is None else [finding]
        return cls(subject, tuple(findings), figures)
