"""Checks before the routes: API keys and tenants, requests from pages of other sites, bodies of bounded work.

API keys     a file has one key on each line:   KEY        no salt: bodies may name one, all routes are allowed
                                                KEY SALT   a tenant: its requests have this salt
             Only requests of a tenant find its cached prompts, so response times reveal nothing about other tenants.
             Routes that report on all tenants at once, such as the metrics, are not for a tenant.

Pages        A page in a browser can send requests to any server that the browser reaches. Two checks refuse them:
             Origin    names the site of the page. It must be the server's own, or allowed.
             Host      names the server as the page sees it. If an attacker points the page's own name at this server
                       (DNS rebinding), Host has that name. IP addresses and names that cannot be registered in
                       public DNS are safe; other names must be allowed.
             A page of another site does not know a key, so a server with keys checks neither.

Bodies       Parsing JSON blocks the interpreter, and all clients wait. Parsing 30 MB takes 20 ms if they are one text,
             and seconds if they are a million small values.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridkv.arguments import text
from hybridkv.errors import ConfigError
from hybridkv.regular_files import open_regular
from hybridkv.serve.errors import RETRY, RETRY_AFTER, ApiError

TENANT_ROUTES: Final = ("/v1/", "/tokenize", "/detokenize", "/version", "/openapi.json")
"""Routes for tenants; the others concern all tenants."""
ANY_HOST: Final = "*"
_PRIVATE: Final = (".localhost", ".local", ".internal", ".home.arpa")
"""Endings of names that public DNS never resolves."""
_PORTS: Final = {"http": 80, "https": 443}
MOST_BODY_BYTES: Final = 32 << 20
MOST_VALUES: Final = 1 << 18
"""JSON values of a body (numbers, texts, objects), unless the length of the model needs more."""
BYTES_PER_SECOND: Final = 32 << 20
"""The pace of all long bodies together: reading 30 MB blocks the interpreter for a quarter of a second."""
_LONGEST_WAIT: Final = 0.5
"""Seconds that a piece of a body may wait for its turn; chosen by hand."""
_SHORT: Final = 64 << 10
"""Bytes at the beginning of a body that are read without a pace."""
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|(?P<open>\\?)\Z)', re.DOTALL)


class HeadGate:
    """An ASGI application before another: a request for which ``check`` raises an ApiError does not reach it."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope, Headers], None]) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application."""
        if scope["type"] == "http":
            try:
                self._check(scope, Headers(scope=scope))
            except ApiError as refused:
                await refused.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


# API keys


