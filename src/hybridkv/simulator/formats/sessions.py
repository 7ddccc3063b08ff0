"""Turns of a session that come some time behind the turn before, as aiperf's traces have them.

    {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 50}
    {"session_id": "a", "delay": 2000, "input_length": 80, "output_length": 50}       2 s behind the answer

aiperf waits for the answer, sends what was said so far with each turn, and of a turn its own input alone is in the line
(``messages`` are all of them). How long an answer took nobody knows before it is replayed: 50 tokens a second.
"""

from __future__ import annotations

from typing import Final

from hybridkv.simulator.formats.fields import MalformedLineError, Record, milliseconds, seconds_of_ms, text
from hybridkv.simulator.formats.request import TraceRequest
from hybridkv.units import shown

ANSWER_TOKENS_PER_S: Final = 50.0


class Sessions:
    """The last turn of each, in one pass."""

    def __init__(self) -> None:
        self._last: dict[str, TraceRequest] = {}

    def turn(self, record: Record) -> tuple[float, TraceRequest | None]:
        """When the turn comes, in seconds, and behind which one; None where the line itself says when."""
        if "timestamp" in record or record.get("delay") is None:
            return seconds_of_ms(record), None
        session = text(record, "session_id")
        if session not in self._last:
            raise MalformedLineError(
                f"the session {shown(session)} has no turn before this one: its first says when in timestamp"
            )
        before = self._last[session]
        answered_s = before.timestamp_s + before.num_output_tokens / ANSWER_TOKENS_PER_S
        return round(answered_s + milliseconds(record, "delay") / 1000, 6), before

    def note(self, record: Record, made: TraceRequest) -> TraceRequest:
        """``made`` of ``record``, which the next turn comes behind."""
        if "session_id" in record:
            self._last[text(record, "session_id")] = made
        return made
