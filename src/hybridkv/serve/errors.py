"""Error answers in OpenAI's format ``{"error": {"message", "type", "param", "code"}}``, and clients that disconnect.

400 the body is wrong       401, 403 the key, the Host or the Origin    404 no such model or route    408 too slow 413,
414, 431 too long      429 the queue is full    500 the forward failed    503 the engine has ended, or no memory
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive
from typing_extensions import TypedDict

from hybridkv.errors import CacheError, ConfigError

logger = logging.getLogger(__name__)

INVALID: Final = "invalid_request_error"
RETRY_AFTER: Final = 1
"""Seconds after which a rejected client should try again."""
RETRY: Final = {"Retry-After": str(RETRY_AFTER)}
CLIENT_GONE: Final = 499
"""The status of an answer to a client that has disconnected."""
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_MOST_CHARACTERS: Final = 1000


class ErrorFields(TypedDict):
    """The fields of an error.

    Attributes:
        message: the error, and how to fix it.
        type: its kind.
        param: the field of the body that it is about.
        code: a name for programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of an error answer."""

    error: ErrorFields


class ClientGoneError(Exception):
    """The client disconnected, so the answer has no reader."""


async def leaves(receive: Receive) -> None:
    """Return once the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ApiError(Exception):
    """An error answer. ``param`` is the field that it is about, ``code`` a name for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> ErrorBody:
        """The error in OpenAI's format."""
        # the text of a client may hold lone surrogates, which JSON in UTF-8 cannot encode
        message = str(self).encode("utf-8", "backslashreplace").decode()
        if len(message) > _MOST_CHARACTERS:
            message = f"{message[:_MOST_CHARACTERS]} ..."
        kind = _KINDS.get(self.status, INVALID)
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the answer."""
        return JSONResponse(self.body, self.status, self.headers)


def api_error(error: Exception) -> ApiError:
    """Return the answer for an error of the engine: its own text if a client can fix it. Other errors are logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):
        return ApiError(400, str(error))
    if isinstance(error, CacheError):
        return ApiError(503, str(error))
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"the request failed with {type(error).__name__}: read the server's log")


def answer_errors(app: FastAPI) -> None:
    """Register a handler for each error that the routes of ``app`` raise."""
    for kind in (ApiError, ConfigError, CacheError, Exception):
        app.add_exception_handler(kind, _of_engine)
    app.add_exception_handler(ClientGoneError, _of_gone_client)
    app.add_exception_handler(RequestValidationError, _of_body)
    app.add_exception_handler(HTTPException, _of_route)


async def _of_engine(_: Request, error: Exception) -> JSONResponse:
    return api_error(error).response()


async def _of_gone_client(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _of_route(request: Request, error: Exception) -> JSONResponse:
    """Answer an unknown route or method, or a body that is too long or incomplete."""
    status, detail, headers = 500, "", None
    if isinstance(error, HTTPException):
        status, detail, headers = error.status_code, error.detail, error.headers
    return ApiError(status, f"{request.method} {request.url.path}: {detail}", headers=headers).response()


async def _of_body(_: Request, error: Exception) -> JSONResponse:
    """Answer with the first invalid field of a body."""
    first = error.errors()[0] if isinstance(error, RequestValidationError) else {}
    name = ".".join(str(one) for one in first.get("loc", ()) if one != "body")
    kind, said = first.get("type", ""), first.get("msg", "").removeprefix("Value error, ")
    code = None
    if kind == "json_invalid":
        message, name = f"the body is not valid JSON: {first['ctx']['error']}", ""
    elif kind == "extra_forbidden":
        instead = "use structured_outputs" if name.startswith("guided_") else "leave it out"  # vLLM's older names
        message, code = f"{name} is not offered: {instead}", "not_offered"
    elif not name:
        whole = kind in {"missing", "model_attributes_type"}
        message = "the body must be a JSON object, sent as application/json" if whole else said
    else:
        message = f"{name} is missing" if kind == "missing" else f"{name}: {said}"
    return ApiError(400, message, param=name or None, code=code).response()
