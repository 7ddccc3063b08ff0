"""Measure the cost of large messages for their reader, both a scheduler's messages and hostile ones.

    python benchmarks/large_messages.py [--megabytes 10] [--json]

Of each kind, one message has a tenth of the size and one the full size. Prints the CPU seconds of one thread to read or
reject each, the growth between the two, and the reader's answer. Below a millisecond no growth is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from hybridkv.errors import SchemaError, WireError
from hybridkv.wire import decode_step

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))  # whose messages these are

from hostile_messages import HOSTILE, VALID

REPEATS: Final = 3
LEAST: Final = 1e-3


def read(data: bytes) -> tuple[float, str]:
    """Seconds, and what came of ``data``."""
    begun = time.thread_time()
    try:
        decode_step(data)
        said = "a Step"
    except (WireError, SchemaError) as error:
        said = f"{type(error).__name__}: {error}"
    return time.thread_time() - begun, said


@dataclass(frozen=True)
class Row:
    """Of a tenth of the size, and of all: bytes of the message, CPU seconds. said: of the large one."""

    num_bytes: tuple[int, int]
    seconds: tuple[float, float]
    growth: float | None
    said: str


def measured(make: Callable[[int], bytes], size: int) -> Row:
    """Return the fastest of some readings of each message."""
    tenth, whole = make(size // 10), make(size)
    small = min(read(tenth)[0] for _ in range(REPEATS))
    large, said = min(read(whole) for _ in range(REPEATS))
    growth = round(large / small, 1) if small >= LEAST else None
    return Row((len(tenth), len(whole)), (round(small, 4), round(large, 4)), growth, said)


def main() -> None:
    """Print a line a kind, or all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    size = int(options.megabytes * 1_000_000)
    rows = {kind: measured(make, size) for kind, make in (VALID | HOSTILE).items()}
    if options.json:
        print(json.dumps({kind: asdict(row) for kind, row in rows.items()}, indent=1))
        return
    print(f"{'':<26}{'bytes':>12}{'bytes':>12}{'s':>9}{'s':>9}{'growth':>8}")
    for kind, row in rows.items():
        sizes = "".join(f"{one:>12,}" for one in row.num_bytes)
        seconds = "".join(f"{one:>9.3f}" for one in row.seconds)
        print(f"{kind:<26}{sizes}{seconds}{row.growth or '-':>8}  {row.said[:90]}")


if __name__ == "__main__":
    main()
