"""`hybridkv generate`: a real model through the paged cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from hybridkv.cli.generate_output import (
    GenerateRun,
    lines_of,
    print_document,
    print_tables,
    require_writable,
    write_lines,
)
from hybridkv.cli.keeping import EvictionOption, ShareOption
from hybridkv.cli.loading import ModelOption, TrustOption, bars_for_terminals, load_quietly
from hybridkv.cli.panels import CACHE, OUTPUT, REQUESTS, RUN
from hybridkv.cli.planning import BlockSize, Layout, LayoutOption, PlacementOption, PlanOptions
from hybridkv.cli.sampling import (
    MaxNewTokensOption,
    SeedOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TopPOption,
    sampling_of,
)
from hybridkv.cli.speculation import Speculate, SpeculateOption
from hybridkv.cli.stepping import (
    AttentionOption,
    MaxRunningOption,
    NoPrefixCachingOption,
    ShortShareOption,
    TokenBudgetOption,
)
from hybridkv.errors import ConfigError
from hybridkv.eviction import TenantShares
from hybridkv.planner import Plan, read_plan
from hybridkv.planner.plan import DEFAULT_LAYOUT
from hybridkv.request import SamplingParams, output_ids

if TYPE_CHECKING:  # these need torch, which is loaded once the command runs
    from hybridkv.runner.assembly import EngineOptions
    from hybridkv.runner.completion import Completion
    from hybridkv.runner.drafters import Drafter
    from hybridkv.runner.engine import Engine
    from hybridkv.runner.load import LoadedModel
    from hybridkv.runner.prompts import Hear, Prompts

CHECK_FAILED: Final = 1
MOST_ROUNDS: Final = 1 << 16
"""All outputs are kept to the end."""

PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with prompt, encoder, sampling, marks, tenant and hints, or text.",
        show_default="a few built-in ones",
        rich_help_panel=REQUESTS,
    ),
]
MessagesOption = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines of conversations, pictures among them, by the chat template.", rich_help_panel=REQUESTS
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option(help="Write all requests there, outputs whole, as JSON lines.", rich_help_panel=OUTPUT)
]
MemoryOption = Annotated[
    str | None,
    typer.Option(help="For the cache: 64MiB, or bytes.", show_default="enough for all prompts", rich_help_panel=CACHE),
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Compare with plain transformers; exit 1 if it differs.", rich_help_panel=OUTPUT)
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("generate")(generate_command)


def generate_command(
    *,
    model: ModelOption,
    trust_remote_code: TrustOption = False,
    prompts: PromptsOption = None,
    messages: MessagesOption = None,
    system: SystemOption = None,
    max_new_tokens: MaxNewTokensOption = 32,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    stop: StopOption = None,
    block_size: BlockSize = None,
    memory: MemoryOption = None,
    layout: LayoutOption = None,
    placement: PlacementOption = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="A plan of this model from --json.", rich_help_panel=CACHE)
    ] = None,
    max_running: MaxRunningOption = 64,
    token_budget: TokenBudgetOption = 2048,
    short_share: ShortShareOption = None,
    no_prefix_caching: NoPrefixCachingOption = False,
    eviction: EvictionOption = None,
    shares: ShareOption = None,
    attention: AttentionOption = "gather",
    compiled: Annotated[
        str | None,
        typer.Option(
            "--compile", metavar="WHAT", help="decode: steps that only decode as CUDA graphs.", rich_help_panel=RUN
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(
            max=MOST_ROUNDS,
            metavar="N",
            help="Rounds over the prompts: the second finds a warm cache.",
            rich_help_panel=RUN,
        ),
    ] = 1,
    in_flight: Annotated[
        int, typer.Option(metavar="N", help="Steps scheduled ahead of their results, 1 or 2.", rich_help_panel=RUN)
    ] = 1,
    speculate: SpeculateOption = None,
    check: CheckOption = False,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Count malformed lines, go on.", rich_help_panel=REQUESTS)
    ] = False,
    output: OutputOption = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Print whole outputs, not their beginnings.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel=OUTPUT)] = False,
) -> int:
    """Generate with an unmodified Hugging Face model: continuous batching on the paged cache."""
    rules = _rules(plan_file, block_size=block_size, memory=memory, layout=layout, placement=placement)
    if repeat < 1:
        raise ConfigError(f"--repeat must be at least 1, got {repeat}")
    asked = None if speculate is None else Speculate.parse(speculate)
    if prompts is not None and messages is not None:
        raise ConfigError("--prompts and --messages name what is run, each by itself: drop one of them")
    if system is not None and messages is None:
        raise ConfigError("--system begins conversations: name a file of them with --messages")
    require_writable(output)
    defaults = sampling_of(max_new_tokens, temperature, top_p, seed, stop)
    bars_for_terminals()
    from hybridkv.runner.assembly import EngineOptions  # noqa: PLC0415  # torch takes seconds: only this command pays

    options = EngineOptions(
        max_running,
        token_budget,
        in_flight,
        not no_prefix_caching,
        attention=attention,
        compile=compiled,
        eviction=eviction,
        shares=TenantShares.parse(shares or ()),
        short_share=short_share,
    )
    loaded = load_quietly(model, trust_remote_code=trust_remote_code)
    if messages is None:
        found = _prompts(loaded, prompts, defaults, skip_bad_lines=skip_bad_lines)
    else:
        found = _conversations(loaded, messages, defaults, system=system, skip_bad_lines=skip_bad_lines)
    drafter = None if asked is None else asked.drafter(_lengths(found), options, trust_remote_code=trust_remote_code)
    plan = _plan(loaded, found, plan_file, rules, drafts=0 if asked is None else asked.drafts)
    run = _run(loaded, plan, found, options, repeat=repeat, check=check, drafter=drafter)
    if output is not None:
        write_lines(output, lines_of(run))
    if as_json:
        print_document(run)
    else:
        print_tables(run, whole=whole)
    return 0 if run.report is None or run.report.ok else CHECK_FAILED


def _rules(plan_file: Path | None, *, layout: Layout | None, placement: str | None, **others: object) -> dict[str, Any]:
    """Those of the rules to plan by that were given.

    ConfigError where a plan file has them, and for a placement that the layout does not know.
    """
    rules = {**others, "layout": layout, "placement": placement}
    given = {name: value for name, value in rules.items() if value is not None}
    if plan_file is not None and given:
        named = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(
            f"--plan holds memory, block size, layout and placement already: drop {named}, or drop --plan"
        )
    PlanOptions(layout=layout, placement=placement).rules_of(layout or DEFAULT_LAYOUT)
    return given


# -- the run


def _prompts(loaded: LoadedModel, path: Path | None, defaults: SamplingParams, *, skip_bad_lines: bool) -> Prompts:
    from hybridkv.runner.inputs import encode  # noqa: PLC0415  # see generate_command
    from hybridkv.runner.prompts import built_in_prompts, read_prompts  # noqa: PLC0415  # same

    hear = _hear(loaded, Path() if path is None else path.parent)

    def checked(prompt: Any) -> list[int]:  # noqa: ANN401  # text or ids, as encode takes them
        return encode(loaded, prompt if hear is None or len(prompt) else loaded.decoder_start)

    if path is None and loaded.model.main_input_name != "input_ids":
        raise ConfigError(
            f"the encoder of {loaded.name} reads features, the built-in prompts are text: name a file with --prompts, "
            'of lines such as {"encoder": "sound.npy"}'
        )
    if path is None:
        return built_in_prompts(checked, defaults, hear)
    return read_prompts(path, checked, defaults, vocab_size=loaded.vocab_size, skip_bad_lines=skip_bad_lines, hear=hear)


def _conversations(
    loaded: LoadedModel, path: Path, defaults: SamplingParams, *, system: str | None, skip_bad_lines: bool
) -> Prompts:
    from hybridkv.runner.encoder_decoder import is_encoder_decoder  # noqa: PLC0415  # see generate_command
    from hybridkv.runner.prompts import read_conversations  # noqa: PLC0415  # same

    if is_encoder_decoder(loaded.model):
        raise ConfigError(f"{loaded.name} is an encoder-decoder: give --prompts with what its encoder reads")
    return read_conversations(path, loaded, defaults, system=system, skip_bad_lines=skip_bad_lines)


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
) -> GenerateRun:
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
        images = [one.images for one in found.prompts for _ in range(one.sampling.n)] * repeat
        done = [one for each in rounds for one in each]
        report = check_completions(loaded, done, sampling, recorder, encoders, images=images)
    return GenerateRun(loaded, plan, found, rounds, engine, report, seconds)


def _round(engine: Engine, found: Prompts, advance: Callable[[], None]) -> list[Completion]:
    """All prompts to their ends, in their order."""
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


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error."""
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
