"""Why tokens were missed, in words; the options of what is explained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from hybridkv.cache import Miss, MissReason
from hybridkv.cli.keeping import REMEMBERED, ExplainOption
from hybridkv.cli.output import in_words
from hybridkv.cli.panels import OUTPUT
from hybridkv.cli.running import Prepared
from hybridkv.errors import ConfigError
from hybridkv.units import format_bytes, format_count

WHY: Final = {
    "never_seen": "never seen",
    "other_salt": "seen under another salt only",
    "unpublished": "seen, not published",
    "evicted": "evicted",
    "no_state": "no state kept behind them",
    "no_window": "no window kept behind them",
    "block_edge": "in a block's last part",
    "no_room": "no room to copy them",
    "caching_off": "caching off",
    "last_token": "last of a prompt",
}
"""By the name that documents have."""
_MORE: Final = {
    MissReason.NEVER_SEEN: "never seen: no prompt before began so",
    MissReason.OTHER_SALT: "seen under another salt or adapter only",
    MissReason.UNPUBLISHED: "seen, but not there yet: who has them computes them still, or never published them",
    MissReason.NO_WINDOW: "keys and values are there, but what layers with windows or chunks read before them is gone",
    MissReason.BLOCK_EDGE: "in a block's last part: in this layout hits end where blocks do",
    MissReason.NO_ROOM: "found and given up: what is copied was in the copy's way",
    MissReason.CACHING_OFF: "not looked up: caching is off for this request",
    MissReason.LAST_TOKEN: "last of the prompt: it runs for its logits",
}

RememberOption = Annotated[
    int | None,
    typer.Option(
        "--remember",
        min=1,
        help="Keys of evicted blocks that are remembered to explain misses, some 200 bytes each.",
        show_default=f"{REMEMBERED:,}",
        rich_help_panel=OUTPUT,
    ),
]


@dataclass(frozen=True, slots=True)
class WhyOptions:
    """What is said of misses."""

    explain: ExplainOption = False
    explain_to: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write why, by request: a line of JSON each, or Parquet where FILE ends in .parquet.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    remember: RememberOption = None

    @property
    def remembered_losses(self) -> int:
        """For ReplaySettings; 0 where nothing is asked. ConfigError for so many of what nobody asks for."""
        if self.explain or self.explain_to is not None:
            return remembered(self.remember)
        if self.remember is not None:
            raise ConfigError(
                "--remember is of misses explained, and none is: give --explain or --explain-to FILE, too"
            )
        return 0


def remembered(given: int | None) -> int:
    """Keys, where misses are explained."""
    return REMEMBERED if given is None else given


def sentence(miss: Miss, run: Prepared) -> str:
    """Why the tokens of ``miss`` were not found in ``run``."""
    if miss.reason is MissReason.EVICTED:
        return _evicted(miss, run)
    if miss.reason is not MissReason.NO_STATE:
        return _MORE[miss.reason]
    nearest = f"the nearest is at {format_count(miss.nearest_state)}" if miss.nearest_state else "none before them"
    said = f"keys and values are there, but no state was kept: {nearest}"
    if miss.interval_state is None:
        return said
    at = format_count(miss.interval_state)
    layout = "" if run.plan.config.slabs is not None else "--layout natural "
    return f"{said}; {layout}--placement interval:{miss.interval} would have kept one at {at}, where there is room"


def _evicted(miss: Miss, run: Prepared) -> str:
    cache, group = run.simulation.scheduler.cache, miss.group or 0
    kind = in_words(type(run.plan.config.groups[group].spec).__name__)
    of = f"the {'state behind them' if kind == 'recurrent state' else 'blocks'} of group {group} ({kind})"
    if miss.ago_s is None or miss.more_bytes is None:
        return f"evicted: {of}, so long ago that nobody remembers when"
    whom = f"for request {miss.by}" if miss.by is not None else "for requests that went on"
    idle = "" if miss.idle_s is None else f", {miss.idle_s:,.1f} s after anybody last came for them"
    more = format_bytes(miss.more_bytes)
    kept = (
        f"{more} more memory would have kept them, if not less"
        if cache.bounds.evicts_in_order
        else f"some {more} more memory would have kept them, by estimate"
    )
    return f"evicted {miss.ago_s:,.1f} s before, {whom}, by {cache.eviction.name}: {of}{idle}; {kept}"
