"""Traces that know lengths alone: each request's tokens are its own, and nothing can be hit.

    azure       TIMESTAMP,ContextTokens,GeneratedTokens                          2023-11-16 18:15:46.6805900,374,44
    burstgpt    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type          5,ChatGPT,472,18,490,...

azure: AzurePublicDataset's LLM inference traces of 2023 and 2024; times with or without a zone. burstgpt: seconds;
lines of requests that failed have no response tokens and are malformed here: skip them. Times count from the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from hybridkv.simulator.formats.fields import MalformedLineError, Record, check_total, text, tokens
from hybridkv.simulator.formats.request import Reader, TraceRequest
from hybridkv.simulator.tokens import NEW_OUTPUT, NEW_PROMPT, Pieces
from hybridkv.units import shown

_DAY_SECONDS: Final = 86400


class Times:
    """Points in time as seconds since the first of one pass."""

    def __init__(self) -> None:
        self._first: float | None = None

    def since_first(self, seconds: float) -> float:
        """Of ``seconds`` on any clock."""
        if self._first is None:
            self._first = seconds
        return round(seconds - self._first, 6)


def iso_seconds(written: str) -> float:
    """Seconds since 1970 of a date and time as ISO 8601 has it; without a zone it is UTC."""
    try:
        time = datetime.fromisoformat(written.strip())
    except ValueError:
        raise MalformedLineError(f"not a date and time: {shown(written)}") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def request_of_lengths(
    timestamp_s: float, prompt_tokens: int, output_tokens: int, origin: str, number: int
) -> TraceRequest:
    """One whose tokens occur nowhere else."""
    check_total(prompt_tokens + output_tokens)
    return TraceRequest(
        timestamp_s,
        Pieces(NEW_PROMPT, ((number, 0, prompt_tokens),)),
        Pieces(NEW_OUTPUT, ((number, 0, output_tokens),)),
        origin=origin,
    )


@dataclass(frozen=True, slots=True)
class LengthsFormat:
    """Rows of a CSV file. time, prompt, output: names of the columns. by_date: the time is a date, no number."""

    name: str
    time: str
    prompt: str
    output: str
    by_date: bool
    timed = True

    @property
    def fields(self) -> str:
        """The columns that are read."""
        return f"{self.time}, {self.prompt}, {self.output}"

    def owns(self, record: Record) -> bool:
        """Whether all three columns are there."""
        return all(name in record for name in (self.time, self.prompt, self.output))

    def reader(self) -> Reader:
        """Times count from the first row."""
        times = Times()

        def parse(record: Record, origin: str, number: int) -> tuple[TraceRequest]:
            written = text(record, self.time)
            seconds = iso_seconds(written) if self.by_date else _number(written)
            counts = {name: _integer(text(record, name), name) for name in (self.prompt, self.output)}
            prompt, output = tokens(counts, self.prompt), tokens(counts, self.output)
            return (request_of_lengths(times.since_first(seconds), prompt, output, origin, number),)

        return parse


def _number(written: str) -> float:
    try:
        seconds = float(written)
    except ValueError:
        raise MalformedLineError(f"not a number of seconds: {shown(written)}") from None
    if not 0 <= seconds < _DAY_SECONDS * 1e6:
        raise MalformedLineError(f"a time must lie in 0 .. 1e6 days, got {shown(written)}")
    return seconds


def _integer(written: str, name: str) -> int:
    digits = written.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise MalformedLineError(f"{name} must be an integer, not {shown(written)}")
    return int(digits)


AZURE: Final = LengthsFormat("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", by_date=True)
BURSTGPT: Final = LengthsFormat("burstgpt", "Timestamp", "Request tokens", "Response tokens", by_date=False)
ROW_FORMATS: Final = (AZURE, BURSTGPT)
"""Of CSV files."""
