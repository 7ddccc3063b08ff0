"""`hybridkv replay`: run a trace or a generated workload through the real scheduler and cache with modelled time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from hybridkv.cli.explain import WHY, WhyOptions
from hybridkv.cli.options import checked_page, output_option, page_option, run_option, write_file
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
from hybridkv.cli.running import Prepared, RunOptions, TraceArgument, unknown_facts
from hybridkv.report import replay_page
from hybridkv.report.caches import of_store
from hybridkv.simulator import Progress, ReplayReport, simulation_of
from hybridkv.simulator.report import Recording, explained_file
from hybridkv.simulator.twin import fitted_time_scale
from hybridkv.units import format_bytes, format_count

_WIDTH: Final = 46
_FEWEST_SAMPLES: Final = 8
"""Fewer samples make no useful sparkline. Chosen by hand."""
_MOST_SAMPLES: Final = 4096
_SECONDS_PER_LINE: Final = 10.0
_MOST_CLASSES: Final = 12
"""Classes of resume points in the table, so that it fits on a screen. Chosen by hand."""
_MOST_HITS: Final = 3
"""Hits from which on classes of resume points are no longer distinguished."""
_REFUSALS: Final = {
    "no_space": "memory full",
    "fragmented": "memory fragmented",
    "admission_limit": "no memory to grow",
    "prefix_not_written": "shared prefix not written yet",
}
"""Reasons why a waiting request was not admitted in a step, by their name in documents."""


def replay_command(
    *,
    trace: TraceArgument,
    options: RunOptions,
    why: WhyOptions,
    fit_times: bool = run_option(
        "Multiply --time-scale by the factor with which requests take as long as when they were recorded.",
        "--fit-times",
        default=False,
    ),
    as_json: bool = output_option("Print the report as JSON.", "--json", default=False),
    page_file: Path | None = page_option(),
) -> None:
    """Replay requests through the real scheduler and cache manager; only time is modelled."""
    settings = options.settings(
        remembered_losses=why.remembered_losses, block_times=page_file is not None or why.explain_to is not None
    )
    page_file = checked_page(page_file)
    run = options.prepare(trace, settings)
    if fit_times:
        settings = replace(settings, time_scale=fitted_time_scale(run.source, run.plan, settings))
        run = replace(run, settings=settings, simulation=simulation_of(run.plan, settings))
    plan, summary = run.plan, run.summary
    if not as_json:
        _show_plan(run)
        if fit_times:
            print_facts({"time scale": f"{run.settings.time_scale:.4g}, fitted to recorded times"})
        set_by = f"from {summary.longest_at}" if options.max_model_len is None else f"set by {run.length_from}"
        own = run.own_length
        beyond = f"; the limit of {plan.model.name} is {format_count(own)}" if own and own < plan.max_model_len else ""
        print_facts(unknown_facts(run.source, tokens_known=summary.tokens_known))
        print_facts({"longest request": f"{format_count(plan.max_model_len)} tokens, {set_by}{beyond}"})
        sys.stdout.flush()
    begun = time.perf_counter()
    recording = None if page_file is None else Recording(run.simulation.scheduler)
    in_order = run.simulation.scheduler.cache.bounds.evicts_in_order
    explained = nullcontext() if why.explain_to is None else explained_file(why.explain_to, in_order=in_order)
    over_time = OverTime(hits=summary.tokens_known)
    with explained as on_explained, _progress(summary.requests, begun) as show_progress:

        def on_progress(now: Progress) -> None:
            show_progress(now)
            over_time.add(now)

        report = run.simulation.run(
            run.source, summary=summary, on_progress=on_progress, recording=recording, on_explained=on_explained
        )
    if page_file is not None and recording is not None:
        write_file("--report", page_file, replay_page(plan, report, recording.recorded()))
    if as_json:
        print(report.to_json(run.conditions()), end="")
        return
    _show(report, run)
    over_time.show()
    print_facts({"took": f"{time.perf_counter() - begun:.1f} s for {report.simulated_s:,.1f} s of simulated time"})


def _show_plan(run: Prepared) -> None:
    """Print the plan and the settings of the replay."""
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
    if run.simulation.transfers is not None:
        host = run.simulation.transfers.tier.host
        rate = (
            "no time" if not settings.time_scale else f"{run.simulation.cost.host_bytes_per_s / 1e9:,.1f} GB/s each way"
        )
        say(f"host memory {format_bytes(host.config.arena_bytes)}, {rate}")
    say(f"up to {running} requests and {budget} tokens a step")
    say(f"on {run.simulation.machine}")


def _show(report: ReplayReport, run: Prepared) -> None:
    """Print the report as tables."""
    if report.caching_off is not None:
        say(f"prefix caching is off: {report.caching_off}")
    counts = table("", report.source)
    rows = {
        "requests": format_count(report.requests),
        "prompt tokens": format_count(report.prompt_tokens),
        "hit tokens": UNKNOWN if report.hit_tokens is None else format_count(report.hit_tokens),
        "hit rate": UNKNOWN if report.hit_rate is None else share(report.hit_rate),
        **_of_host(report),
        "computed tokens": format_count(report.computed_tokens),
        "output tokens": format_count(report.output_tokens),
        "preemptions": format_count(report.preemptions),
        "peak memory use": share(report.peak_usage),
        "steps": format_count(report.steps),
        "requests per step": f"{report.mean_running:.1f}",
        **_times(report),
    }
    rows |= {f"not admitted: {_REFUSALS.get(name, name)}": format_count(n) for name, n in report.refusals.items()}
    if run.plan.config.slabs is not None:
        rows["blocks moved"] = f"{format_count(report.moves)}, {format_bytes(report.moved_bytes)}"
        if run.placement is not None:
            stored, declined = format_count(report.checkpoints), format_count(report.declined_checkpoints)
            rows["states saved"] = f"{stored}, no memory for {declined}"
    if report.drafted_tokens:
        rows["drafts accepted"] = f"{format_count(report.accepted_tokens)} of {format_count(report.drafted_tokens)}"
    if report.bad_lines:
        rows["bad lines skipped"] = format_count(report.bad_lines)
    for name, value in rows.items():
        counts.add_row(name, value)
    console().print(counts)
    _show_misses(report)
    _show_groups(report, run.plan.layers_of_groups)
    _show_ends(report)
    show_tenants(report.tenants)
    if run.summary.first_bad is not None:
        print_facts({"first bad line": run.summary.first_bad})


def _of_host(report: ReplayReport) -> dict[str, str]:
    """Return rows of the host tier; none without one."""
    host = report.host_tier
    if host is None:
        return {}
    stored = f"{format_bytes(host.stored_bytes)}, {format_count(host.stores)} resume points"
    loaded = f"{format_bytes(host.loaded_bytes)}, {format_count(host.loads)} prefixes"
    return {
        "  loaded from host memory": format_count(host.loaded_tokens),
        "stored in host memory": f"{stored}, {format_count(host.stores_refused)} refused",
        "loaded from host memory": f"{loaded}, {format_count(host.loads_refused)} refused",
        **of_store(host),
    }


def _times(report: ReplayReport) -> dict[str, str]:
    """Return rows of the requests' latencies; none if steps take no time."""
    if not report.timed:
        return {}
    first, later = report.time_to_first_token_s, report.time_per_output_token_s
    return {
        "time to first token (TTFT), mean": f"{first.mean:,.3f} s",
        "  TTFT p50 / p90 / p99": f"{first.p50:,.3f} / {first.p90:,.3f} / {first.p99:,.3f} s",
        "time per output token (TPOT), mean": f"{later.mean * 1000:,.1f} ms",
        "  TPOT p50 / p90 / p99": f"{later.p50 * 1000:,.1f} / {later.p90 * 1000:,.1f} / {later.p99 * 1000:,.1f} ms",
    }


