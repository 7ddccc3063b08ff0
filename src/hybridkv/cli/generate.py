"""`hybridkv generate`: a real model through the paged cache."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from hybridkv.cli.output import console, table
from hybridkv.cli.planning import LayoutOption, PlacementOption
from hybridkv.cli.speculation import Speculate, SpeculateOption
from hybridkv.errors import ConfigError
from hybridkv.plan import Plan, read_plan
from hybridkv.request import SamplingParams, output_ids
from hybridkv.units import format_bytes, format_count

if TYPE_CHECKING:  # these need torch, which is loaded once the command runs
    from hybridkv.runner.check import CheckReport
    from hybridkv.runner.completion import Completion
    from hybridkv.runner.drafters import Drafter
    from hybridkv.runner.engine import Engine, EngineOptions
    from hybridkv.runner.load import LoadedModel
    from hybridkv.runner.prompts import Hear, Prompts
    from hybridkv.schedule import SchedulerStatistics

SCHEMA: Final = "hybridkv.generate"
VERSION: Final = 1
CHECK_FAILED: Final = 1
_SHOWN_CHARACTERS: Final = 44


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("generate")(generate_command)


@dataclass(frozen=True, slots=True)
class _Run:
    """A finished run, for both kinds of output. rounds: its completions, one list a round; seconds: of each."""

    loaded: LoadedModel
    plan: Plan
    prompts: Prompts
    rounds: list[list[Completion]]
    engine: Engine
    report: CheckReport | None
    seconds: list[float]


def generate_command(
    *,
    model: Annotated[
        str, typer.Option(help="A folder with safetensors and tokenizer, or tiny:NAME: tiny:? lists the names.")
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with prompt, encoder, sampling and marks, or plain text; a few built-in ones."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Of each request, unless its sampling says max_tokens.")] = 32,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a block; 16.")] = None,
    memory: Annotated[str | None, typer.Option(help="For the cache: 64MiB, or bytes; enough for all prompts.")] = None,
    layout: LayoutOption = None,
    placement: PlacementOption = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="A plan of this model from --json.")] = None,
    max_running: Annotated[int, typer.Option(help="Requests at once.")] = 64,
    token_budget: Annotated[int, typer.Option(help="Tokens of a step.")] = 2048,
    prefix_caching: Annotated[bool, typer.Option(help="Share the blocks of equal prefixes.")] = True,
    repeat: Annotated[int, typer.Option(help="Rounds over the prompts: the second finds a warm cache.")] = 1,
    in_flight: Annotated[int, typer.Option(help="Steps scheduled ahead of their results, 1 or 2.")] = 1,
    speculate: SpeculateOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with plain transformers; exit 1 if it differs.")
    ] = False,
    skip_bad_lines: Annotated[bool, typer.Option("--skip-bad-lines", help="Count malformed lines, go on.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Generate with an unmodified Hugging Face model: continuous batching on the paged cache."""
    rules = {"block_size": block_size, "memory": memory, "layout": layout, "placement": placement}
    given = {name: value for name, value in rules.items() if value is not None}
    if plan_file is not None and given:
        named = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(
            f"--plan holds memory, block size, layout and placement already: drop {named}, or drop --plan"
        )
    if repeat < 1:
        raise ConfigError(f"--repeat must be at least 1, got {repeat}")
    asked = None if speculate is None else Speculate.parse(speculate)
    defaults = SamplingParams(max_tokens=max_new_tokens)
    _quiet_transformers()
    from hybridkv.runner.engine import EngineOptions  # noqa: PLC0415  # torch takes seconds: only this command pays

    options = EngineOptions(max_running, token_budget, in_flight, prefix_caching)
    loaded = _load(model)
    found = _prompts(loaded, prompts, defaults, skip_bad_lines=skip_bad_lines)
    drafter = None if asked is None else asked.drafter(_lengths(found), options)
    plan = _plan(loaded, found, plan_file, given, drafts=0 if asked is None else asked.drafts)
    run = _run(loaded, plan, found, options, repeat=repeat, check=check, drafter=drafter)
    if as_json:
        print(json.dumps(_document(run), indent=2))
    else:
        _show(run)
    return 0 if run.report is None or run.report.ok else CHECK_FAILED


# -- the run


def _quiet_transformers() -> None:
    """No chatter on standard error: what matters here arrives as an exception."""
    from transformers.utils import logging as chatter  # noqa: PLC0415  # see generate_command

    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"transformers\..*")


