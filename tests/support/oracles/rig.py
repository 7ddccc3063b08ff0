"""Scheduler, worker and oracle side by side: every action is done to all of them and the outcomes are compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

from how_much import SHARE
from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import Placement, placement_named
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import EncoderInput
from hybridkv.planner.config import KVCacheConfig
from hybridkv.request import Hasher, Request, SamplingParams
from hybridkv.schedule import FinishReason, Scheduler, SchedulerLimits
from hybridkv.specs import Keeps, KVCacheSpec, MambaSpec
from hybridkv.step import Step, StepResult
from hybridkv.testing import ContentError, FakeWorker, digest_model
from hybridkv.testing.configs import full_spec, model_config, natural_model_config
from hybridkv.testing.event_follower import DifferenceError, EventFollower, same
from hybridkv.testing.model import Origin
from oracles.cache import OracleCache, OracleRequest
from oracles.comparison import Comparison, NaturalComparison
from oracles.natural import NaturalOracle, branch_of
from oracles.natural_cache import NaturalCache
from oracles.scheduler import Oracle
from oracles.steps import OracleStep


class _Flight(NamedTuple):
    """A step that the worker has not run yet."""

    step: Step
    foretold: OracleStep


class Rig:
    """A scheduler over a manager, a FakeWorker and an Oracle.

    config: instead of the one of ``options``. worker: instead of a FakeWorker of its own. now: the clock.
    Steps reach the worker when their result is asked for, as late as possible. Every method raises DifferenceError
    where the library differs from the oracle, ContentError where a step reads wrong content, CacheError where check()
    fails.
    """

    def __init__(
        self, options: RigOptions, *, config: KVCacheConfig | None = None, worker: FakeWorker | None = None
    ) -> None:
        config = config or options.config
        self.options = options
        self.now = 0.0
        self.model = worker.model if worker else digest_model(config, options.vocabulary)
        self.is_natural = config.slabs is not None
        self.has_cross = any(group.spec.keeps is Keeps.ENCODER for group in config.groups)
        placement = placement_named(options.placement, 1) if self.is_natural else None
        self.cache = KVCacheManager(
            config,
            options.max_model_len,
            options.caching,
            use_eagle=options.eagle,
            enable_kv_cache_events=options.events,
            dcp_world_size=options.dcp,
            pcp_world_size=options.pcp,
            options=CacheOptions(placement=placement, remembered_losses=options.remembered_losses, block_times=True),
        )
        self.scheduler = Scheduler(self.cache, options.limits, clock=lambda: self.now)
        self.worker = worker or FakeWorker(config, self.model, sharded=options.ranks > 1)
        self.requests: dict[str, tuple[Request, OracleRequest]] = {}
        self.oracle, self.comparison = self._oracles(config, placement)
        self._events = EventFollower(self.cache)
        self._checks = 0
        self._flights: deque[_Flight] = deque()
        self._last_good = -1
        self._early: dict[int, StepResult] = {}
        self.scheduler.finish("nobody")  # this thread owns it from now on

    def _oracles(self, config: KVCacheConfig, placement: Placement | None) -> tuple[Oracle, Comparison]:
        """The oracle of the layout, and what compares the library with it. placement: None in the reference layout."""
        options = self.options
        if placement is not None:
            natural = NaturalCache(
                config,
                options.max_model_len,
                placement,
                caching=options.caching,
                eagle=options.eagle,
                ranks=options.ranks,
            )
            naive = NaturalOracle(natural, options.limits, self.model, lambda: self.now)
            return naive, NaturalComparison(self.scheduler, naive, self.requests)
        cache = OracleCache(
            [group.spec for group in config.groups],
            config.num_blocks,
            options.max_model_len,
            caching=options.caching,
            eagle=options.eagle,
            ranks=options.ranks,
        )
        oracle = Oracle(cache, options.limits, self.model, lambda: self.now)
        return oracle, Comparison(self.scheduler, oracle, self.requests)

    # -- actions

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop_token_ids: tuple[int, ...] = (),
        eos_token_ids: tuple[int, ...] = (),
        salt: str | None = None,
        priority: int = 0,
        arrival_time: float = 0.0,
        reads: bool = True,
        writes: bool = True,
        marks: Sequence[int] = (),
        n: int = 1,
        encoder: EncoderInput | None = None,
    ) -> str | None:
        """A request arrives; its id, None if it can never run and was refused for it.

        reads, writes: whether it uses the prefix cache. marks: where it is to be resumable. n: outputs wanted.
        encoder: left out where the model has no cross attention.
        """
        asked = RigRequest(
            tuple(prompt),
            max_tokens,
            stop_token_ids,
            eos_token_ids,
            salt,
            priority,
            arrival_time,
            reads=reads,
            writes=writes,
            marks=tuple(marks),
            n=n,
            encoder=encoder if self.has_cross else None,
        )
        name = f"r{len(self.requests)}"
        return name if self._add_to_both(asked, name) else None

    def _add_to_both(self, asked: RigRequest, name: str) -> bool:
        """Whether the request was taken in."""
        request, expected = asked.request(name, self.cache.hasher), asked.expected(name, self.options.max_model_len)
        refused = False
        try:
            self.scheduler.add(request)
        except ConfigError:
            refused = True
        same("refused", refused, not self.oracle.fits_alone(expected))
        if refused:
            return False
        self.requests[name] = request, self.oracle.add(expected, asked.arrival_time)
        arriving = {one.request_id: one for one in self.scheduler._waiting.arriving()}
        for child in self._fork_oracle(self.requests[name][1], asked.n - 1):
            self.requests[child.request_id] = arriving[child.request_id], child
        return True

    def fork(self, request_id: str, n: int) -> list[str]:
        """``n`` branches of a request, known or not; their ids."""
        self.oracle.take_in()
        known = self.oracle.known(request_id)
        try:
            children = self.scheduler.fork(request_id, n)
        except ConfigError:
            same("fork refused", known, None)
            return []
        if known is None:
            raise DifferenceError(f"{request_id!r} was forked, the oracle does not know it")
        branches = self._fork_oracle(known, n)
        same("branches", [child.request_id for child in children], [child.request_id for child in branches])
        self.requests.update({child.request_id: (child, one) for child, one in zip(children, branches, strict=True)})
        self.check()
        return [child.request_id for child in children]

    def _fork_oracle(self, parent: OracleRequest, n: int) -> list[OracleRequest]:
        if not isinstance(self.oracle, NaturalOracle):
            branches = [branch_of(parent, f"{parent.request_id}#{i + 1}") for i in range(n)]
            return [self.oracle.add(branch, parent.arrival[0]) for branch in branches]
        return self.oracle.fork(parent, n) if n else []

    def propose(self, request_id: str, right: int, wrong: int) -> list[int]:
        """Drafts for the next step: ``right`` tokens as the model will draw them, then ``wrong`` others."""
        _, expected = self.requests[request_id]
        tokens, drafts = list(expected.tokens), list[int]()
        for place in range(right + wrong):
            token = self.model.next_token(tokens, expected.digest)
            drafts.append(token if place < right else (token + 1) % self.options.vocabulary)
            tokens.append(drafts[-1])
        self.scheduler.propose({request_id: drafts})
        self.oracle.propose(request_id, drafts)
        return drafts

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    def schedule(self) -> Step:
        """The next step, as foretold."""
        step, foretold = self.scheduler.schedule(), self.oracle.schedule()
        self._flights.append(_Flight(step, foretold))
        same("id", step.id, foretold.step_id)
        same("after", step.after, self._last_good)
        self._last_good = step.id
        self._compare_step(step, foretold)
        self.check()
        return step

    def update(self) -> None:
        """The oldest step runs and its result comes in."""
        step, foretold = self._flights.popleft()
        result = self._early.pop(step.id, None) or self.worker.execute(step)
        outcome = self.scheduler.update(result)
        appended, finished = self.oracle.update()
        same("requests", [r.request_id for r in outcome.requests], [e.request.request_id for e in foretold.entries])
        same("appended", [outcome.appended[i].tolist() for i in range(len(step))], appended)
        same("finished", sorted((f.request.request_id, f.reason.value) for f in outcome.finished), sorted(finished))
        self.check()
        self._check_content()

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
        self._check_content()

    def abort(self, request_id: str) -> bool:
        """A request is aborted, known or not."""
        known = self.oracle.known(request_id)
        same("abort", self.scheduler.abort(request_id), known is not None)
        if known is not None:
            self.oracle.take_in()
            self.oracle.end(known, "abort")
        self.check()
        return known is not None

    def finish(self, request_id: str) -> None:
        """The caller saw a stop string."""
        known = self.oracle.known(request_id)
        same("finish", self.scheduler.finish(request_id, FinishReason.STOP), known is not None)
        self.oracle.take_in()
        if known is not None:
            self.oracle.end(known, "stop")
        self.check()

    def reset_prefix_cache(self) -> None:
        """All keys are forgotten, if nothing is held."""
        same("reset", self.cache.reset_prefix_cache(), self.oracle.pool.reset())
        self.check()

    def probe(
        self, prompt: Sequence[int], salt: str | None = None, *, reads: bool = True, encoder: EncoderInput | None = None
    ) -> int:
        """A look-up that nothing follows; tokens hit."""
        asked = RigRequest(tuple(prompt), 1, salt=salt, reads=reads, encoder=encoder if self.has_cross else None)
        request = asked.request("probe", self.cache.hasher)
        return self.comparison.compare_hit(request, self.oracle.cache.hit(list(prompt), asked.origin, reads=reads))

    def drain(self, most_steps: int = 10_000) -> None:
        """Run until nothing is left. DifferenceError when that takes more than ``most_steps`` steps."""
        for _ in range(most_steps):
            if self.scheduler.drained:
                break
            while len(self._flights) < self.options.limits.max_in_flight:
                self.schedule()
            self.update()
        while self._flights:  # they hold nobody's rows any more
            self.update()
        same("requests left", (self.oracle.num_waiting, self.oracle.running, self.oracle.dead), (0, [], []))
        if not self.scheduler.drained:
            raise DifferenceError("nothing is left, but the scheduler is not drained")
        same("usage", self.cache.usage, 0.0)
        self.scheduler.check()

    # -- answers

    @property
    def num_in_flight(self) -> int:
        """Steps whose results are not in."""
        return len(self._flights)

    @property
    def live_ids(self) -> list[str]:
        """Requests that wait or run."""
        return self.oracle.live_ids

    # -- comparisons

    def check(self) -> None:
        """Compare everything that can be seen with the oracle, and let the scheduler check itself.

        Where a part is tried, at every other call: what it finds wrong does not mend itself.
        """
        self._checks += 1
        if SHARE >= 1 or self._checks % 2:
            self.scheduler.check()
        self.comparison.check()
        if self.options.events:
            self._events.follow()

    def _compare_step(self, step: Step, foretold: OracleStep) -> None:
        rows = step.rows.tolist()
        same("rows above max_running", [row for row in rows if not 0 <= row < self.options.limits.max_running], [])
        self.comparison.compare_step(step, foretold)

    def _check_content(self) -> None:
        """Every block that can be hit, and whose step ran, has what its key says; moved ones once their step ran."""
        if self.options.ranks > 1:
            return
        for group, block, prefix in self.comparison.readable(moved=not self._flights):
            if not self.worker.holds(group, block, prefix):
                raise ContentError(f"block {block} of group {group} can be hit but does not hold the end of {prefix}")


@dataclass(frozen=True, slots=True)
class RigOptions:
    """What a Rig is built of. num_blocks: the null block included. specs: one a group.

    block_sizes: of as many groups of full attention, where no specs are given. dcp, pcp: context parallel sizes; what
    is read is checked on a single rank only. blocks_per_slab: of every group, for the natural layout, whose slabs
    ``num_blocks`` then counts; kernel_blocks: of every group, where a block is more than one. placement: its name,
    as in a plan. remembered_losses: as of the manager.
    """

    num_blocks: int = 16
    block_sizes: tuple[int, ...] = (4,)
    max_model_len: int = 40
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    caching: bool = True
    events: bool = False
    layers_per_group: int = 1
    vocabulary: int = 4
    specs: tuple[KVCacheSpec, ...] = ()
    eagle: bool = False
    dcp: int = 1
    pcp: int = 1
    blocks_per_slab: tuple[int, ...] = ()
    kernel_blocks: tuple[int, ...] = ()
    placement: str = "ends"
    remembered_losses: int = 0

    @property
    def ranks(self) -> int:
        """Context parallel ranks."""
        return self.dcp * self.pcp

    def with_drafts(self, drafts: int) -> RigOptions:
        """The same with up to ``drafts`` drafts of a row in a step, and blocks for their states.

        Fewer in the reference layout, where states are kept every few tokens.
        """
        if not self.blocks_per_slab:
            kept = [spec for spec in self.specs if isinstance(spec, MambaSpec) and spec.cache_mode == "align"]
            drafts = min([drafts, *(spec.block_size - 1 for spec in kept)])
        specs = tuple(
            replace(spec, num_speculative_blocks=max(drafts, spec.num_speculative_blocks))
            if isinstance(spec, MambaSpec)
            else spec
            for spec in self.specs
        )
        return replace(self, specs=specs, limits=replace(self.limits, num_speculative_tokens=drafts))

    @property
    def config(self) -> KVCacheConfig:
        """A config with these groups; strides are larger than pages."""
        specs = self.specs or tuple(full_spec(size) for size in self.block_sizes)
        if self.blocks_per_slab:
            return natural_model_config(
                self.num_blocks,
                specs,
                self.blocks_per_slab,
                layers_per_group=self.layers_per_group,
                kernel_blocks=self.kernel_blocks,
            )
        return model_config(self.num_blocks, specs, layers_per_group=self.layers_per_group, gap_bytes=8)


@dataclass(frozen=True, slots=True)
class RigRequest:
    """What is asked of both. reads, writes: whether it uses the prefix cache. n: outputs wanted.

    encoder: its digest is text.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    salt: str | None = None
    priority: int = 0
    arrival_time: float = 0.0
    reads: bool = True
    writes: bool = True
    marks: tuple[int, ...] = ()
    n: int = 1
    encoder: EncoderInput | None = None

    def request(self, name: str, hasher: Hasher | None) -> Request:
        """For the scheduler."""
        return Request(
            name,
            self.prompt,
            SamplingParams(max_tokens=self.max_tokens, stop_token_ids=self.stop_token_ids, n=self.n),
            hasher=hasher,
            cache_salt=self.salt,
            eos_token_ids=self.eos_token_ids,
            arrival_time=self.arrival_time,
            priority=self.priority,
            skip_reading_prefix_cache=not self.reads,
            skip_writing_prefix_cache=not self.writes,
            marks=self.marks,
            encoder=self.encoder,
        )

    @property
    def origin(self) -> Origin:
        """What tells its tokens from equal ones."""
        return self.salt if self.encoder is None else (self.salt, str(self.encoder.digest))

    def expected(self, name: str, max_model_len: int) -> OracleRequest:
        """For the oracle."""
        return OracleRequest(
            name,
            list(self.prompt),
            len(self.prompt),
            limit=min(len(self.prompt) + self.max_tokens, max_model_len),
            stops=frozenset(self.stop_token_ids + self.eos_token_ids),
            salt=self.origin,
            encoder=0 if self.encoder is None else self.encoder.num_tokens,
            priority=self.priority,
            reads=self.reads,
            writes=self.writes,
            marks=tuple(sorted(self.marks)),
        )
