"""An engine as the routes use it: outputs within its places, structured outputs, embeddings, metrics and samples.

    routes -> Front -> Service -> AsyncEngine                                    in one process
    routes -> Front -> RemoteService ~~messages~~> Service -> AsyncEngine        in front processes (remote, fronts)

One Service owns an engine, so places, metrics and samples are those of all clients, however many fronts ask.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Self

from prometheus_client import generate_latest

from hybridkv.errors import ConfigError
from hybridkv.request import StructuredOutput
from hybridkv.runner.async_engine import AsyncEngine, Bell, EventSink, Reading
from hybridkv.runner.completion import Increment
from hybridkv.runner.engine import Engine
from hybridkv.runner.pooling import Embedder, Kept, Pooling
from hybridkv.serve.front import Piece, Places, ServeOptions, Turns
from hybridkv.serve.generation import Asked, Part
from hybridkv.serve.metrics import Live, RequestMetrics, Snapshot, SnapshotCollector, Watch


class Service:
    """An engine with its places and metrics, used as ``async with``, which closes it. Nothing else may use ``engine``.

    ``events`` receives the cache's events, as in AsyncEngine.
    """

    def __init__(self, engine: Engine, options: ServeOptions, events: EventSink | None = None) -> None:
        self.engine, self.model = AsyncEngine(engine, events=events), engine.loaded
        self.max_model_len = engine.plan.max_model_len
        self.places = Places(engine.options.max_running + options.max_waiting)
        name, self.adapters = options.name or engine.loaded.name, engine.adapters.names
        if name in self.adapters:
            raise ConfigError(f"the model and an adapter are both called {name!r}: give one of them another name")
        self.metrics = RequestMetrics(options.metrics_prefix, name)
        self.live = Live(self.engine, self.metrics)
        self._grammars, self._turns = engine.grammars, Turns(parallel=True)
        self._embedder: Embedder | None = None

    async def __aenter__(self) -> Self:
        with suppress(ConfigError):  # a tokenizer that is converted later would delay steps
            self._grammars.of(StructuredOutput("json_object"))
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.engine.close()
        finally:
            self._turns.close()
            if self._embedder is not None:
                self._embedder.close()

    @contextmanager
    def read(self, asked: Asked, bell: Bell | None = None, *, text: bool = True) -> Iterator[CountedOutputs]:
        """Queue the requests of ``asked``; those that still run when the context ends are aborted.

        ``bell`` is as in ``AsyncEngine.read``; without ``text``, parts have token ids only. Raises ApiError 429 while
        too few places are free, 400 if there are fewer in all, and CacheError once the engine has ended.
        """
        with self.places.take(asked.outputs):
            kept = list[Kept]()
            if asked.embeds and self._embedder is not None:
                kept = [self._embedder.keep(asked.request_id(number)) for number in range(len(asked.prompts))]
            with self.engine.read(asked.requests(text=text), bell) as reading:
                yield CountedOutputs(asked, reading, self.metrics, kept)

    async def compile(self, client: Hashable, form: StructuredOutput) -> None:
        """Compile ``form`` in a turn of ``client``. ConfigError if that is impossible."""
        await self._turns.run(client, [Piece(len(form.text), partial(self._grammars.of, form))])

    async def pooling(self) -> Pooling:
        """Return how states become embeddings; the first call prepares the engine, between two steps.

        Raises ConfigError for an engine or a model without embeddings.
        """

        def made(engine: Engine) -> Embedder:
            if self._embedder is None:
                self._embedder = Embedder(engine)
            return self._embedder

        found = self._embedder
        return (found if found is not None else await self.engine.between_steps(made)).pooling

    async def metrics_text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        snapshot = await self.engine.between_steps(Snapshot.of)
        return generate_latest(SnapshotCollector(snapshot, self.metrics))

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Return False, and change nothing, while requests hold blocks."""
        return await self.engine.between_steps(lambda engine: engine.reset_prefix_cache())

    async def alive(self) -> bool:
        """Return whether the engine can run requests."""
        return not self.engine.ended

    def samples(self, over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Return samples for the page, one a second, until ``over`` returns true or the engine ends."""
        return self.live.events(over)


class CountedOutputs:
    """The outputs of a body, counted in the metrics as one task reads them; ``kept``: states of embedded prompts."""

    def __init__(self, asked: Asked, reading: Reading, metrics: RequestMetrics, kept: Sequence[Kept]) -> None:
        self._each, self._reading, self._kept = asked.sampling.n, reading, kept
        begun = time.monotonic()
        self._watches = [Watch(metrics, begun) for _ in range(asked.outputs)]

    @property
    def ended(self) -> bool:
        """Whether everything was read and nothing more will come."""
        return self._reading.ended

    async def next(self) -> list[Part]:
        """Wait for new parts. Empty after the last. Raises the error of a request, after its parts were returned."""
        return self._counted(await self._reading.next())

    def take(self) -> list[Part]:
        """Return the new parts as ``next`` does, but without waiting: maybe none."""
        return self._counted(self._reading.take())

    def leave(self) -> None:
        """Stop reading, and abort what still runs. A waiting ``next`` then returns an empty list."""
        self._reading.leave()

    def _counted(self, found: list[tuple[int, Increment]]) -> list[Part]:
        parts = list[Part]()
        for prompt, one in found:
            new, choice = one, prompt * self._each + one.output
            self._watches[choice].came(len(new.token_ids), new.completion)
            if self._kept and new.completion is not None:
                new = replace(new, completion=replace(new.completion, pooled=self._kept[prompt].pooled()))
            parts.append((choice, new))
        return parts
