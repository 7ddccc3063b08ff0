"""The state that all routes share: the engine's service, its tokenizer's threads, its places, its tenants.

Texts are tokenized in threads, alongside the event loop:

    piece of work -> lane, by its size -> queue of its client -> the next free thread of the lane, clients in turn

Short texts never wait for long ones, and clients take turns. A tokenizer releases the interpreter while it works, so a
long text occupies a core without delaying others. A call into a tokenizer cannot be stopped. Work that may take long is
divided into pieces, and a client that disconnects is noticed between two of them.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from opentelemetry.trace import Tracer
from starlette.requests import Request

from hybridkv.arguments import check_fields, each, integer, one_of, or_none, text
from hybridkv.errors import ConfigError
from hybridkv.request import StructuredOutput
from hybridkv.runner.chat import chat_ids
from hybridkv.runner.inputs import encode
from hybridkv.runner.load import LoadedModel, TextModel
from hybridkv.serve.bodies import ChatMessage, EmbeddingBody, SamplingBody, TemplateBody
from hybridkv.serve.errors import RETRY, RETRY_AFTER, ApiError, ClientGoneError, leaves
from hybridkv.serve.formats import Formats
from hybridkv.serve.gates import ApiKeys, host_name, origin, tenant_of
from hybridkv.serve.metrics import PREFIX, metrics_prefix
from hybridkv.serve.text_bound import TextBound

if TYPE_CHECKING:  # services take places and turns of this module
    from hybridkv.serve.remote import RemoteService
    from hybridkv.serve.replicas import Replicas
    from hybridkv.serve.service import Service

T = TypeVar("T")

SHORT: Final = 1 << 12
"""Characters or tokens of work that takes a few milliseconds."""
_LANES: Final = (SHORT, 1 << 16, None)
_THREADS: Final = 2
UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
"""The text of tokens that are a part of a character."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How an engine is served.

    Attributes:
        name: of the model, for clients; None for the engine's name.
        max_waiting: outputs that may wait in addition to running ones; further ones are answered with 429.
        keys: API keys of clients; None lets every client ask.
        metrics_prefix: the first part of the names of metrics.
        allow_hosts: names in Host that a server without keys answers to, in addition to private names; "*" for any
            name.
        allow_origins: origins of pages that may use the server from a browser, such as https://app.example.
        tool_call_parser: how the model writes calls of tools: a name in ``formats.CALLS``, or "none"; None to choose by
            its tokenizer.
        reasoning_parser: how it marks reasoning, in the same way: a name in ``formats.REASONING``.

    Raises:
        ConfigError: a value is invalid.
    """

    name: str | None = None
    max_waiting: int = 256
    keys: ApiKeys | None = None
    metrics_prefix: str = PREFIX
    allow_hosts: Sequence[str] = ()
    allow_origins: Sequence[str] = ()
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, or_none(text), "name")
        check_fields(self, partial(integer, least=0), "max_waiting")
        check_fields(self, or_none(one_of(ApiKeys)), "keys")
        check_fields(self, metrics_prefix, "metrics_prefix")
        check_fields(self, each(host_name), "allow_hosts")
        check_fields(self, each(origin), "allow_origins")
        check_fields(self, or_none(text), "tool_call_parser", "reasoning_parser")
        Formats.of(None, self.tool_call_parser, self.reasoning_parser)  # raises for unknown names


class Places:
    """Counts the outputs that run or wait, at most ``most``. One event loop uses it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    def require(self, count: int) -> None:
        """Raise ApiError 400 for more outputs than there are places."""
        if count > self.most:
            raise ApiError(
                400, f"{count} outputs asked for at once (prompts times n), but at most {self.most} fit: ask for fewer"
            )

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold ``count`` places in the context. ApiError 429 while too few are free, 400 if there are fewer in all."""
        self.require(count)
        if self.taken + count > self.most:
            raise ApiError(
                429,
                f"{self.taken} of at most {self.most} outputs run or wait, and {count} more do not fit: try again "
                f"after {RETRY_AFTER} s",
                code="queue_full",
                headers=RETRY,
            )
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count


class Front:
    """The routes' side of a served engine: used as ``async with``, which closes ``service``."""

    def __init__(
        self, service: Service | RemoteService | Replicas, options: ServeOptions, tracer: Tracer | None = None
    ) -> None:
        self.service, self.options, self.tracer = service, options, tracer
        self.loaded, self.max_model_len, self.places = service.model, service.max_model_len, service.places
        self.name, self.adapters = options.name or self.loaded.name, service.adapters
        self.formats = Formats.of(self.loaded.tokenizer, options.tool_call_parser, options.reasoning_parser)
        self.tokens = Tokens(self.loaded, self.max_model_len)
        self.created = int(time.time())
        self.draining = False

    async def __aenter__(self) -> Self:
        await self.service.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.service.__aexit__()
        finally:
            self.tokens.close()

    def require_model(self, asked: str | None) -> None:
        """Raise ApiError 404 for a model that is not served."""
        if asked not in (None, self.name, *self.adapters):
            served = " or ".join(map(repr, (self.name, *self.adapters)))
            raise ApiError(
                404, f"model {asked!r} is not served here: ask for {served}", param="model", code="model_not_found"
            )

    def lora(self, asked: str | None) -> str | None:
        """Return the adapter that clients call ``asked``; None for the model itself."""
        return asked if asked in self.adapters else None

    def salt(self, request: Request, body: SamplingBody | EmbeddingBody) -> str | None:
        """Return the cache salt for ``body``, sent by ``request``.

        Raises ApiError 404 for a model that is not served, 403 for the salt of another tenant.
        """
        self.require_model(body.model)
        tenant, asked, keys = tenant_of(request), body.cache_salt, self.options.keys
        if asked is not None:
            text("cache_salt", asked)
        if tenant is not None and asked not in (None, tenant):
            raise ApiError(403, "cache_salt: this API key has its own salt, leave the field out", param="cache_salt")
        if tenant is None and keys is not None and asked in keys.bound:
            raise ApiError(403, "cache_salt: this salt belongs to another API key, choose another", param="cache_salt")
        return tenant or asked

    def most_tokens(self, prompts: Sequence[Sequence[int]], asked: int | None, default: int | None = None) -> int:
        """Return the most output tokens after each of ``prompts``: ``asked``, else ``default``, else all that fit.

        Raises ApiError 400 if they do not fit the model.
        """
        longest = max(len(one) for one in prompts)
        room, least = self.max_model_len - longest, max(asked or 1, 1)
        if room < least:
            raise ApiError(
                400,
                f"a prompt of {longest} tokens and {least} more do not fit: {self.name} has {self.max_model_len} "
                "tokens for prompt and output together; shorten the prompt, or ask for fewer tokens",
                param="max_tokens" if room > 0 else None,
                code="context_length_exceeded",
            )
        if asked is not None:
            return asked
        return room if default is None else min(default, room)

    async def compile(self, request: Request, form: StructuredOutput | None) -> None:
        """Compile a structured output before its request is queued, in a turn of the client.

        Raises ConfigError for one that cannot be compiled, ClientGoneError if the client of ``request`` disconnects.
        """
        if form is not None:
            await unless_gone(request, self.service.compile(client_of(request), form))

    def require_text(self) -> None:
        """Raise ConfigError without a tokenizer."""
        if self.loaded.tokenizer is None:
            raise ConfigError(f"{self.name} has no tokenizer: ask for token ids, with return_token_ids")