def _show_misses(report: ReplayReport) -> None:
    """Print missed prompt tokens by reason, the most frequent reason first."""
    if not report.misses:
        return
    misses = table("prompt tokens missed", "tokens", "of all prompt tokens", numbers_from=1)
    for reason, tokens in sorted(report.misses.items(), key=lambda one: -one[1]):
        misses.add_row(WHY.get(reason, reason), format_count(tokens), share(tokens / report.prompt_tokens))
    console().print(misses)


def _show_groups(report: ReplayReport, layers: Sequence[int]) -> None:
    """Print the counts of each group's blocks, and its number of layers."""
    groups = table("group", "layers", "block", "published", "evictions", "cached", "copied", numbers_from=2)
    for at, (group, many) in enumerate(zip(report.groups, layers, strict=True)):
        counts = (group.block_size, group.published, group.evictions, group.cached_blocks, group.copies)
        groups.add_row(str(at), f"{many} x {in_words(group.kind)}", *map(format_count, counts))
    console().print(groups)


def _show_ends(report: ReplayReport) -> None:
    """Print the counts of resume points, by kind, if the eviction policy ranks them."""
    if not report.ends:
        return
    ends = table("resume points", "kept", "made", "hits", "missed", "declined", "evicted", "never hit", numbers_from=1)
    for one in report.ends:
        counts = (one.kept, one.made, one.hits, one.missed, one.declined, one.given_up, one.unused)
        ends.add_row(one.kind, *map(format_count, counts))
    console().print(ends)
    _show_classes(report)
    missed, found = report.missed_tokens, report.missed_a_gib_more
    if missed is not None and found is not None:
        more = f"1 GiB more memory would have hit {format_count(found)} of them"
        print_facts({"tokens missed": f"{format_count(missed)}; {more}"})


