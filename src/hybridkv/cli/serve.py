"""`hybridkv serve`: serve a model over HTTP with the OpenAI API."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hybridkv.cache import Medium
from hybridkv.cli.engine_options import (
    ModelOptions,
    Speculate,
    StepOptions,
    StoredOptions,
    TierOptions,
    checking,
    engine_length_option,
    engine_memory_option,
    in_threads,
    speculate_option,
)
from hybridkv.cli.options import REMEMBERED, explain_option, model_option, output_option, request_option, run_option
from hybridkv.cli.output import address_of
from hybridkv.errors import ConfigError
from hybridkv.units import MOST_COUNT, format_bytes, format_count, parse_bytes, shown

if TYPE_CHECKING:  # these need torch, which is loaded once the command runs
    from opentelemetry.trace import Tracer

    from hybridkv.kv_events import KVEventPublisher, RequestPublisher
    from hybridkv.runner.engine import Engine
    from hybridkv.serve.remote import FrontSettings
    from hybridkv.serve.replicas import Replicas, ReplicaServer
    from hybridkv.serve.service import Service

_MOST_PORT: Final = (1 << 16) - 1


class KVEventsForm(StrEnum):
    """The form of the published events (docs/events.md)."""

    RAW = "raw"
    EXACT = "exact"


def serve_command(
    *,
    model: ModelOptions,
    memory: str | None = engine_memory_option(),
    tiers: TierOptions,
    max_model_len: int | None = engine_length_option(),
    tensor_parallel_size: int = run_option(
        "Processes that share the model's weights and cache; above 1, transformers' plan cuts the model.",
        min=1,
        max=64,
        metavar="N",
        default=1,
    ),
    front_workers: int = run_option(
        "Processes that answer HTTP and convert text; 0 does so in the process of the model.",
        min=0,
        max=64,
        metavar="N",
        default=0,
    ),
    replicas: int = run_option(
        "Processes that each run the whole model in the given memory; a prompt goes to one that has cached much of it.",
        "--replicas",
        "--data-parallel-size",
        min=1,
        max=64,
        metavar="N",
        default=1,
    ),
    replica_link: Annotated[int | None, typer.Option(hidden=True)] = None,
    replica_place: Annotated[int, typer.Option(hidden=True)] = 0,
    host: str = run_option("Address or name to listen on.", default="127.0.0.1"),
    port: int = run_option("Port to listen on; 0 takes any free port.", min=0, max=_MOST_PORT, default=8000),
    served_model_name: str | None = request_option("Name of the model for clients.", show_default="that of --model"),
    api_key_file: Path | None = request_option(
        "File of API keys: a line is KEY, or KEY SALT for a tenant.", show_default="no keys"
    ),
    allow_host: list[str] | None = request_option(
        "Host name that requests without keys may use besides private names and addresses; * allows any. May be "
        "repeated.",
        metavar="NAME",
        show_default=False,
    ),
    allow_origin: list[str] | None = request_option(
        "Web origin, such as https://HOST, whose pages may use the server from a browser. May be repeated.",
        metavar="ORIGIN",
        show_default=False,
    ),
    lora_modules: list[str] | None = model_option(
        "LoRA adapter in peft's format, which clients choose as a model called NAME. May be repeated; one option "
        "may list several.",
        metavar="NAME=FOLDER",
        show_default="none",
    ),
    more_adapters: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    enable_lora: bool = model_option(
        "Accept --lora-modules; has no effect of its own.", "--enable-lora", default=False
    ),
    tool_call_parser: str | None = request_option(
        "Format of the model's calls of tools, in vLLM's names; none leaves them in the text.",
        metavar="NAME",
        show_default="that of the tokenizer",
    ),
    reasoning_parser: str | None = request_option(
        "Format of the model's reasoning, in vLLM's names; none leaves it in the text.",
        metavar="NAME",
        show_default="that of the tokenizer",
    ),
    header_timeout: float = request_option(
        "Time for the headers of a request to arrive, in seconds.", metavar="SECONDS", default=10.0
    ),
    body_timeout: float = request_option(
        "Time for the body of a request to arrive, in seconds.", metavar="SECONDS", default=60.0
    ),
    body_memory: str = request_option(
        "Memory for all request bodies over 64 KiB together.", metavar="SIZE", default="128MiB"
    ),
    grace: float = run_option(
        "Time after SIGTERM for running answers, in seconds; then they are cut off.", metavar="SECONDS", default=30.0
    ),
    metrics_prefix: str = output_option(
        "Prefix of the metrics' names; vllm gives the names of vLLM.", metavar="NAME", default="hybridkv"
    ),
    kv_events: str | None = output_option(
        "Endpoint on which cache events are published, such as tcp://HOST:PORT.", metavar="ENDPOINT"
    ),
    kv_events_replay: str | None = output_option(
        "Endpoint on which subscribers ask for events that they missed.", metavar="ENDPOINT"
    ),
    kv_events_form: KVEventsForm = output_option(
        "Form of the events: exact reports the prefixes that a request can hit, raw every cached block.",
        default=KVEventsForm.EXACT,
    ),
    kv_events_medium: list[Medium] | None = output_option(
        "Publish events of blocks in this medium only; GPU is the device. May be repeated.", show_default="all"
    ),
    requests: str | None = output_option(
        "Endpoint on which requests are published as they end, for `hybridkv trace record --requests`.",
        metavar="ENDPOINT",
    ),
    spans: bool = output_option(
        "Send an OpenTelemetry span for each request to OTEL_EXPORTER_OTLP_ENDPOINT.", "--spans", default=False
    ),
    max_waiting: int = request_option(
        "Limit of outputs that wait; more requests are answered with status 429.",
        max=MOST_COUNT,
        metavar="N",
        default=256,
    ),
    stored: StoredOptions,
    stepping: StepOptions,
    explain: bool = explain_option(),
    block_times: bool = output_option(
        "Measure how long blocks stay cached, idle, and between hits.", "--block-times", default=False
    ),
    speculate: str | None = speculate_option(),
) -> int:
    """Serve a model over HTTP with the OpenAI API. SIGTERM or Ctrl-C finishes running answers; a second one exits."""
    drafts = Speculate.parse(speculate)
    from hybridkv.runner.lora import require_combinable  # noqa: PLC0415  # takes seconds
    from hybridkv.serve import ApiKeys, ConnectionLimits, ServeOptions, Server  # noqa: PLC0415  # same
    from hybridkv.serve.app import app_of  # noqa: PLC0415  # same
    from hybridkv.serve.front import Front  # noqa: PLC0415  # same
    from hybridkv.serve.fronts import Fronts, listen_for, settings_of  # noqa: PLC0415  # same
    from hybridkv.serve.gates import is_address  # noqa: PLC0415  # same
    from hybridkv.serve.service import Service  # noqa: PLC0415  # same

    keys = None if api_key_file is None else ApiKeys.read(api_key_file)
    hosts = [*(allow_host or ()), *([host] if host and not is_address(host) else ())]
    served = ServeOptions(
        served_model_name,
        max_waiting,
        keys,
        metrics_prefix,
        hosts,
        allow_origin or (),
        tool_call_parser,
        reasoning_parser,
    )
    is_replica, many = replica_link is not None, replicas > 1 and replica_link is None
    limits = ConnectionLimits(header_timeout, body_timeout, parse_bytes(body_memory), grace)
    options = stepping.engine_options(
        kv_events=kv_events is not None,
        remembered_losses=REMEMBERED if explain else 0,
        block_times=block_times,
        lora_modules=_adapters(lora_modules or (), more_adapters or (), enabled=enable_lora),
    )
    require_combinable(options, ranks=tensor_parallel_size)
    _require_events(
        kv_events, kv_events_replay, kv_events_form, kv_events_medium or (), has_host=tiers.host_memory is not None
    )
    if many:
        _require_replicable({"--kv-events": kv_events, "--front-workers": front_workers, "--requests": requests})
    # a port that is in use should be reported before a model is loaded
    sockets = [] if is_replica else listen_for(host, port, front_workers or 1)
    drafter = drafts.drafter(options, trust_remote_code=model.trust_remote_code) if drafts and not many else None
    with ExitStack() as ending:
        tracer = _tracer(ending) if spans and not is_replica else None  # with fronts, to report what is missing
        server: Server | Fronts | ReplicaServer
        if many:
            together = _replicas(replicas, ending)
            said = _ready(served.name or together.model.name, sockets, f"{replicas} replicas, each {together.size}")
            server = Server(app_of(Front(together, served, tracer)), said, limits)
        else:
            publisher = None if requests is None else _request_publisher(requests, ending)
            make = _maker(model, tensor_parallel_size, ending, share=replicas)
            with checking(model.model):
                engine = make(
                    options=options,
                    memory=memory,
                    max_model_len=max_model_len,
                    **tiers.behind(replica_place, replicas),
                    stored=stored.stored(),
                    speculate=drafter,
                    requests=publisher,
                )
            publish = partial(_publisher, engine, kv_events_replay, kv_events_form, kv_events_medium or None)
            events = None if kv_events is None else ending.enter_context(publish(kv_events, or_raw=is_replica))
            service = Service(engine, served, events)
            said = _ready(served.name or engine.loaded.name, sockets, _size(engine))
            if replica_link is not None:
                server = _replica(engine, service, settings_of(service, served, limits), replica_link)
            elif front_workers:
                server = Fronts(service, served, limits, said, spans=spans)
            else:
                server = Server(app_of(Front(service, served, tracer)), said, limits)
        gc.collect()
        gc.freeze()  # the loaded model stays: scanning it for garbage would pause all streams for some 0.2 s
        ending.callback(gc.unfreeze)  # otherwise it is never freed, and libraries report it as leaked at exit
        server.run(sockets=sockets)
    if server.cut_off:
        print(
            f"stopped: {server.cut_off} answers took longer than the {grace:g} s of --grace and were cut off",
            flush=True,
        )
        return 1
    print("drained: all requests were answered", flush=True)
    return 0


def _tracer(ending: ExitStack) -> Tracer:
    """Return what exports spans until ``ending``."""
    from hybridkv.serve.generation import exporting  # noqa: PLC0415  # OpenTelemetry's SDK is an extra

    return ending.enter_context(exporting())


def _replicas(number: int, ending: ExitStack) -> Replicas:
    """Start replicas by this command's arguments; they end with ``ending``."""
    from hybridkv.serve.replicas import Replicas  # noqa: PLC0415  # pyzmq is an extra

    started = Replicas(sys.argv[1:], number, ending.enter_context(TemporaryDirectory(prefix="hybridkv-")))
    ending.callback(started.close)
    return started


