"""Records of a file, one behind the other: JSON lines, one JSON array, or CSV rows, plain or gzip, by their content.

    {"a": 1}          [{"a": 1},         a,b
    {"a": 2}           {"a": 2}]         1,2

Each comes with the number of its line, or with what is wrong with it. Nothing of the file is kept.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from hybridkv.errors import TraceError
from hybridkv.regular_files import open_regular
from hybridkv.simulator.formats.fields import MalformedLineError, Record

_GZIP_MAGIC: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"
_BETWEEN: Final = " \t\r\n,["
_CHUNK_BYTES: Final = 1 << 20

T = TypeVar("T")

MOST_LINE_BYTES: Final = 1 << 24
"""Of a line, or of an item of an array: a million tokens, each a piece of its own. Mooncake's ids take 40 KB."""

Numbered = Iterator[tuple[int, Record | MalformedLineError]]
"""(number of the line, its record or what is wrong)."""


def records(path: Path, rows: Callable[[Record], bool]) -> Numbered:
    """Those of the file at ``path``; lines without anything are passed over.

    rows: whether a first line's columns are those of a CSV file. Raises TraceError when the file cannot be read, for an
    array that is broken off, and for a line that is too long: it ends nobody knows where, so that it is not skipped.
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
                if columns is not None:
                    yield number, _caught(_row, line, columns)
                elif number == 1 and rows(dict.fromkeys(names := _columns(line))):
                    columns = names
                else:
                    yield number, _caught(_object, line, _BOM if number == 1 else b"")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}, after line {number}: the gzip data is damaged: {error}") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from None


def _lines(path: Path, file: gzip.GzipFile | io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank."""
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


def _caught(make: Callable[[bytes, T], Record], line: bytes, with_: T) -> Record | MalformedLineError:
    try:
        return make(line, with_)
    except MalformedLineError as error:
        return error


def _object(line: bytes, mark: bytes) -> Record:
    """The JSON object of one line."""
    try:
        record = json.loads(line.removeprefix(mark))
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
    """A first line as names; of what is no CSV whatever it gives."""
    try:
        return [name.strip() for name in _cells(line.removeprefix(_BOM))]
    except MalformedLineError:
        return []


def _row(line: bytes, columns: list[str]) -> Record:
    """Cells by the names of their columns."""
    cells = _cells(line)
    if len(cells) != len(columns):
        raise MalformedLineError(f"{len(cells)} columns, but the first line names {len(columns)}")
    return dict(zip(columns, cells, strict=True))


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode()]))
    except UnicodeDecodeError:
        raise MalformedLineError("not UTF-8 text") from None
    except csv.Error as error:
        raise MalformedLineError(f"not CSV: {error}") from None


def _array(path: Path, file: io.TextIOWrapper) -> Numbered:
    """The items of one array, each with the line where it begins. Behind a broken one nothing can be told apart."""
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
