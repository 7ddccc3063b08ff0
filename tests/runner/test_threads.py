"""The threads of a model: as many as its weights are worth, and as the machine has cores for."""

from pathlib import Path

import pytest

from hybridkv.runner import threads
from hybridkv.runner.threads import suitable_threads

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cores", "quota", "weights", "expected"),
    [
        (8, None, 4 * GIB, 8),
        (8, None, GIB, 4),
        (8, None, GIB // 100, 1),
        (64, "400000 100000", 40 * GIB, 4),
        (64, "max 100000", 40 * GIB, 64),
        (2, "50000 100000", 4 * GIB, 1),
    ],
)
def test_suitable_threads_follow_weights_cores_and_quota(
    cores: int, quota: str | None, weights: int, expected: int, *, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(threads, "_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n", "ascii")
    assert suitable_threads(weights, cores) == expected
