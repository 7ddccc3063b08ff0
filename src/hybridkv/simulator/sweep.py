"""Many settings over one trace, each a file of its own, in whatever processes an Executor offers.

    DIR/sweep.json            the trace that all cells are of
    DIR/cells/NAME.json       one cell each: its setting, and its report or why it cannot be
    DIR/claims                empty; the lock of one byte is a claim of one cell

Cells run anywhere. The process that claimed a cell writes its file, whole or not at all. A sweep runs what is missing.
Several processes may sweep into one folder: each runs cells that no other one has claimed. The kernel drops the claims
of a process that ends, however it ends, so another process runs its cells then.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO, Final

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError, SweepError
from hybridkv.simulator.cells import Cell, is_document_of
from hybridkv.simulator.trace import RequestSource, TraceFile, TraceSummary
from hybridkv.simulator.written import write_whole

SCHEMA: Final = "hybridkv.sweep"
VERSION: Final = 1
_HEAD: Final = "sweep.json"
_CELLS: Final = "cells"
_CLAIMS: Final = "claims"
_PLACE_BYTES: Final = 7
"""Of a digest: the place of a claim's byte, which may lie behind the end of the file."""
_POLL_S: Final = 0.5
"""Seconds between two looks at cells that other processes have claimed."""


@dataclass(frozen=True, slots=True)
class Swept:
    """A finished cell. again: whether it was there before."""

    cell: Cell
    document: Mapping[str, object]
    again: bool