def client_of(request: Request) -> tuple[str | None, str | None]:
    """Return whose turns the work of ``request`` takes: a tenant at an address."""
    return tenant_of(request), None if request.client is None else request.client.host


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of ``work``. Cancel it with ClientGoneError if the client of ``request`` disconnects."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(leaves(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


# texts in turns


@dataclass(frozen=True, slots=True)
class Piece(Generic[T]):
    """Work that runs without interruption; ``size`` is its number of characters or tokens."""

    size: int
    work: Callable[[], T]


class Turns:
    """Lanes of threads, each for work of at most some size.

    Args:
        parallel: whether several threads may use the tokenizer at a time; otherwise one thread does all work.
    """

    def __init__(self, *, parallel: bool) -> None:
        sizes = _LANES if parallel else (None,)
        self._lanes = [(most, Lane(_THREADS if parallel else 1)) for most in sizes]

    async def run(self, client: Hashable, pieces: Iterable[Piece[T]]) -> list[T]:
        """Run ``pieces`` one after another, each in a turn of ``client``, and return their results.

        Raises an error of a piece. If the task is cancelled, no further piece begins.
        """
        return [await self._lane(one.size).run(client, one.work) for one in pieces]

    def close(self) -> None:
        """Begin nothing more. Threads end after their current work; a process that ends does not wait for them."""
        for _, lane in self._lanes:
            lane.close()

    def _lane(self, size: int) -> Lane:
        return next(lane for most, lane in self._lanes if most is None or size <= most)


