"""An engine in vLLM's manner over the natural layout: its scheduler's calls, its output, its worker's tables.

What attention keeps of a token, and a state, are digests of all tokens before: whoever reads a wrong block, or one that
was not copied, samples another token.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from engine_groups import Asked
from hybridkv.specs import Keeps
from hybridkv.vllm.manager import CacheManager
from hybridkv.vllm.natural import NaturalStep, StepWriter

if TYPE_CHECKING:
    from natural_host import Host  # which builds on Worker

VOCABULARY, STOP, MOST_STEPS = 50, 7, 900
Table = list[list[int]]
Transfers = tuple[Callable[[], None], Callable[[], None]]
"""Those of a tier before the moves of a step, and after its copies."""


def digest(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[Any] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass
class New:
    req_id: str
    block_ids: Any
    num_computed_tokens: int


@dataclass
class Output:
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Kept:
    """What a model keeps. Groups and their blocks are those of a manager."""

    def __init__(self, manager: CacheManager) -> None:
        groups = manager.cache.config.groups
        self.states = [number for number, group in enumerate(groups) if group.spec.keeps is Keeps.STATE]
        self.sizes = [group.spec.block_size for group in groups]
        self.windows = [group.spec.mask[0] for group in groups]

    def seen(self, group: int, length: int, ahead: int = 0) -> range:
        """Of ``length`` tokens, those that the last one sees; by the ``ahead``-th behind it."""
        window = self.windows[group]
        return range(0 if window is None else max(0, length + ahead - window), length)

    def left(self, tokens: list[int], ahead: int = 0) -> list[int]:
        """Of ``tokens``, what their last one sees, or the ``ahead``-th behind it."""
        state, found = 0, list[int]()
        for token in tokens:
            state = digest(state, token)
        for group in range(len(self.sizes)):
            places = self.seen(group, len(tokens), ahead)
            found += [state] if group in self.states else [digest(tokens[: place + 1]) for place in places]
        return found

    def plain(self, prompt: list[int], outputs: int) -> list[int]:
        """Without a cache."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + outputs:
            tokens.append(digest(self.left(tokens)) % VOCABULARY)
            if tokens[-1] == STOP:
                break
        return tokens[len(prompt) :]


class Worker:
    """Tables by request, as vLLM's worker keeps them, and blocks by class."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.tables: dict[str, Table] = {}
        self.tokens: dict[str, list[int]] = {}
        self.counts: Counter[str] = Counter()
        self.memory: list[dict[int, dict[int, int]]] = []
        self.class_of: list[int] = []

    def execute(
        self, output: Output, step: NaturalStep, prompts: dict[str, list[int]], transfers: Transfers | None = None
    ) -> dict[str, int]:
        """A token behind the last known one of each request that got so far."""
        if step.config is not None and step.config.slabs is not None:
            slabs = step.config.slabs
            self.memory = [{} for _ in slabs.classes]
            self.class_of = [slabs.classes.index(slabs.class_of(group)) for group in range(len(step.config.groups))]
        if transfers is not None:
            transfers[0]()
        self.copy(step.moves.tolist(), "moved")
        for of, block in step.zero.tolist():
            self.memory[of][block] = {}
        self.copy(step.copies.tolist(), "copied")
        if transfers is not None:
            transfers[1]()
        for cell in step.cells:
            table = self.tables.get(cell.request_id)
            if table is not None and cell.column < len(table[cell.group]):
                table[cell.group][cell.column] = cell.block
        self.hear(output, prompts)
        started = self.starts(output)
        sampled = {name: self.forward(name, start, count) for name, start, count in started}
        self.copy(step.keep.tolist(), "kept")
        return {name: token for name, token in sampled.items() if token is not None}

    def copy(self, copies: list[list[int]], what: str) -> None:
        for of, source, target in copies:
            self.memory[of][target] = dict(self.memory[of].get(source, {}))
            self.counts[what] += 1

    def hear(self, output: Output, prompts: dict[str, list[int]]) -> None:
        for one in output.scheduled_new_reqs:
            self.tables[one.req_id] = [list(ids) for ids in one.block_ids]
            self.tokens[one.req_id] = list(prompts[one.req_id])
        cached = output.scheduled_cached_reqs
        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(ids) for ids in new]
            elif new is not None:
                for ids, some in zip(self.tables[name], new, strict=True):
                    ids.extend(some)

    def starts(self, output: Output) -> Iterator[tuple[str, int, int]]:
        before = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        yield from ((name, before[name], count) for name, count in output.num_scheduled_tokens.items())

    def write(self, tables: Table, tokens: list[int], count: int) -> None:
        """What a forward of the first ``count`` tokens would leave, and no state that is not of all that are said."""
        state = 0
        for place in range(count):
            state = digest(state, tokens[place])
            for group, size in enumerate(self.kept.sizes):
                block = tables[group][0 if group in self.kept.states else place // size]
                if block:
                    cell = (0, state) if group in self.kept.states else (place % size, digest(tokens[: place + 1]))
                    self.memory[self.class_of[group]].setdefault(block, {})[cell[0]] = cell[1]

    def read(self, tables: Table, length: int, ahead: int = 0) -> list[int | None]:
        """As Kept.left has it, where ``tables`` say that it lies."""
        found = list[int | None]()
        for group, size in enumerate(self.kept.sizes):
            memory = self.memory[self.class_of[group]]
            places = [0] if group in self.kept.states else self.kept.seen(group, length, ahead)
            found += [memory.get(tables[group][place // size], {}).get(place % size) for place in places]
        return found

    def forward(self, name: str, start: int, count: int) -> int | None:
        tables, tokens, kept = self.tables[name], self.tokens[name], self.kept
        for place in range(start, start + count):
            for group, size in enumerate(kept.sizes):
                memory = self.memory[self.class_of[group]]
                if group in kept.states:
                    block = memory.setdefault(tables[group][0], {})
                    block[0] = digest(block.get(0) if place else 0, tokens[place])
                else:
                    block = memory.setdefault(tables[group][place // size], {})
                    block[place % size] = digest(tokens[: place + 1])
        length = start + count
        if length < len(tokens):
            return None
        tokens.append(digest(self.read(tables, length)) % VOCABULARY)
        return tokens[-1]


@dataclass
class Transfer:
    """Of one request's blocks, by the ids that were told when it began. waits: steps. tokens: how many it is of."""

    request: Asked
    table: Table
    tokens: int
    waits: int


