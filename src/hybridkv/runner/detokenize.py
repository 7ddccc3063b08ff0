"""Tokens into text as they come, and the stop strings found on the way.

A tokenizer decodes sequences, not tokens: a character may take several, and what one token becomes may depend on those
around it. So a window of the last tokens is decoded, and what is new of its text is shown:

    output  [ ... | context           | tail of the context | pending    ]
                  ^ window begins     ^ it may begin here   ^ read        ^ now

Window, tail and read begin where the decoded text ended in a whole character, never inside one. Pending are the tokens
of a character that is not whole yet: tokenizers write U+FFFD for it, which is held back.

Tokenizers with byte fallback (<0xF0> <0x9F> ...) judge neighbouring bytes as one run: unless all of it is UTF-8, each
byte becomes a U+FFFD, those of whole characters too, so a character that was right becomes wrong while the next one is
not whole. What has been shown stays: of a run that turns out to be no UTF-8, the text keeps the longest beginning that
is, and has one U+FFFD for each byte behind it. Everything else is what ``decode`` makes of the whole output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_CONTEXT_TOKENS: Final = 8
_LONG_TOKENS: Final = 24
_CHARACTER_TOKENS: Final = 4
"""The most tokens of one character: UTF-8 has up to 4 bytes."""
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one request's output.

    tokenizer: has ``decode(ids, skip_special_tokens=)``. stop: strings that end the output, where they end behind the
    text of its first ``min_tokens`` tokens.
    ``text``: what is certain so far; ``finish`` adds what was held back. ``num_tokens``: taken in, up to the one that
    completes a stop string. A token costs one decode of at most _LONG_TOKENS tokens, however long the output; inside
    bytes that are no UTF-8, one of all of them for each whole character.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), min_tokens: int = 0) -> None:  # noqa: ANN401  # transformers' tokenizers share no typed base
        self._tokenizer = tokenizer
        self._stop = tuple(one for one in stop if one)
        self._longest = max((len(one) for one in self._stop), default=0)
        self._min_tokens, self._unstopped = min_tokens, 0  # the latter: characters of the first min_tokens tokens
        self._window: list[int] = []
        self._tail = self._read = 0  # tokens of the window in front of its tail, and of its pending tokens
        self._seen = ""  # what of the window's text is shown
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
            if not self._ends_inside_a_character():
                self._show()
            if self.num_tokens <= self._min_tokens:
                self._unstopped = len(self.text)
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
        """The whole text: what was held back as an unfinished character is shown as it is.

        That may complete a stop string, too: ``stopped`` then says so.
        """
        if not self.stopped:
            self._extend(self._decode(self._window))
        return self.text

    def _ends_inside_a_character(self) -> bool:
        """Whether that is certain without decoding all of a window that is long already."""
        if len(self._window) <= _LONG_TOKENS:
            return False
        return self._decode(self._window[-_CHARACTER_TOKENS:]).endswith(_REPLACEMENT)

    def _show(self) -> None:
        """Show what is certain of the window's text."""
        text = self._decode(self._window)
        if text and text == self._seen:
            del self._window[self._read :]  # such as special tokens: however many come, the window stays short
            return
        certain = text.rstrip(_REPLACEMENT)
        if certain == text:
            self._extend(text)
            self._move_on()
        elif certain.startswith(self._seen):
            self._extend(certain)

    def _extend(self, text: str) -> None:
        """Show ``text``, the window's, behind what is shown of it; look for stop strings there."""
        # else the pending bytes made no UTF-8 of their run, and all of it reads as replacement characters
        new = text[len(self._seen) :] if text.startswith(self._seen) else self._decode(self._window[self._read :])
        self._seen = text
        if new:
            searched_from = max(0, len(self.text) - self._longest + 1)
            self.text += new
            self._cut(searched_from)

    def _move_on(self) -> None:
        """The window's text ends in a whole character, and all of it is shown."""
        self._read = len(self._window)
        if self._read - self._tail < _CONTEXT_TOKENS:
            return
        if self._tail:
            del self._window[: self._tail]
            self._seen = self._decode(self._window)
        self._tail = self._read = len(self._window)

    def _cut(self, start: int) -> None:
        if self.num_tokens <= self._min_tokens:
            return
        behind = self._unstopped + 1  # where the first stop string may end
        found = [at for one in self._stop if (at := self.text.find(one, max(start, behind - len(one)))) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
