"""Steps and the replies to them as bytes: MessagePack of the messages of hybridkv.wire.schema.

A message has one encoding. Whatever is decoded is encoded again and compared, so bytes after a message, a field twice
or out of order, and numbers in a longer form are refused. ``encode_step`` and ``encode_reply`` read what they wrote by
the rules of the reader: both ends refuse the same Steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, Encoder

from hybridkv.errors import SchemaError, WireError
from hybridkv.step import SCHEMA_VERSION, NewRow, Step, StepResult
from hybridkv.units import shown
from hybridkv.wire.schema import (
    DTYPES,
    MOST_REFUSED,
    Reply,
    ResultMessage,
    StepFailure,
    StepMessage,
    Unreadable,
    seed_bytes,
)

Message = TypeVar("Message")

_KINDS: Final[dict[type, str]] = {StepResult: "result", StepFailure: "failure", Unreadable: "unreadable"}
_DTYPE_NAMES: Final = {np.dtype(name): name for name in DTYPES}
_LOCAL: Final = (
    "are functions, which no message holds: run them where the Engine is, or say it by logit_bias and bad_words"
)
_FIRST_SCHEMA: Final = b"nschema_version\1"
"""The version of schema 1, in a message of that schema, which was CBOR."""


class _Head(msgspec.Struct):
    """A message of any schema."""

    schema_version: int


def encode_step(step: Step) -> bytes:
    """Return the message of ``step``; equal Steps give equal bytes. O(bytes).

    Raises WireError for a field of another dtype, shape or type than Step says, SchemaError for a Step of another
    schema than this hybridkv has.
    """
    return _encode("step", step, _STEPS)


def decode_step(data: bytes) -> Step:
    """Return the Step of a message. O(bytes).

    Raises SchemaError for another schema version, WireError for anything else that ``encode_step`` never writes: bytes
    missing or left over, fields missing, unknown or of another type, and arrays that do not fit each other.
    """
    return _decode("step", data, _STEPS).value()


def encode_reply(reply: Reply) -> bytes:
    """Return the message of a reply. Raises as ``encode_step``, and WireError for anything that is no reply."""
    kind = _KINDS.get(type(reply))
    if kind is None:
        raise WireError(
            f"a reply must be one of {', '.join(made.__name__ for made in _KINDS)}, got {type(reply).__name__}"
        )
    return _encode(kind, reply, _REPLIES)


def decode_reply(data: bytes) -> Reply:
    """Return the reply of a message. Raises as ``decode_step``."""
    return _decode("reply", data, _REPLIES).value()


def _encode(kind: str, value: Step | Reply, decoder: Decoder[Any]) -> bytes:
    if value.schema_version != SCHEMA_VERSION:
        raise SchemaError(
            f"a {kind} of schema version {value.schema_version} cannot be written: this hybridkv writes version "
            f"{SCHEMA_VERSION}"
        )
    items = {"kind": kind} | _fields(value)
    try:
        if isinstance(value, Step):
            items["new_rows"] = [_row(new) for new in value.new_rows]
        data = _ENCODER.encode(items)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{kind}{_place(items)}: {error}") from None
    _checked(kind, data, decoder)
    return data


def _fields(value: object) -> dict[str, Any]:
    """Return the fields of a dataclass or a Struct by name."""
    names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else value.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: getattr(value, name) for name in names}


def _row(new: NewRow) -> dict[str, Any]:
    if any(isinstance(word, str) for word in new.sampling.bad_words):
        raise WireError(
            f"bad_words of {shown(new.request_id)} must be token ids, and are text: an Engine encodes them, or give "
            "the ids of each word"
        )
    items = _fields(new) | {"sampling": _fields(new.sampling) | {"seed": seed_bytes(new.sampling.seed)}}
    if new.encoder is not None:
        digest = new.encoder.digest
        if is_text := isinstance(digest, str):
            digest = digest.encode()
        items["encoder"] = _fields(new.encoder) | {"digest": digest, "digest_is_text": is_text}
    return items


def _portable(value: object) -> object:
    """Return ``value`` as types that MessagePack has. msgspec asks for types that it does not know."""
    if isinstance(value, np.ndarray):
        name = _DTYPE_NAMES.get(value.dtype)
        if name is None:
            raise TypeError(f"no array of a message is {value.dtype}{list(value.shape)}")
        return name, value.shape, value.astype(DTYPES[name], copy=False).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(_LOCAL if callable(value) else f"no message holds a {type(value).__name__}")


def _place(item: object) -> str:
    """Return the path to the part of ``item`` that no message holds."""
    parts: Iterable[tuple[str, object]] = ()
    if isinstance(item, list | tuple):
        parts = ((f"[{i}]", part) for i, part in enumerate(item))
    elif isinstance(item, dict) or is_dataclass(item):
        parts = ((f".{name}", part) for name, part in (item if isinstance(item, dict) else _fields(item)).items())
    for name, part in parts:
        try:
            _ENCODER.encode(part)
        except (TypeError, ValueError, OverflowError):
            return name + _place(part)
    return ""


def _decode(what: str, data: bytes, decoder: Decoder[Message]) -> Message:
    data = bytes(data)  # bytes stay the same object
    try:
        return _checked(what, data, decoder)
    except WireError:
        _refuse_other_schemas(data)
        raise


def _checked(what: str, data: bytes, decoder: Decoder[Message]) -> Message:
    """Return the message in ``data``. The errors of msgspec end with the path to what is wrong."""
    try:
        message = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        said, _, place = str(error).partition(" - at `$")
        raise WireError(f"{what}{place[:-1]}: {said[:MOST_REFUSED]}") from None
    if _ENCODER.encode(message) != data:
        raise WireError(f"{what}: the message has a field twice or out of order, or a number in another form")
    return message


def _refuse_other_schemas(data: bytes) -> None:
    """Raise SchemaError for a message of another version, whatever else it holds. O(bytes)."""
    try:
        version = _HEADS.decode(data).schema_version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if _FIRST_SCHEMA not in data:
            return
        version = 1
    if version != SCHEMA_VERSION:
        older = "this side" if version > SCHEMA_VERSION else "the other side"
        raise SchemaError(
            f"the message has schema version {version}, this hybridkv reads version {SCHEMA_VERSION}: update hybridkv "
            f"on {older}, so that both ends have the same"
        )


_ENCODER: Final = Encoder(enc_hook=_portable)
_STEPS: Final = Decoder(StepMessage)
_HEADS: Final = Decoder(_Head)
_REPLIES: Final[Decoder[ResultMessage | StepFailure | Unreadable]] = Decoder(ResultMessage | StepFailure | Unreadable)
