"""`hybridkv bench serve` and `bench engine`: send a load, and print latencies, throughput and hits.

Options and lines are those of ``vllm bench serve``. The exit status is 1 if a request failed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from hybridkv.bench import (
    METRICS,
    Answer,
    LoadRequest,
    arrivals,
    custom,
    drive,
    figures,
    ordinary_tokens,
    random_load,
    repeated_prefixes,
    report,
    sharegpt,
)
from hybridkv.bench.loads import Encode
from hybridkv.cli.engine_options import (
    ModelOptions,
    Speculate,
    StepOptions,
    StoredOptions,
    TierOptions,
    checking,
    engine_length_option,
    engine_memory_option,
    speculate_option,
)
from hybridkv.cli.options import output_option, request_option, run_option
from hybridkv.cli.outcome import printable
from hybridkv.cli.output import address_of, progress_bar, status
from hybridkv.errors import ConfigError
from hybridkv.regular_files import write_whole
from hybridkv.request import SamplingParams
from hybridkv.units import MOST_COUNT, shown

_MOST_SHOWN: Final = 10
_GOODPUT: Final = ("ttft", "tpot", "e2el")


class DatasetName(StrEnum):
    """Where the prompts of a load come from."""

    RANDOM = "random"
    SHAREGPT = "sharegpt"
    CUSTOM = "custom"
    PREFIX_REPETITION = "prefix_repetition"


def _tokens_option(text: str, default: int, least: int = 1) -> Any:  # noqa: ANN401  # as options are declared
    return request_option(text, min=least, max=MOST_COUNT, metavar="N", default=default)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The requests of a load, when they are sent, and which figures are printed; names as in ``vllm bench serve``."""

    dataset_name: DatasetName = request_option("Kind of the prompts.", default=DatasetName.RANDOM)
    dataset_path: Path | None = request_option("File of the data sets sharegpt (JSON) and custom (JSON lines).")
    num_prompts: int = _tokens_option("Number of requests.", 1000)
    request_rate: float = request_option("Requests per second; inf sends all at once.", default=float("inf"))
    burstiness: float = request_option(
        "Shape of the gaps between requests: 1 is a Poisson process, less sends bursts, more is more even.", default=1.0
    )
    max_concurrency: int | None = request_option(
        "Limit of requests at once.", min=1, max=MOST_COUNT, metavar="N", show_default="none"
    )
    random_input_len: int = _tokens_option("random: tokens of a prompt after the common prefix.", 1024)
    random_output_len: int = _tokens_option("random: output tokens.", 128)
    random_prefix_len: int = _tokens_option("random: tokens of the common prefix.", 0, 0)
    random_range_ratio: float = request_option("random: lengths vary by this share, 0 to below 1.", default=0.0)
    prefix_repetition_num_prefixes: int = _tokens_option("prefix_repetition: number of prefixes.", 10)
    prefix_repetition_prefix_len: int = _tokens_option("prefix_repetition: tokens of a prefix.", 256)
    prefix_repetition_suffix_len: int = _tokens_option("prefix_repetition: tokens of a prompt after its prefix.", 256)
    prefix_repetition_output_len: int = _tokens_option("prefix_repetition: output tokens.", 128)
    custom_output_len: int = request_option(
        "custom: output tokens; -1 for output_tokens of each line.", min=-1, max=MOST_COUNT, metavar="N", default=256
    )
    sharegpt_output_len: int | None = request_option(
        "sharegpt: output tokens.", min=1, max=MOST_COUNT, metavar="N", show_default="as many as the answer has"
    )
    ignore_eos: bool = request_option("Go on after an end token.", "--ignore-eos", default=False)
    temperature: float | None = request_option("Sampling temperature; 0 is greedy.", show_default="the server's, 1")
    seed: int = request_option("Seed of prompts and arrivals.", min=0, max=MOST_COUNT, default=0)
    num_warmups: int = request_option("Send the first request this often before.", min=0, max=MOST_COUNT, default=0)
    percentile_metrics: str = output_option(f"Latencies to print, of {','.join(METRICS)}.", default="ttft,tpot,itl")
    metric_percentiles: str = output_option("Percentiles to print, such as 50,99.", default="99")
    goodput: list[str] | None = output_option(
        f"Limit of a latency in milliseconds, such as ttft:500, for the goodput: {', '.join(_GOODPUT)}. May be "
        "repeated.",
        metavar="METRIC:MS",
    )
    save_result: bool = output_option("Save the figures as JSON.", "--save-result", default=False)
    result_dir: Path = output_option("Folder of the saved file.", default=Path())
    result_filename: str | None = output_option("Name of the saved file.", show_default="model, rate and time")

    def checked(self) -> _Measures:
        """Return the parsed options of the report. Raises ConfigError for options that cannot work."""
        if not self.request_rate > 0 or not self.burstiness > 0:
            raise ConfigError("--request-rate and --burstiness must be above 0")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {self.random_range_ratio:g}")
        needed = self.dataset_name in {DatasetName.SHAREGPT, DatasetName.CUSTOM}
        if needed != (self.dataset_path is not None):
            raise ConfigError(f"--dataset-name {self.dataset_name} {'needs' if needed else 'has no'} --dataset-path")
        metrics = self.percentile_metrics.split(",")
        if unknown := sorted({*metrics} - {*METRICS}):
            raise ConfigError(f"--percentile-metrics {shown(unknown[0])} is unknown: use {', '.join(METRICS)}")
        percentiles = [_number("--metric-percentiles", one, 100) for one in self.metric_percentiles.split(",")]
        goodput = dict[str, float]()
        for one in (part for given in self.goodput or () for part in given.replace(",", " ").split()):
            name, _, limit = one.partition(":")
            if name not in _GOODPUT:
                raise ConfigError(f"--goodput {shown(one)} must be METRIC:MS, with one of {', '.join(_GOODPUT)}")
            goodput[name] = _number("--goodput", limit, float("inf"))
        return _Measures(metrics, percentiles, goodput)

    def requests(self, encode: Encode) -> list[LoadRequest]:
        """Return the requests. encode: returns the token ids of a text."""
        count, seed = self.num_prompts, self.seed
        if self.dataset_path is not None and self.dataset_name is DatasetName.CUSTOM:
            return custom(self.dataset_path, encode, count, output_len=self.custom_output_len, seed=seed)
        if self.dataset_path is not None:
            return sharegpt(self.dataset_path, encode, count, output_len=self.sharegpt_output_len, seed=seed)
        tokens = ordinary_tokens(encode)
        if self.dataset_name is DatasetName.RANDOM:
            return random_load(
                tokens,
                count,
                input_len=self.random_input_len,
                output_len=self.random_output_len,
                prefix_len=self.random_prefix_len,
                range_ratio=self.random_range_ratio,
                seed=seed,
            )
        return repeated_prefixes(
            tokens,
            count,
            prefixes=self.prefix_repetition_num_prefixes,
            prefix_len=self.prefix_repetition_prefix_len,
            suffix_len=self.prefix_repetition_suffix_len,
            output_len=self.prefix_repetition_output_len,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class _Measures:
    """Latencies and percentiles to print, and the limits of the goodput in milliseconds."""

    metrics: Sequence[str]
    percentiles: Sequence[float]
    goodput: dict[str, float]


def _number(option: str, text: str, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= most:
        raise ConfigError(f"{option} {shown(text)} must be a number of 0 to {most:g}")
    return number


def serve_load_command(
    *,
    host: str = run_option("Address of the server.", default="127.0.0.1"),
    port: int = run_option("Port of the server.", min=1, max=(1 << 16) - 1, default=8000),
    base_url: str | None = run_option("Address instead of host and port, such as https://HOST."),
    endpoint: str = run_option("Path: /v1/completions or /v1/chat/completions.", default="/v1/completions"),
    model: str | None = request_option("Name of the model.", show_default="the first one that the server lists"),
    api_key: str | None = request_option(
        "API key of the server; prefer the environment variable.",
        envvar=["HYBRIDKV_API_KEY", "OPENAI_API_KEY"],
        show_default="none",
    ),
    load: LoadOptions,
) -> int:
    """Send a load to an OpenAI server, and print its latencies, throughput and hits."""
    measures = load.checked()
    from hybridkv.bench.server import connected  # noqa: PLC0415  # httpx2 is an extra

    fields: dict[str, Any] = {"ignore_eos": True} if load.ignore_eos else {}
    fields |= {} if load.temperature is None else {"temperature": load.temperature}
    address = base_url or address_of(host, port)
    with connected(address, endpoint, model, api_key, fields) as server:
        with status("making prompts"):
            bodies = [server.body(one) for one in load.requests(server.encode)]
        delays = arrivals(len(bodies), load.request_rate, load.burstiness, load.seed)
        with progress_bar("asking", len(bodies), "requests") as advance:

            async def run() -> tuple[list[Answer], float]:
                warm = bodies[:1] * load.num_warmups
                await server.drive(warm, np.zeros(len(warm)), load.max_concurrency, lambda: None)
                return await server.drive(bodies, delays, load.max_concurrency, advance)

            answers, seconds = asyncio.run(run())
        return _show(load, measures, server.model, answers, seconds)


def engine_load_command(
    *,
    model: ModelOptions,
    memory: str | None = engine_memory_option(),
    max_model_len: int | None = engine_length_option(),
    tiers: TierOptions,
    stored: StoredOptions,
    stepping: StepOptions,
    speculate: str | None = speculate_option(),
    load: LoadOptions,
) -> int:
    """Send a load to an engine in this process, and print its latencies, throughput and hits."""
    measures = load.checked()
    drafts = Speculate.parse(speculate)
    options = stepping.engine_options()
    loaded = model.load()
    from hybridkv.bench.engine import ask_engine  # noqa: PLC0415  # takes seconds
    from hybridkv.runner import AsyncEngine, Engine  # noqa: PLC0415  # same
    from hybridkv.runner.inputs import encode  # noqa: PLC0415  # same

    requests = load.requests(partial(encode, loaded))
    drafter = drafts.drafter(options, trust_remote_code=model.trust_remote_code) if drafts else None
    with checking(loaded.name):
        engine = Engine(
            loaded,
            options=options,
            memory=memory,
            max_model_len=max_model_len,
            **tiers.behind(),
            stored=stored.stored(),
            speculate=drafter,
        )
    sampling = SamplingParams(
        temperature=1.0 if load.temperature is None else load.temperature, ignore_eos=load.ignore_eos
    )
    delays = arrivals(len(requests), load.request_rate, load.burstiness, load.seed)
    gc.collect()
    gc.freeze()  # as in `serve`

    async def run() -> tuple[list[Answer], float]:
        async with AsyncEngine(engine) as front:
            ask = partial(ask_engine, front, sampling=sampling)
            for _ in range(load.num_warmups):
                await ask(requests[0])
            with progress_bar("asking", len(requests), "requests") as advance:
                return await drive(requests, ask, delays, at_once=load.max_concurrency, advance=advance)

    try:
        answers, seconds = asyncio.run(run())
    finally:
        gc.unfreeze()
    return _show(load, measures, loaded.name, answers, seconds)


def _show(load: LoadOptions, measures: _Measures, model: str, answers: Sequence[Answer], seconds: float) -> int:
    """Print the first errors and the report, save the figures if asked for, and return the exit status."""
    failed = [one.error for one in answers if one.error]
    for error in failed[:_MOST_SHOWN]:
        print(f"failed: {printable(' '.join(error.split()))}", file=sys.stderr)
    found = figures(answers, seconds, percentiles=measures.percentiles, goodput=measures.goodput)
    for line in report(
        found,
        rate=load.request_rate,
        at_once=load.max_concurrency,
        metrics=measures.metrics,
        percentiles=measures.percentiles,
    ):
        print(line)
    if load.save_result:
        now, rate = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"), load.request_rate
        name = load.result_filename or f"hybridkv-{rate:g}qps-{Path(model).name.replace(':', '-')}-{now}.json"
        document = {
            "date": now,
            "backend": "openai",
            "model_id": model,
            "num_prompts": load.num_prompts,
            "request_rate": "inf" if rate == float("inf") else rate,
            "burstiness": load.burstiness,
            "max_concurrency": load.max_concurrency,
            **found,
        }
        write_whole(load.result_dir / name, json.dumps(document).encode())
    return 1 if failed else 0
