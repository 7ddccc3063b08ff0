"""What `generate` prints: one JSON document, or tables for people.

The document is ``hybridkv.generate``, version 2. Of each request it has ``logprobs``, one for each output token, and
``prompt_logprobs``, one for each prompt token but the first; null where they were not asked for. One is an object:
``token_id``, ``logprob``, ``rank`` (1: the most probable token) and ``best``, pairs of a token id and its log
probability, as many as were asked for. Version 1 had neither. ``tenants`` is what each of ``shares`` found and has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from hybridkv.cli.keeping import show_tenants
from hybridkv.cli.output import console, print_facts, share, table
from hybridkv.cli.printable import printable, printable_lines
from hybridkv.errors import ConfigError
from hybridkv.eviction import eviction_of
from hybridkv.planner import Plan
from hybridkv.units import format_bytes, format_count

if TYPE_CHECKING:  # these need torch, which is loaded once the command runs
    from hybridkv.runner.check import CheckReport
    from hybridkv.runner.completion import Completion
    from hybridkv.runner.engine import Engine
    from hybridkv.runner.load import LoadedModel
    from hybridkv.runner.prompts import Prompts
    from hybridkv.runner.sampling.logprobs import TokenLogprob
    from hybridkv.schedule import SchedulerStatistics

SCHEMA: Final = "hybridkv.generate"
VERSION: Final = 2
_SHOWN_CHARACTERS: Final = 40


@dataclass(frozen=True, slots=True)
class GenerateRun:
    """A finished run. rounds: its completions, one list a round; seconds: of each."""

    loaded: LoadedModel
    plan: Plan
    prompts: Prompts
    rounds: list[list[Completion]]
    engine: Engine
    report: CheckReport | None
    seconds: list[float]


def print_document(run: GenerateRun) -> None:
    """Print a run as one document: equal runs give equal documents, so it holds no times."""
    print(json.dumps(_document(run), indent=2))


def _document(run: GenerateRun) -> dict[str, object]:
    plan, report, options = run.plan, run.report, run.engine.options
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "model": run.loaded.name,
        "model_type": plan.model.model_type,
        "block_size": plan.model.block_size,
        "layout": plan.layout,
        "placement": plan.placement,
        "eviction": eviction_of(plan, options.eviction).name,
        "shares": [asdict(one) for one in options.shares.of],
        "memory_bytes": plan.memory_bytes,
        "num_blocks": plan.config.num_blocks,
        "bad_lines": run.prompts.bad_lines,
        "requests": [_request_document(one, number) for number, done in enumerate(run.rounds) for one in done],
        "statistics": asdict(run.engine.statistics()),
        "tenants": [asdict(one) for one in run.engine.cache.statistics().tenants],
        "encoder_runs": None if run.engine.runner.cross is None else run.engine.runner.cross.encoded,
        "check": None if report is None else _check_document(report),
    }


def _request_document(one: Completion, number: int) -> dict[str, object]:
    """A request of the ``number``-th round."""
    return {
        "id": one.request_id,
        "round": number,
        "prompt_tokens": len(one.prompt_token_ids),
        "text": one.text,
        "token_ids": list(one.token_ids),
        "finish_reason": str(one.finish_reason),
        "hit_tokens": one.hit_tokens,
        "computed_tokens": one.computed_tokens,
        "preemptions": one.preemptions,
        "drafted_tokens": one.drafted_tokens,
        "accepted_tokens": one.accepted_tokens,
        "logprobs": _logprobs_document(one.logprobs),
        "prompt_logprobs": _logprobs_document(one.prompt_logprobs),
    }


def lines_of(run: GenerateRun) -> Iterator[str]:
    """A JSON line for each request, as the document has it; of a conversation with its messages, answer included."""
    asked = [one for one in run.prompts.prompts for _ in range(one.sampling.n)]
    for number, done in enumerate(run.rounds):
        for prompt, one in zip(asked, done, strict=True):
            line = _request_document(one, number)
            if prompt.messages is not None:
                line["messages"] = [*prompt.messages, {"role": "assistant", "content": one.text}]
            yield json.dumps(line)


def require_writable(path: Path | None) -> None:
    """Raise ConfigError where ``write_lines`` could make no file: said before a run, not behind it."""
    if path is not None and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ConfigError(f"cannot write to {path}: name a file in a folder that is there and may be written")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Make or replace the file at ``path``, all of it or nothing. ConfigError where that cannot be."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"cannot write to {path}: {error.strerror or error}") from error


def _logprobs_document(found: Sequence[TokenLogprob] | None) -> list[dict[str, object]] | None:
    return None if found is None else [asdict(one) for one in found]


def _check_document(report: CheckReport) -> dict[str, object]:
    return {
        "ok": report.ok,
        "requests": report.requests,
        "tokens": report.tokens,
        "near_ties": report.near_ties,
        "differences": [{**asdict(one), "near_tie": one.near_tie} for one in report.differences],
        "wrong_ends": list(report.wrong_ends),
    }


def print_tables(run: GenerateRun, *, whole: bool = False) -> None:
    """Print a run for people: its requests, round by round, then what the cache did. whole: all of each output, too."""
    out, plan = console(), run.plan
    for number in range(len(run.rounds)):
        which = f", round {number + 1} of {len(run.rounds)}" if len(run.rounds) > 1 else ""
        states = "" if plan.placement is None else f", states kept at {plan.placement}"
        title = f"{run.loaded.name}: {plan.model.model_type}, {plan.layout} layout{states}{which}"
        out.print(Text(printable(title), style="bold"))
        out.print(_round_table(run.rounds[number]))
        for one in run.rounds[number] if whole else ():
            out.print(Text(f"output of {printable(one.request_id)}", style="bold"))
            text = " ".join(map(str, one.token_ids)) if one.text is None else one.text
            out.print(Text(printable_lines(text) + "\n"), soft_wrap=True)
    show_tenants(run.engine.cache.statistics().tenants)
    stats = run.engine.statistics()
    made = sum(len(one.token_ids) for done in run.rounds for one in done)
    lines = {
        "memory": f"{format_bytes(plan.config.arena_bytes)}, {share(stats.peak_usage)} of it in use at most",
        "computed tokens": f"{format_count(stats.computed_tokens)} in {format_count(stats.steps)} steps",
        "preemptions": format_count(stats.preemptions),
    }
    for number, done in enumerate(run.rounds, start=1):
        which = f" {number}" if len(run.rounds) > 1 else ""
        hits, asked = sum(one.hit_tokens for one in done), sum(len(one.prompt_token_ids) for one in done)
        lines[f"hit tokens{which}"] = f"{format_count(hits)} of {format_count(asked)} prompt tokens were not recomputed"
    if (cross := run.engine.runner.cross) is not None:
        heard = len(run.prompts.prompts) * len(run.rounds)
        lines["encoder runs"] = f"{format_count(cross.encoded)} for {format_count(heard)} inputs"
    seconds = sum(run.seconds)
    lines["output tokens"] = f"{format_count(made)}, {format_count(round(made / max(seconds, 1e-9)))} a second"
    lines["took"] = ", then ".join(f"{one:.2f} s" for one in run.seconds)
    if stats.drafted_tokens:
        lines["drafts"] = _drafts(stats)
    if run.prompts.bad_lines:
        lines["bad lines"] = f"{run.prompts.bad_lines} left out; the first: {run.prompts.first_bad}"
    if run.report is not None:
        lines["check"] = _verdict(run.report)
    print_facts(lines)


def _drafts(stats: SchedulerStatistics) -> str:
    """How many were accepted, in all and by position: a draft counts at its own position, whatever came before it."""
    pairs = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
    shares = " ".join(f"{accepted / drafted:.0%}" for accepted, drafted in pairs if drafted)
    return (
        f"{format_count(stats.accepted_tokens)} of {format_count(stats.drafted_tokens)} accepted "
        f"({share(stats.accepted_tokens / stats.drafted_tokens)}); by position {shares}"
    )


def _round_table(done: list[Completion]) -> Table:
    """Text goes in as Text: rich would read markup and emoji codes in a string."""
    rows = table(*("request", "output", "end", "prompt", "hit", "ran"), numbers_from=3)
    for one in done:
        shown = repr(one.text if one.text is not None else list(one.token_ids))
        cut = shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 3] + "..."
        counts = (len(one.prompt_token_ids), one.hit_tokens, one.computed_tokens)
        rows.add_row(one.request_id, Text(cut), str(one.finish_reason), *map(format_count, counts))
    return rows


def _verdict(report: CheckReport) -> str:
    ties = f"{report.near_ties} near-ties"
    if report.ok:
        return f"{format_count(report.tokens)} tokens equal to plain transformers, {ties}"
    real = [one for one in report.differences if not one.near_tie]
    first = report.wrong_ends[0] if not real else ""
    if real:
        one = real[0]
        first = (
            f"request {one.request_id}, output token {one.at}: {one.token}, expected {one.expected} "
            f"(margin {one.margin:.3g}, measured {one.measured:.3g})"
        )
    return f"FAILED: {len(real)} differences, {len(report.wrong_ends)} wrong ends, {ties}; the first: {first}"