class ApiKeys:
    """The known keys, by their digests: a look-up takes the same time whatever the key begins with.

    Args:
        salts: the salt of each key, or None for a key without one.

    Attributes:
        bound: the salts that belong to keys.
    """

    def __init__(self, salts: Mapping[str, str | None]) -> None:
        self._salts = {_digest(key): salt for key, salt in salts.items()}
        self.bound = frozenset(salt for salt in salts.values() if salt is not None)

    @classmethod
    def read(cls, path: str | Path) -> ApiKeys:
        """Read a file of keys: on each line a key, or a key, a blank and its salt; # begins a comment line.

        Args:
            path: the file.

        Raises:
            ConfigError: the file cannot be read, a line has more than two words, a key comes twice, or there is no key.
        """
        try:
            with open_regular(path) as file:
                lines = file.read().decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys in {path}: {error}") from error
        salts: dict[str, str | None] = {}
        for number, line in enumerate(lines, start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2:
                raise ConfigError(f"{path}, line {number}: a line must be KEY or KEY SALT, got {len(words)} words")
            if words[0] in salts:
                raise ConfigError(f"{path}, line {number}: this key is on an earlier line too: remove one of them")
            salts[words[0]] = words[1] if len(words) == 2 else None
        if not salts:
            raise ConfigError(f"{path} holds no API key: give one key on each line")
        return cls(salts)

    def __contains__(self, key: str) -> bool:
        return _digest(key) in self._salts

    def salt(self, key: str) -> str | None:
        """Return the salt of a known key, or ``None`` if it has none.

        Args:
            key: a key of the file.
        """
        return self._salts[_digest(key)]


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def check_key(keys: ApiKeys | None, open_routes: Collection[str], scope: Scope, headers: Headers) -> None:
    """Accept requests with one of ``keys``, before the body is read. ``tenant_of`` then returns their salt.

    ``keys`` None accepts all requests; ``open_routes`` need no key. Raises ApiError 401 for an unknown key, and 403 for
    the key of a tenant on a route that concerns all tenants.
    """
    scope.setdefault("state", {})["tenant"] = None
    path = scope["path"]
    if keys is None or path in open_routes:
        return
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or key.strip() not in keys:
        raise ApiError(
            401,
            "give a known API key: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    tenant = keys.salt(key.strip())
    if tenant is not None and not path.startswith(TENANT_ROUTES):
        raise ApiError(403, f"{path} concerns all tenants: ask with a key that has no salt")
    scope["state"]["tenant"] = tenant


def tenant_of(request: Request) -> str | None:
    """Return the salt of all requests of this client; ``None`` if the client may choose."""
    tenant: str | None = request.state.tenant
    return tenant


# pages of other sites


def host_name(name: str, value: object) -> str:
    """Check the name of a host without a port, or ANY_HOST, and return it in lower case. ConfigError for others."""
    given = text(name, value).lower().rstrip(".")
    if given != ANY_HOST and _split(given) != (given, None):
        raise ConfigError(f"{name} must be the name of a host, without scheme and port, or *, got {value!r}")
    return given


def origin(name: str, value: object) -> str:
    """Check an origin, such as https://app.example, and return it in lower case. ConfigError for other values."""
    given = text(name, value).lower()
    scheme, _, netloc = given.partition("://")
    host, port = _split(netloc)
    if not scheme.isalpha() or not host:
        raise ConfigError(f"{name} must be an origin such as https://app.example, got {value!r}")
    if port is not None and port == _PORTS.get(scheme):
        raise ConfigError(f"{name} must be an origin as browsers send it: leave :{port} out of {value!r}")
    return given


def check_origin(allowed_hosts: Collection[str], allowed_origins: Collection[str], _: Scope, headers: Headers) -> None:
    """Refuse requests of other sites' pages: ApiError 403 for a Host or an Origin that is not allowed.

    IP addresses, names without a dot and names of private networks are allowed in addition to ``allowed_hosts``. The
    origin of Host is allowed in addition to ``allowed_origins``.
    """
    hosts = [one.lower() for one in headers.getlist("host")]
    for one in hosts:
        if one and not _is_safe(one, allowed_hosts):
            raise ApiError(
                403,
                f"Host {one!r} is not allowed: start the server with --allow-host NAME, or with keys",
                code="host_not_allowed",
            )
    origins = headers.getlist("origin")
    if (
        headers.get("sec-fetch-site") == "cross-site"  # an image or script of another site: no Origin is sent
        and headers.get("sec-fetch-mode") != "navigate"
        and not origins
    ):
        raise ApiError(
            403,
            "Sec-Fetch-Site is cross-site: pages of other sites may not use this server; start it with keys",
            code="origin_not_allowed",
        )
    for one in origins:
        if one.lower() not in allowed_origins and not any(_is_of(one.lower(), host) for host in hosts):
            raise ApiError(
                403,
                f"Origin {one!r} is not allowed: start the server with --allow-origin ORIGIN, or with keys",
                code="origin_not_allowed",
            )


def _is_safe(host: str, allowed: Collection[str]) -> bool:
    name = _split(host)[0].rstrip(".")
    if ANY_HOST in allowed or name in allowed or is_address(name):
        return True
    return bool(name) and ("." not in name or name.endswith(_PRIVATE))


def _split(host: str) -> tuple[str, int | None]:
    """Return name and port; the name is empty if ``host`` is not a host."""
    with suppress(ValueError):
        parts = urlsplit(f"//{host}")
        if parts.netloc == host and "@" not in host and parts.hostname is not None:
            return parts.hostname, parts.port
    return "", None


def is_address(name: str) -> bool:
    """Return whether ``name`` is an IP address."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_of(origin: str, host: str) -> bool:
    """Return whether ``origin`` is that of a page from ``host``, with any scheme: a proxy may have removed TLS."""
    scheme, _, netloc = origin.partition("://")
    default = _PORTS.get(scheme)
    if default is None:
        return False
    (name, port), (own_name, own_port) = _split(netloc), _split(host)
    return bool(name) and name == own_name and (port or default) == (own_port or default)


# bodies


class Pace:
    """Limits the bytes per second of all clients together, so that other work gets its share of the interpreter.

    Args:
        bytes_per_second: for all callers together.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._seconds_per_byte = 1.0 / bytes_per_second
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        """Wait until ``size`` more bytes may pass. Callers wait in the order in which they came.

        Raises ApiError 503 if that takes more than half a second, because a waiting client occupies memory and may
        disconnect.
        """
        now = asyncio.get_running_loop().time()
        begins = max(self._free_at, now)
        if begins - now > _LONGEST_WAIT:
            again = f"try again after {RETRY_AFTER} s"
            raise ApiError(503, f"the server reads too many long bodies at once: {again}", headers=RETRY)
        self._free_at = begins + size * self._seconds_per_byte
        await asyncio.sleep(self._free_at - now)


class BodyGate:
    """Reads the body before the application runs. Refuses a body that is too long, with status 413.

    If a client disconnects before the end, its input is dropped at once. FastAPI would raise, and keep the body until
    the next garbage collection.

    Args:
        app: receives the whole body.
        most_values: most JSON values in the body.
        pace: the pace at which bodies are read, after the first 64 KiB of each.
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
        """Return the whole body; ``None`` if the client disconnects before its end."""
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
                raise ApiError(400, "the body is not JSON: send it as UTF-8 text")  # values are counted in UTF-8
            more = message.get("more_body", False)
            _require_length(read)
            count = values.add(piece)
            if read > _SHORT:  # a refused body costs as much
                await self._pace.take(len(piece))
            if count > self._most_values:
                raise ApiError(
                    413, f"the body has {count} JSON values or more, at most {self._most_values} are read: send fewer"
                )
        return b"".join(pieces)


def _require_length(size: int) -> None:
    if size > MOST_BODY_BYTES:
        raise ApiError(
            413, f"the body has {size} bytes or more, at most {MOST_BODY_BYTES} are read: send a shorter one"
        )


class ValueCounter:
    """Counts the values of JSON that arrives in pieces: commas outside of strings. O(bytes)."""

    def __init__(self) -> None:
        self._count = 1
        self._open = b""  # a string that the last piece did not end, as if it began with the next one

    def add(self, piece: bytes) -> int:
        """Read the next piece. Return an upper bound of the number of values so far."""
        text, self._open = self._open + piece, b""
        self._count += (_STRING.sub(self._without, text) if b'"' in text else text).count(b",")
        return self._count

    def _without(self, string: re.Match[bytes]) -> bytes:
        """Replace a string by nothing, and remember one that is still open."""
        ends_in = string["open"]
        if ends_in is not None:
            self._open = b'"' + ends_in
        return b""
