"""Any source as a token-exact trace: times, pieces, marks, tenants and hints, and nothing that was text."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from hybridkv.request import NO_HINTS
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.tokens import Pieces
from hybridkv.simulator.trace import RequestSource
from hybridkv.simulator.written import written_whole

_NO_HINTS = asdict(NO_HINTS)


def convert(source: RequestSource, path: str | Path) -> int:
    """Write ``source`` to ``path``, gzip where it ends in .gz, and say how many requests.

    The file is there whole or not at all. Segments are numbered as they come: equal tokens stay equal, and no id of the
    source is told. O(pieces); some 100 bytes are kept for each segment. Raises TraceError as iterating does, OSError
    where it cannot be written.
    """
    path, requests = Path(path), 0
    with written_whole(path) as raw, _zipped(path, raw) as file:
        for line in _lines(source):
            file.write(line)
            requests += 1
    return requests


def _zipped(path: Path, raw: BinaryIO) -> AbstractContextManager[gzip.GzipFile | BinaryIO]:
    """What writes to ``raw`` as the name of ``path`` says; ``raw`` itself stays open."""
    if path.suffix != ".gz":
        return nullcontext(raw)
    return gzip.GzipFile("", "wb", fileobj=raw, mtime=0)


def _lines(source: RequestSource) -> Iterator[bytes]:
    numbers: defaultdict[tuple[int, int], int] = defaultdict(itertools.count().__next__)
    for request in source:
        yield json.dumps(_record(request, numbers), separators=(",", ":")).encode() + b"\n"


def _record(request: TraceRequest, numbers: defaultdict[tuple[int, int], int]) -> dict[str, object]:
    def numbered(run: Pieces) -> list[list[int]] | int:
        if not request.tokens_known:
            return run.num_tokens
        return [[numbers[run.kind, segment], offset, length] for segment, offset, length in run.pieces]

    milliseconds = round(request.timestamp_s * 1000, 3)
    made: dict[str, object] = {
        "timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
        "prompt": numbered(request.prompt),
        "output": numbered(request.output),
    }
    if request.marks:
        made["marks"] = list(request.marks)
    if request.tenant is not None:
        made["tenant"] = request.tenant
    hints = {name: value for name, value in asdict(request.hints).items() if value != _NO_HINTS[name]}
    if hints:
        made["hints"] = hints
    return made
