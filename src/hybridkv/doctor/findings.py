"""Results of checks: what is wrong, the figure that shows it, and the remedy."""

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
TIERS: Final = "tiers"
SALTED: Final = (
    "Prompts with a common prefix have different salts, so they share no blocks.",
    "one salt for all requests that may share, such as those of a tenant, instead of one for each request",
)
"""The problem of many salts, and its remedy."""
LITTLE: Final = 0.01
"""Smaller shares are not reported; chosen by hand."""
MANY: Final = 100
"""Fewer states, resume points or attempts do not show a problem; chosen by hand."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The effect of a remedy, from a replay or a plan.

    Attributes:
        change: the remedy, for example ``with --layout natural``.
        figure: name and unit of the compared quantity.
        before: its value without the remedy.
        after: its value with the remedy.
    """

    change: str
    figure: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: name of the check.
        said: the problem in one sentence; empty if nothing is wrong.
        figure: the measured quantity, in words.
        remedy: how to fix the problem; empty if nothing is wrong.
        proof: the effect of the remedy; ``None`` if it was not tried.
    """

    name: str
    said: str
    figure: str
    remedy: str
    proof: Proof | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The results of all checks.

    Attributes:
        subject: the checked plan, trace or server, in words.
        findings: the problems.
        figures: the figure of each check by its name; checks that were not possible are absent.
    """

    subject: str
    findings: tuple[Finding, ...]
    figures: Mapping[str, str]

    @classmethod
    def of(cls, subject: str, looks: Iterable[Finding]) -> Diagnosis:
        """Collect the results of checks.

        Args:
            subject: the checked plan, trace or server, in words.
            looks: the results; they count as problems if ``said`` is not empty.
        """
        every = list(looks)
        return cls(subject, tuple(one for one in every if one.said), {one.name: one.figure for one in every})


def fine(name: str, figure: str) -> Finding:
    """Return the result of a check that found no problem."""
    return Finding(name, "", figure, "")
