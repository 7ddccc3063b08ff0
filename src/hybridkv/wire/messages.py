"""Steps and the replies to them as bytes.

    message      one CBOR map: "kind", "schema_version", and the fields of the dataclass by name
    kinds        "step"; replies are "result", "failure" and "unreadable"
    arrays       typed arrays (hybridkv.wire.arrays); lists of lists and cells are maps of such columns
    copies       int32[C, 5]: stage, group, source, destination, kind; words as places in STAGES and COPY_KINDS

A message has one encoding: RFC 8949, 4.2.1, core deterministic. Any other bytes are refused where they stand, so that
whatever is decoded encodes to what was read: nothing behind a message, no field twice. Only what a record has is
decoded, in one pass: bytes of any other kind (tags, integers as names, lists in lists) are never made into values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import cbor2

from hybridkv.errors import SchemaError, WireError
from hybridkv.step import SCHEMA_VERSION, Step, StepResult
from hybridkv.wire.codecs import Integer, Record
from hybridkv.wire.reader import MAP, TEXT, UNSIGNED, Reader, not_canonical
from hybridkv.wire.records import FAILURE, RESULT, STEP, UNREADABLE, Reply, StepFailure, Unreadable

_REPLIES: Final[dict[str, Record[Any]]] = {"result": RESULT, "failure": FAILURE, "unreadable": UNREADABLE}
_ID: Final = Integer()
_KINDS: Final[dict[type, str]] = {StepResult: "result", StepFailure: "failure", Unreadable: "unreadable"}


def encode_step(step: Step) -> bytes:
    """The message of ``step``; equal Steps give equal bytes. O(bytes).

    Raises WireError for a field of another dtype, shape or type than Step says, SchemaError for a Step of another
    schema than this hybridkv has.
    """
    return _encode("step", STEP, step)


def decode_step(data: bytes) -> Step:
    """The Step of a message. O(bytes).

    Raises SchemaError for another schema version, WireError for anything else that ``encode_step`` never writes: bytes
    missing or left over, fields missing, unknown or of another type, and arrays that do not fit each other.
    """
    step: Step = _decode(data, {"step": STEP})
    return step


def encode_reply(reply: Reply) -> bytes:
    """The message of a reply. Raises as ``encode_step``, and WireError for anything that is no reply."""
    kind = _KINDS.get(type(reply))
    if kind is None:
        raise WireError(
            f"a reply must be one of {', '.join(made.__name__ for made in _KINDS)}, got {type(reply).__name__}"
        )
    return _encode(kind, _REPLIES[kind], reply)


def decode_reply(data: bytes) -> Reply:
    """The reply of a message. Raises as ``decode_step``."""
    reply: Reply = _decode(data, _REPLIES)
    return reply


def _encode(kind: str, record: Record[Any], value: Step | Reply) -> bytes:
    if value.schema_version != SCHEMA_VERSION:
        raise SchemaError(
            f"a {kind} of schema version {value.schema_version} cannot be written: this hybridkv writes version "
            f"{SCHEMA_VERSION}"
        )
    try:
        return cbor2.dumps(record.pack(value), canonical=True)
    except WireError as error:
        raise WireError(f"{kind}: {error}") from None


def _decode(data: bytes, records: Mapping[str, Record[Any]]) -> Any:  # noqa: ANN401  # an instance of one of the records
    try:
        return _read(bytes(data), records)  # bytes stay the same object
    except WireError:
        _refuse_other_schemas(data)
        raise


def _read(data: bytes, records: Mapping[str, Record[Any]]) -> Any:  # noqa: ANN401  # same
    kind, reader = _kind(data, tuple(records)), Reader(data)
    try:
        value = records[kind].read(reader)
    except WireError as error:
        raise WireError(f"{kind}: {error}") from None
    if reader.at != len(data):
        raise WireError(f"{kind}: the message is {len(data) - reader.at} bytes too many (RFC 8949, 4.2.1)")
    return value


def _kind(data: bytes, known: tuple[str, ...]) -> str:
    """The kind of a message. Of the fields of this schema, ``id`` alone stands before it."""
    reader = _opened(data)
    name = reader.take_bytes(TEXT)
    if name == b"id":
        try:
            _ID.read(reader)
        except WireError as error:
            raise WireError(f"{' or '.join(known)}: id: {error}") from None
        name = reader.take_bytes(TEXT)
    if name != b"kind":
        raise not_canonical("kind is not where it would stand, first or behind id")
    kind = reader.take_bytes(TEXT)
    text = None if kind is None else kind.decode(errors="replace")
    if text is None or text not in known:
        got = reader.kind() if text is None else repr(text[:40])
        raise WireError(f"a message of kind {' or '.join(map(repr, known))} was expected, got {got}")
    return text


def _refuse_other_schemas(data: bytes) -> None:
    """SchemaError for a message of another version, whatever else it holds: its kinds and fields may be others.

    For what could not be read only; WireError if it has no version. O(items), not more than MOST_SKIPPED.
    """
    try:
        version = _version(data)
    except WireError:
        return  # no map, or no whole one: that was said
    if version < 0:
        raise WireError("not a message: it has no schema_version")
    if version != SCHEMA_VERSION:
        older = "this side" if version > SCHEMA_VERSION else "the other side"
        raise SchemaError(
            f"the message has schema version {version}, this hybridkv reads version {SCHEMA_VERSION}: update hybridkv "
            f"on {older}, so that both ends have the same"
        )


def _version(data: bytes) -> int:
    """The schema_version of a message of any schema, -1 if it has none."""
    reader = _opened(data)
    while reader.at < len(data):
        name = reader.take_bytes(TEXT)
        if name == b"schema_version":
            return reader.take(UNSIGNED)
        reader.skip()
    return -1


def _opened(data: bytes) -> Reader:
    """In front of the first name of the map that ``data`` is."""
    reader = Reader(data)
    if reader.take(MAP) < 0:
        raise WireError(f"not a message: a map was expected, got {reader.kind()}")
    return reader
