"""`hybridkv generate`: run a real model on the paged cache; print one JSON document, or tables.

The document has the schema ``hybridkv.generate``, version 2. Each request has ``logprobs``, one for each output token,
and ``prompt_logprobs``, one for each prompt token but the first; they are null unless requested. A log probability is
an object with ``token_id``, ``logprob``, ``rank`` (1: the most probable token) and ``best``: pairs of a token id and
its log probability, as many as requested. Version 1 had neither field. ``tenants`` holds the hits and the cached bytes
of each tenant in ``shares``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from rich.text import Text

from hybridkv.cli.engine_options import (
    ModelOptions,
    SamplingOptions,
    Speculate,
    StepOptions,
    StoredOptions,
    TierOptions,
    checking,
    speculate_option,
    system_option,
)
from hybridkv.cli.options import (
    as_option,
    cache_option,
    output_option,
    request_option,
    require_writable,
    run_option,
    skip_bad_lines_option,
    write_file,
)
from hybridkv.cli.outcome import printable, printable_lines
from hybridkv.cli.output import console, print_facts, progress_bar, share, show_tenants, table
from hybridkv.cli.running import Layout, block_size_option, layout_option, placement_option
from hybridkv.errors import ConfigError
from hybridkv.eviction import eviction_of
from hybridkv.planner import Plan, read_plan
from hybridkv.planner.plan import DEFAULT_LAYOUT
from hybridkv.report.caches import of_store
from hybridkv.request import SamplingParams, output_ids
from hybridkv.simulator.setup import require_placement
from hybridkv.units import format_bytes, format_count

if TYPE_CHECKING:  # these need torch, which is loaded once the command runs
    from hybridkv.runner.check import CheckReport
    from hybridkv.runner.completion import Completion
    from hybridkv.runner.drafters import Drafter
    from hybridkv.runner.engine import Engine
    from hybridkv.runner.load import LoadedModel
    from hybridkv.runner.options import EngineOptions
    from hybridkv.runner.prompts import Prompts, ReadEncoder
    from hybridkv.schedule import SchedulerStatistics

_CHECK_FAILED: Final = 1
_MOST_ROUNDS: Final = 1 << 16
"""Limit of rounds, because all outputs are held in memory until the end."""
_SHOWN_CHARACTERS: Final = 40


def generate_command(
    *,
    model: ModelOptions,
    prompt: list[str] | None = request_option("Text to continue. May be repeated.", metavar="TEXT"),
    prompts: Path | None = request_option(
        "File of prompts: JSON lines with prompt, encoder, sampling, marks, tenant and hints, or lines of text.",
        show_default="built-in prompts",
    ),
    messages: Path | None = request_option(
        "File of conversations as JSON lines, with pictures if the model reads them; the chat template formats them."
    ),
    system: str | None = system_option(),
    sampling: SamplingOptions,
    block_size: int | None = block_size_option(),
    memory: str | None = cache_option(
        "Cache memory: 64MiB, or a number of bytes.", show_default="enough for all prompts"
    ),
    tiers: TierOptions,
    layout: Layout | None = layout_option(),
    placement: str | None = placement_option(),
    stored: StoredOptions,
    plan_file: Path | None = cache_option("Plan file of this model, written by `hybridkv plan --json`.", "--plan"),
    stepping: StepOptions,
    compiled: str | None = run_option(
        "Parts to compile: decode runs steps that only decode as CUDA graphs.", "--compile", metavar="WHAT"
    ),
    repeat: int = run_option(
        "Number of rounds over the prompts; later rounds find a warm cache.", max=_MOST_ROUNDS, metavar="N", default=1
    ),
    in_flight: int = run_option(
        "Steps that are scheduled before their results are known, 1 or 2.", metavar="N", default=1
    ),
    speculate: str | None = speculate_option(),
    check: bool = output_option(
        "Compare the outputs with plain transformers; exit with status 1 if they differ.", "--check", default=False
    ),
    skip_bad_lines: bool = skip_bad_lines_option(),
    out: Path | None = output_option(
        "File for all requests with their full outputs, as JSON lines.", "--out", "--output", metavar="FILE"
    ),
    whole: bool = output_option(
        "Print full outputs instead of their first characters, as with --prompt.", "--whole", default=False
    ),
    as_json: bool = output_option("Print the results as one JSON document.", "--json", default=False),
) -> int:
    """Generate text with an unmodified Hugging Face model: continuous batching on the paged cache."""
    rules = _rules(plan_file, block_size=block_size, memory=memory, layout=layout, placement=placement)
    if check and stored.kv_dtype is not None:
        raise ConfigError("--check compares with keys and values that are not quantized: drop it, or --kv-dtype")
    if plan_file is not None and stored != StoredOptions():
        raise ConfigError("--plan sets the form of keys and values already: drop --kv-dtype and --kv-dtype-skip-layers")
    if repeat < 1:
        raise ConfigError(f"--repeat must be at least 1, got {repeat}")
    drafts = Speculate.parse(speculate)
    if sum(map(bool, (prompt, prompts, messages))) > 1:
        raise ConfigError("--prompt, --prompts and --messages cannot be used together: give one of them")
    if system is not None and messages is None:
        raise ConfigError("--system has no effect without conversations: give --messages FILE too")
    require_writable("--out", out)
    defaults = sampling.params()
    from hybridkv.runner.planning import plan_for  # noqa: PLC0415  # torch takes seconds to import

    options = stepping.engine_options(in_flight=in_flight, compile=compiled)
    loaded = model.load()
    found = _prompts(loaded, prompt, prompts, messages, defaults, system=system, skip_bad_lines=skip_bad_lines)
    lengths = [len(one.token_ids) + one.sampling.max_tokens for one in found.prompts for _ in range(one.sampling.n)]
    drafter = drafts.drafter(options, lengths, trust_remote_code=model.trust_remote_code) if drafts else None
    if plan_file is not None:
        plan = read_plan(plan_file)
    else:
        held = drafts.drafts if drafts else 0
        plan = plan_for(loaded, lengths, num_speculative_tokens=held, stored=stored.stored(), **rules)
    run = _run(loaded, plan, found, options, repeat=repeat, check=check, drafter=drafter, behind=tiers.behind())
    if out is not None:
        _write_lines(out, run)
    if as_json:
        print(json.dumps(_document(run), indent=2))  # without times: equal runs give equal documents
    else:
        _print_tables(run, whole=whole or bool(prompt))
    return 0 if run.report is None or run.report.ok else _CHECK_FAILED


def _rules(plan_file: Path | None, *, layout: Layout | None, placement: str | None, **others: object) -> dict[str, Any]:
    """Return the given arguments of ``plan_for``.

    Raises:
        ConfigError: if a plan file sets them already, and for a placement that the layout does not have.
    """
    rules = {**others, "layout": layout, "placement": placement}
    given = {name: value for name, value in rules.items() if value is not None}
    if plan_file is not None and given:
        named = " and ".join(map(as_option, given))
        raise ConfigError(f"--plan sets memory, block size, layout and placement already: drop {named}, or drop --plan")
    require_placement(placement, layout or DEFAULT_LAYOUT)
    return given


def _prompts(
    loaded: LoadedModel,
    prompt: list[str] | None,
    prompts: Path | None,
    messages: Path | None,
    defaults: SamplingParams,
    *,
    system: str | None,
    skip_bad_lines: bool,
) -> Prompts:
    """Return the texts of ``prompt``, the requests of one of the files, or the built-in prompts."""
    from hybridkv.runner.inputs import encode, read_encoder_input  # noqa: PLC0415  # takes seconds
    from hybridkv.runner.model_call import is_encoder_decoder  # noqa: PLC0415  # same
    from hybridkv.runner.prompts import BUILT_IN, plain_prompts, read_conversations, read_prompts  # noqa: PLC0415  # same

    hears = is_encoder_decoder(loaded.model)
    if messages is not None:
        if hears:
            raise ConfigError(
                f"{loaded.name} is an encoder-decoder and has no chat: give --prompts with encoder inputs"
            )
        return read_conversations(messages, loaded, defaults, system=system, skip_bad_lines=skip_bad_lines)
    folder = Path() if prompts is None else prompts.parent
    read_encoder: ReadEncoder | None = (lambda given: read_encoder_input(loaded, given, folder)) if hears else None

    def checked(prompt: Any) -> list[int]:  # noqa: ANN401  # text or ids, as encode takes them
        return encode(loaded, prompt if read_encoder is None or len(prompt) else loaded.decoder_start)

    if prompts is None and loaded.model.main_input_name != "input_ids":
        raise ConfigError(
            f"the encoder of {loaded.name} reads features, but --prompt and the built-in prompts are text: give "
            '--prompts FILE with lines such as {"encoder": "sound.npy"}'
        )
    if prompts is None:
        return plain_prompts(prompt or BUILT_IN, checked, defaults, read_encoder)
    vocab_size = loaded.vocab_size
    return read_prompts(
        prompts, checked, defaults, vocab_size=vocab_size, skip_bad_lines=skip_bad_lines, read_encoder=read_encoder
    )


def _run(
    loaded: LoadedModel,
    plan: Plan,
    found: Prompts,
    options: EngineOptions,
    *,
    repeat: int,
    check: bool,
    drafter: Drafter | None,
    behind: dict[str, Any],
) -> _Run:
    """Run every round, and compare the outputs with plain transformers if ``check``."""
    from hybridkv.runner.check import LogitRecorder, check_completions  # noqa: PLC0415  # takes seconds
    from hybridkv.runner.engine import Engine  # noqa: PLC0415  # same

    recorder = LogitRecorder() if check else None
    with checking(loaded.name):
        engine = Engine(loaded, plan, options, observer=recorder, speculate=drafter, **behind)
    rounds: list[list[Completion]] = []
    seconds: list[float] = []
    try:
        with progress_bar("generating", repeat * sum(one.sampling.n for one in found.prompts), "requests") as advance:
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
        images = [one.images for one in found.prompts for _ in range(one.sampling.n)] * repeat
        done = [one for each in rounds for one in each]
        with progress_bar("checking", len(done), "requests", left=True) as advance:
            report = check_completions(loaded, done, sampling, recorder, encoders, images=images, advance=advance)
    return _Run(loaded, plan, found, rounds, engine, report, seconds)


def _round(engine: Engine, found: Prompts, advance: Callable[[], None]) -> list[Completion]:
    """Run all prompts once, and return their completions in order."""
    ids = []
    for one in found.prompts:
        given, digest = (None, None) if one.encoder is None else (one.encoder.values[0], one.encoder.read.digest)
        added = engine.add(
            one.token_ids,
            one.sampling,
            tenant=one.tenant,
            marks=one.marks,
            hints=one.hints,
            encoder=given,
            encoder_digest=digest,
            images=one.images,
        )
        ids += output_ids(added, one.sampling.n)
    done: dict[str, Completion] = {}
    while not engine.idle:
        for completion in engine.step():
            done[completion.request_id] = completion
            advance()
    return [done[one] for one in ids]


@dataclass(frozen=True, slots=True)
class _Run:
    """A finished run. rounds: a list of completions for each round. seconds: duration of each round."""

    loaded: LoadedModel
    plan: Plan
    prompts: Prompts
    rounds: list[list[Completion]]
    engine: Engine
    report: CheckReport | None
    seconds: list[float]


# -- output


def _document(run: _Run) -> dict[str, object]:
    plan, report, options = run.plan, run.report, run.engine.options
    return {
        "schema": "hybridkv.generate",
        "version": 2,
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
        "host_tier": None if run.engine.tier is None else asdict(run.engine.tier.statistics()),
        "encoder_runs": None if run.engine.runner.cross is None else run.engine.runner.cross.encoded,
        "check": None
        if report is None
        else {
            "ok": report.ok,
            "requests": report.requests,
            "tokens": report.tokens,
            "near_ties": report.near_ties,
            "differences": [{**asdict(one), "near_tie": one.near_tie} for one in report.differences],
            "wrong_ends": list(report.wrong_ends),
        },
    }


def _request_document(one: Completion, number: int) -> dict[str, object]:
    """Return the document of a request in round ``number``, counted from 0."""
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
        "logprobs": one.logprobs and [asdict(of) for of in one.logprobs],
        "prompt_logprobs": one.prompt_logprobs and [asdict(of) for of in one.prompt_logprobs],
    }


def _write_lines(path: Path, run: _Run) -> None:
    """Write a JSON line for each request to ``path``, in one piece; it holds the fields of the document.

    A line of a conversation also holds its messages with the answer. Raises ConfigError if the file cannot be written.
    """
    asked = [one for one in run.prompts.prompts for _ in range(one.sampling.n)]
    lines = []
    for number, done in enumerate(run.rounds):
        for prompt, one in zip(asked, done, strict=True):
            line = _request_document(one, number)
            if prompt.messages is not None:
                line["messages"] = [*prompt.messages, {"role": "assistant", "content": one.text}]
            lines.append(f"{json.dumps(line)}\n")
    write_file("--out", path, "".join(lines))


def _print_tables(run: _Run, *, whole: bool = False) -> None:
    """Print the requests round by round, then counts of the cache. whole: also print each output in full."""
    out, plan = console(), run.plan
    for number in range(len(run.rounds)):
        which = f", round {number + 1} of {len(run.rounds)}" if len(run.rounds) > 1 else ""
        states = "" if plan.placement is None else f", placement {plan.placement}"
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
        "memory": f"{format_bytes(plan.config.arena_bytes)}, peak use {share(stats.peak_usage)}",
        "computed tokens": f"{format_count(stats.computed_tokens)} in {format_count(stats.steps)} steps",
        "preemptions": format_count(stats.preemptions),
    }
    for number, done in enumerate(run.rounds, start=1):
        which = f" {number}" if len(run.rounds) > 1 else ""
        hits, asked = sum(one.hit_tokens for one in done), sum(len(one.prompt_token_ids) for one in done)
        lines[f"hit tokens{which}"] = f"{format_count(hits)} of {format_count(asked)} prompt tokens"
    if (tier := run.engine.tier) is not None:
        counts = tier.statistics()
        lines["loaded from host memory"] = f"{format_count(counts.loaded_tokens)} tokens of {counts.loads} prefixes"
        lines["stored in host memory"] = f"{format_bytes(counts.stored_bytes)} of {counts.stores} resume points"
        lines |= of_store(counts)
    if (cross := run.engine.runner.cross) is not None:
        heard = len(run.prompts.prompts) * len(run.rounds)
        lines["encoder runs"] = f"{format_count(cross.encoded)} for {format_count(heard)} inputs"
    seconds = sum(run.seconds)
    lines["output tokens"] = f"{format_count(made)}, {format_count(round(made / max(seconds, 1e-9)))} per second"
    lines["took"] = ", then ".join(f"{one:.2f} s" for one in run.seconds)
    if stats.drafted_tokens:
        lines["drafts"] = _drafts(stats)
    if run.prompts.bad_lines:
        lines["bad lines"] = f"{run.prompts.bad_lines} skipped; the first: {run.prompts.first_bad}"
    if run.report is not None:
        lines["check"] = _verdict(run.report)
    print_facts(lines)


def _drafts(stats: SchedulerStatistics) -> str:
    """Return the share of accepted drafts, in total and by position; each draft counts only at its own position."""
    pairs = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
    shares = " ".join(f"{accepted / drafted:.0%}" for accepted, drafted in pairs if drafted)
    return (
        f"{format_count(stats.accepted_tokens)} of {format_count(stats.drafted_tokens)} accepted "
        f"({share(stats.accepted_tokens / stats.drafted_tokens)}); by position {shares}"
    )


def _round_table(done: list[Completion]) -> Table:
    """Return a table of requests. Outputs are added as Text, because rich reads markup and emoji codes in a string."""
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
