"""Steps and their replies as bytes: MessagePack messages, with their fields, types and bounds.

    message      a map: "kind", and the fields of the dataclass by name
    array        [dtype, dimensions, bytes]: little-endian, row after row
    seed         bytes: a little-endian integer in two's complement, because MessagePack's integers have 64 bits

msgspec decodes only the fields of these classes. ``__post_init__`` checks that the fields are consistent. Only the
worker knows the sizes that decide whether a row, a group, a column, a block or a token id exists. Whether a Step is
next depends on the Steps before it.

A message has exactly one encoding. A decoded message is encoded again and compared. So bytes after a message, duplicate
or reordered fields, and numbers in a longer form are refused. ``encode_step`` and ``encode_reply`` decode their own
output with the same rules, so both ends refuse the same Steps.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from itertools import pairwise
from math import prod
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import asdict, astuple
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, SchemaError, WireError
from hybridkv.request import SamplingParams, StructuredKind, StructuredOutput
from hybridkv.step import (
    SCHEMA_VERSION,
    Cells,
    Copy,
    Csr,
    EncoderRead,
    Logprobs,
    NewRow,
    Step,
    StepResult,
    StoreTransfer,
    TierCopies,
)
from hybridkv.units import shown

MOST_LISTED: Final = 1 << 19
"""Items of all lists of a Step together: new rows, and the lists of their sampling. Decoding an item of a list takes a
hundred times as long as an item of an array. The limit allows a thousand new rows with 500 stop ids each."""
MOST_KEY_BYTES: Final = 64
"""Bytes of a key in a store."""
MOST_SAID: Final = 10_000
"""Characters of an exception's text in a reply: the text may print a whole tensor."""
MOST_REFUSED: Final = 400
"""Characters of a decoder's error that a WireError repeats: it may print a huge value."""

# -- arrays

Dtype = TypeVar("Dtype", bound=str)
Shape = TypeVar("Shape", bound=tuple[int, ...])
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]

DTYPES: Final = {"bool": np.dtype("?"), "int32": np.dtype("<i4"), "int64": np.dtype("<i8"), "float32": np.dtype("<f4")}


class Array(Struct, Generic[Dtype, Shape], array_like=True, forbid_unknown_fields=True):
    """An array: the name of its dtype, one of DTYPES, its dimensions, and its bytes."""

    dtype: Dtype
    shape: Shape
    data: memoryview

    def __post_init__(self) -> None:
        size = prod(self.shape) * DTYPES[self.dtype].itemsize
        if len(self.data) != size:
            raise WireError(f"{self.dtype}{list(self.shape)} has {size} bytes, got {len(self.data)}")
        if self.dtype == "bool" and self.view.view(np.uint8).max(initial=0) > 1:
            raise WireError("bool must be of bytes 0 and 1")

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def view(self) -> NDArray[Any]:
        """The array in the memory of the message, read-only."""
        return np.ndarray(self.shape, DTYPES[self.dtype], self.data)

    def copy(self) -> NDArray[Any]:
        """Return the array in memory of its own, which may be written like the array of a local Step."""
        return self.view.astype(self.dtype)


Bools = Array[Literal["bool"], tuple[Count]]
Int32s = Array[Literal["int32"], tuple[Count]]
Int64s = Array[Literal["int64"], tuple[Count]]
Float32s = Array[Literal["float32"], tuple[Count]]
Int32Pairs = Array[Literal["int32"], tuple[Count, Literal[2]]]
Int32Quads = Array[Literal["int32"], tuple[Count, Literal[4]]]
Int32Table = Array[Literal["int32"], tuple[Count, Count]]


class _Part(Struct, forbid_unknown_fields=True):
    """A part of a message; ``made`` is the class of its value, with the same fields in the same order."""

    made: ClassVar[type[Any]]

    def value(self) -> Any:  # noqa: ANN401  # of class ``made``
        """Return the value. Raises ConfigError for sampling that SamplingParams refuses."""
        return self.made(*map(_value, astuple(self)))


