"""`hybridkv replay`: a trace or a generated workload through the real scheduler and cache, time modelled."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from hybridkv.cli.explain import WHY, WhyOptions
from hybridkv.cli.options import checked_page, output_option, page_option, write_page
from hybridkv.cli.output import (
    NAME_COLUMNS,
    UNKNOWN,
    console,
    in_words,
    print_facts,
    say,
    share,
    show_tenants,
    sparkline,
    table,
)
from hybridkv.cli.running import Prepared, RunOptions, TraceArgument, untold
from hybridkv.report import replay_page
from hybridkv.simulator import Progress, ReplayReport
from hybridkv.simulator.report import Recording, explained_file
from hybridkv.units import format_bytes, format_count

_WIDTH: Final = 46
_FEWEST_LOOKS: Final = 8
"""Looks that make a picture."""
_MOST_LOOKS: Final = 4096
_SECONDS_PER_LINE: Final = 10.0
_MOST_CLASSES: Final = 12
"""Of ends, that are shown."""
_MOST_HITS: Final = 3
"""That classes of ends tell apart."""
_PUT_OFF: Final = {
    "no_space": "memory full",
    "fragmented": "memory not in one piece",
    "admission_limit": "no room to grow",
    "prefix_not_written": "its beginning not written",
}
"""Why a request could not begin in a step, by the name that documents have."""


def replay_command(
    *,
    trace: TraceArgument,
    options: RunOptions,
    why: WhyOptions,
    as_json: bool = output_option("Print the report as JSON.", "--json", default=False),
    page_file: Path | None = page_option(),
) -> None:
    """Replay requests through the scheduler and the cache manager; only time is modelled."""
    settings = options.settings(
        remembered_losses=why.remembered_losses, block_times=page_file is not None or why.explain_to is not None
    )
    page_file = checked_page(page_file)
    run = options.prepare(trace, settings)
    plan, summary = run.plan, run.summary
    if not as_json:
        _show_plan(run)
        set_by = f"that of {summary.longest_at}" if options.max_model_len is None else f"set by {run.length_from}"
        own = run.own_length
        beyond = f"; {plan.model.name} is made for {format_count(own)}" if own and own < plan.max_model_len else ""
        print_facts(untold(run.source, tokens_known=summary.tokens_known))
        print_facts({"longest request": f"{format_count(plan.max_model_len)} tokens, {set_by}{beyond}"})
        sys.stdout.flush()
    begun = time.perf_counter()
    recording = None if page_file is None else Recording(run.simulation.scheduler)
    in_order = run.simulation.scheduler.cache.bounds.evicts_in_order
    told = nullcontext() if why.explain_to is None else explained_file(why.explain_to, in_order=in_order)
    pictures = OverTime(hits=summary.tokens_known)
    with told as on_explained, _progress(summary.requests, begun) as show_progress:

        def on_progress(now: Progress) -> None:
            show_progress(now)
            pictures.see(now)

        report = run.simulation.run(
            run.source, summary=summary, on_progress=on_progress, recording=recording, on_explained=on_explained
        )
    if page_file is not None and recording is not None:
        write_page(page_file, replay_page(plan, report, recording.recorded()))
    if as_json:
        print(report.to_json(run.told()), end="")
        return
    _show(report, run)
    pictures.show()
    print_facts({"took": f"{time.perf_counter() - begun:.1f} s here for {report.simulated_s:,.1f} s simulated"})


def _show_plan(run: Prepared) -> None:
    """What the requests will find, for people."""
    plan, settings = run.plan, run.settings
    model = plan.model
    sizes = sorted({group.spec.block_size for group in plan.config.groups})
    say(
        f"{model.name}, tp {model.tp}, {format_bytes(plan.memory_bytes)}: "
        f"blocks of {' or '.join(map(format_count, sizes))} tokens"
    )
    states = "no recurrent states" if run.placement is None else f"placement {run.placement}"
    evicts = "" if settings.eviction is None else f"eviction {settings.eviction}, "
    say(f"layout {plan.layout}, {states}, {evicts}{model.dtype} cache")
    running, budget = format_count(settings.max_running), format_count(settings.token_budget)
    say(f"up to {running} requests and {budget} tokens a step")
    say(f"on {run.simulation.machine}")


def _show(report: ReplayReport, run: Prepared) -> None:
    """The report for people."""
    if report.caching_off is not None:
        say(f"prefix caching is off: {report.caching_off}")
    counts = table("", report.source)
    rows = {
        "requests": format_count(report.requests),
        "prompt tokens": format_count(report.prompt_tokens),
        "hit tokens": UNKNOWN if report.hit_tokens is None else format_count(report.hit_tokens),
        "hit rate": UNKNOWN if report.hit_rate is None else share(report.hit_rate),
        "computed tokens": format_count(report.computed_tokens),
        "output tokens": format_count(report.output_tokens),
        "preemptions": format_count(report.preemptions),
        "memory in use, at most": share(report.peak_usage),
        "steps": format_count(report.steps),
        "requests per step": f"{report.mean_running:.1f}",
        **_times(report),
    }
    rows |= {f"put off, {_PUT_OFF.get(reason, reason)}": format_count(n) for reason, n in report.refusals.items()}
    if run.plan.config.slabs is not None:
        rows["blocks moved"] = f"{format_count(report.moves)}, {format_bytes(report.moved_bytes)}"
        if run.placement is not None:
            stored, declined = format_count(report.checkpoints), format_count(report.declined_checkpoints)
            rows["states kept"] = f"{stored}, no room for {declined}"
    if report.drafted_tokens:
        rows["drafts accepted"] = f"{format_count(report.accepted_tokens)} of {format_count(report.drafted_tokens)}"
    if report.bad_lines:
        rows["bad lines left out"] = format_count(report.bad_lines)
    for name, value in rows.items():
        counts.add_row(name, value)
    console().print(counts)
    _show_misses(report)
    _show_groups(report)
    _show_ends(report)
    show_tenants(report.tenants)
    if run.summary.first_bad is not None:
        print_facts({"first bad line": run.summary.first_bad})


def _times(report: ReplayReport) -> dict[str, str]:
    """Of requests; none where steps take no time."""
    if not report.timed:
        return {}
    first, later = report.time_to_first_token_s, report.time_per_output_token_s
    return {
        "time to first token, mean": f"{first.mean:,.3f} s",
        "  half / 90% / 99% within": f"{first.p50:,.3f} / {first.p90:,.3f} / {first.p99:,.3f} s",
        "time per output token, mean": f"{later.mean * 1000:,.1f} ms",
        " half / 90% / 99% within": f"{later.p50 * 1000:,.1f} / {later.p90 * 1000:,.1f} / {later.p99 * 1000:,.1f} ms",
    }


def _show_misses(report: ReplayReport) -> None:
    """Why tokens were not found, most of them first."""
    if not report.misses:
        return
    misses = table("prompt tokens missed", "tokens", "of the prompts", numbers_from=1)
    for reason, tokens in sorted(report.misses.items(), key=lambda one: -one[1]):
        misses.add_row(WHY.get(reason, reason), format_count(tokens), share(tokens / report.prompt_tokens))
    console().print(misses)


def _show_groups(report: ReplayReport) -> None:
    """What became of each group's blocks."""
    groups = table("group", "layers", "tokens", "published", "evicted", "cached", "copied", numbers_from=2)
    for at, group in enumerate(report.groups):
        counts = (group.block_size, group.published, group.evictions, group.cached_blocks, group.copies)
        groups.add_row(str(at), f"{group.layers} x {in_words(group.kind)}", *map(format_count, counts))
    console().print(groups)


