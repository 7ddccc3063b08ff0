"""Random histories for as long as asked: ``python tests/independent/run.py --seconds 3600 --seed 1``.

Prints what happened; ends with 1 at the first difference, whose seed plays it again: ``--seed THAT --seconds 0``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from typing import Any

from content import DifferenceError
from history import play

from hybridkv.eviction.choice import HAZARD


def main() -> int:
    """Play until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after the history that reaches this")
    parser.add_argument("--seed", type=int, default=0, help="of the first history; the next one has the next")
    parser.add_argument("--steps", type=int, default=120, help="steps of a history before its requests run out")
    parser.add_argument("--family", help='of models: "compressed" for compressed caches; any other by default')
    parser.add_argument(
        "--tiers", choices=("host", "store"), help="host memory below the device, and a store behind it"
    )
    parser.add_argument("--layout", choices=("natural", "reference"), help="of the plans; either by default")
    options = parser.parse_args()
    logging.getLogger("hybridkv").setLevel(logging.CRITICAL)
    tiers: dict[str, Any] = {}
    if options.tiers is not None:
        tiers = {"eviction": HAZARD.name, "tiered": True, "stored": options.tiers == "store"}
    counts: Counter[str] = Counter()
    start = shown = time.monotonic()
    seed = options.seed
    while True:
        try:
            counts += play(seed, steps=options.steps, family=options.family, layout=options.layout, **tiers)
        except DifferenceError as error:
            sys.stdout.write(f"DIFFERENCE after {counts['row-steps']} row-steps\n{error}\n")
            return 1
        counts["histories"] += 1
        seed += 1
        now = time.monotonic()
        if now - shown > 60 or now - start >= options.seconds:
            shown = now
            told = ", ".join(f"{counts[name]} {name}" for name in sorted(counts))
            sys.stdout.write(f"{now - start:.0f} s, seeds {options.seed} .. {seed - 1}: {told}\n")
            sys.stdout.flush()
        if now - start >= options.seconds:
            return 0


if __name__ == "__main__":
    sys.exit(main())