def _value(part: object) -> Any:  # noqa: ANN401  # what a part stands for
    if isinstance(part, Array):
        return part.copy()
    return part.value() if isinstance(part, _Part) else part


def _require_one_length(message: Struct, *names: str) -> None:
    if len({len(getattr(message, name)) for name in names}) != 1:
        raise WireError(f"{', '.join(names[:-1])} and {names[-1]} must have one length")


class CsrMessage(_Part):
    """Lists of token ids."""

    made: ClassVar = Csr

    indptr: Int64s
    values: Int32s

    def __post_init__(self) -> None:
        indptr, values = self.indptr.view, len(self.values)
        if not len(indptr) or indptr[0] != 0 or indptr[-1] != values or (indptr[1:] < indptr[:-1]).any():
            raise WireError(f"indptr must rise from 0 to the {values} values, and never fall")

    def __len__(self) -> int:
        return len(self.indptr) - 1


# -- Steps

Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Listed = Meta(max_length=MOST_LISTED)
TokenIds = Annotated[tuple[Int32, ...], Listed]
StepId = Annotated[int, Meta(ge=0)]
Key = Annotated[bytes, Meta(min_length=1, max_length=MOST_KEY_BYTES)]
Version = Annotated[int, Meta(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]


class CellsMessage(_Part):
    """Cells of block tables."""

    made: ClassVar = Cells

    group: Int32s
    row: Int32s
    column: Int32s
    block: Int32s

    def __post_init__(self) -> None:
        _require_one_length(self, "group", "row", "column", "block")


class CopyMessage(_Part):
    """One copy of a block."""

    made: ClassVar = Copy

    stage: Literal["before", "after"]
    group: Int32
    source: Int32
    destination: Int32
    kind: Literal["move", "block", "state"]


class TierCopiesMessage(_Part):
    """Copies between the device and the host tier."""

    made: ClassVar = TierCopies

    transfer: Int32s
    group: Int32s
    source: Int32s
    destination: Int32s

    def __post_init__(self) -> None:
        _require_one_length(self, "transfer", "group", "source", "destination")
        if len(self.numbers) != len(np.unique(self.numbers)):
            raise WireError("the copies of a transfer must be next to each other")

    def __len__(self) -> int:
        return len(self.transfer)

    @property
    def numbers(self) -> NDArray[np.int32]:
        """The transfers, in their order."""
        of = self.transfer.view
        numbers: NDArray[np.int32] = of[np.flatnonzero(np.diff(of, prepend=of[:1] - 1))]
        return numbers


class StoreTransferMessage(_Part):
    """Blocks of the host tier that go to a store, or come from it."""

    made: ClassVar = StoreTransfer

    number: Annotated[int, Meta(ge=0)]
    group: Int32s
    block: Int32s
    keys: Annotated[tuple[Key, ...], Listed]
    mark: Annotated[bytes, Meta(max_length=MOST_KEY_BYTES)]
    tail: bytes

    def __post_init__(self) -> None:
        _require_one_length(self, "group", "block", "keys")

    def __len__(self) -> int:
        return len(self.keys)


class EncoderMessage(_Part):
    """The encoder output that cross attention reads for a row."""

    digest: Annotated[bytes, Meta(min_length=1)]
    num_tokens: Annotated[int, Meta(ge=1)]
    encodes: bool
    digest_is_text: bool

    def __post_init__(self) -> None:
        self.value()  # text must be UTF-8

    def value(self) -> EncoderRead:
        """Return the value."""
        digest = self.digest.decode() if self.digest_is_text else self.digest
        return EncoderRead(digest, self.num_tokens, self.encodes)


class StructuredMessage(_Part):
    """A structured output."""

    made: ClassVar = StructuredOutput

    kind: StructuredKind
    text: str
    frame: str


class SamplingMessage(_Part):
    """Sampling parameters. SamplingParams checks the values."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: Annotated[bytes, Meta(min_length=1, max_length=32)]
    max_tokens: int
    stop_token_ids: TokenIds
    stop: Annotated[tuple[str, ...], Listed]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    n: int
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    logit_bias: Annotated[tuple[tuple[Int32, float], ...], Listed]
    bad_words: Annotated[tuple[TokenIds, ...], Listed]
    logits_processors: tuple[()]
    structured: StructuredMessage | None
    skip_special_tokens: bool

    def __post_init__(self) -> None:
        if seed_bytes(int.from_bytes(self.seed, "little", signed=True)) != self.seed:
            raise WireError("seed must be as short as it can be")
        if any(one[0] >= other[0] for one, other in pairwise(self.logit_bias)):
            raise WireError("token ids of logit_bias must ascend")

    def value(self) -> SamplingParams:
        """Return the value. Raises ConfigError for values that SamplingParams refuses."""
        seed = int.from_bytes(self.seed, "little", signed=True)
        return SamplingParams(**asdict(self) | {"seed": seed, "structured": _value(self.structured)})


def seed_bytes(seed: int) -> bytes:
    """Return ``seed`` in as few bytes as hold it."""
    seed = operator.index(seed)
    return seed.to_bytes(seed.bit_length() // 8 + 1, "little", signed=True)


class NewRowMessage(_Part):
    """A row that begins."""

    made: ClassVar = NewRow

    row: Annotated[int, Meta(ge=0)]
    request_id: str
    token_ids: Int32s
    num_prompt_tokens: Annotated[int, Meta(ge=0)]
    sampling: SamplingMessage
    encoder: EncoderMessage | None
    held_ids: TokenIds
    lora: str | None

    def __post_init__(self) -> None:
        if self.num_prompt_tokens > len(self.token_ids):
            raise WireError(
                f"num_prompt_tokens is {self.num_prompt_tokens}, but there are {len(self.token_ids)} tokens"
            )

    @property
    def listed(self) -> int:
        """Items of the lists of the row, itself counted."""
        asked = self.sampling
        lists = (asked.stop, asked.stop_token_ids, asked.logit_bias, asked.bad_words, self.held_ids, *asked.bad_words)
        return 1 + sum(map(len, lists))


_PARTS: Final = ("copies", "tier_copies", "spills", "fetches")


class StepMessage(_Part, tag_field="kind", tag="step"):
    """A Step."""

    id: StepId
    after: Annotated[int, Meta(ge=-1)]
    rows: Int32s
    num_computed: Int32s
    num_scheduled: Int32s
    samples: Bools
    token_ids: CsrMessage
    drafts: CsrMessage
    cells: CellsMessage
    finished_rows: Int32s
    new_rows: Annotated[tuple[NewRowMessage, ...], Listed]
    zero: Int32Pairs
    copies: tuple[CopyMessage, ...]
    state_read: Int32Table
    state_writes: Int32Quads
    stores: TierCopiesMessage
    tier_copies: tuple[CopyMessage, ...]
    loads: TierCopiesMessage
    spills: Annotated[tuple[StoreTransferMessage, ...], Listed]
    fetches: Annotated[tuple[StoreTransferMessage, ...], Listed]
    schema_version: Version

    def __post_init__(self) -> None:
        rows = len(self.rows)
        if self.after >= self.id:
            raise WireError(f"after must lie below id {self.id}, got {self.after}")
        listed = sum(new.listed for new in self.new_rows) + sum(map(len, (*self.spills, *self.fetches)))
        if listed > MOST_LISTED:
            raise WireError(
                f"new_rows, the lists of their sampling, and the keys of spills and fetches may have {MOST_LISTED:,} "
                f"items together, not {listed:,}"
            )
        for name in ("num_computed", "num_scheduled", "samples", "token_ids", "drafts"):
            if len(getattr(self, name)) != rows:
                raise WireError(f"{name} is for {len(getattr(self, name))} rows, but there are {rows}")
        if self.num_computed.view.min(initial=0) < 0:
            raise WireError("num_computed must be 0 or more")
        counts = np.diff(self.token_ids.indptr.view)
        if not np.array_equal(counts, self.num_scheduled.view):
            raise WireError("token_ids must hold as many tokens of each row as num_scheduled says")
        if len(self.drafts.values) and (np.diff(self.drafts.indptr.view) > counts).any():
            raise WireError("drafts must be the last of token_ids: some row has more drafts than tokens")
        self._check_blocks(rows)

    def _check_blocks(self, rows: int) -> None:
        if len(self.state_read) not in (0, rows):
            raise WireError(f"state_read is for {len(self.state_read)} rows, but there are {rows}")
        writers = self.state_writes.view[:, 0]
        if len(writers) and not 0 <= writers.min() <= writers.max() < rows:
            raise WireError(f"state_writes must begin with places in rows, 0 .. {rows - 1}")
        if np.isin(self.stores.numbers, self.loads.numbers).any():
            raise WireError("a transfer must be in stores or in loads, not in both")
        numbers = [one.number for one in (*self.spills, *self.fetches)]
        copied = {*self.stores.numbers.tolist(), *self.loads.numbers.tolist()}
        if len(copied.union(numbers)) < len(copied) + len(numbers):
            raise WireError("each transfer of spills and fetches must have a number of its own")

    def value(self) -> Step:
        """Return the value. Raises WireError for sampling that SamplingParams refuses."""
        parts = {name: _value(part) for name, part in asdict(self).items()}
        lists = {name: tuple(copy.value() for copy in getattr(self, name)) for name in _PARTS}
        return Step(**parts | {"new_rows": tuple(self._new_rows())} | lists)

    def _new_rows(self) -> Iterator[NewRow]:
        for i, new in enumerate(self.new_rows):
            try:
                yield new.value()
            except ConfigError as error:
                raise WireError(f"step.new_rows[{i}].sampling: {str(error)[:MOST_REFUSED]}") from None


# -- replies


class LogprobsMessage(_Part):
    """Log probabilities of tokens."""

    made: ClassVar = Logprobs

    row: Int32s
    position: Int32s
    token: Int32s
    logprob: Float32s
    rank: Int32s
    best: CsrMessage
    best_logprobs: Float32s

    def __post_init__(self) -> None:
        _require_one_length(self, "row", "position", "token", "logprob", "rank", "best")
        if len(self.best_logprobs) != len(self.best.values):
            raise WireError(f"best_logprobs must be one for each of the {len(self.best.values)} tokens of best")


class ResultMessage(_Part, tag_field="kind", tag="result"):
    """A StepResult."""

    made: ClassVar = StepResult

    id: StepId
    sampled: CsrMessage
    num_accepted: Int32s | None
    logprobs: LogprobsMessage | None
    arrived: Int32s
    lost: Int32s
    arrived_s: Float32s
    schema_version: Version

    def __post_init__(self) -> None:
        rows = len(self.sampled)
        named = np.empty(0) if self.logprobs is None else self.logprobs.row.view
        if len(named) and not 0 <= named.min() <= named.max() < rows:
            raise WireError(f"logprobs must be of places in rows, 0 .. {rows - 1}")
        if self.num_accepted is not None and len(self.num_accepted) != rows:
            raise WireError(f"num_accepted is for {len(self.num_accepted)} rows, sampled for {rows}")
        ended = np.concatenate((self.arrived.view, self.lost.view))
        if len(np.unique(ended)) != len(ended):
            raise WireError("arrived and lost must name a transfer once")
        took_s = self.arrived_s.view
        if len(took_s) not in {0, len(self.arrived)} or not (np.isfinite(took_s) & (took_s >= 0)).all():
            raise WireError("arrived_s must be seconds, 0 or more, for each of arrived or for none")


class StepFailure(Struct, frozen=True, tag_field="kind", tag="failure", forbid_unknown_fields=True):
    """The reply to a Step that has no result.

    Attributes:
        id: of the Step.
        error: the name of the exception's class.
        message: its text, at most MOST_SAID characters.
        schema_version: of the message.
    """

    id: StepId
    error: str
    message: str
    schema_version: Version = SCHEMA_VERSION

    @classmethod
    def of(cls, step_id: int, error: BaseException) -> StepFailure:
        """Return the failure of a Step.

        Args:
            step_id: of the Step.
            error: the exception.
        """
        return cls(step_id, *_described(error))

    def __str__(self) -> str:
        return f"{self.error}: {self.message}"


class Unreadable(Struct, frozen=True, tag_field="kind", tag="unreadable", forbid_unknown_fields=True):
    """The reply to bytes that are not a Step of this schema, so that the Step's id is unknown.

    Attributes:
        error: as in StepFailure.
        message: as in StepFailure.
        schema_version: of the message.
    """

    error: str
    message: str
    schema_version: Version = SCHEMA_VERSION

    @classmethod
    def of(cls, error: BaseException) -> Unreadable:
        """Return the reply to bytes that raised an error.

        Args:
            error: the exception.
        """
        return cls(*_described(error))


def _described(error: BaseException) -> tuple[str, str]:
    """Return the class and the text of an exception; characters that UTF-8 does not have are escaped."""
    text = str(error)[:MOST_SAID].encode(errors="backslashreplace").decode()
    return type(error).__name__, text


Reply = StepResult | StepFailure | Unreadable


Message = TypeVar("Message")

_KINDS: Final[dict[type, str]] = {StepResult: "result", StepFailure: "failure", Unreadable: "unreadable"}
_DTYPE_NAMES: Final = {np.dtype(name): name for name in DTYPES}
_LOCAL: Final = (
    "are functions, which no message holds: run them where the Engine is, or say it by logit_bias and bad_words"
)


class _Head(msgspec.Struct):
    """A message of any schema."""

    schema_version: int


def encode_step(step: Step) -> bytes:
    """Encode a Step; equal Steps give equal bytes. O(bytes).

    Args:
        step: the Step.

    Raises:
        WireError: a field has another dtype, shape or type than Step says.
        SchemaError: the Step has another schema version than this hybridkv.
    """
    return _encode("step", step, _STEPS)


def decode_step(data: bytes) -> Step:
    """Decode a Step. O(bytes).

    Args:
        data: the message.

    Raises:
        SchemaError: the message has another schema version.
        WireError: the message is not an output of ``encode_step``: bytes are missing or left over, fields are missing,
            unknown or of another type, or arrays are inconsistent.
    """
    return _decode("step", data, _STEPS).value()


def encode_reply(reply: Reply) -> bytes:
    """Encode a reply. O(bytes).

    Args:
        reply: a result, a failure, or Unreadable.

    Raises:
        WireError: as ``encode_step``, or ``reply`` is not a reply.
        SchemaError: the reply has another schema version.
    """
    kind = _KINDS.get(type(reply))
    if kind is None:
        raise WireError(
            f"a reply must be one of {', '.join(made.__name__ for made in _KINDS)}, got {type(reply).__name__}"
        )
    return _encode(kind, reply, _REPLIES)


def decode_reply(data: bytes) -> Reply:
    """Decode a reply. Raises as ``decode_step``. O(bytes).

    Args:
        data: the message.
    """
    reply: Reply = _value(_decode("reply", data, _REPLIES))
    return reply


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
    """Return ``value`` as types that MessagePack has; msgspec calls this for types that it does not know."""
    if isinstance(value, np.ndarray):
        name = _DTYPE_NAMES.get(value.dtype)
        if name is None:
            raise TypeError(f"no array of a message is {value.dtype}{list(value.shape)}")
        return name, value.shape, value.astype(DTYPES[name], copy=False).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(_LOCAL if callable(value) else f"no message holds a {type(value).__name__}")


def _place(item: object) -> str:
    """Return the path to the part of ``item`` that cannot be encoded."""
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
    """Return the message in ``data``. Errors of msgspec end with the path to the invalid part."""
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
        return
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
