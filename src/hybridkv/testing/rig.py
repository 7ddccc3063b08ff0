"""Scheduler, worker and oracle side by side: every action is done to all of them and the outcomes are compared."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np

from hybridkv.cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.plan.config import KVCacheConfig
from hybridkv.request import Extra, Request, SamplingParams
from hybridkv.schedule import FinishReason, Scheduler, SchedulerLimits
from hybridkv.step import Step, StepResult
from hybridkv.testing.configs import attention_config
from hybridkv.testing.fake_worker import FakeWorker
from hybridkv.testing.model import DigestModel
from hybridkv.testing.oracle import Oracle, OracleRequest, OracleStep
from hybridkv.testing.oracle_pool import Prefix


class OracleError(Exception):
    """The library did something else than the oracle."""


@dataclass(frozen=True, slots=True)
class RigOptions:
    """What a Rig is built of. num_blocks: the null block included. block_sizes: one a group."""

    num_blocks: int = 16
    block_sizes: tuple[int, ...] = (4,)
    max_model_len: int = 40
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    caching: bool = True
    events: bool = False
    layers_per_group: int = 1
    vocabulary: int = 4

    @property
    def config(self) -> KVCacheConfig:
        """A config with these sizes; strides are larger than pages."""
        return attention_config(self.num_blocks, self.block_sizes, layers_per_group=self.layers_per_group, gap_bytes=8)


class _Flight(NamedTuple):
    """A step that the worker has not run yet."""

    step: Step
    foretold: OracleStep


class Rig:
    """A scheduler over a manager, a FakeWorker and an Oracle.

    config: instead of the one of ``options``, whose sizes it must have. worker: instead of a FakeWorker of its own.
    Steps reach the worker when their result is asked for, as late as possible. Every method raises OracleError where
    the library differs from the oracle, ContentError where a step reads wrong content, CacheError where check() fails.
    """

    def __init__(
        self, options: RigOptions, *, config: KVCacheConfig | None = None, worker: FakeWorker | None = None
    ) -> None:
        config = config or options.config
        self.options = options
        layers = [name for group in config.groups for name in group.layer_names]
        self.model = worker.model if worker else DigestModel(layers, options.vocabulary)
        self.cache = KVCacheManager(
            config, options.max_model_len, options.caching, enable_kv_cache_events=options.events
        )
        self.scheduler = Scheduler(self.cache, options.limits)
        self.worker = worker or FakeWorker(config, self.model)
        self.oracle = Oracle(
            options.num_blocks,
            options.block_sizes,
            options.max_model_len,
            options.limits,
            self.model,
            caching=options.caching,
        )
        self.requests: dict[str, tuple[Request, OracleRequest]] = {}
        self._flights: deque[_Flight] = deque()
        self._owners: dict[int, str] = {}
        self._last_good = -1
        self._told: Counter[tuple[int, bytes]] = Counter()
        self._hashes: dict[Prefix, bytes] = {}
        self._early: dict[int, StepResult] = {}
        self.scheduler.finish("nobody")  # this thread owns it from now on

    # -- actions

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop_token_ids: tuple[int, ...] = (),
        eos_token_ids: tuple[int, ...] = (),
        salt: str | None = None,
    ) -> str | None:
        """A request arrives; its id, None if it can never run and was refused for it."""
        name = f"r{len(self.requests)}"
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids)
        request = Request(
            name, prompt, sampling, hasher=self.cache.hasher, cache_salt=salt, eos_token_ids=eos_token_ids
        )
        refused = False
        try:
            self.scheduler.add(request)
        except ConfigError:
            refused = True
        _same("refused", refused, not self.oracle.fits_alone(len(prompt), max_tokens))
        if refused:
            return None
        stops = frozenset(stop_token_ids + eos_token_ids)
        self.requests[name] = request, self.oracle.add(name, list(prompt), max_tokens, stops, salt)
        return name

    def schedule(self) -> Step:
        """The next step, as foretold."""
        step, foretold = self.scheduler.schedule(), self.oracle.schedule()
        self._flights.append(_Flight(step, foretold))
        _same("id", step.id, foretold.step_id)
        _same("after", step.after, self._last_good)
        self._last_good = step.id
        self._follow_rows(step)
        self._compare_step(step, foretold)
        self.check()
        return step

    def update(self) -> None:
        """The oldest step runs and its result comes in."""
        step, foretold = self._flights.popleft()
        result = self._early.pop(step.id, None) or self.worker.execute(step)
        outcome = self.scheduler.update(result)
        appended, finished = self.oracle.update()
        _same("requests", [r.request_id for r in outcome.requests], [e.request.request_id for e in foretold.entries])
        _same("appended", [outcome.appended[i].tolist() for i in range(len(step))], appended)
        _same("finished", sorted((f.request.request_id, f.reason.value) for f in outcome.finished), sorted(finished))
        self.check()

    def fail(self, place: int, random: Random) -> None:
        """The ``place``-th of the steps in flight fails in the worker, and with it those behind it.

        Steps before it have run; their results are still to come. If it has run, too, its result was lost.
        """
        flights = list(self._flights)
        for step, _ in flights[:place]:
            if step.id > self.worker.last_applied:
                self._early[step.id] = self.worker.execute(step)
        failed = flights[place]
        if failed.step.id > self.worker.last_applied:
            self.worker.break_down(failed.step, random)
        self._early = {step_id: result for step_id, result in self._early.items() if step_id < failed.step.id}
        self.scheduler.fail(failed.step.id, RuntimeError("broken on purpose"))
        self.oracle.fail(failed.step.id)
        self._last_good = failed.step.after
        while len(self._flights) > place:
            self._flights.pop()
        self.check()

    def abort(self, request_id: str) -> bool:
        """A request is aborted, known or not."""
        known = self.oracle.known(request_id)
        _same("abort", self.scheduler.abort(request_id), known is not None)
        if known is not None:
            self.oracle.end(known, "abort")
        self.check()
        return known is not None

    def finish(self, request_id: str) -> None:
        """The caller saw a stop string."""
        known = self.oracle.known(request_id)
        _same("finish", self.scheduler.finish(request_id, FinishReason.STOP), known is not None)
        if known is not None:
            self.oracle.end(known, "stop")
        self.check()

    def reset_prefix_cache(self) -> None:
        """All keys are forgotten, if nothing is held."""
        _same("reset", self.cache.reset_prefix_cache(), self.oracle.pool.reset())
        self.check()

    def probe(self, prompt: Sequence[int], salt: str | None = None) -> int:
        """A look-up that nothing follows; tokens hit."""
        request = Request("probe", prompt, hasher=self.cache.hasher, cache_salt=salt)
        blocks, tokens = self.cache.get_computed_blocks(request)
        _same("hit", (tokens, list(blocks.blocks)), self.oracle.hit(list(prompt), salt))
        return tokens

    def drain(self, most_steps: int = 10_000) -> None:
        """Run until nothing is left. OracleError when that takes more than ``most_steps`` steps."""
        for _ in range(most_steps):
            if self.scheduler.drained:
                break
            while len(self._flights) < self.options.limits.max_in_flight:
                self.schedule()
            self.update()
        while self._flights:  # they hold nobody's rows any more
            self.update()
        _same("requests left", (self.oracle.waiting, self.oracle.running, self.oracle.dead), ([], [], []))
        if not self.scheduler.drained:
            raise OracleError("nothing is left, but the scheduler is not drained")
        _same("usage", self.cache.usage, 0.0)

    # -- answers

    @property
    def num_in_flight(self) -> int:
        """Steps whose results are not in."""
        return len(self._flights)

    @property
    def live_ids(self) -> list[str]:
        """Requests that wait or run."""
        return [request.request_id for request in self.oracle.waiting + self.oracle.running]

    # -- comparisons

    def _follow_rows(self, step: Step) -> None:
        """Who has which row, from the Step alone; exactly those that run or are dead have one."""
        for row in step.finished_rows.tolist():
            self._owners.pop(row, None)
        for new in step.new_rows:
            _same(f"owner of row {new.row}", self._owners.get(new.row), None)
            self._owners[new.row] = new.request_id
        holders = [request.request_id for request in self.oracle.running + self.oracle.dead]
        _same("rows", sorted(self._owners.values()), sorted(holders))

    def _compare_step(self, step: Step, foretold: OracleStep) -> None:
        entries = foretold.entries
        rows = step.rows.tolist()
        _same("batch", [self._owners.get(row) for row in rows], [e.request.request_id for e in entries])
        _same("rows above max_running", [row for row in rows if not 0 <= row < self.options.limits.max_running], [])
        _same("num_computed", step.num_computed.tolist(), [e.computed for e in entries])
        _same("num_scheduled", step.num_scheduled.tolist(), [e.count for e in entries])
        _same("samples", step.samples.tolist(), [e.samples for e in entries])
        _same("token_ids", [step.token_ids[i].tolist() for i in range(len(rows))], [e.tokens for e in entries])
        cells = np.stack([step.cells.group, step.cells.row, step.cells.column, step.cells.block], axis=1).tolist()
        expected = [[g, row, c, b] for row, e in zip(rows, entries, strict=True) for g, c, b in e.cells]
        _same("cells", cells, expected)
        new = [(n.request_id, n.token_ids.tolist(), n.num_prompt_tokens) for n in step.new_rows]
        begun = [e.request for e in entries if e.admitted]
        _same("new_rows", new, [(r.request_id, r.tokens, r.num_prompt_tokens) for r in begun])

    def check(self) -> None:
        """Compare everything that can be seen with the oracle, and let the scheduler check itself."""
        self.scheduler.check()
        oracle, pool, scheduler = self.oracle, self.cache.block_pool, self.scheduler
        _same("free order", pool.free_order(), oracle.pool.free)
        _same("usage", round(self.cache.usage, 9), round(oracle.pool.usage, 9))
        running = [request.request_id for request in scheduler._running.requests]
        _same("running", running, [request.request_id for request in oracle.running])
        waiting = [request.request_id for request in (*scheduler._waiting.requests(), *scheduler._inbox.arriving())]
        _same("waiting", waiting, [request.request_id for request in oracle.waiting])
        _same("number waiting", scheduler.num_waiting, len(oracle.waiting))
        self._compare_requests()
        self._compare_statistics()
        for group, index in enumerate(pool.indexes):
            real: dict[bytes, list[int]] = {}
            for key, block in index.entries():
                real.setdefault(key, []).append(block)
            expected = {
                self._hash(prefix): blocks
                for (of_group, prefix), blocks in oracle.pool.published.items()
                if of_group == group and blocks
            }
            _same(f"index of group {group}", real, expected)
        unwritten = {b: pool.step_of(b) for b in range(pool.num_blocks) if not pool.is_written(b)}
        _same("unwritten", unwritten, oracle.pool.step)
        if self.options.events:
            self._follow_events(self.cache.take_events())

    def _compare_requests(self) -> None:
        for name, (request, expected) in self.requests.items():
            _same(f"tokens of {name}", request.token_ids().tolist(), expected.tokens)
            _same(f"preemptions of {name}", request.num_preemptions, expected.preemptions)
            _same(f"first hit of {name}", request.first_hit_tokens, expected.first_hit)
            _same(
                f"blocks of {name}", [b for b in self.cache.get_block_ids(name) if b], [t for t in expected.tables if t]
            )
            if expected in self.oracle.running:
                _same(f"computed of {name}", request.num_computed_tokens, expected.computed)

    def _compare_statistics(self) -> None:
        now, counts = self.scheduler.statistics(), self.oracle.counts
        names = ("steps", "finished", "preempted", "failed", "prompt", "hit", "computed")
        real = (
            now.steps,
            now.requests_finished,
            now.preemptions,
            now.failed_steps,
            now.prompt_tokens,
            now.hit_tokens,
            now.computed_tokens,
        )
        _same("statistics", dict(zip(names, real, strict=True)), {name: counts[name] for name in names})
        _same("peak usage", round(now.peak_usage, 9), round(self.oracle.peak_usage, 9))

    def _follow_events(self, events: Sequence[KVCacheEvent]) -> None:
        """Who follows the events knows which written blocks can be hit."""
        for event in events:
            match event:
                case BlockStored():
                    self._compare_stored(event)
                    self._told.update((event.group_idx, key) for key in event.block_hashes)
                case BlockRemoved():
                    self._told.subtract((event.group_idx, key) for key in event.block_hashes)
                case AllBlocksCleared():
                    self._told.clear()
        pool = self.cache.block_pool
        written = Counter(
            (group, key)
            for group, index in enumerate(pool.indexes)
            for key, block in index.entries()
            if pool.is_written(block)
        )
        _same("events", {key: n for key, n in self._told.items() if n}, dict(written))

    def _compare_stored(self, event: BlockStored) -> None:
        """The hashes of an event follow from its parent, tokens and extra keys."""
        hasher = self.cache.hasher
        if hasher is None:
            raise OracleError("a block was stored without caching")
        stride = event.block_size // hasher.block_size
        extras: list[Extra | None] = [None] * (len(event.token_ids) // hasher.block_size)
        for i, extra in enumerate(event.extra_keys or ()):
            extras[i * stride] = None if extra is None else (("cache_salt", extra[0]),)
        keys = hasher.hash_chain(event.parent_block_hash, np.array(event.token_ids, np.int32), extras)
        _same("hashes of an event", event.block_hashes, tuple(keys[stride - 1 :: stride]))
        _same("tokens of an event", len(event.token_ids), len(event.block_hashes) * event.block_size)

    def _hash(self, prefix: Prefix) -> bytes:
        """The key of a block whose last token ends ``prefix``."""
        if prefix not in self._hashes:
            salt, tokens = prefix
            self._hashes[prefix] = Request("key", tokens, hasher=self.cache.hasher, cache_salt=salt).hashes[-1]
        return self._hashes[prefix]


def _same(what: str, real: object, expected: object) -> None:
    if real != expected:
        raise OracleError(f"{what}: {real}, the oracle says {expected}")
