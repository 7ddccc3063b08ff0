"""Sweeps: every cell a file, whole or not there; started again, what is missing; any Executor."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from cli_support import error, run
from hybridkv.errors import ConfigError, SweepError
from hybridkv.models import read_model
from hybridkv.simulator import (
    HARDWARE,
    Cell,
    ReplaySettings,
    Speculation,
    Swept,
    TraceFile,
    UniformWorkload,
    convert,
    plan_for_trace,
    processes,
    replay,
    sweep,
)

SMALL = Cell("llama-3-8b", "1GiB")
CELLS = [SMALL, replace(SMALL, memory="2GiB"), replace(SMALL, layout="reference")]
SOURCE = UniformWorkload()


class Here(Executor):
    """Runs what is submitted at once, and counts it. fails: with what from which cell on."""

    def __init__(self, fails: BaseException | None = None, after: int = 0) -> None:
        self.ran = 0
        self._fails, self._after = fails, after

    def submit(self, fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Future[Any]:
        future: Future[Any] = Future()
        self.ran += 1
        if self._fails is not None and self.ran > self._after:
            future.set_exception(self._fails)
        else:
            future.set_result(fn(*args, **kwargs))
        return future


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cells").iterdir()}


def test_sweep_cell_matches_a_replay(tmp_path: Path) -> None:
    (one,) = sweep(SOURCE, [SMALL], tmp_path, Here())
    plan = plan_for_trace(SOURCE.summary(), read_model("llama-3-8b"), "1GiB")
    report = replay(SOURCE, plan, ReplaySettings()).to_dict({})
    assert one.document["report"] == {**report, "requests_within_aims": 40}
    ((name, text),) = files(tmp_path).items()
    assert (name, json.loads(text)) == (f"{SMALL.name}.json", json.loads(json.dumps(one.document)))


def test_sweep_cell_with_drafts_is_checked(tmp_path: Path) -> None:
    at: dict[str, Any] = {"model": "qwen3-next-80b-a3b", "memory": "4GiB", "hardware": "b200"}
    hybrid = Cell.of(**at, drafts=3, acceptance=0.9)
    (one,) = sweep(SOURCE, [hybrid], tmp_path, Here())
    model = read_model("qwen3-next-80b-a3b", num_speculative_tokens=3)  # states want room for them
    plan = plan_for_trace(SOURCE.summary(), model, "4GiB")
    report = replay(SOURCE, plan, ReplaySettings(speculation=Speculation(3, 0.9), hardware=HARDWARE["b200"])).to_dict(
        {}
    )
    assert one.document["report"] == {**report, "requests_within_aims": 40}
    assert hybrid.options() == {**Cell(**at).options(), "drafts": 3, "acceptance": 0.9}
    assert Cell.of(**at, drafts=0, acceptance=0.9) == Cell(**at)
    assert Cell.of(**at, router="prefix") == Cell(**at)
    for drafts, acceptance in ((65, 0.9), (-1, 0.9), (3, 1.5)):
        with pytest.raises(ConfigError):
            Cell.of(**at, drafts=drafts, acceptance=acceptance)


def test_sweep_started_again_runs_missing_cells_only(tmp_path: Path) -> None:
    told: list[Swept] = []
    executor = Here()
    first = sweep(SOURCE, [*CELLS, SMALL], tmp_path, executor, on_done=told.append)
    assert ([one.cell for one in first], executor.ran, len(told)) == ([*CELLS, SMALL], 3, 3)
    kept = files(tmp_path)
    (tmp_path / "cells" / f"{CELLS[1].name}.json").unlink()
    (tmp_path / "cells" / f"{CELLS[2].name}.json").write_bytes(kept[f"{CELLS[2].name}.json"][:-9])  # broken off
    executor = Here()
    again = sweep(SOURCE, CELLS, tmp_path, executor)
    assert (executor.ran, [one.again for one in again]) == (2, [True, False, False])
    assert files(tmp_path) == kept
    (tmp_path / "cells" / f"{SMALL.name}.json").write_bytes(kept[f"{CELLS[1].name}.json"])  # another's
    assert [one.again for one in sweep(SOURCE, CELLS, tmp_path, Here())] == [False, True, True]


def test_sweep_cell_that_is_invalid_is_reported(tmp_path: Path) -> None:
    (one,) = sweep(SOURCE, [replace(SMALL, memory="1MiB")], tmp_path, Here())
    assert "memory" in str(one.document["refused"])
    assert [other.again for other in sweep(SOURCE, [one.cell], tmp_path, Here())] == [True]
    with pytest.raises(ConfigError, match="nobody"):
        sweep(SOURCE, [replace(SMALL, model="nobody")], tmp_path, Here())
    options: dict[str, Any] = {"model": "llama-3-8b", "memory": "1GiB"}
    for wrong in ({"memory": "x"}, {"layout": "x"}, {"placement": "x"}, {"eviction": "x"}, {"max_running": 0}):
        with pytest.raises(ConfigError):
            Cell.of(**(options | wrong))
    with pytest.raises(ConfigError, match="the reference layout has no placement 'ends'"):
        Cell.of(model="llama-3-8b", memory="1GiB", layout="reference", placement="ends")


def test_sweep_cell_names_are_distinct() -> None:
    others = [replace(SMALL, **one) for one in ({"tp": 2}, {"block_size": 32}, {"dtype": "fp8"})]
    others += [
        replace(SMALL, settings=one) for one in (ReplaySettings(token_budget=99), ReplaySettings(short_share=0.5))
    ]
    assert len({one.name for one in (*CELLS, *others)}) == 8
    assert SMALL.name == "llama-3-8b-1GiB-natural-4121a25e4acb"  # names of earlier sweeps stay
    assert "short_share" not in SMALL.to_dict()
    assert "/" not in replace(SMALL, model="a/b c").name
    assert len(replace(SMALL, model="x" * 500).name) < 100


def test_sweep_folder_of_another_trace_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    convert(SOURCE, path)
    sweep(TraceFile(path), [SMALL], tmp_path / "out", Here())
    assert sweep(TraceFile(path), [SMALL], tmp_path / "out", Here())[0].again
    before = files(tmp_path / "out")
    for other in (SOURCE, TraceFile(path, limit=5)):
        with pytest.raises(ConfigError, match=r"holds cells of another trace, a\.jsonl"):
            sweep(other, [SMALL], tmp_path / "out", Here())
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="holds cells of another trace"):
        sweep(TraceFile(path), [SMALL], tmp_path / "out", Here())
    assert files(tmp_path / "out") == before


def test_sweep_on_full_disk_keeps_finished_cells(tmp_path: Path) -> None:
    sweep(SOURCE, CELLS[:1], tmp_path, Here())
    with (
        patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(SweepError, match=r"\(No space left on device\); 1 of 3 cells are finished and kept: free disk"),
    ):
        sweep(SOURCE, CELLS, tmp_path, Here())
    assert set(files(tmp_path)) == {f"{SMALL.name}.json"}
    assert [one.again for one in sweep(SOURCE, CELLS, tmp_path, Here())] == [True, False, False]
    with pytest.raises(SweepError, match="name another folder"):
        sweep(SOURCE, CELLS, Path(os.devnull) / "x", Here())


def test_sweep_with_lost_worker_keeps_finished_cells(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"a worker process was lost; . of 3 cells are finished and kept"):
        sweep(SOURCE, CELLS, tmp_path, Here(BrokenProcessPool("killed"), after=1))
    executor = Here()
    sweep(SOURCE, CELLS, tmp_path, executor)
    assert executor.ran in {2, 3}


SHARED = """
import os, sys, time
from concurrent.futures import Executor, Future
from pathlib import Path
from hybridkv.simulator import Cell, UniformWorkload, sweep

