"""A request of any trace format, and code that formats share: checked fields, times, turns of sessions.

A record is a JSON object or a CSV row, by field name. Each format declares the fields that it reads in a struct;
``read`` checks a record against it. Other fields are ignored.

Turns of a session come some time after the turn before, as in aiperf's traces:

    {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 50}
    {"session_id": "a", "delay": 2000, "input_length": 80, "output_length": 50}       2 s after the answer

aiperf waits for the answer and sends the conversation so far with each turn; a line has its own input only
(``messages`` have all). The time of an answer is unknown before a replay: 50 tokens per second are assumed.
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
Record = Mapping[str, object]
Tokens = Annotated[int, Meta(ge=1, le=MOST_COUNT)]
Milliseconds = Annotated[float, Meta(ge=0, lt=1e15)]  # sums of seconds stay exact to a microsecond

T = TypeVar("T")


class MalformedLineError(Exception):
    """A malformed line; the reader adds file and line number in a TraceError."""


def read(record: object, kind: type[T], *, from_text: bool = False) -> T:
    """Return the fields of ``record`` that ``kind`` has. from_text: numbers may be text, as in CSV files."""
    try:
        return msgspec.convert(record, kind, strict=not from_text)
    except msgspec.ValidationError as error:
        raise MalformedLineError(str(error)) from None


def check_total(total: int) -> None:
    """Raise MalformedLineError if a request is longer than a request may be."""
    if total > MOST_COUNT:
        raise MalformedLineError(f"a request of {total} tokens is longer than {MOST_COUNT}")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    timestamp_s: seconds since the trace began. prompt, output: tokens as pieces, with ids on demand. marks: token
    counts, ascending, where the caller wants a state kept. origin: its line, for messages. tenant, hints: as Request
    has them. delayed: it comes some time after another request, maybe one on a later line.
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
        """Whether equal tokens of prompts are known; otherwise only lengths are known."""
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


def request_of_lengths(timestamp_s: float, prompt: int, output: int, origin: str, number: int) -> TraceRequest:
    """Return a request with that many tokens, which occur nowhere else."""
    check_total(prompt + output)
    asked, said = Pieces(NEW_PROMPT, ((number, 0, prompt),)), Pieces(NEW_OUTPUT, ((number, 0, output),))
    return TraceRequest(timestamp_s, asked, said, origin=origin)


Reader = Callable[[Record, str, int], Iterable[TraceRequest]]
"""Reads the records of one pass, in order: record, where it stands in words, and its line. MalformedLineError."""


@dataclass(frozen=True, slots=True)
class Format:
    """One format of records. name: for `--format`. fields: the fields of a record, for messages.

    owns: whether a record has this format, complete or not. reader: makes the reader of one pass, which may remember
    lines. timed: records have timestamps; without, a request counts seconds from its record's turn. in_rows: records
    are CSV rows.
    """

    name: str
    fields: str
    owns: Callable[[Record], bool]
    reader: Callable[[], Reader]
    timed: bool = True
    in_rows: bool = False


class Times:
    """Points in time as seconds since the first of one pass."""

    def __init__(self) -> None:
        self._first: float | None = None

    def since_first(self, seconds: float) -> float:
        """Return ``seconds``, on any clock, since the first."""
        if self._first is None:
            self._first = seconds
        return round(seconds - self._first, 6)


def iso_seconds(written: str) -> float:
    """Return the seconds since 1970 of a date and time in ISO 8601; without a zone it is UTC."""
    try:
        time = datetime.fromisoformat(written.strip())
    except ValueError:
        raise MalformedLineError(f"not a date and time: {shown(written)}") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


class Turn(Struct):
    """The fields of a line that give its time."""

    timestamp: Milliseconds | UnsetType = UNSET
    delay: Milliseconds | None = None
    session_id: str | UnsetType = UNSET


class Sessions:
    """The last turn of each session, in one pass."""

    def __init__(self) -> None:
        self._last: dict[str, TraceRequest] = {}

    def turn(self, line: Turn) -> tuple[float, TraceRequest | None]:
        """Return the time of the turn in seconds, and the turn before it; None if the line has its own time."""
        if line.timestamp is not UNSET:
            return line.timestamp / 1000, None
        if line.delay is None or line.session_id is UNSET:
            raise MalformedLineError("a line needs the field 'timestamp', or 'delay' and 'session_id'")
        if line.session_id not in self._last:
            raise MalformedLineError(
                f"the session {shown(line.session_id)} has no turn before this one: its first says when in timestamp"
            )
        before = self._last[line.session_id]
        answered_s = before.timestamp_s + before.num_output_tokens / ANSWER_TOKENS_PER_S
        return round(answered_s + line.delay / 1000, 6), before

    def note(self, line: Turn, made: TraceRequest) -> TraceRequest:
        """Remember ``made`` of ``line`` as the session's last turn."""
        if line.session_id is not UNSET:
            self._last[line.session_id] = made
        return made
