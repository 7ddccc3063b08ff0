"""How many tokens an answer took, in OpenAI's form."""

from __future__ import annotations

from typing_extensions import TypedDict

from hybridkv.runner.completion import Completion


class CachedTokens(TypedDict):
    """Of the prompt tokens: those found in the cache."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of all prompts and all outputs of an answer. Details: once every prompt has been computed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None


class Counter:
    """Counts of one answer as it grows. prompt_tokens: of all its prompts, each once however many outputs it has."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._cached: int | None = None

    def add(self, tokens: int) -> None:
        """So many more output tokens."""
        self._completion_tokens += tokens

    def ended(self, done: Completion, output: int) -> None:
        """An output has ended, the ``output``-th of its prompt: the first of them says what was cached."""
        if output == 0:
            self._cached = (self._cached or 0) + done.hit_tokens

    def usage(self) -> Usage:
        """So far."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": None if self._cached is None else {"cached_tokens": self._cached},
        }
