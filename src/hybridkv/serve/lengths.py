"""Bodies of bounded length, and of bounded work: parsing JSON holds the interpreter, and everybody waits.

30 MB are parsed in 20 ms if they are one text, and in seconds if they are a million small values.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridkv.serve.errors import ApiError

MOST_BODY_BYTES: Final = 32 << 20
MOST_VALUES: Final = 1 << 18
"""Values in a body of JSON (numbers, texts, objects), where the model's length asks for no more."""
BYTES_PER_SECOND: Final = 32 << 20
"""Of all long bodies together: 30 MB hold the interpreter, which all share, for a quarter of a second."""
_LONGEST_WAIT: Final = 0.5
"""Seconds that a piece of a body may wait for its turn. Only a flood of them waits longer."""
_SHORT: Final = 64 << 10
"""Bytes at the beginning of a body that are read at once."""
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|(?P<open>\\?)\Z)', re.DOTALL)


class Pace:
    """Lets so many bytes pass in a second, whoever sends them, so that others get their share of the interpreter.

    Args:
        bytes_per_second: of all callers together.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._seconds_per_byte = 1.0 / bytes_per_second
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        """Wait until ``size`` bytes more may pass. Callers wait in the order in which they came.

        Raises ApiError (503) if that takes more than half a second: who waits holds its bytes, and may have left.
        """
        now = asyncio.get_running_loop().time()
        begins = max(self._free_at, now)
        if begins - now > _LONGEST_WAIT:
            again = {"Retry-After": "1"}
            raise ApiError(503, "the server reads too many long bodies: ask again later", headers=again)
        self._free_at = begins + size * self._seconds_per_byte
        await asyncio.sleep(self._free_at - now)


class BodyGate:
    """Reads the body before the application is asked. Refuses one that is too long, with status 413.

    A client that leaves on the way is dropped here with all it sent. FastAPI would raise, and hold the body until the
    next garbage collection.

    Args:
        app: is asked with the whole body.
        most_values: values in the body.
        pace: at which bodies are read, behind the first 64 KiB of each.
    """

    def __init__(self, app: ASGIApp, most_values: int, pace: Pace) -> None:
        self._app, self._most_values, self._pace = app, most_values, pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._body(Headers(scope=scope), receive)
        except ApiError as refused:
            await refused.response()(scope, receive, send)
            return
        if body is None:
            return
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_whole() -> Message:
            return given.pop() if given else await receive()

        await self._app(scope, receive_whole, send)

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """All of it; None if the client leaves before."""
        said = headers.get("content-length", "")
        _require_length(int(said) if said.isdecimal() else 0)
        pieces, values, read, more = list[bytes](), ValueCounter(), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece: bytes = message.get("body", b"")
            pieces.append(piece)
            read += len(piece)
            if len(pieces) == 1 and json.detect_encoding(piece) not in {"utf-8", "utf-8-sig"}:
                raise ApiError(400, "the body is no JSON: it must be UTF-8 text")  # values are counted in UTF-8
            more = message.get("more_body", False)
            _require_length(read)
            count = values.add(piece)
            if read > _SHORT:  # a refused body costs as much
                await self._pace.take(len(piece))
            if count > self._most_values:
                raise ApiError(413, f"the body has too many values: at most {self._most_values} are read")
        return b"".join(pieces)


def _require_length(size: int) -> None:
    if size > MOST_BODY_BYTES:
        raise ApiError(413, f"the body is too long: at most {MOST_BODY_BYTES} bytes are read")


class ValueCounter:
    """Counts values of JSON that comes in pieces: commas outside of strings. O(bytes), whatever they are."""

    def __init__(self) -> None:
        self._count = 1
        self._open = b""  # a string that the last piece did not end, as if it began with the next one

    def add(self, piece: bytes) -> int:
        """Read the next piece; return how many values there are so far, at most."""
        text, self._open = self._open + piece, b""
        self._count += (_STRING.sub(self._without, text) if b'"' in text else text).count(b",")
        return self._count

    def _without(self, string: re.Match[bytes]) -> bytes:
        """Nothing in the place of a string."""
        ends_in = string["open"]
        if ends_in is not None:
            self._open = b'"' + ends_in
        return b""
