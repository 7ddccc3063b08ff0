"""Gates before the routes: API keys and tenants, pages of other sites, bodies of bounded length and work.

API keys     a file has a key a line:   KEY        no salt of its own: bodies may name one, all routes may be asked
                                        KEY SALT   a tenant: its requests have this salt
             A tenant's cached prompts are found by its own requests only, so nobody tells by the clock what another
             asked. Routes that tell of all tenants at once, such as the metrics, are not for a tenant.

Pages        A page in a browser can send requests to any server that the browser reaches. Two checks refuse them:
             Origin    names the page that asks. It must be the server's own, or allowed.
             Host      names the server as the page sees it. A page whose own name was pointed at this server (DNS
                       rebinding) has its name there. Names that nobody can register, and IP addresses, are safe;
                       others must be allowed.
             A key cannot be known to such a page. A server with keys checks neither.

Bodies       Parsing JSON holds the interpreter, and everybody waits. 30 MB are parsed in 20 ms if they are one text,
             and in seconds if they are a million small values.
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
from hybridkv.serve.errors import ApiError

TENANT_ROUTES: Final = ("/v1/", "/tokenize", "/detokenize", "/version", "/openapi.json")
"""What a tenant may ask for; the rest concerns all tenants."""
ANY_HOST: Final = "*"
_PRIVATE: Final = (".localhost", ".local", ".internal", ".home.arpa")
"""Endings of names that no public DNS answers for."""
_PORTS: Final = {"http": 80, "https": 443}
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


class HeadGate:
    """An ASGI application before another: requests that ``check`` raises an ApiError for do not reach it."""

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
    """Known keys, by their digests: looking one up takes as long whatever it begins with.

    Args:
        salts: of each key its salt, or None for a key without one.
    """

    def __init__(self, salts: Mapping[str, str | None]) -> None:
        self._salts = {_digest(key): salt for key, salt in salts.items()}
        self.bound = frozenset(salt for salt in salts.values() if salt is not None)
        """Salts that belong to keys."""

    @classmethod
    def read(cls, path: str | Path) -> ApiKeys:
        """Read a file of keys: a key a line, maybe a blank and its salt; # begins a comment line.

        Raises ConfigError for a file that cannot be read, a line of more than two words, a key that comes twice, and a
        file without keys.
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
                raise ConfigError(f"{path}, line {number}: a line is a key, or a key and its salt")
            if words[0] in salts:
                raise ConfigError(f"{path}, line {number}: the key was there before")
            salts[words[0]] = words[1] if len(words) == 2 else None
        if not salts:
            raise ConfigError(f"{path} holds no API key")
        return cls(salts)

    def __contains__(self, key: str) -> bool:
        return _digest(key) in self._salts

    def salt(self, key: str) -> str | None:
        """Return the salt of a known key."""
        return self._salts[_digest(key)]


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def check_key(keys: ApiKeys | None, open_routes: Collection[str], scope: Scope, headers: Headers) -> None:
    """Let requests with one of ``keys`` pass, before anything of a body is read; ``tenant_of`` then tells their salt.

    keys: None lets all pass. open_routes: need no key.
    Raises ApiError 401 for an unknown key, 403 for a tenant's where a route concerns all tenants.
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
    """Return the salt of all that this client asks for; None for a client that may choose."""
    tenant: str | None = request.state.tenant
    return tenant


# pages of other sites


def host_name(name: str, value: object) -> str:
    """Check the name of a host, without a port, or ANY_HOST; return it in lower case. ConfigError for others."""
    given = text(name, value).lower().rstrip(".")
    if given != ANY_HOST and _split(given) != (given, None):
        raise ConfigError(f"{name} must be the name of a host, without scheme and port, or *, got {value!r}")
    return given


def origin(name: str, value: object) -> str:
    """Check an origin, such as https://app.example; return it in lower case. ConfigError for others."""
    given = text(name, value).lower()
    scheme, _, netloc = given.partition("://")
    host, port = _split(netloc)
    if not scheme.isalpha() or not host:
        raise ConfigError(f"{name} must be an origin such as https://app.example, got {value!r}")
    if port is not None and port == _PORTS.get(scheme):
        raise ConfigError(f"{name} must be an origin as browsers send it: leave :{port} out of {value!r}")
    return given


def check_origin(allowed_hosts: Collection[str], allowed_origins: Collection[str], _: Scope, headers: Headers) -> None:
    """Refuse requests that pages of others send: ApiError 403 for a Host or an Origin that is not allowed.

    allowed_hosts: beside IP addresses, names without a dot, and names of private networks.
    allowed_origins: beside that of Host.
    """
    hosts = [one.lower() for one in headers.getlist("host")]
    for one in hosts:
        if one and not _is_safe(one, allowed_hosts):
            raise ApiError(
                403,
                f"Host {one!r} is not known here: start the server with --allow-host NAME, or with keys",
                code="host_not_allowed",
            )
    origins = headers.getlist("origin")
    if (
        headers.get("sec-fetch-site") == "cross-site"  # a picture or a script of another page: no Origin is sent
        and headers.get("sec-fetch-mode") != "navigate"
        and not origins
    ):
        raise ApiError(403, "pages of other sites may not ask this server", code="origin_not_allowed")
    for one in origins:
        if one.lower() not in allowed_origins and not any(_is_of(one.lower(), host) for host in hosts):
            raise ApiError(
                403,
                f"pages of {one!r} may not ask this server: start it with --allow-origin ORIGIN, or with keys",
                code="origin_not_allowed",
            )


def _is_safe(host: str, allowed: Collection[str]) -> bool:
    name = _split(host)[0].rstrip(".")
    if ANY_HOST in allowed or name in allowed or is_address(name):
        return True
    return bool(name) and ("." not in name or name.endswith(_PRIVATE))


def _split(host: str) -> tuple[str, int | None]:
    """Name and port; an empty name if it is no host."""
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
    """Whether ``origin`` is that of a page from ``host``. A proxy may have taken TLS off, so any scheme is one."""
    scheme, _, netloc = origin.partition("://")
    default = _PORTS.get(scheme)
    if default is None:
        return False
    (name, port), (own_name, own_port) = _split(netloc), _split(host)
    return bool(name) and name == own_name and (port or default) == (own_port or default)


# bodies


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

        Raises ApiError (503) if that takes more than half a second: a client that waits holds its bytes, and may leave.
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
        pace: at which bodies are read, after the first 64 KiB of each.
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