def _load(source: str) -> LoadedModel:
    import torch  # noqa: PLC0415  # see generate_command

    from hybridkv.runner.load import TINY, load  # noqa: PLC0415  # same

    if source.startswith(TINY):
        torch.set_num_threads(1)  # such a model is done before threads have met
    return load(source)


def _prompts(loaded: LoadedModel, path: Path | None, defaults: SamplingParams, *, skip_bad_lines: bool) -> Prompts:
    from hybridkv.runner.inputs import encode  # noqa: PLC0415  # see generate_command
    from hybridkv.runner.prompts import built_in_prompts, read_prompts  # noqa: PLC0415  # same

    hear = _hear(loaded, Path() if path is None else path.parent)

    def checked(prompt: Any) -> list[int]:  # noqa: ANN401  # text or ids, as encode takes them
        return encode(loaded, prompt if hear is None or len(prompt) else loaded.decoder_start)

    if path is None:
        return built_in_prompts(checked, defaults, hear)
    return read_prompts(path, checked, defaults, vocab_size=loaded.vocab_size, skip_bad_lines=skip_bad_lines, hear=hear)


def _hear(loaded: LoadedModel, folder: Path) -> Hear | None:
    """How an encoder's input is read, from files in ``folder``; None for a model without an encoder."""
    from hybridkv.runner.encoder_decoder import is_encoder_decoder  # noqa: PLC0415  # see generate_command
    from hybridkv.runner.encoder_inputs import read_encoder_input  # noqa: PLC0415  # same

    if not is_encoder_decoder(loaded.model):
        return None
    return lambda given: read_encoder_input(loaded, given, folder)


def _lengths(found: Prompts) -> list[int]:
    """Tokens of each request, prompt and output together."""
    return [len(one.token_ids) + one.sampling.max_tokens for one in found.prompts for _ in range(one.sampling.n)]


def _plan(
    loaded: LoadedModel, found: Prompts, plan_file: Path | None, given: Mapping[str, Any], *, drafts: int
) -> Plan:
    """The plan in ``plan_file``, or one for the prompts, and so many drafts a step, by the rules that were given."""
    from hybridkv.runner.planning import plan_for  # noqa: PLC0415  # see generate_command

    if plan_file is not None:
        return read_plan(plan_file)
    return plan_for(loaded, _lengths(found), num_speculative_tokens=drafts, **given)


def _run(
    loaded: LoadedModel,
    plan: Plan,
    found: Prompts,
    options: EngineOptions,
    *,
    repeat: int,
    check: bool,
    drafter: Drafter | None,
) -> _Run:
    from hybridkv.runner.check import LogitRecorder, check_completions  # noqa: PLC0415  # see generate_command
    from hybridkv.runner.engine import Engine  # noqa: PLC0415  # same

    recorder = LogitRecorder() if check else None
    engine = Engine(loaded, plan, options, observer=recorder, speculate=drafter)
    rounds: list[list[Completion]] = []
    seconds: list[float] = []
    try:
        with _progress(repeat * sum(one.sampling.n for one in found.prompts)) as advance:
            for _ in range(repeat):
                begun = time.perf_counter()
                rounds.append(_round(engine, found, advance))
                seconds.append(time.perf_counter() - begun)
    finally:
        engine.close()
    report = None
    if recorder is not None:
        asked = [one.sampling for one in found.prompts]
        sampling = [one.of_branch(number) for one in asked for number in range(one.n)] * repeat
        heard = [None if one.encoder is None else one.encoder.values for one in found.prompts]
        encoders = [one for one, params in zip(heard, asked, strict=True) for _ in range(params.n)] * repeat
        report = check_completions(loaded, [one for done in rounds for one in done], sampling, recorder, encoders)
    return _Run(loaded, plan, found, rounds, engine, report, seconds)


