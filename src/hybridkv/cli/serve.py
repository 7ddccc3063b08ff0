"""`hybridkv serve`: a model over HTTP, in OpenAI's forms."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hybridkv.cli.keeping import REMEMBERED, EvictionOption, ExplainOption, ShareOption
from hybridkv.cli.loading import ModelOption, TrustOption, bars_for_terminals, load_quietly
from hybridkv.cli.panels import CACHE, OUTPUT, REQUESTS, RUN
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
from hybridkv.units import MOST_COUNT, format_bytes, format_count, parse_bytes

if TYPE_CHECKING:  # these need torch, which is loaded once the command runs
    from hybridkv.runner.engine import Engine
    from hybridkv.serve import ServeOptions

_MOST_PORT: Final = (1 << 16) - 1


class KVEventsForm(StrEnum):
    """Which events are published; see docs/events.md."""

    RAW = "raw"
    EXACT = "exact"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve_command)


def serve_command(
    *,
    model: ModelOption,
    trust_remote_code: TrustOption = False,
    memory: Annotated[
        str | None, typer.Option(help="For the cache: 8GiB, or bytes.", show_default="1GiB", rich_help_panel=CACHE)
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            max=MOST_COUNT,
            metavar="N",
            help="Tokens of prompt and output together.",
            show_default="the model's, or what fits",
            rich_help_panel=CACHE,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen.", rich_help_panel=RUN)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=_MOST_PORT, help="0 is any free one.", rich_help_panel=RUN)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call it.", show_default="that of --model", rich_help_panel=REQUESTS)
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="Lines of KEY, or KEY SALT for a tenant.", show_default="no keys", rich_help_panel=REQUESTS),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Without keys: answer to this name in Host, beside private names and addresses. * for any.",
            show_default=False,
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let pages of https://HOST use the server from a browser.",
            show_default=False,
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    header_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="For the headers of a request to arrive.", rich_help_panel=REQUESTS)
    ] = 10.0,
    body_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="For its body to arrive.", rich_help_panel=REQUESTS)
    ] = 60.0,
    body_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="For all bodies over 64 KiB together.", rich_help_panel=REQUESTS)
    ] = "128MiB",
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="After SIGTERM, for answers in hand; then they are cut off.", rich_help_panel=RUN
        ),
    ] = 30.0,
    metrics_prefix: Annotated[
        str, typer.Option(metavar="NAME", help="Of metrics' names: vllm for vLLM's own.", rich_help_panel=OUTPUT)
    ] = "hybridkv",
    kv_events: Annotated[
        str | None,
        typer.Option(metavar="ENDPOINT", help="Publish cache events there: tcp://HOST:PORT.", rich_help_panel=OUTPUT),
    ] = None,
    kv_events_replay: Annotated[
        str | None,
        typer.Option(metavar="ENDPOINT", help="Answer who missed some, or comes late.", rich_help_panel=OUTPUT),
    ] = None,
    kv_events_form: Annotated[
        KVEventsForm,
        typer.Option(
            help="raw: all that is cached. exact: what can be hit, where layers keep states or windows.",
            rich_help_panel=OUTPUT,
        ),
    ] = KVEventsForm.RAW,
    spans: Annotated[
        bool,
        typer.Option(
            "--spans",
            help="Send a span of OpenTelemetry a request to OTEL_EXPORTER_OTLP_ENDPOINT.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    max_waiting: Annotated[
        int,
        typer.Option(
            max=MOST_COUNT, metavar="N", help="Outputs that may wait; more are answered 429.", rich_help_panel=REQUESTS
        ),
    ] = 256,
    max_running: MaxRunningOption = 64,
    token_budget: TokenBudgetOption = 2048,
    short_share: ShortShareOption = None,
    no_prefix_caching: NoPrefixCachingOption = False,
    eviction: EvictionOption = None,
    shares: ShareOption = None,
    explain: ExplainOption = False,
    block_times: Annotated[
        bool,
        typer.Option(
            "--block-times", help="Tell how long blocks are kept, idle, and between hits.", rich_help_panel=OUTPUT
        ),
    ] = False,
    attention: AttentionOption = "gather",
    speculate: SpeculateOption = None,
) -> int:
    """Serve a model over HTTP in OpenAI's forms, until SIGTERM or Ctrl-C: the first drains, the second ends at once."""
    asked = None if speculate is None else Speculate.parse(speculate)
    bars_for_terminals()
    from hybridkv.runner.assembly import EngineOptions  # noqa: PLC0415  # torch takes seconds: only this command pays
    from hybridkv.runner.engine import Engine  # noqa: PLC0415  # same
    from hybridkv.serve import (  # noqa: PLC0415  # same
        ApiKeys,
        ConnectionLimits,
        ServeOptions,
        Server,
        create_app,
        listen,
    )
    from hybridkv.serve.gates import is_address  # noqa: PLC0415  # same

    keys = None if api_key_file is None else ApiKeys.read(api_key_file)
    hosts = [*(allow_host or ()), *([host] if host and not is_address(host) else ())]
    served = ServeOptions(served_model_name, max_waiting, keys, metrics_prefix, hosts, allow_origin or ())
    limits = ConnectionLimits(header_timeout, body_timeout, parse_bytes(body_memory), grace)
    options = EngineOptions(
        max_running,
        token_budget,
        prefix_caching=not no_prefix_caching,
        attention=attention,
        kv_events=kv_events is not None,
        end_events=kv_events_form is KVEventsForm.EXACT,
        eviction=eviction,
        shares=TenantShares.parse(shares or ()),
        short_share=short_share,
        remembered_losses=REMEMBERED if explain else 0,
        block_times=block_times,
    )
    if kv_events_replay is not None and kv_events is None:
        raise ConfigError("--kv-events-replay repeats what --kv-events publishes: name that endpoint, too")
    if kv_events_form is KVEventsForm.EXACT and kv_events is None:
        raise ConfigError("--kv-events-form exact says what --kv-events publishes: name that endpoint, too")
    listening = listen(host, port)  # what cannot be should show before a model is loaded
    loaded = load_quietly(model, trust_remote_code=trust_remote_code)
    drafter = None if asked is None else asked.drafter_of_a_server(options, trust_remote_code=trust_remote_code)
    engine = Engine(loaded, options=options, memory=memory, max_model_len=max_model_len, speculate=drafter)
    shown_host, shown_port = listening.getsockname()[:2]
    at = f"http://[{shown_host}]:{shown_port}" if ":" in shown_host else f"http://{shown_host}:{shown_port}"
    with ExitStack() as ending:
        events = None
        if kv_events is not None:
            from hybridkv.kv_events import KVEventPublisher  # noqa: PLC0415  # pyzmq is an extra

            exact = kv_events_form is KVEventsForm.EXACT
            publisher = KVEventPublisher(engine.plan.config, kv_events, kv_events_replay, exact=exact)
            events = ending.enter_context(publisher)
        tracer = None
        if spans:
            from hybridkv.serve.generation import exporting  # noqa: PLC0415  # OpenTelemetry's SDK is an extra

            tracer = ending.enter_context(exporting())
        app = create_app(engine, served, events=events, tracer=tracer)
        gc.collect()
        gc.freeze()  # what was loaded stays: looking for garbage in it would stop all streams for some 0.2 s
        ending.callback(gc.unfreeze)  # else the interpreter keeps it at its end, and libraries report it as leaked
        server = Server(app, lambda: print(_ready(engine, served, at), flush=True), limits)
        server.run(sockets=[listening])
    if server.cut_off:
        print(
            f"ended: answers that took longer than the {grace:g} s of --grace were cut off: {server.cut_off}",
            flush=True,
        )
        return 1
    print("drained: all that was asked has been answered", flush=True)
    return 0


def _ready(engine: Engine, served: ServeOptions, at: str) -> str:
    """One line: what is served, where, and with which room."""
    plan = engine.plan
    return (
        f"serving {served.name or engine.loaded.name} at {at}: {format_bytes(plan.memory_bytes)} for "
        f"{format_count(plan.max_model_len)} tokens a request, {engine.options.max_running} at once"
    )
