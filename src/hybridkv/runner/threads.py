"""The number of CPU threads that suits a model on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_BYTES_PER_THREAD: Final = 256 << 20
"""Weights for which another thread is worth its start in each operation; chosen by hand."""
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def suitable_threads(weight_bytes: int, cores: int) -> int:
    """Return the threads of a model: one for each 256 MiB of weights, at least 1.

    A container may use less time than it has cores. More threads than that time allows would stop together until the
    next period.

    Args:
        weight_bytes: bytes of the model's weights.
        cores: cores that this process may run on.
    """
    if _QUOTA.is_file():
        quota, period = _QUOTA.read_text("ascii").split()  # "max 100000", or microseconds of each period
        cores = cores if quota == "max" else min(cores, int(quota) // int(period))
    return max(1, min(weight_bytes // _BYTES_PER_THREAD, cores))