def processes(jobs: int) -> ProcessPoolExecutor:
    """An Executor of ``jobs`` processes of this machine, which end with this one."""
    if jobs < 1:
        raise ConfigError(f"jobs (--jobs) must be at least 1, got {jobs}")
    context = multiprocessing.get_context("spawn")  # a fork would copy threads that draw progress
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """Of a worker: leave interrupts to the parent, and end when it does, however it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_behind, args=(parent,), daemon=True).start()


def _end_behind(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def sweep(
    source: RequestSource,
    cells: Sequence[Cell],
    folder: str | Path,
    executor: Executor,
    *,
    at_a_time: int | None = None,
    on_done: Callable[[Swept], None] | None = None,
) -> list[Swept]:
    """Run each of ``cells`` over ``source``, and return them in their order. Their files are in ``folder``.

    executor: only ``submit`` is called, and its futures must be those of concurrent.futures.
    at_a_time: how many cells to claim and submit at a time, such as the executor's processes. None claims all that are
    free at once, so a second sweep into ``folder`` finds none to run.
    on_done: called with each cell as it ends, first with those that were there before.

    Waits for cells that another process has claimed. Raises ConfigError for unknown models and for a folder of another
    trace. Raises SweepError if files cannot be written or workers are lost: cells that ended are kept.
    """
    for setting in {(cell.model, cell.tp, cell.block_size, cell.dtype): cell for cell in cells}.values():
        setting.read()
    most = len(cells) + 1 if at_a_time is None else integer("at_a_time", at_a_time, 1)
    place = _Folder(Path(folder), source)
    summary = source.summary()
    done: dict[Cell, Swept] = {}

    def end(swept: Swept) -> None:
        done[swept.cell] = swept
        if on_done is not None:
            on_done(swept)

    for cell in dict.fromkeys(cells):
        known = place.read(cell)
        if known is not None:
            end(Swept(cell, known, again=True))

    def submit(cell: Cell) -> Future[dict[str, object]]:
        return executor.submit(_run, cell, source, summary)

    missing = [cell for cell in dict.fromkeys(cells) if cell not in done]
    try:
        with closing(_finished(place, missing, submit, most)) as finished:
            for swept in finished:
                end(swept)
    except (OSError, BrokenExecutor) as error:
        kept = f"{len(done)} of {len(set(cells))} cells are finished and kept"
        if isinstance(error, OSError):
            raise SweepError(f"{folder}: {error.strerror}; {kept}: make room and run the same again") from error
        raise SweepError(f"a worker process was lost; {kept}: run the same again, in fewer --jobs") from error
    finally:
        place.close()
    return [done[cell] for cell in cells]


def _finished(
    place: _Folder, missing: Sequence[Cell], submit: Callable[[Cell], Future[dict[str, object]]], most: int
) -> Generator[Swept, None, None]:
    """Yield each of ``missing`` as it ends, in this process or in one that claimed it before."""
    running: dict[Future[dict[str, object]], Cell] = {}
    waiting = deque(missing)
    try:
        while waiting or running:
            for _ in range(len(waiting)):
                cell = waiting.popleft()
                if len(running) == most or not place.claim(cell):
                    waiting.append(cell)
                    continue
                known = place.read(cell)  # another process may have finished it
                if known is None:
                    running[submit(cell)] = cell
                else:
                    place.release(cell)
                    yield Swept(cell, known, again=True)
            if not running:
                time.sleep(_POLL_S if waiting else 0)
                continue
            for future in wait(running, _POLL_S if waiting else None, FIRST_COMPLETED).done:
                cell, document = running.pop(future), future.result()
                place.write(cell, document)
                yield Swept(cell, document, again=False)
    finally:
        for future in running:
            future.cancel()


def _run(cell: Cell, source: RequestSource, summary: TraceSummary) -> dict[str, object]:
    return cell.run(source, summary)


def identity(source: RequestSource) -> str:
    """What tells a source from others: a trace's content and how it is read, a workload's settings."""
    return source.digest() if isinstance(source, TraceFile) else sha256(repr(source).encode()).hexdigest()


class _Folder:
    """The files of one sweep, and its claims of cells.

    Raises ConfigError if the folder has cells of another trace, and SweepError if it cannot be written.
    """

    def __init__(self, path: Path, source: RequestSource) -> None:
        self._cells = path / _CELLS
        self._claims_path = path / _CLAIMS
        self._claims: BinaryIO | None = None  # a finished sweep is read where nothing can be written
        self._trace = identity(source)
        head = path / _HEAD
        try:
            self._cells.mkdir(parents=True, exist_ok=True)
            there = _document(head)
            if there is None:
                about = {"schema": SCHEMA, "version": VERSION, "source": source.name, "trace": self._trace}
                write_whole(head, _text(about))
        except OSError as error:
            raise SweepError(f"{path}: cannot write: {error.strerror}; name another folder (--out)") from error
        if there is not None and (there.get("schema"), there.get("trace")) != (SCHEMA, self._trace):
            raise ConfigError(
                f"{path} holds cells of another trace, {there.get('source')}, or of it read otherwise: name another "
                "folder (--out)"
            )

    def read(self, cell: Cell) -> Mapping[str, object] | None:
        """What is there of ``cell``."""
        document = _document(self._cells / f"{cell.name}.json")
        return document if is_document_of(cell, document) else None

    def claim(self, cell: Cell) -> bool:
        """Claim ``cell`` for this process, until ``release`` or ``close``. Return False if another process has it."""
        try:
            self._lock(cell, taken=True)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        return True

    def release(self, cell: Cell) -> None:
        """Give up the claim of ``cell``."""
        self._lock(cell, taken=False)

    def _lock(self, cell: Cell, *, taken: bool) -> None:
        import fcntl  # noqa: PLC0415  # POSIX alone has it: the rest of the simulator runs anywhere

        if self._claims is None:
            self._claims = self._claims_path.open("ab")
        digest = sha256(cell.name.encode()).digest()
        fcntl.lockf(
            self._claims,
            fcntl.LOCK_EX | fcntl.LOCK_NB if taken else fcntl.LOCK_UN,
            1,
            int.from_bytes(digest[:_PLACE_BYTES], "big"),
        )

    def write(self, cell: Cell, document: Mapping[str, object]) -> None:
        """Write the document of ``cell``, which was claimed, and give up the claim."""
        write_whole(self._cells / f"{cell.name}.json", _text(document))
        self.release(cell)

    def close(self) -> None:
        """Give up all claims."""
        if self._claims is not None:
            self._claims.close()


def _document(path: Path) -> Mapping[str, object] | None:
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else {}


def _text(document: Mapping[str, object]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
