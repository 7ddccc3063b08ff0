"""Clients that go away: what they asked for ends, and nobody is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from starlette.types import Receive

T = TypeVar("T")

CLIENT_GONE: Final = 499
"""The status of an answer that nobody reads."""


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


async def leaves(receive: Receive) -> None:
    """Return once the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(receive: Receive, work: Awaitable[T]) -> T:
    """Return what ``work`` returns; cancel it and raise ClientGoneError if the client goes first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(leaves(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
