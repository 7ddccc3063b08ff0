"""Tokens and hashes that stay an engine's: read where they lie, neither copied nor hashed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError
from hybridkv.units import MOST_COUNT, shown


class Lender(Protocol):
    """An engine's own request: ``num_tokens`` known tokens, in ``all_token_ids``; appended to, never changed."""

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Theirs; slices of it are read."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """In place of a Request's prompt: who has its tokens, ``num_prompt_tokens`` of them the prompt's.

    hashes: the engine's own list of one key a full hash block, which grows as it hashes; None: the request's hasher
    hashes what is lent. ConfigError for what is none of these.
    """

    lender: Lender
    num_prompt_tokens: int
    hashes: list[bytes] | None = None

    def __post_init__(self) -> None:
        if not (hasattr(self.lender, "num_tokens") and hasattr(self.lender, "all_token_ids")):
            raise ConfigError(f"lender must have num_tokens and all_token_ids, got {shown(self.lender)}")
        integer("num_prompt_tokens", self.num_prompt_tokens, 1, MOST_COUNT)
        if self.hashes is not None and not isinstance(self.hashes, list):
            raise ConfigError(f"hashes must be the engine's own list, which grows, or None, got {shown(self.hashes)}")
