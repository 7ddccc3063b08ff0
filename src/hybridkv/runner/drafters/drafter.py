"""What an engine asks of whoever proposes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError

if TYPE_CHECKING:
    from hybridkv.request import Request
    from hybridkv.runner.load import LoadedModel

MOST_TOKENS: Final = 8
"""Drafts of a request in one step: behind so many, hardly any is accepted, and each holds a state."""


class Drafter(Protocol):
    """Proposes tokens for requests of one engine, which closes it. Drafts change how fast outputs come, never which.

    One with a method ``took(tokens, seconds)`` is told of each step in which every row decoded how long it took.
    num_speculative_tokens: most drafts of a request in one step; recurrent layers hold a state for each.
    """

    @property
    def num_speculative_tokens(self) -> int:
        """See the class."""
        ...

    def require(self, target: LoadedModel) -> None:
        """Raise ConfigError where it cannot propose tokens for ``target``."""
        ...

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Drafts behind the known tokens of each of ``requests``: at most ``num_speculative_tokens``, maybe none."""
        ...

    def close(self) -> None:
        """Give back what it holds; it is done."""
        ...


def checked_count(num_speculative_tokens: int) -> int:
    """``num_speculative_tokens``. ConfigError unless it lies in 1 .. MOST_TOKENS."""
    num_speculative_tokens = integer("num_speculative_tokens", num_speculative_tokens)
    if not 1 <= num_speculative_tokens <= MOST_TOKENS:
        raise ConfigError(f"num_speculative_tokens must lie in 1 .. {MOST_TOKENS}, got {num_speculative_tokens}")
    return num_speculative_tokens
