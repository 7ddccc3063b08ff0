"""A front process: HTTP, chat templates, text to tokens and back, for an engine in another process.

    client --HTTP--> routes -> Front -> RemoteService --Ask--> Service (the engine's process)
                                   RemoteOutputs, with text <--Parts--

A client that reads slowly delays nobody: its unread tokens wait here, at most those of its output, and become one part.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from msgspec import Struct

from hybridkv.errors import CacheError
from hybridkv.request import StructuredOutput
from hybridkv.runner.async_engine import Bell
from hybridkv.runner.completion import Completion, Detokenizer, Increment
from hybridkv.runner.load import TextModel
from hybridkv.runner.pooling import Pooling
from hybridkv.runner.sampling.draws import TokenLogprob
from hybridkv.serve.app import app_of
from hybridkv.serve.front import Front, Places, ServeOptions
from hybridkv.serve.generation import Asked, Part, exporting
from hybridkv.serve.messages import OF_ENGINE, Answer, Ask, Call, Ended, Leave, Parts, Ready, framed, received
from hybridkv.serve.server import ConnectionLimits, Server

_FLUSH_S: Final = 1.0
_OVER: Final = CacheError("the engine's process has ended: restart the server; its log says why")


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """How a front process serves: ``most_outputs`` may run or wait, of all fronts; ``spans``: whether to send spans."""

    model: TextModel
    adapters: tuple[str, ...]
    max_model_len: int
    most_outputs: int
    options: ServeOptions
    limits: ConnectionLimits
    spans: bool = False


class RemoteService:
    """The Service at the other end of ``link``, with its methods.

    Once its process has ended, ``lost`` is called, and what is asked raises ``over``.
    """

    def __init__(
        self, settings: FrontSettings, link: socket.socket, lost: Callable[[], None], over: Exception = _OVER
    ) -> None:
        self.model, self.adapters, self.max_model_len = settings.model, settings.adapters, settings.max_model_len
        self.places = Places(settings.most_outputs)  # only ``require``: the Service takes them
        self._link, self._lost, self._over = link, lost, over
        self._bodies: dict[int, RemoteOutputs] = {}
        self._calls: dict[int, asyncio.Queue[Any]] = {}
        self._last = 0
        self._is_over = False

    async def __aenter__(self) -> Self:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._link)
        self._receiving = asyncio.create_task(self._receive(reader))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._receiving.cancel()
        self._writer.close()
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), _FLUSH_S)

    @contextmanager
    def read(self, asked: Asked) -> Iterator[RemoteOutputs]:
        """Queue the requests of ``asked``, as in Service. Errors come with the outputs."""
        outputs = RemoteOutputs(asked, self.model)
        with self._numbered(self._bodies, outputs) as number:
            self._send(Ask.of(number, asked))
            yield outputs

    async def compile(self, client: Hashable, form: StructuredOutput) -> None:
        """Compile ``form`` in a turn of ``client``, as in Service."""
        await self._call("compile", client, form)

    async def pooling(self) -> Pooling:
        """Return how states become embeddings, as in Service."""
        return Pooling(**await self._call("pooling"))

    async def metrics_text(self) -> bytes:
        """Return the metrics, as in Service."""
        return bytes(await self._call("metrics_text"))

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, as in Service."""
        return bool(await self._call("reset_prefix_cache"))

    async def alive(self) -> bool:
        """Return whether the engine can run requests."""
        return not self._is_over and bool(await self._call("alive"))

    async def samples(self, over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield samples until ``over`` returns true or the engine ends, as in Service."""
        with self._calling("samples") as answers:
            while not over() and (sample := _value(await answers.get())) is not None:
                yield sample

    async def _call(self, *call: Any) -> Any:  # noqa: ANN401  # the fields of Call, and a result of any method
        with self._calling(*call) as answers:
            return _value(await answers.get())

    @contextmanager
    def _calling(self, *call: Any) -> Iterator[asyncio.Queue[Any]]:  # noqa: ANN401  # same
        """Give the answers of a call, and its error. Of unread ones, the newest is kept."""
        answers = asyncio.Queue[Any]()
        with self._numbered(self._calls, answers) as number:
            self._send(Call(number, *call))
            yield answers

    @contextmanager
    def _numbered(self, known: dict[int, Any], one: object) -> Iterator[int]:
        """Know ``one`` by a new number, until the context ends; then tell the Service."""
        self._last += 1
        number = self._last
        known[number] = one
        try:
            yield number
        finally:
            del known[number]
            if not self._is_over:
                self._send(Leave(number))

    def _send(self, message: Struct) -> None:
        if self._is_over:
            raise self._over
        self._writer.write(framed(message))

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        try:
            async for message in received(reader, OF_ENGINE):
                if isinstance(message, Parts):
                    for one in message.parts:
                        if (outputs := self._bodies.get(one.number)) is not None:
                            outputs.add(one.choice, one.new)
                else:
                    self._tell(message.number, message.value if isinstance(message, Answer) else message.error)
        finally:
            self._is_over = True
            for number in [*self._bodies, *self._calls]:
                self._tell(number, self._over)
        self._lost()

    def _tell(self, number: int, value: object) -> None:
        """Give an answer to its call, or an error to its body or call. Nobody may wait for it any more."""
        if (outputs := self._bodies.get(number)) is not None and isinstance(value, Exception):
            outputs.fail(value)
        elif (answers := self._calls.get(number)) is not None:
            while not answers.empty():
                answers.get_nowait()
            answers.put_nowait(value)


def _value(answer: Any) -> Any:  # noqa: ANN401  # of any call
    if isinstance(answer, Exception):
        raise answer
    return answer


class RemoteOutputs:
    """The outputs of one body of another process. Text is made when a part is read."""

    def __init__(self, asked: Asked, model: TextModel) -> None:
        self._each = each = asked.sampling.n
        self._outputs = [_Output(asked, asked.prompts[choice // each], model) for choice in range(asked.outputs)]
        self._fresh: dict[int, None] = {}  # the outputs with unread parts, in their order
        self._running = len(self._outputs)
        self._error: Exception | None = None
        self._left, self._bell = False, Bell()

    @property
    def ended(self) -> bool:
        """Whether everything was read and nothing more will come."""
        return self._left or not (self._running or self._fresh)

    async def next(self) -> list[Part]:
        """Wait for new parts. Empty after the last. Raises the error of a request, after its parts were returned."""
        while not self._fresh and not self.ended:
            if self._error is not None:
                raise self._error
            await self._bell.wait()
        if self._left:
            return []
        fresh, self._fresh = self._fresh, {}
        found = [(choice, self._outputs[choice].take()) for choice in fresh]
        self._running -= sum(new.completion is not None for _, new in found)
        return found

    def has_begun(self, prompt: int) -> bool:
        """Return whether something came of this prompt."""
        return self._outputs[prompt * self._each].has_begun

    def leave(self) -> None:
        """Stop reading. A waiting ``next`` then returns an empty list."""
        self._left = True
        self._bell.ring()

    def add(self, choice: int, new: Increment) -> None:
        """Add the new part of output ``choice``."""
        self._outputs[choice].add(new)
        self._fresh[choice] = None
        self._bell.ring()

    def fail(self, error: Exception) -> None:
        """Raise ``error`` after the parts that came before it."""
        self._error = error
        self._bell.ring()


class _Output:
    """One output: all that came of it, and how much of that was read."""

    def __init__(self, asked: Asked, prompt: Sequence[int], model: TextModel) -> None:
        self._prompt, self._params = prompt, asked.sampling
        self._text: Detokenizer | None = None
        if model.tokenizer is not None:
            self._text = Detokenizer.of(model.tokenizer, asked.sampling, model.eos_token_ids)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._of_prompt: tuple[TokenLogprob, ...] | None = None
        self._read_tokens = self._read_characters = 0
        self.has_begun = False

    def add(self, new: Increment) -> None:
        """Add a new part."""
        self._last, self.has_begun = new, True
        self._tokens += new.token_ids
        self._logprobs += new.logprobs or ()
        if new.prompt_logprobs is not None:  # in the first part alone
            self._of_prompt = new.prompt_logprobs

    def take(self) -> Increment:
        """Return everything that was not read before. O(new tokens), and O(output) at its end."""
        begin, characters, known, done = self._read_tokens, self._read_characters, self._text, self._last.completion
        tokens, text = tuple(self._tokens[begin:]), None
        if known is not None:
            known.add(tokens)
            text = known.text[characters : known.settled_characters] if done is None else known.finish()[characters:]
        if done is not None:
            done = self._whole(done)
        self._read_tokens += len(tokens)
        self._read_characters += len(text or "")
        return replace(
            self._last,
            token_ids=tokens,
            text=text,
            completion=done,
            logprobs=self._logprobs_from(begin),
            prompt_logprobs=None if begin else self._of_prompt,
        )

    def _logprobs_from(self, first: int) -> tuple[TokenLogprob, ...] | None:
        return None if self._params.logprobs is None else tuple(self._logprobs[first:])

    def _whole(self, done: Completion) -> Completion:
        return replace(
            done,
            prompt_token_ids=tuple(self._prompt),
            token_ids=tuple(self._tokens),
            text=None if self._text is None else self._text.text,
            logprobs=self._logprobs_from(0),
            prompt_logprobs=self._of_prompt,
        )


def run_front(link: int, listening: int) -> None:
    """Run a front process with the settings on standard input, until a signal or the end of the engine's process.

    ``link`` and ``listening`` are the descriptors of the socket to that process and of the port's.
    """
    settings: FrontSettings = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the parent alone
    engine, lost = socket.socket(fileno=link), list[bool]()

    def end() -> None:
        lost.append(True)
        if server.should_exit:  # it drains already, and that process was told to end at once
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    with engine.dup() as last, exporting() if settings.spans else nullcontext() as tracer:
        front = Front(RemoteService(settings, engine, end), settings.options, tracer)
        server = Server(app_of(front), lambda: last.sendall(framed(Ready())), settings.limits)
        # also after the first signal, which may be of the system: then the engine's process sends one, too
        signal.signal(signal.SIGTERM, server.handle_exit)
        gc.collect()
        gc.freeze()  # as in the engine's process
        server.run(sockets=[socket.socket(fileno=listening)])
        gc.unfreeze()
        if lost:
            sys.exit("the engine's process has ended, and this front process with it")
        last.sendall(framed(Ended(server.cut_off)))
