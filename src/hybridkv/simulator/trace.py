"""Requests of a trace file: plain or gzip JSON lines, streamed.

    TraceFile(path).summary()     first pass: counts and the longest request (it sets the maximum length)
    for request in TraceFile(path)    second pass: one TraceRequest at a time, nothing kept

The format is that of the first good line; formats.py holds the two that are read. Empty lines are passed
over. Requests must stand in the order of their timestamps, equal ones allowed: a file that is streamed
cannot be sorted on the way.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from hybridkv.errors import ConfigError, TraceError
from hybridkv.simulator.formats import MalformedLineError, MooncakeFormat, PieceFormat, TraceRequest

_GZIP_MAGIC: Final = b"\x1f\x8b"

MOST_LINE_BYTES: Final = 1 << 24
"""Of a line: a million tokens, each a piece of its own. Mooncake's ids take 40 KB for as many."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What one pass over a source says.

    longest_tokens: prompt and output of the longest request. longest_at: where it stands.
    bad_lines: lines left out. first_bad: what was wrong with the first of them.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    longest_tokens: int
    longest_at: str
    bad_lines: int = 0
    first_bad: str | None = None


class RequestSource(Protocol):
    """Where requests come from: a trace file or a generated workload. Iterating again starts over."""

    @property
    def name(self) -> str:
        """For reports and messages."""
        ...

    def summary(self) -> TraceSummary:
        """Counts over the whole source. O(requests)."""
        ...

    def __iter__(self) -> Iterator[TraceRequest]:
        """Requests in the order of their timestamps."""
        ...


def summarise(items: Iterable[TraceRequest | TraceError], name: str) -> TraceSummary:
    """Counts over ``items``; an error among them is a line left out. TraceError when no request is left."""
    requests = prompt_tokens = output_tokens = longest_tokens = bad_lines = 0
    longest_at, first_bad = "", None
    for item in items:
        if isinstance(item, TraceError):
            bad_lines += 1
            first_bad = str(item) if first_bad is None else first_bad
            continue
        requests += 1
        prompt_tokens += item.num_prompt_tokens
        output_tokens += item.num_output_tokens
        if item.num_tokens > longest_tokens:
            longest_tokens, longest_at = item.num_tokens, item.origin
    if not requests:
        because = f" but {bad_lines} bad lines; the first: {first_bad}" if bad_lines else ""
        raise TraceError(f"{name} holds no requests{because}")
    return TraceSummary(requests, prompt_tokens, output_tokens, longest_tokens, longest_at, bad_lines, first_bad)


class TraceFile:
    """The requests of ``path``.

    trace_block_size: tokens of a Mooncake hash block. limit: read this many requests at most.
    skip_bad_lines: leave malformed lines out and count them, where otherwise the first raises TraceError.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        trace_block_size: int = 512,
        skip_bad_lines: bool = False,
        limit: int | None = None,
    ) -> None:
        if trace_block_size < 1:
            raise ConfigError(f"the trace's block size must be at least 1 token, got {trace_block_size}")
        if limit is not None and limit < 1:
            raise ConfigError(f"the limit must be at least 1 request, got {limit}")
        self.path = Path(path)
        self.skip_bad_lines = skip_bad_lines
        self.limit = limit
        self._formats = (MooncakeFormat(trace_block_size), PieceFormat())

    @property
    def name(self) -> str:
        """The file's name without its folder: reports must not depend on where a trace lies."""
        return self.path.name

    def summary(self) -> TraceSummary:
        """One pass over the file. Raises TraceError as iterating does, and when no request is left."""
        return summarise(self._items(), str(self.path))

    def __iter__(self) -> Iterator[TraceRequest]:
        """Requests, first line first. Raises TraceError at a malformed line unless these are skipped."""
        for item in self._items():
            if isinstance(item, TraceRequest):
                yield item

    def _items(self) -> Iterator[TraceRequest | TraceError]:
        """Requests, and the errors of the lines that are skipped."""
        good = 0
        previous_s = 0.0
        line_format: MooncakeFormat | PieceFormat | None = None
        for number, line in self._lines():
            try:
                record = _record(line)
                line_format = self._detect(record) if line_format is None else line_format
                request = line_format.parse(record, f"line {number}", number)
                _check_order(request.timestamp_s, previous_s)
            except MalformedLineError as error:
                wrong = TraceError(f"{self.path}, line {number}: {error}")
                if not self.skip_bad_lines:
                    raise wrong from None
                yield wrong
                if good == 0:
                    line_format = None
                continue
            previous_s = request.timestamp_s
            good += 1
            yield request
            if good == self.limit:
                return

    def _detect(self, record: dict[str, object]) -> MooncakeFormat | PieceFormat:
        """The format whose own fields ``record`` has."""
        for line_format in self._formats:
            if line_format.owns(record):
                return line_format
        known = " or ".join(line_format.fields for line_format in self._formats)
        raise MalformedLineError(f"neither format is recognised: a line has the fields {known}")

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Numbered lines that are not blank, of the plain or gzip file.

        TraceError when it cannot be read, and for a line that is too long: it ends nobody knows where, so that it is
        not skipped.
        """
        number = 0
        try:
            with _open(self.path) as file:
                while line := file.readline(MOST_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MOST_LINE_BYTES:
                        raise TraceError(
                            f"{self.path}, line {number}: longer than {MOST_LINE_BYTES} bytes: a line is one request"
                        )
                    if line.strip():
                        yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{self.path}, after line {number}: the gzip data is damaged: {error}") from None
        except OSError as error:
            raise TraceError(f"cannot read {self.path}: {error.strerror or error}") from None


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """The file's plain bytes, whatever its name says."""
    if path.exists() and not path.is_file():
        raise TraceError(f"{path} is not a regular file; a trace is read twice, so name a file")
    with path.open("rb") as file:
        zipped = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return gzip.open(path, "rb") if zipped else path.open("rb")


def _record(line: bytes) -> dict[str, object]:
    """The JSON object of one line."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise MalformedLineError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise MalformedLineError(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets nested as deep
        raise MalformedLineError(f"not JSON that can be read: {error}") from None
    if not isinstance(record, dict):
        raise MalformedLineError(f"a line must be a JSON object, not {type(record).__name__}")
    return record


def _check_order(timestamp_s: float, previous_s: float) -> None:
    if timestamp_s < previous_s:
        raise MalformedLineError(
            f"timestamp {timestamp_s * 1000:.0f} ms is before the previous request's "
            f"{previous_s * 1000:.0f} ms: sort the lines by timestamp"
        )
