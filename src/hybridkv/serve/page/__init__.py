"""The page at ``/``: one document, its style and script, and uPlot, which draws its charts, as they lie here.

Nothing in it tells of requests: figures come from ``/live``, for who may have them.
"""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

if TYPE_CHECKING:  # which knows the page's routes
    from hybridkv.serve.front import Front

_HERE: Final = Path(__file__).parent
PAGE: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/uplot.css": ("uplot.css", "text/css; charset=utf-8"),
    "/page/uplot.js": ("uplot.js", "text/javascript; charset=utf-8"),
    "/page/uplot.LICENSE": ("uplot.LICENSE", "text/plain; charset=utf-8"),
}
"""Of each route: the file here, and its type."""
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, front: Front) -> None:
    """Its routes, and ``/live``."""
    for path, (name, kind) in PAGE.items():
        _add_file(app, path, (_HERE / name).read_bytes(), kind)

    @app.get("/live", include_in_schema=False)
    async def live() -> Response:
        """A sample of the engine a second, as server-sent events."""
        return LiveStream(front)


def _add_file(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)


class LiveStream(StreamingResponse):
    """Samples until the client goes, or the server drains."""

    def __init__(self, front: Front) -> None:
        self._events = front.live.events(lambda: front.draining)
        super().__init__(self._events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)
