"""Replay one source under many settings. Each setting is a cell and has one file.

    DIR/sweep.json            names the trace that all cells replay
    DIR/cells/NAME.json       one cell: its options, and its report or the reason why it cannot run
    DIR/claims                an empty file; a lock on one byte of it claims one cell

Any ``concurrent.futures.Executor`` may run the cells. The process that claimed a cell writes the cell's file in one
piece, so a file is complete or absent. A sweep runs only the cells without a file.
Several processes may sweep into one folder: each runs the cells that no other process has claimed. The kernel drops the
claims of a process when it exits for any reason; another process then runs its cells.
"""

from __future__ import annotations

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
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO, Final

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError, SweepError
from hybridkv.models import Model, read_model
from hybridkv.planner.plan import DEFAULT_LAYOUT, LAYOUTS
from hybridkv.regular_files import write_whole
from hybridkv.simulator.fleet import MOST_REPLICAS, ROUND_ROBIN, replay_replicas, router_named
from hybridkv.simulator.hardware import DEFAULT_HARDWARE, hardware_named
from hybridkv.simulator.outputs import ACCEPTANCE, Speculation
from hybridkv.simulator.setup import ReplaySettings, plan_for_trace, require_placement
from hybridkv.simulator.trace import RequestSource, TraceFile, TraceSummary
from hybridkv.units import parse_bytes, shown

_CELL_SCHEMA: Final = "hybridkv.sweep.cell"
_CELL_VERSION: Final = 2
_NAME_CHARACTERS: Final = 60
_DEFAULTS: Final = ReplaySettings()
_ALWAYS_WRITTEN: Final = (
    *("model", "memory", "tp", "layout", "placement", "eviction", "block_size", "dtype", "max_running"),
    *("token_budget", "hardware", "weights", "replicas", "router", "drafts", "acceptance"),
    *("first_token_s", "per_token_s"),
)
"""Options that every cell's document holds, in this order.

A document holds any other option of ReplaySettings only if it differs from its default. A new option therefore leaves
the names and files of earlier sweeps valid.
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a sweep's grid: a model, its cache memory and its machines, and how each replica runs.

    Attributes:
        model: a model, as ``read_model`` takes it.
        memory: cache memory of one rank, for example ``40GiB``.
        tp: tensor parallel ranks.
        layout: cache layout, a name of LAYOUTS.
        block_size: tokens of a block.
        dtype: dtype of keys and values; ``None``: the dtype of the model's config.
        hardware: name or file of the machine of one rank, as ``hardware_named`` takes it. It replaces
            ``settings.hardware``.
        replicas: number of engines.
        router: policy that chooses a replica for each request, as ``router_named`` takes it.
        first_token_s: limit of the time to first token of a request within the aims, in seconds.
        per_token_s: limit of the time per output token of a request within the aims, in seconds.
        settings: how each replica runs.

    Raises:
        ConfigError: for values out of range, and for a placement that the layout does not have.
    """

    model: str
    memory: str
    tp: int = 1
    layout: str = DEFAULT_LAYOUT
    block_size: int = 16
    dtype: str | None = None
    hardware: str = DEFAULT_HARDWARE
    replicas: int = 1
    router: str = ROUND_ROBIN
    first_token_s: float = math.inf
    per_token_s: float = math.inf
    settings: ReplaySettings = _DEFAULTS

    def __post_init__(self) -> None:
        parse_bytes(self.memory)
        if self.layout not in LAYOUTS:
            raise ConfigError(f"unknown layout {shown(self.layout)}: use one of {', '.join(LAYOUTS)}")
        require_placement(self.settings.placement, self.layout)
        integer("replicas", self.replicas, 1, MOST_REPLICAS)
        router_named(self.router)
        object.__setattr__(self, "settings", replace(self.settings, hardware=hardware_named(self.hardware)))

    @classmethod
    def of(cls, *, drafts: int = 0, acceptance: float | None = None, **options: Any) -> Cell:  # noqa: ANN401 - by field
        """Make a cell from flat options.

        Options without effect do not distinguish cells: the router of one replica, and acceptance without drafts.

        Args:
            drafts: drafted tokens of each decoding request in a step; 0: no speculation.
            acceptance: probability that a draft is accepted, 0 to 1; ``None``: 0.7 (``outputs.ACCEPTANCE``).
            options: fields of Cell and of ReplaySettings, by name.

        Raises:
            ConfigError: for values out of range, and for a placement that the layout does not have.
        """
        names = {field.name for field in fields(ReplaySettings)} - {"hardware"}
        settings = ReplaySettings(
            speculation=Speculation.of(drafts, acceptance),
            **{name: options.pop(name) for name in names & options.keys()},
        )
        cell = cls(**options, settings=settings)
        return cell if cell.replicas > 1 else replace(cell, router=ROUND_ROBIN)

    def options(self) -> dict[str, object]:
        """Return all options by name, in one flat mapping. A latency without a limit is ``None``."""
        speculation = self.settings.speculation
        values: dict[str, object] = asdict(self.settings)
        values |= {field.name: getattr(self, field.name) for field in fields(self)}
        values["drafts"] = 0 if speculation is None else speculation.drafts
        values["acceptance"] = ACCEPTANCE if speculation is None else speculation.acceptance
        del values["settings"], values["speculation"]
        ordered = {name: values[name] for name in _ALWAYS_WRITTEN} | values
        return {name: None if value == math.inf else value for name, value in ordered.items()}

    def to_dict(self) -> dict[str, object]:
        """Return the options that the cell's document holds."""
        defaults = asdict(_DEFAULTS)
        written = {
            name: value for name, value in self.options().items() if name in _ALWAYS_WRITTEN or value != defaults[name]
        }
        return dict(json.loads(json.dumps(written)))  # a document that is read back has lists, no tuples

    @property
    def name(self) -> str:
        """Name of the cell's file: readable, and different for different options."""
        options = self.to_dict()
        words = [str(options[name]) for name in ("model", "memory", "layout", "placement", "eviction") if options[name]]
        digest = sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', '_'.join(words))[-_NAME_CHARACTERS:].strip('-')}-{digest}"

    def read(self) -> Model:
        """Read the model, with the cell's block size, ranks, dtype and drafts.

        Raises:
            ConfigError: for an unknown model, and for a model that ``tp`` ranks cannot share.
        """
        drafts = 0 if self.settings.speculation is None else self.settings.speculation.drafts
        return read_model(
            self.model, block_size=self.block_size, tp=self.tp, dtype=self.dtype, num_speculative_tokens=drafts
        )

    def run(self, source: RequestSource, summary: TraceSummary) -> dict[str, object]:
        """Replay a source.

        Args:
            source: requests to replay.
            summary: counts of the source, from ``source.summary()``.

        Returns:
            The cell's document. It has either ``report``, or ``refused`` with the reason why the options cannot serve
            the requests.
        """
        document: dict[str, object] = {
            "schema": _CELL_SCHEMA,
            "version": _CELL_VERSION,
            "cell": self.to_dict(),
            "machine": asdict(self.settings.hardware),  # the file that ``hardware`` names may change later
        }
        try:
            plan = plan_for_trace(
                summary,
                self.read(),
                self.memory,
                placement=self.settings.placement,
                layout=self.layout,
                token_budget=self.settings.token_budget,
            )
            report = replay_replicas(
                source, plan, self.settings, replicas=self.replicas, router=self.router, summary=summary
            )
        except ConfigError as error:
            return {**document, "refused": str(error)}
        within = report.within(self.first_token_s, self.per_token_s)
        return {**document, "report": {**report.to_dict({}), "requests_within_aims": within}}


