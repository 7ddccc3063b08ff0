"""API keys, and whose prompts share a cache.

    file:  KEY            no salt of its own: it may name one in a body, and ask for what concerns all
           KEY SALT       everything it asks for has this salt: a tenant

A tenant's cached prompts are found by its own requests only, so nobody tells by the clock what another asked. What
tells of all tenants at once, such as the metrics, is not for a tenant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from hybridkv.arguments import text
from hybridkv.errors import ConfigError
from hybridkv.regular_files import open_regular
from hybridkv.serve.errors import ApiError
from hybridkv.serve.page import PAGE

OPEN_ROUTES: Final = frozenset({"/health", "/ready"} | PAGE.keys())
"""Asked by whoever starts and stops servers; the page, which has no figures before it gives a key."""
TENANT_ROUTES: Final = ("/v1/", "/tokenize", "/detokenize", "/version", "/openapi.json")
"""What a tenant may ask for; the rest concerns all tenants."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks. salt: that all its requests have; None for whoever may choose."""

    salt: str | None = None


@dataclass(frozen=True)
class ApiKeys:
    """Known keys, by their digests: looking one up takes as long whatever it begins with."""

    tenants: Mapping[bytes, Tenant] = field(repr=False)

    @classmethod
    def read(cls, path: str | Path) -> ApiKeys:
        """From a file: a key a line, maybe a blank and its salt; # begins a comment line.

        Raises ConfigError for a file that cannot be read, a line of more than two words, a key that comes twice, and a
        file without keys.
        """
        try:
            with open_regular(path) as file:
                lines = file.read().decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys in {path}: {error}") from error
        tenants: dict[bytes, Tenant] = {}
        for number, line in enumerate(lines, start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2:
                raise ConfigError(f"{path}, line {number}: a line is a key, or a key and its salt")
            digest = _digest(words[0])
            if digest in tenants:
                raise ConfigError(f"{path}, line {number}: the key was there before")
            tenants[digest] = Tenant(words[1] if len(words) == 2 else None)
        if not tenants:
            raise ConfigError(f"{path} holds no API key")
        return cls(tenants)

    @property
    def salts(self) -> frozenset[str]:
        """Those that are bound to keys."""
        return frozenset(one.salt for one in self.tenants.values() if one.salt is not None)

    def tenant(self, key: str) -> Tenant | None:
        """Whose key it is; None for nobody's."""
        return self.tenants.get(_digest(key))


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyGate:
    """Lets through who has a key, before anything of a body is read; ``tenant_of`` then says who it is."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        if scope["type"] == "http":
            try:
                scope.setdefault("state", {})["tenant"] = self._tenant(scope)
            except ApiError as refused:
                await refused.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant:
        if self._keys is None or scope["path"] in OPEN_ROUTES:
            return Tenant()
        given = Headers(scope=scope).get("authorization", "")
        scheme, _, key = given.partition(" ")
        tenant = self._keys.tenant(key.strip()) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise ApiError(
                401,
                "give a known API key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if tenant.salt is not None and not scope["path"].startswith(TENANT_ROUTES):
            raise ApiError(403, f"{scope['path']} concerns all tenants: ask with a key that has no salt")
        return tenant


def tenant_of(request: Request) -> Tenant:
    """Who asks."""
    tenant: Tenant = request.state.tenant
    return tenant


def salt_for(tenant: Tenant, asked: str | None, keys: ApiKeys | None) -> str | None:
    """The salt of a request whose body asks for ``asked``. ApiError 403 for another tenant's."""
    if asked is not None:
        text("cache_salt", asked)
    if tenant.salt is not None and asked not in (None, tenant.salt):
        raise ApiError(403, "cache_salt: this API key has a salt of its own, leave it out", param="cache_salt")
    if tenant.salt is None and keys is not None and asked in keys.salts:
        raise ApiError(403, "cache_salt: that one belongs to another API key", param="cache_salt")
    return tenant.salt or asked