def _show_classes(report: ReplayReport) -> None:
    """Print the classes of resume points that ``hazard`` distinguishes, those with most hits and evictions first."""
    met = [(kind.kind, one) for kind in report.ends for one in kind.classes]
    met.sort(key=lambda of: (of[1].hits + of[1].given_up, of[1].kept), reverse=True)
    shown, rest = met[:_MOST_CLASSES], len(met[_MOST_CLASSES:])
    classes = table(
        "resume points", "hint", "hits before", "pause", "kept", "hits", "missed", "evicted", numbers_from=2
    )
    for name, one in shown:
        before = "3 or more" if one.hits_before == _MOST_HITS else str(one.hits_before)
        paused = "new session" if one.pause_s is None else f"{one.pause_s:.0f} s or more"
        counts = (one.kept, one.hits, one.missed, one.given_up)
        classes.add_row(name, one.promise, before, paused, *map(format_count, counts))
    console().print(classes)
    if rest:
        print_facts({"more classes": f"{rest} with fewer hits; --json prints them"})


@contextmanager
def _progress(requests: int, begun: float) -> Iterator[Callable[[Progress], None]]:
    """Yield a function for progress: on standard error, a bar on a terminal, else a line every ten seconds."""
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


# -- sparklines over time: hit rate, running and waiting requests, memory in use


class OverTime:
    """Sparklines of a replay's progress, from at most _MOST_SAMPLES samples at even distances.

    Args:
        hits: whether hits are known.
    """

    def __init__(self, *, hits: bool = True) -> None:
        self._hits = hits
        self._kept: list[Progress] = []
        self._newest: Progress | None = None
        self._every, self._skipped = 1, 0

    def add(self, now: Progress) -> None:
        """Add a sample. If there are too many, keep every second one and double the distance."""
        self._newest = now
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._kept.append(now)
        if len(self._kept) == _MOST_SAMPLES:
            self._kept = self._kept[::2]
            self._every *= 2

    def show(self) -> None:
        """Print the sparklines, or nothing after a replay that was too short."""
        samples = self._samples()
        if len(samples) < _FEWEST_SAMPLES or not samples[-1].time_s:
            return
        for line in self.lines():
            say(line)

    def lines(self) -> Iterator[str]:
        """Yield lines of a name, a character for each part of the time, and a figure."""
        samples = self._samples()
        last = samples[-1]
        seconds = last.time_s
        parts = _parts(samples, seconds)
        yield f"{'over time':<{NAME_COLUMNS}} 0 .. {seconds:,.1f} s"
        found = [_found(before[-1], part[-1]) for before, part in pairwise(parts)]
        whole = last.hit_tokens / last.prompt_tokens if last.prompt_tokens else 0.0
        if self._hits:
            yield _line("hit rate", sparkline(found, 1.0), f"{share(whole)} overall")
        for name, counts in (
            ("running", [max(one.running for one in part) for part in parts[1:]]),
            ("waiting", [max(one.waiting for one in part) for part in parts[1:]]),
        ):
            yield _line(name, sparkline(counts), f"█ is {format_count(max(counts))}" if any(counts) else "none")
        usage = [max(one.usage for one in part) for part in parts[1:]]
        yield _line("memory in use", sparkline(usage, 1.0), "█ is all of it")

    def _samples(self) -> list[Progress]:
        """Return the kept samples and the newest one, which holds the final state."""
        if self._newest is None or (self._kept and self._kept[-1] is self._newest):
            return self._kept
        return [*self._kept, self._newest]


def _parts(samples: list[Progress], seconds: float) -> list[list[Progress]]:
    """Return a zero sample, then the samples of each part of the time; an empty part repeats the sample before it."""
    parts = [[Progress(0, 0, 0, 0, 0.0, 0, 0, 0.0, 0)], *([] for _ in range(_WIDTH))]
    for one in samples:
        parts[min(int(one.time_s / seconds * _WIDTH), _WIDTH - 1) + 1].append(one)
    for before, part in pairwise(parts):
        if not part:
            part.append(before[-1])
    return parts


def _found(before: Progress, now: Progress) -> float:
    """Return the hit rate of the requests that began between two samples."""
    prompts = now.prompt_tokens - before.prompt_tokens
    return (now.hit_tokens - before.hit_tokens) / prompts if prompts else 0.0


def _line(name: str, drawn: str, said: str) -> str:
    return f"{name:<{NAME_COLUMNS}} {drawn:<{_WIDTH}} {said}"
