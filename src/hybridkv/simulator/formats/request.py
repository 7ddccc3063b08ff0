"""One request of a trace, whatever its format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hybridkv.request import NO_HINTS, Hints
from hybridkv.simulator.formats.fields import Record
from hybridkv.simulator.tokens import NEW_PROMPT, Pieces


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    timestamp_s: seconds since the trace began. prompt, output: tokens as pieces, ids on demand.
    marks: token counts, ascending, at which the caller wants a state kept. origin: where it stands, for messages.
    tenant, hints: as Request has them. delayed: it comes some time behind another, maybe behind what stands below it.
    """

    timestamp_s: float
    prompt: Pieces
    output: Pieces
    marks: tuple[int, ...] = ()
    origin: str = ""
    tenant: str | None = None
    hints: Hints = NO_HINTS
    delayed: bool = False

    @property
    def tokens_known(self) -> bool:
        """Whether it is known which tokens of the prompt are equal to others'; else only how many there are."""
        return self.prompt.kind != NEW_PROMPT

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.prompt.num_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output."""
        return self.output.num_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt.num_tokens + self.output.num_tokens


class Reader(Protocol):
    """What reads the records of one pass: it may remember lines."""

    def __call__(self, record: Record, origin: str, number: int, /) -> Iterable[TraceRequest]:
        """The requests of ``record``; origin, number: where it stands. MalformedLineError."""
        ...


@runtime_checkable
class Held(Reader, Protocol):
    """A Reader that knows its requests only when the file has ended."""

    def rest(self) -> Iterable[TraceRequest]:
        """All of them, by time."""
        ...


class Format(Protocol):
    """One format of records. name: for `--format`. fields: what a record has, for messages.

    timed: records say when requests came; without, ``Reader`` counts seconds from when the record's turn is.
    """

    @property
    def name(self) -> str: ...  # noqa: D102  # above
    @property
    def fields(self) -> str: ...  # noqa: D102
    @property
    def timed(self) -> bool: ...  # noqa: D102

    def owns(self, record: Record) -> bool:
        """Whether the record is of this format, complete or not."""
        ...

    def reader(self) -> Reader:
        """What reads the records of one pass, in order."""
        ...
