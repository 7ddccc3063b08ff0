"""Requests of a trace file, streamed: JSON lines, one JSON array, or CSV rows, plain or gzip, by their content.

    TraceFile(path).summary()     first pass: counts and the longest request (it sets the maximum length)
    for request in TraceFile(path)    second pass: one TraceRequest at a time

The format is that of the first good record, or the one that is named; formats/ holds them. Requests must stand in the
order of their timestamps, equal ones allowed: a file that is streamed cannot be sorted on the way. Formats without
times arrive as a Poisson process, equal ones for equal files; of conversations only turns to come are kept.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from hybridkv.errors import ConfigError, TraceError
from hybridkv.regular_files import open_regular
from hybridkv.simulator.formats import FORMATS, Format, MalformedLineError, Record, TraceRequest, format_named, formats
from hybridkv.simulator.formats.events import Recording
from hybridkv.simulator.formats.texts import Encoder, encoder_named
from hybridkv.units import shown

_GZIP_MAGIC: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"
_BETWEEN: Final = " \t\r\n,["
_CHUNK_BYTES: Final = 1 << 20

MOST_LINE_BYTES: Final = 1 << 24
"""Of a line, or of an item of an array: a million tokens, each a piece of its own. Mooncake's ids take 40 KB."""

Numbered = Iterator[tuple[int, Record | MalformedLineError]]
"""(number of the line, its record or what is wrong)."""


def records(path: Path, rows: Callable[[Record], bool]) -> Numbered:
    """Yield the records of the file at ``path``; blank lines are skipped.

    rows: whether the columns of a first line belong to a CSV file. Raises TraceError if the file cannot be read, for an
    array that is cut off, and for a line that is too long: its end is unknown, so it cannot be skipped.
    """
    number = 0
    try:
        with _open(path) as file:
            if file.peek(_CHUNK_BYTES).removeprefix(_BOM).lstrip()[:1] == b"[":
                with io.TextIOWrapper(file, "utf-8-sig") as text:
                    yield from _array(path, text)
                return
            columns: list[str] | None = None
            for number, line in _lines(path, file):  # told where it ended
                if number == 1:
                    line = line.removeprefix(_BOM)  # noqa: PLW2901  # a mark, no content
                    if rows(dict.fromkeys(names := _columns(line))):
                        columns = names
                        continue
                record: Record | MalformedLineError
                try:
                    record = _object(line) if columns is None else _row(line, columns)
                except MalformedLineError as error:
                    record = error
                yield number, record
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}, after line {number}: the gzip data is damaged: {error}") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from None