class Here(Executor):
    \"\"\"Notes each cell that this process begins. In the mode "stays" it stays in its second one.\"\"\"

    def submit(self, fn, cell, *args):
        with open(sys.argv[2], "a") as ran:
            ran.write(f"{os.getpid()} {cell.name}\\n")
        if sys.argv[3] == "stays" and Path(sys.argv[2]).read_text().count(f"{os.getpid()} ") == 2:
            time.sleep(60)
        future = Future()
        future.set_result(fn(cell, *args))
        return future

cells = [Cell("llama-3-8b", f"{size}GiB") for size in range(1, 7)]
print(len(sweep(UniformWorkload(), cells, sys.argv[1], Here(), at_a_time=1)), "cells")
"""


def test_sweep_twice_in_one_folder_runs_no_cell_twice(tmp_path: Path) -> None:
    """One stays in its second cell. The other runs all but that, until the first is killed; then it runs that, too."""
    ran = tmp_path / "ran"

    def begin(mode: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SHARED, str(tmp_path / "out"), str(ran), mode]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  # our own

    def begun() -> list[str]:
        return ran.read_text().split("\n")[:-1] if ran.exists() else []

    def until(count: int) -> None:
        end = time.monotonic() + 60
        while len(begun()) < count and time.monotonic() < end:
            time.sleep(0.02)
        assert len(begun()) == count

    with begin("stays") as stays:
        try:
            until(2)
            with begin("runs") as other:
                until(6)
                held = [line.split()[1] for line in begun()]
                assert len(set(held)) == 6
                assert other.poll() is None  # it waits for the cell that is claimed
                stays.kill()
                assert other.communicate(timeout=60)[0] == "6 cells\n"
        finally:
            stays.kill()
    assert [line.split()[1] for line in begun()] == [*held, held[1]]
    again = Here()
    done = sweep(SOURCE, [Cell("llama-3-8b", f"{size}GiB") for size in range(1, 7)], tmp_path / "out", again)
    assert (again.ran, all(one.again for one in done)) == (0, True)


def test_sweep_by_processes_and_threads_gives_equal_files(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": f"what is a cache? {k}", "output_tokens": 3}) for k in range(9)), "utf-8"
    )
    source = TraceFile(path, tokenizer="bytes:4", limit=8)
    with processes(2) as executor:
        sweep(source, CELLS, tmp_path / "a", executor)
    with ThreadPoolExecutor(1) as threads:
        sweep(source, CELLS, tmp_path / "b", threads)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    with pytest.raises(ConfigError, match="jobs"):
        processes(0)


DASK = """
import sys
from distributed import Client
from hybridkv.simulator import Cell, UniformWorkload, sweep