def _round(engine: Engine, found: Prompts, advance: Callable[[], None]) -> list[Completion]:
    """All prompts to their ends, in their order."""
    ids = []
    for one in found.prompts:
        given, digest = (None, None) if one.encoder is None else (one.encoder.values[0], one.encoder.read.digest)
        added = engine.add(one.token_ids, one.sampling, marks=one.marks, encoder=given, encoder_digest=digest)
        ids += output_ids(added, one.sampling.n)
    done: dict[str, Completion] = {}
    while not engine.idle:
        for completion in engine.step():
            done[completion.request_id] = completion
            advance()
    return [done[one] for one in ids]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error."""
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


# -- output


def _document(run: _Run) -> dict[str, object]:
    """The run as one document: equal runs give equal documents, so it holds no times."""
    plan, report = run.plan, run.report
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "model": run.loaded.name,
        "model_type": plan.model.model_type,
        "block_size": plan.model.block_size,
        "layout": plan.layout,
        "placement": plan.placement,
        "memory_bytes": plan.memory_bytes,
        "num_blocks": plan.config.num_blocks,
        "bad_lines": run.prompts.bad_lines,
        "requests": [
            {
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
            }
            for number, done in enumerate(run.rounds)
            for one in done
        ],
        "statistics": asdict(run.engine.statistics()),
        "encoder_runs": None if run.engine.runner.cross is None else run.engine.runner.cross.encoded,
        "check": None if report is None else _check_document(report),
    }


def _check_document(report: CheckReport) -> dict[str, object]:
    return {
        "ok": report.ok,
        "requests": report.requests,
        "tokens": report.tokens,
        "near_ties": report.near_ties,
        "differences": [{**asdict(one), "near_tie": one.near_tie} for one in report.differences],
        "wrong_ends": list(report.wrong_ends),
    }


def _show(run: _Run) -> None:
    """Print a run for people: its requests, round by round, then what the cache did."""
    out, plan = console(), run.plan
    for number in range(len(run.rounds)):
        which = f", round {number + 1} of {len(run.rounds)}" if len(run.rounds) > 1 else ""
        states = "" if plan.placement is None else f", states kept at {plan.placement}"
        title = f"{run.loaded.name}: {plan.model.model_type}, {plan.layout} layout{states}{which}"
        out.print(Text(title, style="bold"))
        out.print(_round_table(run.rounds[number]))
    stats = run.engine.statistics()
    made = sum(len(one.token_ids) for done in run.rounds for one in done)
    lines = {
        "memory": f"{format_bytes(plan.config.arena_bytes)}, {format_count(plan.config.num_blocks)} blocks",
        "peak usage": f"{stats.peak_usage:.1%}",
        "computed tokens": f"{format_count(stats.computed_tokens)} in {format_count(stats.steps)} steps",
        "preemptions": format_count(stats.preemptions),
    }
    for number, (done, seconds) in enumerate(zip(run.rounds, run.seconds, strict=True), start=1):
        which = f" {number}" if len(run.rounds) > 1 else ""
        hits, asked = sum(one.hit_tokens for one in done), sum(len(one.prompt_token_ids) for one in done)
        lines[f"hit tokens{which}"] = (
            f"{format_count(hits)} of {format_count(asked)} prompt tokens were not recomputed ({seconds:.2f} s)"
        )
    if (cross := run.engine.runner.cross) is not None:
        heard = len(run.prompts.prompts) * len(run.rounds)
        lines["encoder runs"] = f"{format_count(cross.encoded)} for {format_count(heard)} inputs"
    lines["output tokens"] = f"{format_count(made)}, {made / max(sum(run.seconds), 1e-9):.0f} a second"
    if stats.drafted_tokens:
        lines["drafts"] = _drafts(stats)
    if run.prompts.bad_lines:
        lines["bad lines"] = f"{run.prompts.bad_lines} left out; the first: {run.prompts.first_bad}"
    if run.report is not None:
        lines["check"] = _verdict(run.report)
    for name, value in lines.items():
        out.print(f"{name:<17} {value}", soft_wrap=True, markup=False)


def _drafts(stats: SchedulerStatistics) -> str:
    """How many were accepted, in all and by position: a draft counts at its own position, whatever came before it."""
    pairs = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
    shares = " ".join(f"{accepted / drafted:.0%}" for accepted, drafted in pairs if drafted)
    return (
        f"{format_count(stats.accepted_tokens)} of {format_count(stats.drafted_tokens)} accepted "
        f"({stats.accepted_tokens / stats.drafted_tokens:.1%}); by position {shares}"
    )


def _round_table(done: list[Completion]) -> Table:
    """Text goes in as Text: rich would read markup and emoji codes in a string."""
    rows = table(*("request", "output", "end", "prompt", "hit", "ran", "preempted"), numbers_from=3)
    for one in done:
        shown = repr(one.text if one.text is not None else list(one.token_ids))
        cut = shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 3] + "..."
        counts = (len(one.prompt_token_ids), one.hit_tokens, one.computed_tokens, one.preemptions)
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
