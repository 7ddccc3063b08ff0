"""Steps and the replies to them as bytes.

message      one CBOR map: "kind", "schema_version", and the fields of the dataclass by name
kinds        "step"; replies are "result", "failure" and "unreadable"
arrays       typed arrays (hybridkv.wire.arrays); lists of lists and cells are maps of such columns
copies       int32[C, 5]: stage, group, source, destination, kind; words as places in STAGES and COPY_KINDS

A message has one encoding: RFC 8949, 4.2.1, core deterministic. Any other bytes are refused, so that whatever is
decoded encodes to what was read: nothing behind a message, no field twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import cbor2

from hybridkv.errors import SchemaError, WireError
from hybridkv.step import SCHEMA_VERSION, Step, StepResult
from hybridkv.wire.codecs import Record
from hybridkv.wire.records import FAILURE, RESULT, STEP, UNREADABLE, Reply, StepFailure, Unreadable

_REPLIES: Final[dict[str, Record[Any]]] = {"result": RESULT, "failure": FAILURE, "unreadable": UNREADABLE}
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
        return cbor2.dumps({"kind": kind, **record.pack(value)}, canonical=True)
    except WireError as error:
        raise WireError(f"{kind}: {error}") from None


def _decode(data: bytes, records: Mapping[str, Record[Any]]) -> Any:  # noqa: ANN401  # an instance of one of the records
    message = _loads(data)
    kind = _kind(message, tuple(records))
    try:
        value = records[kind].unpack({name: item for name, item in message.items() if name != "kind"})
    except WireError as error:
        raise WireError(f"{kind}: {error}") from None
    # only now: items of any other shape may be endless, or contain themselves
    again = cbor2.dumps(message, canonical=True)
    if again != data:
        what = f"{len(data) - len(again)} bytes too many" if data.startswith(again) else "not in canonical form"
        raise WireError(f"{kind}: the message is {what} (RFC 8949, 4.2.1)")
    return value


def _loads(data: bytes) -> dict[object, object]:
    """The map that ``data`` begins with."""
    try:
        message = cbor2.loads(data)
    except Exception as error:  # noqa: BLE001  # decoders of tags that no message has may raise anything
        cut = isinstance(error, cbor2.CBORDecodeEOF)
        raise WireError(f"{'a message cut short' if cut else 'not a message'}: {error}") from None
    if type(message) is not dict:
        raise WireError(f"not a message: a map was expected, got {type(message).__name__}")
    return message


def _kind(message: dict[object, object], known: tuple[str, ...]) -> str:
    """The kind of a message. The version comes first: another schema may have other kinds."""
    version, kind = message.get("schema_version"), message.get("kind")
    if type(version) is not int or version.bit_length() > 64:
        raise WireError("not a message: it has no schema_version")
    if version != SCHEMA_VERSION:
        older = "this side" if version > SCHEMA_VERSION else "the other side"
        raise SchemaError(
            f"the message has schema version {version}, this hybridkv reads version {SCHEMA_VERSION}: update hybridkv "
            f"on {older}, so that both ends have the same"
        )
    if type(kind) is not str or kind not in known:
        got = repr(kind[:40]) if type(kind) is str else type(kind).__name__
        raise WireError(f"a message of kind {' or '.join(map(repr, known))} was expected, got {got}")
    return kind
