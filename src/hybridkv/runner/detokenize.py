"""Tokens into text as they come, and the stop strings found on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_KEEP_TOKENS: Final = 8
_WINDOW_TOKENS: Final = 24
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_MOST_HELD: Final = 3
"""A character has up to 4 bytes, so up to 3 replacement characters may still become one."""


class Detokenizer:
    """The text of one request's output.

    tokenizer: has ``decode(ids, skip_special_tokens=)``. stop: strings that end the output.
    ``text``: what is certain so far; ``finish`` adds what was held back. ``num_tokens``: taken in, up to the one that
    completes a stop string. A token costs one decode of at
    most _WINDOW_TOKENS tokens, however long the output.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:  # noqa: ANN401  # transformers' tokenizers share no typed base
        self._tokenizer = tokenizer
        self._stop = tuple(one for one in stop if one)
        self._longest = max((len(one) for one in self._stop), default=0)
        self._window: list[int] = []
        self._shown = 0
        self.text = ""
        self.num_tokens = 0
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> bool:
        """Take in ``tokens``; True once a stop string is complete: ``text`` then ends in front of it."""
        for token in tokens:
            if self.stopped:
                break
            self.num_tokens += 1
            self._window.append(token)
            self._show(self._certain())
        return self.stopped

    @property
    def settled_characters(self) -> int:
        """How many characters of ``text`` no later token takes back: all but what may begin a stop string."""
        known = len(self.text)
        if self.stopped:
            return known
        for start in range(max(0, known - self._longest + 1), known):
            if any(one.startswith(self.text[start:]) for one in self._stop):
                return start
        return known

    def finish(self) -> str:
        """The whole text: what was held back as an unfinished character is shown as it is."""
        if not self.stopped:
            self._show(self._decoded())
        return self.text

    def _show(self, certain: str) -> None:
        """Append what ``certain`` has behind the part shown before, and look for stop strings there."""
        new = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if new:
            searched_from = max(0, len(self.text) - self._longest + 1)
            self.text += new
            self._cut(searched_from)
        if len(self._window) > _WINDOW_TOKENS:
            # how much of the shorter window is shown follows from how much of the longer one is not
            self._window = self._window[-_KEEP_TOKENS:]
            self._shown = len(self._certain())

    def _cut(self, start: int) -> None:
        found = [at for one in self._stop if (at := self.text.find(one, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=True)
        return text

    def _certain(self) -> str:
        """The window's text without a character at its end that later tokens may change."""
        text = self._decoded()
        held = len(text) - len(text.rstrip(_REPLACEMENT))
        return text[: len(text) - min(held, _MOST_HELD)]
