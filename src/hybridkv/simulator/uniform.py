"""A workload of equal conversations, whose hit rate in an endless cache has a closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridkv.errors import ConfigError
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.tokens import PROMPT_SEGMENT, Piece, Pieces
from hybridkv.simulator.trace import TraceSummary, summarise


@dataclass(frozen=True, slots=True)
class UniformWorkload:
    """``conversations`` conversations, dealt out to ``templates`` system prompts in turn, of ``turns`` turns.

        prompt of turn t   system | user 0 | answer 0 | ... | user t      S + U + t * (A + U) tokens

    Every conversation takes its turn t before any takes turn t + 1, one request every ``gap_s`` seconds.
    When an answer is done before the next turn arrives, and nothing is evicted, at a block size b:

    * turn 0 hits ``S // b * b`` tokens, but for the first conversation of each template: 0;
    * turn t > 0 hits ``known // b * b`` of known = P(t - 1) + A - 1 tokens: the last token of an answer is sampled
      but never run.

    That a prompt's last token always runs costs nothing here: it is never part of what was said before.
    """

    templates: int = 3
    conversations: int = 10
    turns: int = 4
    system_tokens: int = 150
    user_tokens: int = 37
    answer_tokens: int = 21
    gap_s: float = 10.0
    name: str = "workload:uniform"

    def __post_init__(self) -> None:
        for what in ("templates", "conversations", "turns", "system_tokens", "user_tokens", "answer_tokens"):
            if getattr(self, what) < 1:
                raise ConfigError(f"{what} must be at least 1, got {getattr(self, what)}")

    def prompt_tokens(self, turn: int) -> int:
        """Tokens of a prompt of that turn."""
        return self.system_tokens + self.user_tokens + turn * (self.answer_tokens + self.user_tokens)

    def hit_tokens(self, block_size: int, *, exact: bool = False) -> int:
        """Prompt tokens of the whole workload that an endless cache holds: the formulas above.

        exact: where a turn ended is hit to the token (natural layout); where prompts part, the edge before.
        """
        warm = max(self.conversations - self.templates, 0)
        tokens = warm * (self.system_tokens // block_size * block_size)
        for turn in range(1, self.turns):
            known = self.prompt_tokens(turn - 1) + self.answer_tokens - 1
            tokens += self.conversations * (known if exact else known // block_size * block_size)
        return tokens

    def summary(self) -> TraceSummary:
        """Counts. O(requests)."""
        return summarise(self, self.name)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Requests in the order of their timestamps."""
        for turn in range(self.turns):
            for conversation in range(self.conversations):
                at = turn * self.conversations + conversation
                prompt = [(conversation % self.templates, 0, self.system_tokens)]
                for earlier in range(turn):
                    prompt += [self._user(conversation, earlier), self._answer(conversation, earlier)]
                prompt.append(self._user(conversation, turn))
                answer = (self._answer(conversation, turn),)
                yield TraceRequest(
                    at * self.gap_s,
                    Pieces(PROMPT_SEGMENT, tuple(prompt)),
                    Pieces(PROMPT_SEGMENT, answer),
                    origin=f"request {at}",
                )

    def _user(self, conversation: int, turn: int) -> Piece:
        return (self.templates + 2 * (conversation * self.turns + turn), 0, self.user_tokens)

    def _answer(self, conversation: int, turn: int) -> Piece:
        return (self.templates + 2 * (conversation * self.turns + turn) + 1, 0, self.answer_tokens)
