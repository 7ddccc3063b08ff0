"""Which web pages may use a server without keys: none but its own, and those that are named.

A page in a browser can send requests to any server that the browser reaches. Two checks refuse them:

    Origin    names the page that asks. It must be the server's own, or allowed.
    Host      names the server as the page sees it. A page whose own name was pointed at this server (DNS rebinding)
              has its name there. Names that nobody can register, and IP addresses, are safe; others must be allowed.

A key cannot be known to such a page. A server with keys checks neither.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from hybridkv.arguments import text
from hybridkv.errors import ConfigError
from hybridkv.serve.errors import ApiError

ANY_HOST: Final = "*"
_PRIVATE: Final = (".localhost", ".local", ".internal", ".home.arpa")
"""Endings of names that no public DNS answers for."""
_PORTS: Final = {"http": 80, "https": 443}


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


class OriginGate:
    """Refuses requests that pages of others send, with status 403.

    Args:
        app: what is asked if a request is not refused.
        hosts: allowed in Host, beside IP addresses, names without a dot, and names of private networks.
        origins: allowed in Origin, beside that of Host.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._app, self._origins = app, frozenset(origins)
        self._hosts = frozenset(hosts) | {socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application."""
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope))
            except ApiError as refused:
                await refused.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        hosts = [one.lower() for one in headers.getlist("host")]
        for one in hosts:
            if one and not self._is_safe(one):
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
            if one.lower() not in self._origins and not any(_is_of(one.lower(), host) for host in hosts):
                raise ApiError(
                    403,
                    f"pages of {one!r} may not ask this server: start it with --allow-origin ORIGIN, or with keys",
                    code="origin_not_allowed",
                )

    def _is_safe(self, host: str) -> bool:
        name, _ = _split(host)
        name = name.rstrip(".")
        if ANY_HOST in self._hosts or name in self._hosts or is_address(name):
            return True
        return bool(name) and ("." not in name or name.endswith(_PRIVATE))


def _split(host: str) -> tuple[str, int | None]:
    """Name and port; an empty name if it is no host."""
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port
    except ValueError:
        return "", None
    if parts.netloc != host or "@" in host or parts.hostname is None:
        return "", None
    return parts.hostname, port


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
