"""Names that callers give to content: of multimodal items, and of what encoders read.

A name stands in the keys of blocks in place of the content, so it must mean one content. How many tokens that has is
all that can be checked of it: a name that comes with another number is refused, and not served what the first one left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hybridkv.errors import ConfigError
from hybridkv.request import Request

MOST_NAMES: Final = 1 << 16
"""Names that are remembered; the one not seen for longest goes first."""

_Name = tuple[str, str | bytes, str | None]
"""Of what; the name; the salt, since under another one nothing is shared."""


class ContentNames:
    """name -> tokens of its content, of requests that began. Any thread may ask ``refuse``."""

    def __init__(self) -> None:
        self._tokens: dict[_Name, int] = {}

    def refuse(self, request: Request) -> None:
        """ConfigError for a request in which a name comes with another number of tokens. O(its names)."""
        for name, tokens in _names(request):
            known = self._tokens.get(name, tokens)
            if known != tokens:
                raise ConfigError(
                    f"{name[0]} {name[1]!r} of request {request.request_id!r} has {tokens} tokens, it had {known} "
                    "before: a name means one content, so give content that differs another name"
                )

    def know(self, request: Request) -> None:
        """``request`` begins: blocks may be kept under its names from now on."""
        for name, tokens in _names(request):
            self._tokens.pop(name, None)
            self._tokens[name] = tokens
            if len(self._tokens) > MOST_NAMES:
                del self._tokens[next(iter(self._tokens))]

    def forget(self) -> None:
        """No block is kept under any name."""
        self._tokens.clear()


def _names(request: Request) -> Iterator[tuple[_Name, int]]:
    for item in request.multimodal:
        yield ("multimodal item", item.id, request.cache_salt), item.length
    if request.encoder is not None:
        yield ("encoder input", request.encoder.digest, request.cache_salt), request.encoder.num_tokens
