"""Measure the first answer to a long prompt in a new process: computed, and from a warm disk.

    python warm_disk.py [--tokens 2000]

Each row starts three processes: one fills the disk, one has no disk, one has the warm disk. Times are from the prompt
to its first token, after a short prompt that warms the model up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

MODELS: Final = ("tiny llama", "tiny qwen3_next", "llama_100m", "qwen3_next_100m")
_SCRIPT: Final = """
import json, random, sys, time
import larger_models
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, load
from hybridkv.stores import DiskFolder

name, tokens, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model = load("tiny:" + name[5:]) if name.startswith("tiny ") else getattr(larger_models, name)()
tiers = {"host_memory": "512MiB", "store": DiskFolder(folder, "1GiB")} if folder else {}
draw = random.Random(1)
warm, prompt = ([draw.randrange(3, 200) for _ in range(count)] for count in (50, tokens))
once = SamplingParams(max_tokens=1, ignore_eos=True)
with Engine(model, options=EngineOptions(self_check=False), memory="512MiB", **tiers) as engine:
    engine.generate([warm], once)
    begun = time.perf_counter()
    (done,) = engine.generate([prompt], once)
    print(json.dumps([time.perf_counter() - begun, done.hit_tokens, list(done.token_ids)]))
"""


def first_answer(name: str, tokens: int, folder: str) -> tuple[float, int, list[int]]:
    """Return seconds, hit tokens and the first token of a new process."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", _SCRIPT, name, str(tokens), folder]
    done = subprocess.run(  # noqa: S603 - this interpreter
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    seconds, hits, made = json.loads(done.stdout.splitlines()[-1])
    return seconds, hits, made


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000)
    tokens = parser.parse_args().tokens
    print("| model | computed | from the disk | ratio | hit tokens |\n|---|--:|--:|--:|--:|")
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            _, _, first = first_answer(name, tokens, folder)
            computed, _, alone = first_answer(name, tokens, "")
            warm, hits, again = first_answer(name, tokens, folder)
        if not first == alone == again:
            raise SystemExit(f"{name}: the answers differ")
        print(f"| {name} | {computed:.2f} s | {warm:.2f} s | {computed / warm:.1f} | {hits} of {tokens} |", flush=True)


if __name__ == "__main__":
    main()