def _replica(engine: Engine, service: Service, front: FrontSettings, link: int) -> ReplicaServer:
    from hybridkv.serve.replicas import ReplicaServer  # noqa: PLC0415  # pyzmq is an extra

    return ReplicaServer(engine, service, front, _size(engine), link)


def _maker(model: ModelOptions, ranks: int, ending: ExitStack, *, share: int) -> Callable[..., Engine]:
    """Load the model; return what makes its engine. Processes of other ranks end with ``ending``.

    ``share``: how many such processes run on this machine.
    """
    import torch  # noqa: PLC0415  # takes seconds

    from hybridkv.runner.engine import Engine  # noqa: PLC0415  # same

    if share > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(torch.get_num_threads() // share, 1))
    return partial(Engine, model.load()) if ranks == 1 else ending.enter_context(model.ranks(ranks)).engine


def _request_publisher(endpoint: str, ending: ExitStack) -> RequestPublisher:
    from hybridkv.kv_events import RequestPublisher  # noqa: PLC0415  # pyzmq is an extra

    return ending.enter_context(RequestPublisher(endpoint))


def _require_events(
    endpoint: str | None, replay: str | None, form: KVEventsForm, media: Sequence[Medium], *, has_host: bool
) -> None:
    """Raise ConfigError for an option of KV events that has no effect."""
    given = {"replay": replay is not None, "form raw": form is KVEventsForm.RAW, "medium": len(media) > 0}
    for name, is_given in given.items():
        if is_given and endpoint is None:
            raise ConfigError(f"--kv-events-{name} has no effect without --kv-events: give --kv-events ENDPOINT too")
    if Medium.CPU in media and not has_host:
        raise ConfigError("--kv-events-medium CPU publishes nothing without --host-memory: give --host-memory SIZE too")


def _adapters(given: Sequence[str], more: Sequence[str], *, enabled: bool) -> dict[str, str]:
    """Return the folders of adapters by name. ``more``: words after the first, as vLLM's option takes them."""
    if more and not given:
        raise ConfigError(f"serve has no argument {shown(more[0])}: write options as --NAME VALUE")
    if enabled and not given:
        raise ConfigError("--enable-lora loads no adapter: give --lora-modules NAME=FOLDER too")
    found = dict[str, str]()
    for one in (*given, *more):
        name, _, folder = one.partition("=")
        if not name or not folder or name in found:
            raise ConfigError(f"--lora-modules must be NAME=FOLDER, each NAME once, got {shown(one)}")
        found[name] = folder
    return found


def _publisher(
    engine: Engine,
    replay: str | None,
    form: KVEventsForm,
    media: Sequence[Medium] | None,
    endpoint: str,
    *,
    or_raw: bool,
) -> KVEventPublisher:
    """Return a publisher of events. ``or_raw``: of raw ones where exact ones are not supported."""
    from hybridkv.kv_events import KVEventPublisher  # noqa: PLC0415  # pyzmq is an extra

    publisher = partial(KVEventPublisher, engine.plan.config, endpoint, replay, media=media)
    try:
        return publisher(exact=form is KVEventsForm.EXACT)
    except ConfigError:
        if not or_raw:
            raise
    return publisher(exact=False)


def _require_replicable(given: Mapping[str, object]) -> None:
    """Raise ConfigError for a given option that replicas cannot share."""
    instead = {
        "--kv-events": "each replica publishes to this server's own router: leave it out, or start servers one by one",
        "--front-workers": "this server is the front of its replicas: leave it out",
        "--requests": "each replica would publish at the same endpoint: leave it out",
    }
    for name, said in instead.items():
        if given.get(name):
            raise ConfigError(f"{name} does not work with --replicas: {said}")


def _ready(name: str, sockets: Sequence[socket.socket], size: str) -> Callable[[], None]:
    """Return what prints one line with the model's name, the address and the cache memory. A replica prints none."""
    if not sockets:
        return lambda: None
    host, port = sockets[0].getsockname()[:2]
    return partial(print, f"serving {name} at {address_of(host, port)}: {size}", flush=True)


def _size(engine: Engine) -> str:
    plan = engine.plan
    return (
        f"{format_bytes(plan.memory_bytes)} for {format_count(plan.max_model_len)} tokens a request, "
        f"{engine.options.max_running} at once, {in_threads()}"
    )
