"""Examples as whoever reads them runs them: in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path


def run_example(path: Path) -> subprocess.CompletedProcess[str]:
    """What it prints, in text. On one thread: those of a tiny model wait for each other on a busy machine."""
    return subprocess.run(  # noqa: S603 - our own example
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
