"""A request of any trace format, and code that formats share: checked fields, times, turns of sessions.

A record maps field names to the values of a JSON object or a CSV row. Each format declares the fields that it reads in
a struct, and ``read`` checks a record against it. Other fields are ignored.

A later turn of a session gives its delay after the previous answer, as in aiperf's traces:

    {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 50}
    {"session_id": "a", "delay": 2000, "input_length": 80, "output_length": 50}       2 s after the answer

aiperf waits for the answer, and sends the conversation so far with each turn. A line holds only the new input, except
``messages``, which hold the whole conversation. The time of an answer is unknown before a replay: 50 tokens per second
are assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from hybridkv.request import NO_HINTS, Hints
from hybridkv.simulator.tokens import NEW_OUTPUT, NEW_PROMPT, Pieces
from hybridkv.units import MOST_COUNT, shown

ANSWER_TOKENS_PER_S: Final = 50.0
"""Assumed speed of answers, for the times of later turns. Chosen by hand."""
Record = Mapping[str, object]
"""The values of one record, by field name."""
Tokens = Annotated[int, Meta(ge=1, le=MOST_COUNT)]
Milliseconds = Annotated[float, Meta(ge=0, lt=1e15)]  # sums of seconds stay exact to a microsecond

T = TypeVar("T")


class MalformedLineError(Exception):
    """A malformed line. TraceFile converts it to a TraceError with the file and the line."""


def read(record: object, kind: type[T], *, from_text: bool = False) -> T:
    """Return a record as a struct. O(fields).

    Args:
        record: the record.
        kind: the struct, with the fields to read.
        from_text: whether numbers may be text, as in CSV files.

    Raises:
        MalformedLineError: for a missing field or a wrong value; the message names the field.
    """
    try:
        return msgspec.convert(record, kind, strict=not from_text)
    except msgspec.ValidationError as error:
        raise MalformedLineError(str(error)) from None


def check_total(total: int) -> None:
    """Raise MalformedLineError if a request of ``total`` tokens is too long."""
    if total > MOST_COUNT:
        raise MalformedLineError(f"a request of {total} tokens is longer than {MOST_COUNT}, the limit")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        timestamp_s: arrival in seconds since the trace began.
        prompt: tokens of the prompt as pieces; ids are computed on demand.
        output: tokens of the output as pieces.
        marks: resume marks, ascending token counts.
        origin: line or number of the request, for messages.
        tenant: as in Request.
        hints: as in Request.
        delayed: whether it is a later turn of a session, so that requests of later lines may arrive before it.
        took_s: seconds from its arrival to its end in the engine that was recorded; ``None`` if unknown.
    """

    timestamp_s: float
    prompt: Pieces
    output: Pieces
    marks: tuple[int, ...] = ()
    origin: str = ""
    tenant: str | None = None
    hints: Hints = NO_HINTS
    delayed: bool = False
    took_s: float | None = None

    @property
    def tokens_known(self) -> bool:
        """Whether equal tokens of prompts are known; otherwise only lengths are known."""
        return self.prompt.kind != NEW_PROMPT

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return self.prompt.num_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens."""
        return self.output.num_tokens

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens together."""
        return self.prompt.num_tokens + self.output.num_tokens


def request_of_lengths(timestamp_s: float, prompt: int, output: int, origin: str, number: int) -> TraceRequest:
    """Return a request of known lengths, whose tokens occur nowhere else.

    Args:
        timestamp_s: arrival in seconds since the trace began.
        prompt: number of prompt tokens.
        output: number of output tokens.
        origin: line of the request, for messages.
        number: number of the line, unique in the trace.

    Raises:
        MalformedLineError: if the request is too long.
    """
    check_total(prompt + output)
    asked, said = Pieces(NEW_PROMPT, ((number, 0, prompt),)), Pieces(NEW_OUTPUT, ((number, 0, output),))
    return TraceRequest(timestamp_s, asked, said, origin=origin)


Reader = Callable[[Record, str, int], Iterable[TraceRequest]]
"""A function that reads the records of one pass in order. It takes a record, its origin in words and its line number,
returns requests, and raises MalformedLineError."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of records.

    Attributes:
        name: name of the format, as `--format` takes it.
        fields: fields of a record, for messages.
        owns: returns whether a record has this format, even if fields are missing.
        reader: returns a reader for one pass, which may remember earlier records.
        timed: whether records have timestamps. Otherwise times of requests count from the first request of the record.
        in_rows: whether records are CSV rows.
    """

    name: str
    fields: str
    owns: Callable[[Record], bool]
    reader: Callable[[], Reader]
    timed: bool = True
    in_rows: bool = False


class Times:
    """Converts times of one pass to seconds since the first time."""

    def __init__(self) -> None:
        self._first: float | None = None

    def since_first(self, seconds: float) -> float:
        """Return the seconds since the first time.

        Args:
            seconds: a time in seconds, on any clock.
        """
        if self._first is None:
            self._first = seconds
        return round(seconds - self._first, 6)


def iso_seconds(written: str) -> float:
    """Return a date and time in seconds since 1970.

    Args:
        written: the date and time in ISO 8601; without a zone, it is UTC.

    Raises:
        MalformedLineError: for another text.
    """
    try:
        time = datetime.fromisoformat(written.strip())
    except ValueError:
        raise MalformedLineError(
            f"not a date and time: {shown(written)}, must be ISO 8601 such as 2025-01-31T18:15:46"
        ) from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


class Turn(Struct):
    """Fields of a line that give its time. Times are in milliseconds."""

    timestamp: Milliseconds | UnsetType = UNSET
    delay: Milliseconds | None = None
    session_id: str | UnsetType = UNSET


class Sessions:
    """The last turn of each session, in one pass."""

    def __init__(self) -> None:
        self._last: dict[str, TraceRequest] = {}

    def turn(self, line: Turn) -> tuple[float, TraceRequest | None]:
        """Return the time of a turn, and the previous turn of its session if the time depends on that.

        Args:
            line: the fields of the turn.

        Returns:
            The time in seconds, and the previous turn; ``None`` for a line with its own timestamp.

        Raises:
            MalformedLineError: if the time is unknown.
        """
        if line.timestamp is not UNSET:
            return line.timestamp / 1000, None
        if line.delay is None or line.session_id is UNSET:
            raise MalformedLineError("a line needs the field 'timestamp', or 'delay' and 'session_id'")
        if line.session_id not in self._last:
            raise MalformedLineError(
                f"the session {shown(line.session_id)} has no turn before this one: give its first turn a timestamp"
            )
        before = self._last[line.session_id]
        answered_s = before.timestamp_s + before.num_output_tokens / ANSWER_TOKENS_PER_S
        return round(answered_s + line.delay / 1000, 6), before

    def note(self, line: Turn, made: TraceRequest) -> TraceRequest:
        """Remember a request as the last turn of its session, and return it.

        Args:
            line: the fields of the turn.
            made: the request of the turn.
        """
        if line.session_id is not UNSET:
            self._last[line.session_id] = made
        return made