def _lines(path: Path, file: gzip.GzipFile | io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines that are not blank."""
    number = 0
    while line := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(line) > MOST_LINE_BYTES:
            raise TraceError(f"{path}, line {number}: longer than {MOST_LINE_BYTES} bytes: a line is one request")
        if line.strip():
            yield number, line


@contextmanager
def _open(path: Path) -> Iterator[gzip.GzipFile | io.BufferedReader]:
    """Open the plain bytes of the file at ``path``, whatever its name says."""
    with open_regular(path) as file:
        zipped = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        if zipped:
            with gzip.GzipFile(fileobj=file) as unzipped:
                yield unzipped
        else:
            yield file


def _object(line: bytes) -> Record:
    """Return the JSON object of one line."""
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


def _columns(line: bytes) -> list[str]:
    """Return a first line as column names; the result is meaningless if the file is not CSV."""
    try:
        return [name.strip() for name in _cells(line)]
    except MalformedLineError:
        return []


def _row(line: bytes, columns: list[str]) -> Record:
    """Return the cells of a line by column name."""
    cells = _cells(line)
    if len(cells) != len(columns):
        raise MalformedLineError(f"{len(cells)} columns, but the first line names {len(columns)}")
    return dict(zip(columns, map(str.strip, cells), strict=True))


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode()]))
    except UnicodeDecodeError:
        raise MalformedLineError("not UTF-8 text") from None
    except csv.Error as error:
        raise MalformedLineError(f"not CSV: {error}") from None


def _array(path: Path, file: io.TextIOWrapper) -> Numbered:
    """Yield the items of one array, each with its first line. Items after a broken one cannot be told apart."""
    decoder, text, at, number = json.JSONDecoder(), "", 0, 1
    while True:
        while at < len(text) and text[at] in _BETWEEN:
            number += text[at] == "\n"
            at += 1
        if at < len(text) and text[at] == "]":
            return
        wrong = "the array ends too soon"
        if at < len(text):
            try:
                item, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                wrong = f"not JSON: {error.msg}"
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{path}, line {number}: not JSON that can be read: {error}") from None
            else:
                right = isinstance(item, dict)
                kind = type(item).__name__
                yield number, item if right else MalformedLineError(f"an item must be a JSON object, not {kind}")
                number += text.count("\n", at, end)
                at = end
                continue
        try:
            more = file.read(max(_CHUNK_BYTES, len(text) - at)) if len(text) - at < MOST_LINE_BYTES else ""
        except UnicodeDecodeError:
            raise TraceError(f"{path}, line {number}: not UTF-8 text") from None
        if not more:
            raise TraceError(f"{path}, line {number}: {wrong}")
        text, at = text[at:] + more, 0


ARRIVALS_PER_S: Final = 1.0
"""Of formats without times."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Counts from one pass over a source.

    Attributes:
        longest_tokens: prompt and output tokens of the longest request.
        longest_at: the line or index of that request.
        bad_lines: lines that were skipped.
        first_bad: the error of the first of them.
        tokens_known: False if only lengths are known, so equal tokens cannot be found.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    longest_tokens: int
    longest_at: str
    bad_lines: int = 0
    first_bad: str | None = None
    tokens_known: bool = True


class RequestSource(Protocol):
    """A source of requests: a trace file or a generated workload. Iterating again starts over."""

    @property
    def name(self) -> str:
        """The name in reports and messages."""

    def summary(self) -> TraceSummary:
        """Return counts of the whole source. O(requests)."""

    def __iter__(self) -> Iterator[TraceRequest]:
        """Iterate over requests in the order of their timestamps."""


def summarise(items: Iterable[TraceRequest | TraceError], name: str) -> TraceSummary:
    """Return counts of ``items``; an error among them is a skipped line. Raises TraceError if no request is left."""
    requests = prompt_tokens = output_tokens = longest_tokens = bad_lines = 0
    longest_at, first_bad, known = "", None, False
    for item in items:
        if isinstance(item, TraceError):
            bad_lines += 1
            first_bad = str(item) if first_bad is None else first_bad
            continue
        requests += 1
        prompt_tokens += item.num_prompt_tokens
        output_tokens += item.num_output_tokens
        known = known or item.tokens_known
        if item.num_tokens > longest_tokens:
            longest_tokens, longest_at = item.num_tokens, item.origin
    if not requests:
        because = f" but {bad_lines} bad lines; the first: {first_bad}" if bad_lines else ""
        raise TraceError(f"{name} holds no requests{because}")
    longest = longest_tokens, longest_at
    return TraceSummary(requests, prompt_tokens, output_tokens, *longest, bad_lines, first_bad, known)


class TraceFile:
    """The requests of a trace file.

    Args:
        path: the file.
        format_name: one of FORMATS; None: detected from the content.
        trace_block_size: tokens of a Mooncake hash block.
        tokenizer: for formats of text: a name as encoder_named takes it, or an encoder.
        arrivals_per_s: requests per second, for formats without timestamps.
        limit: most requests to read.
        skip_bad_lines: skip and count malformed lines; otherwise the first raises TraceError.
        salts: whether requests with different salts share nothing, for formats that have salts.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        format_name: str | None = None,
        trace_block_size: int = 512,
        tokenizer: str | Encoder | None = None,
        arrivals_per_s: float = ARRIVALS_PER_S,
        skip_bad_lines: bool = False,
        limit: int | None = None,
        salts: bool = True,
    ) -> None:
        if trace_block_size < 1:
            raise ConfigError(f"the trace's block size must be at least 1 token, got {trace_block_size}")
        if limit is not None and limit < 1:
            raise ConfigError(f"the limit must be at least 1 request, got {limit}")
        if not 0 < arrivals_per_s <= 1e6:
            raise ConfigError(f"arrivals must be above 0 and at most 1e6 a second, got {arrivals_per_s}")
        self.path = Path(path)
        self.skip_bad_lines = skip_bad_lines
        self.limit = limit
        self._options = {
            "format_name": format_name,
            "trace_block_size": trace_block_size,
            "tokenizer": tokenizer,
            "arrivals_per_s": arrivals_per_s,
            "skip_bad_lines": skip_bad_lines,
            "limit": limit,
            **({} if salts else {"salts": salts}),
        }
        self._arrivals_per_s = arrivals_per_s
        encode = encoder_named(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self._formats = formats(trace_block_size, encode, salts=salts)
        self._named = None if format_name is None else format_named(format_name, self._formats)

    @property
    def name(self) -> str:
        """The file's name without its folder, because reports must not depend on the trace's location."""
        return self.path.name

    @property
    def format_name(self) -> str:
        """The format of the first good record. Raises TraceError if there is no good record."""
        for item in self._items():
            if isinstance(item, tuple):
                return item[0].name
            if not self.skip_bad_lines:
                raise item
        raise TraceError(f"{self.path} holds no requests")

    def without_salts(self) -> TraceFile:
        """Return the same source, as if all requests had one salt."""
        return TraceFile(self.path, **{**self._options, "salts": False})  # type: ignore[arg-type]  # as __reduce__

    def __reduce__(self) -> tuple[object, ...]:
        """Return a recipe for another process, which opens the file for itself."""
        return partial(TraceFile, **self._options), (self.path,)  # type: ignore[arg-type]  # each its own type

    def digest(self) -> str:
        """Return a digest of the content and of how it is read: equal digests give equal requests. O(bytes)."""
        found = sha256(repr(sorted(self._options.items())).encode())
        try:
            with open_regular(self.path) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    found.update(chunk)
        except OSError as error:
            raise TraceError(f"cannot read {self.path}: {error.strerror or error}") from None
        return found.hexdigest()

    def summary(self) -> TraceSummary:
        """Return counts from one pass. Raises TraceError as iterating does, and if no request is left."""
        return summarise(self._requests(), str(self.path))

    def __iter__(self) -> Iterator[TraceRequest]:
        """Iterate over the requests in order. Raises TraceError at a malformed line unless these are skipped."""
        for item in self._requests():
            if isinstance(item, TraceRequest):
                yield item

    def _requests(self) -> Iterator[TraceRequest | TraceError]:
        """Yield requests by time, and the errors of skipped lines."""
        good = 0
        for item in self._in_order():
            if isinstance(item, TraceError) and not self.skip_bad_lines:
                raise item
            yield item
            good += isinstance(item, TraceRequest)
            if good == self.limit:
                return

    def _in_order(self) -> Iterator[TraceRequest | TraceError]:
        """Yield requests of formats without times, and later turns of conversations, each at its time."""
        later = _Later()
        gaps, begins_s = np.random.default_rng(0), 0.0
        previous_s = 0.0
        for item in self._items():
            if isinstance(item, TraceError):
                yield item
                continue
            line_format, number, requests = item
            if not line_format.timed:
                yield from later.until(begins_s)
                for request in requests:
                    later.put(replace(request, timestamp_s=round(begins_s + request.timestamp_s, 3)))
                begins_s += gaps.exponential(1 / self._arrivals_per_s) if requests else 0.0
                continue
            for request in requests:
                if request.timestamp_s < previous_s:
                    yield self._wrong(number, _unordered(request.timestamp_s, previous_s))
                elif request.delayed:
                    later.put(request)
                else:
                    previous_s = request.timestamp_s
                    yield from later.until(previous_s)
                    yield request
        yield from later.until(math.inf)

    def _items(self) -> Iterator[tuple[Format, int, tuple[TraceRequest, ...]] | TraceError]:
        """Yield the requests of each record, or its error."""
        line_format, good = self._named, 0
        read = None if line_format is None else line_format.reader()
        number = 0
        for number, record in records(self.path, self._is_row):
            try:
                if isinstance(record, MalformedLineError):
                    raise record
                if line_format is None or read is None:
                    line_format = self._detect(record)
                    read = line_format.reader()
                yield line_format, number, tuple(read(record, f"line {number}", number))
                good += 1
            except MalformedLineError as error:
                yield self._wrong(number, str(error))
                if good == 0 and self._named is None:
                    line_format = None
        if line_format is not None and isinstance(read, Recording):
            yield line_format, number, tuple(read.rest())

    def _wrong(self, number: int, what: str) -> TraceError:
        return TraceError(f"{self.path}, line {number}: {what}")

    def _is_row(self, columns: Record) -> bool:
        """Return whether a first line names the columns of a CSV file."""
        if self._named is not None and self._named.in_rows and not self._named.owns(columns):
            raise TraceError(f"{self.path}, line 1: it must name the columns {self._named.fields}")
        return any(one.in_rows and one.owns(columns) for one in self._formats)

    def _detect(self, record: Record) -> Format:
        """Return the format whose own fields ``record`` has."""
        for line_format in self._formats:
            if line_format.owns(record):
                return line_format
        raise MalformedLineError(
            f"no format is recognised by the fields {shown(sorted(record))}: name it (--format), one of "
            f"{', '.join(FORMATS)}"
        )


class _Later:
    """Later requests by time; equal times in the order of ``put``."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TraceRequest]] = []
        self._made = 0

    def put(self, request: TraceRequest) -> None:
        """Add a request for later."""
        self._made += 1
        heapq.heappush(self._heap, (request.timestamp_s, self._made, request))

    def until(self, now_s: float) -> Iterator[TraceRequest]:
        """Yield and remove the requests whose time has come."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heapq.heappop(self._heap)[2]


def _unordered(timestamp_s: float, previous_s: float) -> str:
    return (
        f"timestamp {timestamp_s * 1000:.0f} ms is before the previous request's {previous_s * 1000:.0f} ms: "
        "sort the lines by timestamp"
    )