def is_document_of(cell: Cell, document: object) -> bool:
    """Return whether a document is the result of a cell, on the same machine and in this version of the format.

    Args:
        cell: the cell.
        document: any value that was read from a file.
    """
    return (
        isinstance(document, Mapping)
        and document.get("schema") == _CELL_SCHEMA
        and document.get("version") == _CELL_VERSION
        and document.get("cell") == cell.to_dict()
        and document.get("machine") == asdict(cell.settings.hardware)
        and isinstance(document.get("report", document.get("refused")), dict | str)
    )


def differing(cells: Sequence[Cell]) -> list[str]:
    """Return the names of the options with different values, in the order of a document.

    Args:
        cells: cells to compare.
    """
    options = [cell.options() for cell in cells]
    return [name for name in options[0] if len({str(one[name]) for one in options}) > 1]


def machines_of(cells: Sequence[Cell]) -> str:
    """Return the machines and formats of weights as text, each combination once.

    Args:
        cells: cells of a sweep.
    """
    words = (f"{cell.settings.hardware.name} with {cell.settings.weights} weights" for cell in cells)
    return ", ".join(dict.fromkeys(words))


def in_words(cell: Cell, names: Sequence[str]) -> str:
    """Return some options as text: each name and its value.

    Args:
        cell: the cell.
        names: names of the options.
    """
    options = cell.options()
    return ", ".join(f"{name.replace('_', ' ')} {options[name]}" for name in names)


def in_short(cell: Cell, names: Sequence[str]) -> str:
    """Return the values of some options as text, without absent values.

    Args:
        cell: the cell.
        names: names of the options.
    """
    options = cell.options()
    return ", ".join(str(options[name]) for name in names if options[name] is not None)


SCHEMA: Final = "hybridkv.sweep"
VERSION: Final = 1
_HEAD: Final = "sweep.json"
_CELLS: Final = "cells"
_CLAIMS: Final = "claims"
_PLACE_BYTES: Final = 7
"""Bytes of a digest that choose the locked byte of a claim, at 0 to 2**56 - 1. The file may be shorter."""
_POLL_S: Final = 0.5
"""Seconds between two polls of the cells that other processes have claimed. Chosen by hand."""