class Connector:
    """Brings every ``every``-th request all tokens but the last, and reads what requests end with, both ``delay`` late.

    tears: of every so many-th load only the first half comes. sent: what was read.
    """

    def __init__(self, every: int, delay: int, tears: int = 0) -> None:
        self.every, self.delay, self.tears, self.asked = every, delay, tears, 0
        self.tried = set[str]()
        self.loads, self.sends = list[Transfer](), list[Transfer]()
        self.sent: dict[str, list[int | None]] = {}
        self.brought = 0

    def has(self, request: Asked, hit: int) -> int:
        """Tokens behind ``hit`` that it brings; once."""
        if request.request_id in self.tried:
            return 0
        self.tried.add(request.request_id)
        self.asked += 1
        return 0 if self.asked % self.every else max(request.num_tokens - 1 - hit, 0)

    def run(self, worker: Worker) -> tuple[list[tuple[Transfer, int]], list[Transfer]]:
        """Loads that are over, with what came, and sends that are over."""
        for one in self.loads + self.sends:
            one.waits -= 1
        over, sent = ([one for one in some if one.waits < 0] for some in (self.loads, self.sends))
        self.loads, self.sends = ([one for one in some if one.waits >= 0] for some in (self.loads, self.sends))
        came = []
        for one in over:
            self.brought += 1
            torn = bool(self.tears) and self.brought % self.tears == 0
            worker.write(one.table, one.request.all_token_ids, one.tokens // 2 if torn else one.tokens)
            came.append((one, one.tokens // 2 if torn else one.tokens))
        for one in sent:
            self.sent[one.request.request_id] = worker.read(one.table, one.tokens, 1)
        return came, sent


class Engine:
    """ahead: a step is scheduled before the last one's output is in. change: of every NaturalStep, a fault.

    connector, host: None without one.
    by_priority: who came last is not who is preempted: every third goes last, though it runs. preempted_late: who had
    its slots in the step that preempted it. decodes: steps in which all decode one token.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        budget: int = 24,
        seats: int = 6,
        ahead: bool = False,
        change: Callable[[NaturalStep], NaturalStep] = lambda step: step,
        connector: Connector | None = None,
        by_priority: bool = False,
        host: "Host | None" = None,
    ) -> None:
        self.manager, self.writer, self.kept = manager, StepWriter(manager), Kept(manager)
        self.worker = Worker(self.kept)
        self.budget, self.seats, self.ahead, self.change = budget, seats, ahead, change
        self.asked, self.waiting, self.running = list[Asked](), deque[Asked](), list[Asked]()
        self.prompts: dict[str, list[int]] = {}
        self.limits: dict[str, int] = {}
        self.resumed: set[str] = set()
        self.hits: dict[str, int] = {}
        self.preemptions = self.preempted_late = self.decodes = 0
        self.by_priority = by_priority
        self.in_flight = deque[tuple[Output, dict[str, Asked], dict[str, int]]]()
        self.connector, self.host = connector, host
        self.arrived = list[tuple[Transfer, int]]()
        self.aside = list[Asked]()  # passed over in this step: their prefixes come up

    def add(self, name: str, prompt: list[int], outputs: int) -> Asked:
        request = Asked(name, prompt)
        request.max_tokens = outputs
        self.prompts[name], self.limits[name] = prompt, len(prompt) + outputs
        self.asked.append(request)
        self.waiting.append(request)
        return request

    def run(self) -> None:
        for _ in range(MOST_STEPS):
            transfers = self.connector is not None and (self.connector.loads or self.connector.sends or self.arrived)
            busy = self.host is not None and self.host.requests.is_busy
            if not (self.waiting or self.running or self.in_flight or transfers or busy):
                return
            self.step()
            self.manager.cache.check()
            if self.manager.tier is not None:
                self.manager.tier.check()
        raise AssertionError(f"{len(self.waiting)} wait and {len(self.running)} run after {MOST_STEPS} steps")

    def step(self) -> None:
        output, owners = Output(), dict[str, Asked]()
        with self.manager.step():
            if not self.decode(output, owners):
                self.manager.ahead.give(self.running, 1, 0)
                room = self.go_on(output, owners)
                self.take_arrived()
                if room:
                    self.let_in(output, owners)
                self.waiting.extendleft(reversed(self.aside))
                self.aside.clear()
            work = None if self.host is None else self.host.requests.work(output, self.manager).step
            step = self.change(self.writer.write(output))
        self.manager.scheduled(output)
        for name, count in output.num_scheduled_tokens.items():
            request = owners[name]
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
            if request.num_computed_tokens == request.num_tokens + request.num_output_placeholders:
                request.num_output_placeholders += 1
        host, transfers = self.host, None
        if host is not None and work is not None:
            transfers = partial(host.begin, work, self.worker), partial(host.load, self.worker)
        self.in_flight.append((output, owners, self.worker.execute(output, step, self.prompts, transfers)))
        if host is not None:
            host.end(self.worker)
        if self.connector is not None:
            came, sent = self.connector.run(self.worker)
            self.arrived += came
            for one in sent:
                self.manager.free(one.request)
        while len(self.in_flight) > (self.ahead and bool(output.num_scheduled_tokens)):
            self.take_in()

    def decode(self, output: Output, owners: dict[str, Asked]) -> bool:
        """Whether all that runs decodes one token, and nobody is there besides: they are then in ``output``."""
        if self.waiting or self.arrived or self.connector or self.host or len(self.running) > self.budget:
            return False
        decoded = self.manager.decode(self.running, len(self.running))
        if decoded is None:
            return False
        self.decodes += bool(decoded.requests)
        names = [request.request_id for request in decoded.requests]
        output.scheduled_cached_reqs = Cached(names, list(decoded.new_blocks), decoded.num_computed_tokens)
        output.num_scheduled_tokens |= dict.fromkeys(names, 1)
        owners |= {request.request_id: request for request in self.running}
        return True

    def budget_left(self, output: Output) -> int:
        return self.budget - sum(output.num_scheduled_tokens.values())

    def go_on(self, output: Output, owners: dict[str, Asked]) -> bool:
        place, room = 0, True
        while place < len(self.running):
            request = self.running[place]
            more = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            if request.num_computed_tokens + 2 - request.num_output_placeholders >= self.limits[request.request_id]:
                more = 0 if request.num_output_placeholders else more
            more = self.manager.share(request, request.num_computed_tokens, min(more, self.budget_left(output)))
            if more <= 0:
                place += 1
                continue
            while (new := self.manager.allocate_slots(request, more)) is None:
                room = False
                last = self.victim()
                place -= self.running.index(last) < place
                self.running.remove(last)
                if output.num_scheduled_tokens.pop(last.request_id, 0):
                    self.preempted_late += 1
                    self.leave_out(output, last.request_id)
                self.preempt(last)
                if last is request:
                    return False
            cached = output.scheduled_cached_reqs
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(new.get_block_ids(allow_none=True))
            cached.num_computed_tokens.append(request.num_computed_tokens)
            output.num_scheduled_tokens[request.request_id] = more
            owners[request.request_id] = request
            place += 1
        return room

    def victim(self) -> Asked:
        """By priority the first of each three goes last."""
        if not self.by_priority:
            return self.running[-1]
        return max(self.running, key=lambda one: self.asked.index(one) % 3 == 0)

    @staticmethod
    def leave_out(output: Output, name: str) -> None:
        cached = output.scheduled_cached_reqs
        place = cached.req_ids.index(name)
        for column in (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            del column[place]

    def preempt(self, request: Asked) -> None:
        self.manager.free(request)
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.stale = request.num_in_flight_tokens
        self.resumed.add(request.request_id)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def let_in(self, output: Output, owners: dict[str, Asked]) -> None:
        while self.waiting and self.budget_left(output) > 0 and len(self.running) < self.seats:
            request, name = self.waiting[0], self.waiting[0].request_id
            if request.stale:
                return  # until what it has in flight is in
            blocks, hit, loaded = self.manager.empty_kv_cache_blocks, 0, request.num_computed_tokens
            if not loaded:
                blocks, hit, _ = self.manager.get_computed_blocks(request)
                if self.host is not None and self.host.requests.matched(request, hit)[0] is None:
                    self.aside.append(self.waiting.popleft())
                    continue
                if self.load(request, blocks, hit):
                    continue
            begins = loaded or hit
            more = self.manager.share(request, begins, min(self.budget_left(output), request.num_tokens - begins))
            new = self.manager.allocate_slots(
                request, more, hit, blocks, full_sequence_must_fit=True, has_scheduled_reqs=bool(self.running)
            )
            if new is None:
                return
            self.running.append(self.waiting.popleft())
            if self.host is not None:
                self.host.requests.allocated(request, new, 0)
            hit = request.num_computed_tokens = begins
            self.hits.setdefault(name, hit)
            table = self.manager.get_blocks(name).get_block_ids()
            if name in self.resumed:
                cached = output.scheduled_cached_reqs
                cached.resumed_req_ids.add(name)
                cached.req_ids.append(name)
                cached.new_block_ids.append(table)
                cached.num_computed_tokens.append(hit)
                self.resumed.discard(name)
            else:
                output.scheduled_new_reqs.append(New(name, table, hit))
            output.num_scheduled_tokens[name] = more
            owners[name] = request

    def load(self, request: Asked, blocks: Any, hit: int) -> bool:  # noqa: ANN401 - Blocks
        """Whether the first that waits is loaded beside the steps from now on."""
        more = 0 if self.connector is None else self.connector.has(request, hit)
        if self.connector is None or not more:
            return False
        new = self.manager.allocate_slots(
            request, 0, hit, blocks, num_external_computed_tokens=more, delay_cache_blocks=True
        )
        if new is None:
            return False
        self.waiting.popleft()
        request.num_computed_tokens = hit + more
        table = self.manager.get_block_ids(request.request_id)
        self.connector.loads.append(Transfer(request, list(table), hit + more, self.connector.delay))
        return True

    def take_arrived(self) -> None:
        for one, came in self.arrived:
            one.request.num_computed_tokens = came
            self.manager.cache_blocks(one.request, came)
            self.waiting.appendleft(one.request)
        self.arrived = []

    def end(self, request: Asked) -> None:
        """Its blocks go when they have been sent, if there is who takes them."""
        if self.connector is None or request.num_in_flight_tokens:
            self.manager.free(request)
            return
        tokens = request.num_computed_tokens
        self.manager.remove_skipped_blocks(request.request_id, tokens)
        table = self.manager.get_block_ids_for_computed_tokens(request.request_id, tokens)
        self.manager.hold(request)
        self.connector.sends.append(Transfer(request, list(table), tokens, self.connector.delay))

    def take_in(self) -> None:
        output, owners, sampled = self.in_flight.popleft()
        self.manager.executed(output)
        for name, count in output.num_scheduled_tokens.items():
            request = owners[name]
            request.num_in_flight_tokens -= count
            stale, request.stale = request.stale > 0, max(0, request.stale - count)
            if request.finished or name not in sampled:
                continue
            request.append(sampled[name])
            if not stale:
                request.num_output_placeholders -= 1
                self.manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
            if sampled[name] == STOP or request.num_tokens == self.limits[name]:
                request.finished = True
                if request in self.running:
                    self.running.remove(request)
                    self.end(request)
                else:
                    self.waiting.remove(request)
                    self.manager.free(request)