def _show_ends(report: ReplayReport) -> None:
    """What became of the ends that an eviction ranks."""
    if not report.ends:
        return
    ends = table("ends at", "kept", "made", "hit", "missed", "declined", "given up", "never hit", numbers_from=1)
    for one in report.ends:
        counts = (one.kept, one.made, one.hits, one.missed, one.declined, one.given_up, one.unused)
        ends.add_row(one.kind, *map(format_count, counts))
    console().print(ends)
    _show_classes(report)
    missed, found = report.missed_tokens, report.missed_a_gib_more
    if missed is not None and found is not None:
        more = f"a GiB more would have found {format_count(found)} of them"
        print_facts({"tokens missed": f"{format_count(missed)}; {more}"})


def _show_classes(report: ReplayReport) -> None:
    """Of the classes of ends that ``hazard`` tells apart those with most hits and ends given up."""
    met = [(kind.kind, one) for kind in report.ends for one in kind.classes]
    met.sort(key=lambda of: (of[1].hits + of[1].given_up, of[1].kept), reverse=True)
    shown, rest = met[:_MOST_CLASSES], len(met[_MOST_CLASSES:])
    classes = table("ends at", "promised", "hit before", "paused", "kept", "hit", "missed", "given up", numbers_from=2)
    for name, one in shown:
        before = "3 or more" if one.hits_before == _MOST_HITS else str(one.hits_before)
        paused = "new session" if one.pause_s is None else f"{one.pause_s:.0f} s or more"
        counts = (one.kept, one.hits, one.missed, one.given_up)
        classes.add_row(name, one.promise, before, paused, *map(format_count, counts))
    console().print(classes)
    if rest:
        print_facts({"classes with less": f"{rest}, told with --json"})