@dataclass(frozen=True, slots=True)
class Swept:
    """A finished cell.

    Attributes:
        cell: the cell.
        document: content of its file.
        again: whether an earlier sweep or another process finished it.
    """

    cell: Cell
    document: Mapping[str, object]
    again: bool


def processes(jobs: int) -> ProcessPoolExecutor:
    """Return an Executor of processes on this machine. They exit when this process exits.

    Args:
        jobs: number of processes, at least 1.

    Raises:
        ConfigError: for fewer than one process.
    """
    integer("jobs (--jobs)", jobs, 1)
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of the progress bar
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """Set up a worker process: ignore interrupts, and exit when the parent process exits for any reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    """Wait for the end of ``parent``, then exit at once: a replay in the main thread would run on."""
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
    """Replay a source once for each cell and write the files of the cells.

    Cells with a file are not run again. The call waits for cells that another process has claimed.

    Args:
        source: requests to replay.
        cells: settings to run; equal cells run once.
        folder: folder of the files; it is created if absent.
        executor: runs the cells. Only ``submit`` is called, and it must return futures of ``concurrent.futures``.
        at_a_time: most cells to claim and submit at once, for example the processes of ``executor``. ``None`` claims
            all free cells, so a second sweep into the folder finds no cell to run.
        on_done: called with each finished cell, first with the cells that have a file.

    Returns:
        The finished cells, in the order of ``cells``.

    Raises:
        ConfigError: for an unknown model, and for a folder that holds cells of another trace.
        SweepError: if a file cannot be written or a worker process is lost. Finished cells are kept.
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
            raise SweepError(
                f"cannot write to {folder} ({error.strerror}); {kept}: free disk space and run the same command again"
            ) from error
        raise SweepError(f"a worker process was lost; {kept}: run the same command again with fewer --jobs") from error
    finally:
        place.close()
    return [done[cell] for cell in cells]


def _finished(
    place: _Folder, missing: Sequence[Cell], submit: Callable[[Cell], Future[dict[str, object]]], most: int
) -> Generator[Swept, None, None]:
    """Yield the missing cells as they are finished, by this process or by another one that claimed them.

    ``submit`` starts a cell that this process claimed; at most ``most`` run at once.
    """
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
    """Return a digest of a source: content and reading options of a trace, or settings of a workload.

    Args:
        source: a trace file or a workload.
    """
    return source.digest() if isinstance(source, TraceFile) else sha256(repr(source).encode()).hexdigest()


class _Folder:
    """The files of one sweep, and its claims of cells."""

    def __init__(self, path: Path, source: RequestSource) -> None:
        """Open or create the folder.

        Raises:
            ConfigError: if the folder has cells of another trace.
            SweepError: if the folder cannot be written.
        """
        self._cells = path / _CELLS
        self._claims_path = path / _CLAIMS
        self._claims: BinaryIO | None = None  # opened by the first claim: a finished sweep's folder may be read-only
        self._trace = identity(source)
        head = path / _HEAD
        try:
            self._cells.mkdir(parents=True, exist_ok=True)
            there = _document(head)
            if there is None:
                about = {"schema": SCHEMA, "version": VERSION, "source": source.name, "trace": self._trace}
                write_whole(head, _text(about))
        except OSError as error:
            raise SweepError(f"cannot write to {path} ({error.strerror}): name another folder (--out)") from error
        if there is not None and (there.get("schema"), there.get("trace")) != (SCHEMA, self._trace):
            raise ConfigError(
                f"{path} holds cells of another trace, {there.get('source')}, or of this trace with other reading "
                "options: name another folder (--out)"
            )

    def read(self, cell: Cell) -> Mapping[str, object] | None:
        """Return the document of ``cell`` on the same machine, or ``None`` if it is not finished."""
        document = _document(self._cells / f"{cell.name}.json")
        return document if is_document_of(cell, document) else None

    def claim(self, cell: Cell) -> bool:
        """Claim ``cell`` for this process until ``release`` or ``close``; return whether the cell was free."""
        try:
            self._lock(cell, taken=True)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        return True

    def release(self, cell: Cell) -> None:
        """Drop the claim of ``cell``."""
        self._lock(cell, taken=False)

    def _lock(self, cell: Cell, *, taken: bool) -> None:
        """Lock or unlock the byte of ``cell``. The kernel drops locks when the process exits."""
        import fcntl  # noqa: PLC0415  # only POSIX has it; the rest of the simulator runs anywhere

        if self._claims is None:
            self._claims = self._claims_path.open("ab")
        place = int.from_bytes(sha256(cell.name.encode()).digest()[:_PLACE_BYTES], "big")
        fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB if taken else fcntl.LOCK_UN, 1, place)

    def write(self, cell: Cell, document: Mapping[str, object]) -> None:
        """Write the document of the claimed ``cell`` and drop the claim."""
        write_whole(self._cells / f"{cell.name}.json", _text(document))
        self.release(cell)

    def close(self) -> None:
        """Drop all claims."""
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
