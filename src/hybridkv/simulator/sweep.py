"""Many settings over one trace, each a cell with a file of its own, in whatever processes an Executor offers.

    DIR/sweep.json            the trace that all cells are of
    DIR/cells/NAME.json       one cell each: its setting, and its report or why it cannot be
    DIR/claims                empty; the lock of one byte is a claim of one cell

Cells run anywhere. The process that claimed a cell writes its file, whole or not at all. A sweep runs what is missing.
Several processes may sweep into one folder: each runs cells that no other one has claimed. The kernel drops the claims
of a process that ends, however it ends, so another process runs its cells then.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO, Final

from hybridkv.arguments import integer
from hybridkv.cache import placement_named
from hybridkv.errors import ConfigError, SweepError
from hybridkv.models import Model, read_model
from hybridkv.planner.plan import ALIGN, DEFAULT_LAYOUT, LAYOUTS, NATURAL, NO_STATES
from hybridkv.regular_files import write_whole
from hybridkv.simulator.fleet import MOST_REPLICAS, ROUND_ROBIN, replay_replicas, router_named
from hybridkv.simulator.hardware import BF16, DEFAULT_HARDWARE, hardware_named
from hybridkv.simulator.loop import ACCEPTANCE, MOST_DRAFTS, Speculation
from hybridkv.simulator.setup import TOKEN_BUDGET, ReplaySettings, plan_for_trace
from hybridkv.simulator.trace import RequestSource, TraceFile, TraceSummary
from hybridkv.units import parse_bytes, shown

_CELL_SCHEMA: Final = "hybridkv.sweep.cell"
_CELL_VERSION: Final = 2
_NAME_CHARACTERS: Final = 60


@dataclass(frozen=True, slots=True)
class Cell:
    """A setting. model: as read_model takes it. memory: for the cache of one rank. dtype: of keys and values.

    hardware: as hardware_named takes it. drafts, acceptance: as Speculation has them, 0 drafts for none.
    first_token_s, per_token_s: aims that single requests are counted by.

    Others as plan_for_trace and ReplaySettings have them. ConfigError for what no model or machine could make right.
    """

    model: str
    memory: str
    tp: int = 1
    layout: str = DEFAULT_LAYOUT
    placement: str | None = None
    eviction: str | None = None
    block_size: int = 16
    dtype: str | None = None
    max_running: int = 256
    token_budget: int = TOKEN_BUDGET
    hardware: str = DEFAULT_HARDWARE
    weights: str = BF16
    replicas: int = 1
    router: str = ROUND_ROBIN
    drafts: int = 0
    acceptance: float = ACCEPTANCE
    first_token_s: float = math.inf
    per_token_s: float = math.inf

    def __post_init__(self) -> None:
        parse_bytes(self.memory)
        if self.layout not in LAYOUTS:
            raise ConfigError(f"unknown layout {shown(self.layout)}: use one of {', '.join(LAYOUTS)}")
        if self.layout == NATURAL and self.placement is not None:
            placement_named(self.placement, align_tokens=1)  # only read
        if self.layout != NATURAL and self.placement not in {None, ALIGN, NO_STATES}:
            raise ConfigError(f"placement {shown(self.placement)} is none of the {self.layout} layout's")
        integer("replicas", self.replicas, 1, MOST_REPLICAS)
        integer("drafts", self.drafts, 0, MOST_DRAFTS)
        router_named(self.router)
        self.settings()

    def plainest(self) -> Cell:
        """What runs alike, without what does nothing: a router before one engine, acceptance of no drafts."""
        router = self.router if self.replicas > 1 else ROUND_ROBIN
        return replace(self, router=router, acceptance=self.acceptance if self.drafts else ACCEPTANCE)

    def said(self) -> dict[str, object]:
        """The fields as JSON has them: what is not limited is null."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}

    @property
    def name(self) -> str:
        """Of its file: readable, and another one for any other setting."""
        said = self.said()
        words = [str(said[name]) for name in ("model", "memory", "layout", "placement", "eviction") if said[name]]
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', '_'.join(words))[-_NAME_CHARACTERS:].strip('-')}-{digest}"

    def read(self) -> Model:
        """The model. ConfigError where there is none, or none that is sharded so."""
        return read_model(
            self.model, block_size=self.block_size, tp=self.tp, dtype=self.dtype, num_speculative_tokens=self.drafts
        )

    def settings(self) -> ReplaySettings:
        """How it runs."""
        placed = self.placement if self.layout == NATURAL else None
        return ReplaySettings(
            self.max_running,
            self.token_budget,
            hardware=hardware_named(self.hardware),
            weights=self.weights,
            placement=placed,
            eviction=self.eviction,
            speculation=Speculation(self.drafts, self.acceptance) if self.drafts else None,
        )

    def run(self, source: RequestSource, summary: TraceSummary) -> dict[str, object]:
        """Its document: the report, or why the setting cannot serve these requests."""
        machine = asdict(hardware_named(self.hardware))  # a file may say something else tomorrow
        document: dict[str, object] = {
            "schema": _CELL_SCHEMA,
            "version": _CELL_VERSION,
            "cell": self.said(),
            "machine": machine,
        }
        try:
            plan = plan_for_trace(
                summary,
                self.read(),
                self.memory,
                placement=self.placement,
                layout=self.layout,
                token_budget=self.token_budget,
            )
            report = replay_replicas(
                source, plan, self.settings(), replicas=self.replicas, router=self.router, summary=summary
            )
        except ConfigError as error:
            return {**document, "refused": str(error)}
        within = report.within(self.first_token_s, self.per_token_s)
        return {**document, "report": {**report.to_dict({}), "requests_within_aims": within}}


def is_document_of(cell: Cell, document: object) -> bool:
    """Whether it is what this version made of ``cell``."""
    return (
        isinstance(document, Mapping)
        and document.get("schema") == _CELL_SCHEMA
        and document.get("version") == _CELL_VERSION
        and document.get("cell") == cell.said()
        and document.get("machine") == asdict(hardware_named(cell.hardware))
        and isinstance(document.get("report", document.get("refused")), dict | str)
    )


def differing(cells: Sequence[Cell]) -> list[str]:
    """Fields that are not the same in all ``cells``."""
    said = [cell.said() for cell in cells]
    return [name for name in said[0] if len({str(of[name]) for of in said}) > 1]


def machines_of(cells: Sequence[Cell]) -> str:
    """Name the machines that times of ``cells`` are of, and what they keep weights in."""
    return ", ".join(dict.fromkeys(f"{hardware_named(one.hardware).name} with {one.weights} weights" for one in cells))


def in_words(cell: Cell, names: Sequence[str]) -> str:
    """Its ``names``, and what they are."""
    said = cell.said()
    return ", ".join(f"{name.replace('_', ' ')} {said[name]}" for name in names)


def in_short(cell: Cell, names: Sequence[str]) -> str:
    """What its ``names`` are."""
    said = cell.said()
    return ", ".join(str(said[name]) for name in names if said[name] is not None)


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
        return executor.submit(Cell.run, cell, source, summary)

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
        place = int.from_bytes(sha256(cell.name.encode()).digest()[:_PLACE_BYTES], "big")
        fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB if taken else fcntl.LOCK_UN, 1, place)

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
