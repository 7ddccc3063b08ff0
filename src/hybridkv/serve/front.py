"""What all routes share: the engine behind asyncio, its tokenizer's threads, its places, its tenants."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

from opentelemetry.trace import Tracer
from starlette.requests import Request

from hybridkv.arguments import check_fields, each, integer, one_of, or_none, text
from hybridkv.errors import ConfigError
from hybridkv.runner.async_engine import AsyncEngine, EventSink
from hybridkv.runner.engine import Engine
from hybridkv.serve.bodies import SamplingBody
from hybridkv.serve.errors import ApiError
from hybridkv.serve.gates import ApiKeys, host_name, origin, tenant_of
from hybridkv.serve.metrics import PREFIX, Live, RequestMetrics, metrics_prefix
from hybridkv.serve.tokens import Tokens

RETRY_AFTER: Final = 1
"""Seconds until a client that was turned away should ask again."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How an engine is served. name: of the model, for clients; None for the engine's.

    max_waiting: outputs that may wait beside those that run; further ones are answered 429.
    keys: of clients; None lets every client ask. metrics_prefix: what names of metrics begin with.
    allow_hosts: names in Host that a server without keys answers to, beside private ones; "*" for any.
    allow_origins: of pages that may use the server from a browser, such as https://app.example.
    Raises ConfigError for values that cannot be.
    """

    name: str | None = None
    max_waiting: int = 256
    keys: ApiKeys | None = None
    metrics_prefix: str = PREFIX
    allow_hosts: Sequence[str] = ()
    allow_origins: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_fields(self, or_none(text), "name")
        check_fields(self, partial(integer, least=0), "max_waiting")
        check_fields(self, or_none(one_of(ApiKeys)), "keys")
        check_fields(self, metrics_prefix, "metrics_prefix")
        check_fields(self, each(host_name), "allow_hosts")
        check_fields(self, each(origin), "allow_origins")


class Places:
    """``most`` outputs at once, whether they run or wait; of one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    def require(self, count: int) -> None:
        """Raise ApiError 400 for more outputs than there are places."""
        if count > self._most:
            raise ApiError(400, f"{count} outputs asked for at once: at most {self._most} are in hand at a time")

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold ``count`` places in the context. ApiError 429 while too few are left, 400 where there never are."""
        self.require(count)
        if self.taken + count > self._most:
            raise ApiError(
                429,
                f"{self.taken} outputs are in hand, {self._most} at most: ask again later",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER)},
            )
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count


class Front:
    """An engine that is served: used as ``async with``, which closes it."""

    def __init__(
        self, engine: Engine, options: ServeOptions, events: EventSink | None, tracer: Tracer | None = None
    ) -> None:
        self.engine, self.options = AsyncEngine(engine, events=events), options
        self.loaded = engine.loaded
        self.name = options.name or engine.loaded.name
        self.max_model_len = engine.plan.max_model_len
        self.places = Places(engine.options.max_running + options.max_waiting)
        self.tokens = Tokens(engine.loaded, engine.plan.max_model_len)
        self.metrics = RequestMetrics(options.metrics_prefix, self.name)
        self.live = Live(self.engine, self.metrics)
        self.tracer = tracer
        self.created = int(time.time())
        self.draining = False
        self._closing = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._closing.callback(self.tokens.close)
        self._closing.push_async_callback(self.engine.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._closing.aclose()

    def require_model(self, asked: str | None) -> None:
        """Raise ApiError 404 for another model than the one that is served."""
        if asked not in (None, self.name):
            raise ApiError(
                404, f"model {asked!r} is not served here: ask for {self.name!r}", param="model", code="model_not_found"
            )

    def salt(self, request: Request, body: SamplingBody) -> str | None:
        """Return the salt for ``body``, sent by ``request``.

        Raises ApiError 404 for another model than the one that is served, 403 for another tenant's salt.
        """
        self.require_model(body.model)
        tenant, asked, keys = tenant_of(request), body.cache_salt, self.options.keys
        if asked is not None:
            text("cache_salt", asked)
        if tenant is not None and asked not in (None, tenant):
            raise ApiError(403, "cache_salt: this API key has a salt of its own, leave it out", param="cache_salt")
        if tenant is None and keys is not None and asked in keys.bound:
            raise ApiError(403, "cache_salt: that one belongs to another API key", param="cache_salt")
        return tenant or asked

    def most_tokens(self, prompts: Sequence[Sequence[int]], asked: int | None, default: int | None = None) -> int:
        """Return the most output tokens after each of ``prompts``: those ``asked`` for.

        If nothing is asked: ``default``, or all that there is room for. ApiError 400 if they do not fit.
        """
        longest = max(len(one) for one in prompts)
        room, least = self.max_model_len - longest, max(asked or 1, 1)
        if room < least:
            raise ApiError(
                400,
                f"a prompt of {longest} tokens and {least} more do not fit: {self.name} has {self.max_model_len} "
                "tokens for prompt and output together",
                param="max_tokens" if room > 0 else None,
                code="context_length_exceeded",
            )
        if asked is not None:
            return asked
        return room if default is None else min(default, room)

    def require_text(self) -> None:
        """Raise ConfigError without a tokenizer."""
        if self.loaded.tokenizer is None:
            raise ConfigError(f"{self.name} has no tokenizer: ask for token ids, with return_token_ids")
