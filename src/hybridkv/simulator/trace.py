"""Read the requests of a trace file as a stream: JSON lines, one JSON array, or CSV rows, all plain or as gzip.

    TraceFile(path).summary()         first pass: counts, and the longest request, which sets the maximum length
    for request in TraceFile(path)    second pass: one TraceRequest at a time

The format is the one that you name, or that of the first good record (formats/). Requests must be in the order of their
timestamps, because a stream cannot be sorted; equal timestamps are allowed. Requests of formats without timestamps
arrive as a Poisson process; the same file gives the same arrivals. Only later turns of conversations stay in memory.
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
"""Limit of a line, or of an item of an array. A request of a million pieces fits; Mooncake's longest line has 40 KB."""

Numbered = Iterator[tuple[int, Record | MalformedLineError]]
"""Pairs of a line's number and its record, or the error of a malformed line."""


def records(path: Path, rows: Callable[[Record], bool]) -> Numbered:
    """Yield the records of a file, without blank lines.

    Args:
        path: the file.
        rows: whether the columns of a first line belong to a CSV file.

    Raises:
        TraceError: if the file cannot be read, for an array that is cut off, and for a line over MOST_LINE_BYTES. Its
            end is unknown, so it cannot be skipped.
    """
    number = 0
    try:
        with _open(path) as file:
            if file.peek(_CHUNK_BYTES).removeprefix(_BOM).lstrip()[:1] == b"[":
                with io.TextIOWrapper(file, "utf-8-sig") as text:
                    yield from _array(path, text)
                return
            columns: list[str] | None = None
            for number, line in _lines(path, file):  # errors below name the last number
                if number == 1:
                    line = line.removeprefix(_BOM)  # noqa: PLW2901  # the byte order mark is no content
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
        raise TraceError(
            f"{path}, after line {number}: the gzip data is damaged: {error}: compress the trace again"
        ) from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from None