@contextmanager
def _progress(requests: int, begun: float) -> Iterator[Callable[[Progress], None]]:
    """What to call as the replay goes on: a bar on a terminal, else a line every ten seconds, on standard error."""
    if not sys.stderr.isatty():
        yield _lines(requests, begun)
        return
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[running]} running, {task.fields[waiting]} waiting,"),
        TextColumn("{task.fields[steps]} steps"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("replay", total=requests, running=0, waiting=0, steps="0")

        def show(now: Progress) -> None:
            bar.update(
                task, completed=now.requests, running=now.running, waiting=now.waiting, steps=format_count(now.steps)
            )

        yield show


def _lines(requests: int, begun: float) -> Callable[[Progress], None]:
    next_s = begun + _SECONDS_PER_LINE

    def show(now: Progress) -> None:
        nonlocal next_s
        if time.perf_counter() < next_s:
            return
        next_s += _SECONDS_PER_LINE
        done = f"{format_count(now.requests)} of {format_count(requests)} requests"
        print(f"replay: {done}, {format_count(now.steps)} steps, {now.waiting} waiting", file=sys.stderr)

    return show


# -- over time, in small: what was found, who ran and waited, how much memory was held


class OverTime:
    """What replays told of their progress, the last few thousand looks evenly thinned. hits: whether they are known."""

    def __init__(self, *, hits: bool = True) -> None:
        self._hits = hits
        self._kept: list[Progress] = []
        self._newest: Progress | None = None
        self._every, self._skipped = 1, 0

    def see(self, now: Progress) -> None:
        """One more look."""
        self._newest = now
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._kept.append(now)
        if len(self._kept) == _MOST_LOOKS:
            self._kept = self._kept[::2]
            self._every *= 2

    def show(self) -> None:
        """Lines of pictures; nothing of what was over at once."""
        seen = self._seen()
        if len(seen) < _FEWEST_LOOKS or not seen[-1].time_s:
            return
        for line in self.lines():
            say(line)

    def lines(self) -> Iterator[str]:
        """Each a name, a character for each part of the time, and what is worth a number."""
        seen = self._seen()
        last = seen[-1]
        seconds = last.time_s
        parts = _parts(seen, seconds)
        yield f"{'over time':<{NAME_COLUMNS}} 0 .. {seconds:,.1f} s"
        found = [_found(before[-1], part[-1]) for before, part in pairwise(parts)]
        whole = last.hit_tokens / last.prompt_tokens if last.prompt_tokens else 0.0
        if self._hits:
            yield _line("hit rate", sparkline(found, 1.0), f"{share(whole)} of all")
        for name, counts in (
            ("running", [max(one.running for one in part) for part in parts[1:]]),
            ("waiting", [max(one.waiting for one in part) for part in parts[1:]]),
        ):
            yield _line(name, sparkline(counts), f"█ is {format_count(max(counts))}" if any(counts) else "none")
        usage = [max(one.usage for one in part) for part in parts[1:]]
        yield _line("memory in use", sparkline(usage, 1.0), "█ is all of it")

    def _seen(self) -> list[Progress]:
        """The looks that are kept, and the newest, which says how it ended."""
        if self._newest is None or (self._kept and self._kept[-1] is self._newest):
            return self._kept
        return [*self._kept, self._newest]


def _parts(seen: list[Progress], seconds: float) -> list[list[Progress]]:
    """The looks before the first, then those of each part of the time; one without any has the last before it."""
    parts = [[Progress(0, 0, 0, 0, 0.0, 0, 0, 0.0, 0)], *([] for _ in range(_WIDTH))]
    for one in seen:
        parts[min(int(one.time_s / seconds * _WIDTH), _WIDTH - 1) + 1].append(one)
    for before, part in pairwise(parts):
        if not part:
            part.append(before[-1])
    return parts


def _found(before: Progress, now: Progress) -> float:
    """Of what began in between."""
    prompts = now.prompt_tokens - before.prompt_tokens
    return (now.hit_tokens - before.hit_tokens) / prompts if prompts else 0.0


def _line(name: str, drawn: str, said: str) -> str:
    return f"{name:<{NAME_COLUMNS}} {drawn:<{_WIDTH}} {said}"