if __name__ == "__main__":
    client = Client(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with client, client.get_executor() as executor:
        client.wait_for_workers(2)
        cells = [Cell("llama-3-8b", memory) for memory in ("1GiB", "2GiB", "3GiB")]
        sweep(UniformWorkload(), cells, sys.argv[1], executor)
        print(len(client.nthreads()), "workers")
    client.cluster.close()
"""


def test_sweep_by_dask_gives_equal_files(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    script = tmp_path / "script.py"
    script.write_text(DASK, "utf-8")
    command = [sys.executable, str(script), str(tmp_path / "a")]
    told = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own
    assert "2 workers" in told.stdout, told.stderr
    sweep(SOURCE, [Cell("llama-3-8b", memory) for memory in ("1GiB", "2GiB", "3GiB")], tmp_path / "b", Here())
    assert files(tmp_path / "a") == files(tmp_path / "b")


RAY = """
import sys
import ray
from concurrent.futures import BrokenExecutor
from hybridkv.errors import ConfigError
from hybridkv.simulator import Cell, UniformWorkload, sweep
from hybridkv.simulator.ray_executor import RayExecutor

def wrong():
    raise ConfigError("as it was raised")

def lost():
    import os
    os._exit(1)

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with RayExecutor() as executor:
        cells = [Cell("llama-3-8b", memory) for memory in ("1GiB", "2GiB", "3GiB")]
        sweep(UniformWorkload(), cells, sys.argv[1], executor)
        print(repr(executor.submit(wrong).exception()))
        print(type(executor.submit(lost).exception()) is BrokenExecutor)
    ray.shutdown()
"""


def test_sweep_by_ray_gives_equal_files(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="its wheel and what it needs are 350 MB: pip install 'hybridkv[ray]'")
    script = tmp_path / "script.py"
    script.write_text(RAY, "utf-8")
    command = [sys.executable, str(script), str(tmp_path / "a")]
    quiet = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    told = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)  # noqa: S603  # our own
    lines = [line for line in told.stdout.splitlines() if "raylet" not in line]
    assert lines == ["ConfigError('as it was raised')", "True"], told.stderr
    sweep(SOURCE, [Cell("llama-3-8b", memory) for memory in ("1GiB", "2GiB", "3GiB")], tmp_path / "b", Here())
    assert files(tmp_path / "a") == files(tmp_path / "b")


# -- as a command


def test_sweep_command_writes_cells(tmp_path: Path) -> None:
    base = ("sweep", "workload:uniform", "--model", "llama-3-8b,qwen3-0.6b", "--out", tmp_path, "--jobs", "1")
    done = run(*base, "--memory", "1GiB:3GiB:1GiB,1MiB")
    lines = done.stdout.splitlines()
    assert sum("GiB" in line and "%" in line for line in lines) == 6
    assert sum("refused" in line for line in lines) >= 3
    assert f"8 cells in {tmp_path}" in done.stdout
    assert max(map(len, lines)) <= 400
    assert "sweep: 8 of 8: " in done.stderr
    again = run(*base, "--memory", "2GiB", "--json")
    documents = json.loads(again.stdout)
    assert [one["cell"]["model"] for one in documents] == ["llama-3-8b", "qwen3-0.6b"]
    drafted = run(*base, "--memory", "2GiB", "--drafts", "0,2", "--acceptance", "0.6,0.9", "--json")
    cells = [one["cell"] for one in json.loads(drafted.stdout) if one["cell"]["model"] == "llama-3-8b"]
    assert [(one["drafts"], one["acceptance"]) for one in cells] == [(0, 0.7), (2, 0.6), (2, 0.9)]
    assert "2 of them from an earlier run" in run(*base, "--memory", "2GiB").stdout
    for wrong, what in (
        (("--memory", "1GiB:3GiB"), "must be from:to:step"),
        (("--memory", "3GiB:1GiB:1GiB"), "must ascend"),
        (("--memory", "1GiB:1TiB:1"), "in fewer than"),
        (("--memory", "1GiB,"), "has an empty entry"),
        (("--memory", "x"), "not a size"),
        (("--memory", "1GiB", "--tp", "x"), "--tp 'x' is not a whole number"),
        (("--memory", "1GiB", "--placement", "x"), "placement"),
        (("--memory", "1GiB", "--jobs", "0"), "--jobs"),
        (("--memory", "1GiB", "--acceptance", "0.5"), "give --drafts N too"),
        (("--memory", "1GiB", "--drafts", "2", "--acceptance", "much"), "--acceptance 0.6,0.8"),
        (("--memory", "1GiB", "--drafts", "2", "--acceptance", "2"), "acceptance"),
        (("--memory", "1GiB", "--drafts", "99"), "drafts"),
        (("--memory", "1GiB", "--rate", "2"), "--rate has no effect on workload:uniform|holds cells"),
    ):
        assert any(part in error(*base, *wrong) for part in what.split("|")), wrong


def test_sweep_with_no_cell_at_a_time_is_rejected(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match="at_a_time"):
        sweep(UniformWorkload(), [Cell("llama-3-8b", "1GiB")], tmp_path / "out", pool, at_a_time=0)
