"""Many settings over one trace, each a file of its own, in whatever processes an Executor offers.

    DIR/sweep.json            the trace that all cells are of
    DIR/cells/NAME.json       one cell each: its setting, and its report or why it cannot be

Cells run anywhere; this process alone writes, each file whole or not at all. Again, a sweep runs what is missing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from hybridkv.errors import ConfigError, SweepError
from hybridkv.simulator.cells import Cell, is_document_of
from hybridkv.simulator.trace import RequestSource, TraceFile, TraceSummary
from hybridkv.simulator.written import write_whole

SCHEMA: Final = "hybridkv.sweep"
VERSION: Final = 1
_HEAD: Final = "sweep.json"
_CELLS: Final = "cells"


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
    on_done: Callable[[Swept], None] | None = None,
) -> list[Swept]:
    """Each of ``cells`` over ``source``, in their order; the files are in ``folder``.

    executor: only ``submit`` is asked, and its futures must be those of concurrent.futures. on_done: called with each
    cell as it ends, those that were there first. Raises ConfigError for models that nobody knows and for a folder of
    another trace, SweepError where files cannot be written or workers are lost: cells that ended are kept.
    """
    for setting in {(cell.model, cell.tp, cell.block_size, cell.dtype): cell for cell in cells}.values():
        setting.read()
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
    running: dict[Future[dict[str, object]], Cell] = {}
    try:
        missing = [cell for cell in dict.fromkeys(cells) if cell not in done]
        running = {executor.submit(_run, cell, source, summary): cell for cell in missing}
        for future in as_completed(running):
            document = future.result()
            place.write(running[future], document)
            end(Swept(running[future], document, again=False))
    except (OSError, BrokenExecutor) as error:
        kept = f"{len(done)} of {len(set(cells))} cells are finished and kept"
        if isinstance(error, OSError):
            raise SweepError(f"{folder}: {error.strerror}; {kept}: make room and run the same again") from error
        raise SweepError(f"a worker process was lost; {kept}: run the same again, in fewer --jobs") from error
    finally:
        for future in running:
            future.cancel()
    return [done[cell] for cell in cells]


def _run(cell: Cell, source: RequestSource, summary: TraceSummary) -> dict[str, object]:
    return cell.run(source, summary)


def identity(source: RequestSource) -> str:
    """What tells a source from others: a trace's content and how it is read, a workload's settings."""
    return source.digest() if isinstance(source, TraceFile) else sha256(repr(source).encode()).hexdigest()


class _Folder:
    """Files of one sweep. ConfigError where the folder has cells of another trace, SweepError where it cannot be."""

    def __init__(self, path: Path, source: RequestSource) -> None:
        self._cells = path / _CELLS
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

    def write(self, cell: Cell, document: Mapping[str, object]) -> None:
        """``document`` of ``cell`` is there from now on."""
        write_whole(self._cells / f"{cell.name}.json", _text(document))


def _document(path: Path) -> Mapping[str, object] | None:
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else {}


def _text(document: Mapping[str, object]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