def _lines(path: Path, file: gzip.GzipFile | io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines that are not blank."""
    number = 0
    while line := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(line) > MOST_LINE_BYTES:
            raise TraceError(f"{path}, line {number}: longer than {MOST_LINE_BYTES} bytes: write one request per line")
        if line.strip():
            yield number, line


@contextmanager
def _open(path: Path) -> Iterator[gzip.GzipFile | io.BufferedReader]:
    """Open a file for reading, decompressed if its content is gzip data."""
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
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond the limits of Python
        raise MalformedLineError(f"not JSON that can be read: {error}") from None
    if not isinstance(record, dict):
        raise MalformedLineError(f"a line must be a JSON object, not {type(record).__name__}")
    return record


def _columns(line: bytes) -> list[str]:
    """Return the cells of a first line as column names; an empty list if it is not CSV."""
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
    """Yield the items of one array, each with the number of its first line.

    A broken item raises TraceError, because the beginning of the next item is unknown.
    """
    decoder, text, at, number = json.JSONDecoder(), "", 0, 1
    while True:
        while at < len(text) and text[at] in _BETWEEN:
            number += text[at] == "\n"
            at += 1
        if at < len(text) and text[at] == "]":
            return
        wrong = "the array ends too soon: write the trace again"
        if at < len(text):
            try:
                item, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                wrong = f"not JSON: {error.msg}: correct the item, because an array cannot skip it"
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
"""Requests per second of formats without timestamps, unless you set it. Chosen by hand."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Counts from one pass over a source.

    Attributes:
        requests: number of requests.
        prompt_tokens: prompt tokens of all requests.
        output_tokens: output tokens of all requests.
        longest_tokens: prompt and output tokens of the longest request.
        longest_at: line or number of that request, for messages.
        bad_lines: skipped lines.
        first_bad: error of the first skipped line, if there is one.
        tokens_known: whether equal tokens are known; False if the trace holds only lengths.
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
    """A source of requests: a trace file or a generated workload. Each iteration starts at the first request."""

    @property
    def name(self) -> str:
        """The name in reports and messages."""

    def summary(self) -> TraceSummary:
        """Return counts of the whole source. O(requests)."""

    def __iter__(self) -> Iterator[TraceRequest]:
        """Iterate over requests in the order of their timestamps."""


def summarise(items: Iterable[TraceRequest | TraceError], name: str) -> TraceSummary:
    """Return counts of requests. O(requests).

    Args:
        items: requests, and the errors of skipped lines.
        name: name of the source, for messages.

    Raises:
        TraceError: if there is no request.
    """
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
        because = f": {bad_lines} bad lines were skipped, the first is {first_bad}" if bad_lines else ""
        raise TraceError(f"{name} holds no requests, at least 1 is needed{because}")
    longest = longest_tokens, longest_at
    return TraceSummary(requests, prompt_tokens, output_tokens, *longest, bad_lines, first_bad, known)


class TraceFile:
    """The requests of a trace file.

    Args:
        path: the file.
        format_name: one of FORMATS; ``None``: detected from the content.
        trace_block_size: tokens that one hash id of a Mooncake trace stands for.
        tokenizer: for formats of text: a name as ``encoder_named`` takes it, or an encoder.
        arrivals_per_s: requests per second, for formats without timestamps.
        skip_bad_lines: skip and count malformed lines; otherwise the first one raises TraceError.
        limit: number of requests after which reading stops; ``None``: read all.
        salts: whether requests with different salts share nothing, for formats that have salts.

    Attributes:
        path: the file.
        skip_bad_lines: as given.
        limit: as given.

    Raises:
        ConfigError: for values out of range, an unknown format, and as ``encoder_named``.
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
            raise ConfigError(
                f"the trace's block size (--trace-block-size) must be at least 1 token, got {trace_block_size}"
            )
        if limit is not None and limit < 1:
            raise ConfigError(f"the limit (--limit) must be at least 1 request, got {limit}")
        if not 0 < arrivals_per_s <= 1e6:
            raise ConfigError(
                f"arrivals (--arrivals) must be above 0 and at most 1e6 requests per second, got {arrivals_per_s}"
            )
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
        """The file's name without its folder, so that reports do not depend on the folder."""
        return self.path.name

    @property
    def format_name(self) -> str:
        """Name of the first good record's format. Raises TraceError if there is no good record."""
        for item in self._items():
            if isinstance(item, tuple):
                return item[0].name
            if not self.skip_bad_lines:
                raise _with_remedy(item)
        raise TraceError(f"{self.path} holds no requests, at least 1 is needed")

    def without_salts(self) -> TraceFile:
        """Return the same source, but with equal salts for all requests."""
        return TraceFile(self.path, **{**self._options, "salts": False})  # type: ignore[arg-type]  # as __reduce__

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the arguments, so that another process opens the file itself."""
        return partial(TraceFile, **self._options), (self.path,)  # type: ignore[arg-type]  # each its own type

    def digest(self) -> str:
        """Return a digest of the content and of the options: equal digests give equal requests. O(bytes).

        Raises:
            TraceError: if the file cannot be read.
        """
        found = sha256(repr(sorted(self._options.items())).encode())
        try:
            with open_regular(self.path) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    found.update(chunk)
        except OSError as error:
            raise TraceError(f"cannot read {self.path}: {error.strerror or error}") from None
        return found.hexdigest()

    def summary(self) -> TraceSummary:
        """Return counts from one pass over the file. O(bytes).

        Raises:
            TraceError: as for iterating, and if there is no request.
        """
        return summarise(self._requests(), str(self.path))

    def __iter__(self) -> Iterator[TraceRequest]:
        """Iterate over the requests in the order of their timestamps.

        Raises:
            TraceError: for a file that cannot be read, and for a malformed line unless bad lines are skipped.
        """
        for item in self._requests():
            if isinstance(item, TraceRequest):
                yield item

    def _requests(self) -> Iterator[TraceRequest | TraceError]:
        """Yield requests by time, and the errors of skipped lines."""
        good = 0
        for item in self._in_order():
            if isinstance(item, TraceError) and not self.skip_bad_lines:
                raise _with_remedy(item)
            yield item
            good += isinstance(item, TraceRequest)
            if good == self.limit:
                return

    def _in_order(self) -> Iterator[TraceRequest | TraceError]:
        """Yield the requests of all records by time, and the errors of malformed lines.

        Requests of formats without timestamps get their times here. Later turns of conversations wait for theirs.
        """
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
                    ms, previous_ms = request.timestamp_s * 1000, previous_s * 1000
                    said = f"timestamp {ms:.0f} ms is before the previous request's {previous_ms:.0f} ms"
                    yield self._wrong(number, f"{said}: sort the lines by timestamp")
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

    def _wrong(self, number: int, message: str) -> TraceError:
        """Return the error of a malformed line."""
        return TraceError(f"{self.path}, line {number}: {message}")

    def _is_row(self, columns: Record) -> bool:
        """Return whether a first line names the columns of a CSV file."""
        if self._named is not None and self._named.in_rows and not self._named.owns(columns):
            raise TraceError(
                f"{self.path}, line 1: it must name the columns {self._named.fields}: add them, or change --format"
            )
        return any(one.in_rows and one.owns(columns) for one in self._formats)

    def _detect(self, record: Record) -> Format:
        """Return the first format that has the fields of ``record``."""
        for line_format in self._formats:
            if line_format.owns(record):
                return line_format
        raise MalformedLineError(
            f"no format is recognised by the fields {shown(sorted(record))}: name it (--format), one of "
            f"{', '.join(FORMATS)}"
        )


class _Later:
    """A queue of later requests by time; requests with equal times keep the order of ``put``."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TraceRequest]] = []
        self._made = 0

    def put(self, request: TraceRequest) -> None:
        """Add a request for later."""
        self._made += 1
        heapq.heappush(self._heap, (request.timestamp_s, self._made, request))

    def until(self, now_s: float) -> Iterator[TraceRequest]:
        """Remove and yield the requests up to the time ``now_s``."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heapq.heappop(self._heap)[2]


def _with_remedy(error: TraceError) -> TraceError:
    """Return the error of a malformed line with the option that skips it."""
    return TraceError(f"{error}; --skip-bad-lines skips it")