class Lane:
    """Threads that share a queue; they start with the first work.

    A client may use all threads but one, so that one is left for other clients.
    """

    def __init__(self, threads: int) -> None:
        self._most, self._most_of_client = threads, max(threads - 1, 1)
        self._waiting: OrderedDict[Hashable, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._running: Counter[Hashable] = Counter()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closed = False

    async def run(self, client: Hashable, work: Callable[[], T]) -> T:
        """Return the result of ``work``, in a turn of ``client``. Work cancelled before it begins never runs."""
        future: Future[T] = Future()
        queued = (future, work)
        with self._changed:
            if len(self._threads) < self._most:
                self._start_thread()
            self._waiting.setdefault(client, deque()).append(queued)
            self._changed.notify()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._forget(client, queued)
            raise

    def close(self) -> None:
        """Cancel waiting work, and let the threads end."""
        with self._changed:
            self._closed = True
            for queue in self._waiting.values():
                for future, _ in queue:
                    future.cancel()
            self._waiting.clear()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        # daemons: the process may end while a tokenizer is busy
        thread = threading.Thread(target=self._work, name="hybridkv-tokens", daemon=True)
        thread.start()  # may raise where the process has no more threads
        self._threads.append(thread)

    def _forget(self, client: Hashable, queued: tuple[Future[Any], Callable[[], Any]]) -> None:
        """Drop work that was cancelled, and the text in it."""
        with self._changed:
            queue = self._waiting.get(client, deque())
            if queued in queue:
                queue.remove(queued)
            if not queue:
                self._waiting.pop(client, None)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            client, future, work = taken
            if future.set_running_or_notify_cancel():
                _settle(future, work)
            del future, work, taken  # a thread that waits holds no text
            with self._changed:
                self._running[client] -= 1
                self._running += Counter()  # without clients that have none
                self._changed.notify()

    def _take(self) -> tuple[Hashable, Future[Any], Callable[[], Any]] | None:
        """Wait for the next work: the oldest of the first client that may have a thread. ``None`` once closed."""
        with self._changed:
            while not self._closed:
                client = next((one for one in self._waiting if self._running[one] < self._most_of_client), None)
                if client is None:
                    self._changed.wait()
                    continue
                queue = self._waiting.pop(client)
                future, work = queue.popleft()
                if queue:
                    self._waiting[client] = queue  # after all others
                self._running[client] += 1
                return client, future, work
            return None


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  # the waiting task raises it
        future.set_exception(error)


class Tokens:
    """The tokenizer of a server.

    Args:
        loaded: the model that is served.
        max_model_len: tokens of prompt and output together; no longer text is tokenized.
    """

    def __init__(self, loaded: LoadedModel | TextModel, max_model_len: int) -> None:
        self._loaded, self._most = loaded, max_model_len
        self._bound = TextBound.of(loaded.tokenizer)
        self._turns = Turns(parallel=bool(getattr(loaded.tokenizer, "is_fast", False)))

    async def run(self, request: Request, pieces: Iterable[Piece[T]]) -> list[T]:
        """Run ``pieces`` in turns with other clients. ClientGoneError if the client of ``request`` disconnects."""
        return await unless_gone(request, self._turns.run(client_of(request), pieces))

    async def ids(self, request: Request, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Return the token ids of each of ``prompts``.

        Raises ApiError 400 for a prompt that cannot fit the model, ConfigError as ``encode``, ClientGoneError as
        ``run``.
        """
        for one in prompts:
            if not isinstance(one, str):
                self.require_room(one)
            elif self._bound is not None and self._bound.spaces_count:  # the length alone is then enough to refuse
                self._require_room_for_text(one)
        if sum(SHORT if isinstance(one, str) else len(one) for one in prompts) < SHORT:
            return self._encoded(prompts)
        pieces = [Piece(sum(map(len, some)), partial(self._encoded, some)) for some in _grouped(prompts)]
        return [one for some in await self.run(request, pieces) for one in some]

    async def conversation(self, request: Request, messages: Sequence[ChatMessage], reads: TemplateBody) -> list[int]:
        """Return the token ids of a conversation.

        Raises ApiError 400 for one that cannot fit the model, ConfigError as ``chat_ids`` and for tool calls with
        arguments that are not a JSON object, ClientGoneError as ``run``.
        """
        offered = None if reads.tool_choice == "none" else reads.tools
        tools = None if offered is None else [one.model_dump() for one in offered]
        check = None if self._bound is None else self._require_room_for_text

        def work() -> list[int]:
            said = [_message(one) for one in messages]
            return chat_ids(self._loaded, said, tools=tools, names=reads.chat_template_kwargs, check=check)

        (ids,) = await self.run(request, [Piece(len(await request.body()), work)])
        return ids

    def require_room(self, ids: Sequence[int]) -> None:
        """Raise ApiError 400 for more token ids than the model has room for."""
        if len(ids) > self._most:
            raise self._too_long(f"{len(ids)} tokens do")

    def close(self) -> None:
        """Begin nothing more."""
        self._turns.close()

    def _require_room_for_text(self, given: str) -> None:
        if self._bound is not None and self._bound.exceeded(given, self._most):
            raise self._too_long(f"a text of {len(given)} characters does")

    def _too_long(self, what: str) -> ApiError:
        """Return the error for a prompt that does not fit; ``what`` describes its size ("9 tokens do")."""
        message = (
            f"{what} not fit: {self._loaded.name} has {self._most} tokens for prompt and output together; shorten the "
            "prompt"
        )
        return ApiError(400, message, code="context_length_exceeded")

    def _encoded(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        for one in prompts:
            if isinstance(one, str):
                self._require_room_for_text(one)
        return [encode(self._loaded, one) for one in prompts]


def _grouped(prompts: Iterable[str | list[int]]) -> Iterator[list[str | list[int]]]:
    """Yield short neighbours together, and each long prompt alone."""
    group: list[str | list[int]] = []
    size = 0
    for one in prompts:
        if group and size + len(one) > SHORT:
            yield group
            group, size = [], 0
        group.append(one)
        size += len(one)
    yield group


def _message(given: ChatMessage) -> dict[str, Any]:
    """Return a message for chat templates: content as one text, developer as system, call arguments as objects.

    Reasoning has both of its names, because templates differ.
    """
    made, content = given.model_dump(exclude_none=True), given.content
    if given.role == "developer":
        made["role"] = "system"
    made["content"] = "\n".join(one.text for one in content) if isinstance(content, list) else content or ""
    if reasoning := given.reasoning or given.reasoning_content:
        made["reasoning"] = made["reasoning_content"] = reasoning
    if not given.tool_calls:
        made.pop("tool_calls", None)
    for call in made.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return made


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"arguments of a tool call are not valid JSON: {error}, got {text[:40]!r}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"arguments of a tool call must be a JSON object, got {text[:40]!r}")
    return found


class TokenTexts:
    """Converts single tokens to text.

    Args:
        tokenizer: None to return ids.
        as_ids: return ``token_id:7`` even if there is a tokenizer.
    """

    def __init__(self, tokenizer: Any, *, as_ids: bool = False) -> None:  # noqa: ANN401  # transformers' tokenizers share no typed base
        self._tokenizer: Any = None if as_ids else tokenizer

    def text(self, token: int, before: int | None) -> str:
        """Return ``token`` as text after the token ``before``: the space before a word belongs to the word."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        if before is not None:
            shown = self._decode([before])
            together = self._decode([before, token])
            if together.startswith(shown) and not shown.endswith(UNFINISHED):
                return together[len(shown) :]
        return self._decode([token])

    @staticmethod
    def utf8(text: str) -> list[int] | None:
        """Return the bytes of a token's text; ``None`` if it is a part of a character."""
        return None if UNFINISHED in text else list(text.encode())

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
