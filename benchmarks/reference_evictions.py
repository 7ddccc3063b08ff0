"""Compare ranked eviction with the order of last use in the reference layout: hit rates of replays, as CSV.

    python reference_evictions.py OUT.csv STREAM [STREAM ...] [--models NAME ...] [--memories GIB ...] [--limit N]

A stream is a trace file or workload:NAME. Each cell replays one stream through the scheduler, on a machine whose memory
has no bound besides the cache. A cell that stands in OUT.csv is not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

MODELS: Final = ("qwen3.5-35b-a3b", "nemotron-3-nano-30b-a3b", "gemma-3-27b", "llama-3.1-70b")
FIELDS: Final = ("stream", "model", "GiB", "requests", "lru", "hazard")


def hit_rate(stream: str, model: str, memory: int, eviction: str, limit: int | None) -> tuple[int, float] | None:
    """Return the requests of a replay and its hit rate; ``None`` if the longest request does not fit."""
    command = [sys.executable, "-m", "hybridkv", "replay", stream, "--model", model, "--memory", f"{memory}GiB"]
    command += ["--layout", "reference", "--eviction", eviction, "--hardware", "h100-unbounded", "--json"]
    if limit is not None:
        command += ["--limit", str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
    if done.returncode:
        if "too small" in done.stderr:
            return None
        raise SystemExit(done.stderr)
    report = json.loads(done.stdout)
    return report["requests"], report["hit_rate"]


def main() -> None:
    """Run the cells that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("streams", nargs="+")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--memories", nargs="+", type=int, default=[10, 40, 160])
    parser.add_argument("--limit", type=int)
    asked = parser.parse_args()
    rows = list(csv.DictReader(asked.out.open(encoding="utf-8"))) if asked.out.exists() else []
    known = {(row["stream"], row["model"], row["GiB"]) for row in rows}
    with asked.out.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for stream in asked.streams:
            name = Path(stream).name.removesuffix(".jsonl.gz").removeprefix("workload:")
            for memory in asked.memories:
                for model in asked.models:
                    if (name, model, str(memory)) in known:
                        continue
                    found = [hit_rate(stream, model, memory, one, asked.limit) for one in ("lru", "hazard")]
                    if found[0] is None or found[1] is None:
                        continue
                    requests, rates = found[0][0], [f"{one[1]:.4f}" for one in found if one is not None]
                    writer.writerow(dict(zip(FIELDS, (name, model, memory, requests, *rates), strict=True)))
                    file.flush()


if __name__ == "__main__":
    main()
