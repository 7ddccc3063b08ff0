"""`hybridkv serve`: a model over HTTP, in OpenAI's forms."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hybridkv.cli.engine_options import ModelOptions, Speculate, StepOptions, speculate_option
from hybridkv.cli.options import REMEMBERED, cache_option, explain_option, output_option, request_option, run_option
from hybridkv.errors import ConfigError
from hybridkv.units import MOST_COUNT, format_bytes, format_count, parse_bytes

if TYPE_CHECKING:  # these need torch, which is loaded once the command runs
    from hybridkv.runner.engine import Engine
    from hybridkv.serve import ServeOptions

_MOST_PORT: Final = (1 << 16) - 1


class KVEventsForm(StrEnum):
    """Which events are published; see docs/events.md."""

    RAW = "raw"
    EXACT = "exact"


def serve_command(
    *,
    model: ModelOptions,
    memory: str | None = cache_option("For the cache: 8GiB, or bytes.", show_default="1GiB"),
    max_model_len: int | None = cache_option(
        "Tokens of prompt and output together.", max=MOST_COUNT, metavar="N", show_default="the model's, or what fits"
    ),
    host: str = run_option("Where to listen.", default="127.0.0.1"),
    port: int = run_option("0 is any free one.", min=0, max=_MOST_PORT, default=8000),
    served_model_name: str | None = request_option("What clients call it.", show_default="that of --model"),
    api_key_file: Path | None = request_option("Lines of KEY, or KEY SALT for a tenant.", show_default="no keys"),
    allow_host: list[str] | None = request_option(
        "Without keys: answer to this name in Host, beside private names and addresses. * for any.",
        metavar="NAME",
        show_default=False,
    ),
    allow_origin: list[str] | None = request_option(
        "Let pages of https://HOST use the server from a browser.", metavar="ORIGIN", show_default=False
    ),
    header_timeout: float = request_option("For the headers of a request to arrive.", metavar="SECONDS", default=10.0),
    body_timeout: float = request_option("For its body to arrive.", metavar="SECONDS", default=60.0),
    body_memory: str = request_option("For all bodies over 64 KiB together.", metavar="SIZE", default="128MiB"),
    grace: float = run_option(
        "After SIGTERM, for answers in hand; then they are cut off.", metavar="SECONDS", default=30.0
    ),
    metrics_prefix: str = output_option("Of metrics' names: vllm for vLLM's own.", metavar="NAME", default="hybridkv"),
    kv_events: str | None = output_option("Publish cache events there: tcp://HOST:PORT.", metavar="ENDPOINT"),
    kv_events_replay: str | None = output_option("Answer who missed some, or comes late.", metavar="ENDPOINT"),
    kv_events_form: KVEventsForm = output_option(
        "raw: all that is cached. exact: what can be hit, where layers keep states or windows.",
        default=KVEventsForm.RAW,
    ),
    spans: bool = output_option(
        "Send a span of OpenTelemetry a request to OTEL_EXPORTER_OTLP_ENDPOINT.", "--spans", default=False
    ),
    max_waiting: int = request_option(
        "Outputs that may wait; more are answered 429.", max=MOST_COUNT, metavar="N", default=256
    ),
    stepping: StepOptions,
    explain: bool = explain_option(),
    block_times: bool = output_option(
        "Tell how long blocks are kept, idle, and between hits.", "--block-times", default=False
    ),
    speculate: str | None = speculate_option(),
) -> int:
    """Serve a model over HTTP in OpenAI's forms, until SIGTERM or Ctrl-C: the first drains, the second ends at once."""
    drafts = Speculate.parse(speculate)
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
    exact = kv_events_form is KVEventsForm.EXACT
    options = stepping.engine_options(
        kv_events=kv_events is not None,
        end_events=exact,
        remembered_losses=REMEMBERED if explain else 0,
        block_times=block_times,
    )
    if kv_events_replay is not None and kv_events is None:
        raise ConfigError("--kv-events-replay repeats what --kv-events publishes: name that endpoint, too")
    if exact and kv_events is None:
        raise ConfigError("--kv-events-form exact says what --kv-events publishes: name that endpoint, too")
    listening = listen(host, port)  # what cannot be should show before a model is loaded
    loaded = model.load()
    drafter = drafts.drafter(options, trust_remote_code=model.trust_remote_code) if drafts else None
    engine = Engine(loaded, options=options, memory=memory, max_model_len=max_model_len, speculate=drafter)
    shown_host, shown_port = listening.getsockname()[:2]
    at = f"http://[{shown_host}]:{shown_port}" if ":" in shown_host else f"http://{shown_host}:{shown_port}"
    with ExitStack() as ending:
        events = None
        if kv_events is not None:
            from hybridkv.kv_events import KVEventPublisher  # noqa: PLC0415  # pyzmq is an extra

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
