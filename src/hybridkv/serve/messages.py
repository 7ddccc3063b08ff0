"""The messages between front processes and the process of the engine: MessagePack, each after its length.

    front     Ready | Ask ................. Leave | Call ......... Leave | Ended
    engine                Parts, Parts ..                Answer                      or a Failure of the same number

A number names a body or a call of one front. Nothing is pickled, because fronts read what strangers send.
"""

from __future__ import annotations

from asyncio import IncompleteReadError, StreamReader
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any, Final, Literal, Self, TypeVar

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from hybridkv.request import Hints, SamplingParams, StructuredOutput
from hybridkv.runner.completion import Increment
from hybridkv.serve.errors import ApiError, api_error
from hybridkv.serve.generation import Asked

T = TypeVar("T")
_LENGTH: Final = 4  # bytes
_PLAIN: Final = SamplingParams()


class Ready(Struct, tag=True):
    """The front answers clients."""


class Ended(Struct, tag=True):
    """The front has drained, and cut off ``cut_off`` answers."""

    cut_off: int


class Ask(Struct, tag=True):
    """A body; ``sampling`` and ``hints`` have the fields that differ from their defaults."""

    number: int
    id: str
    prompts: list[list[int]]
    sampling: dict[str, Any]
    salt: str | None
    hints: dict[str, Any]
    lora: str | None
    embeds: bool

    @classmethod
    def of(cls, number: int, asked: Asked) -> Self:
        """Return the message for ``asked``."""
        given = ((one.name, getattr(asked.sampling, one.name)) for one in fields(SamplingParams))
        sampling = {name: value for name, value in given if value != getattr(_PLAIN, name)}
        sampling["seed"] = str(asked.sampling.seed)  # MessagePack's integers have 64 bits
        prompts, hints = [list(one) for one in asked.prompts], asked.hints.given()
        return cls(number, asked.id, prompts, sampling, asked.salt, hints, asked.lora, asked.embeds)

    @property
    def asked(self) -> Asked:
        """The body. Raises ConfigError for values that the engine refuses."""
        sampling = SamplingParams(**self.sampling | {"seed": int(self.sampling["seed"])})
        return Asked(self.id, self.prompts, sampling, self.salt, Hints.parse(self.hints), self.lora, self.embeds)


class Call(Struct, tag=True):
    """A call of a method of Service; ``client`` and ``form`` are the arguments of ``compile``."""

    number: int
    method: Literal["compile", "pooling", "metrics_text", "reset_prefix_cache", "alive", "samples"]
    client: tuple[str | None, str | None] = (None, None)
    form: StructuredOutput | None = None


class Leave(Struct, tag=True):
    """The end of a body or a call: what still runs of it is ended."""

    number: int


class NewPart(Struct, array_like=True):
    """The new part of output ``choice`` of the body ``number``.

    It has token ids and no text. A completion lacks what the parts had: its tokens, and their log probabilities.
    """

    number: int
    choice: int
    new: Increment


class Parts(Struct, tag=True):
    """New parts of any bodies of a front."""

    parts: list[NewPart]


class Answer(Struct, tag=True):
    """A result of a call."""

    number: int
    value: Any


class Failure(Struct, tag=True):
    """The error of a body or a call, as the fields of an ApiError."""

    number: int
    status: int
    message: str
    param: str | None
    code: str | None
    headers: dict[str, str] | None

    @classmethod
    def of(cls, number: int, error: Exception) -> Self:
        """Return the message for ``error``."""
        shown = api_error(error)
        said, headers = shown.body["error"], None if shown.headers is None else dict(shown.headers)
        return cls(number, shown.status, said["message"], said["param"], said["code"], headers)

    @property
    def error(self) -> ApiError:
        """The error."""
        return ApiError(self.status, self.message, param=self.param, code=self.code, headers=self.headers)


OfFront = Ready | Ended | Ask | Call | Leave
OfEngine = Parts | Answer | Failure
OF_FRONT: Final[Decoder[OfFront]] = Decoder(OfFront)
OF_ENGINE: Final[Decoder[OfEngine]] = Decoder(OfEngine)
_ENCODER: Final = Encoder()


def framed(message: Struct) -> bytes:
    """Return ``message`` after its length."""
    data = _ENCODER.encode(message)
    return len(data).to_bytes(_LENGTH, "little") + data


async def received(reader: StreamReader, decoder: Decoder[T]) -> AsyncIterator[T]:
    """Yield the messages that ``decoder`` reads, until the other end is closed."""
    while True:
        try:
            size = int.from_bytes(await reader.readexactly(_LENGTH), "little")
            data = await reader.readexactly(size)
        except (IncompleteReadError, ConnectionError):
            return
        yield decoder.decode(data)
