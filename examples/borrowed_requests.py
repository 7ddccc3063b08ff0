"""A loop with its own requests: the cache borrows them, and blocks also arrive from another engine between steps.

    python examples/borrowed_requests.py

In examples/foreign_engine.py the loop hands tokens over. This loop has its own queue, requests, counts and hashes, and
schedules a step before the last step's tokens are known. A second engine sends blocks that it has computed; a transfer
takes several steps, or brings only half. The model is a stand-in: it stores a digest of all tokens so far for each
token. So a request that reads a missing or a wrong block produces a different token.

    loop        requests, counts, hashes      Lent, EngineHashes, synchronise
    step n      begin_step ... end_step       allocate_batch for running requests; waiting ones are admitted or loaded
    step n-1    tokens become known, settle   cache_blocks at publish_boundaries
    transfers   0 new tokens ... finish_load  resume after their blocks; computed where they fail
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from hybridkv import KVCacheManager, Plan, Request, plan, read_model
from hybridkv.cache import Admission, EngineHashes, Refusal
from hybridkv.request import Lent
from hybridkv.specs import RequestLimits

SEATS, CHUNK, OUTPUTS, VOCABULARY = 4, 64, 24, 50_000
TAKES, FAILS = 3, 3  # steps of a transfer; every so many-th brings half


def digest(*parts: object) -> int:
    """64 bits of what was said."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


@dataclass
class Asked:
    """The engine's own request: its tokens and hashes are nowhere else. computed: scheduled; unknown: not drawn yet."""

    name: str
    all_token_ids: list[int]
    block: int
    hashes: list[bytes] = field(default_factory=list)
    prompt: int = 0
    computed: int = 0
    in_flight: int = 0
    unknown: int = 0

    def __post_init__(self) -> None:
        self.prompt = self.num_tokens
        self.take()

    @property
    def num_tokens(self) -> int:
        """Those that are known."""
        return len(self.all_token_ids)

    def take(self, *tokens: int) -> None:
        """More tokens are known; whole blocks are hashed."""
        self.all_token_ids += tokens
        for end in range((len(self.hashes) + 1) * self.block, self.num_tokens + 1, self.block):
            self.hashes.append(digest(self.all_token_ids[:end]).to_bytes(8, "little"))


@dataclass
class Step:
    """What one forward runs: of each request how many tokens, behind how many."""

    number: int
    runs: list[tuple[Asked, int, int]] = field(default_factory=list)


class Engine:
    """All of an engine but the arithmetic. store: what a neighbour has of each prompt. counts: what happened."""

    def __init__(self, planned: Plan, store: dict[tuple[int, ...], int] | None = None) -> None:
        self.size = planned.config.groups[0].spec.block_size
        self.cache = KVCacheManager(planned, hasher=EngineHashes(self.size))
        self.memory: dict[tuple[int, int], int] = {}  # (block, place in it) -> what is kept of the token there
        self.store = store or {}
        self.waiting: deque[Asked] = deque()
        self.running: list[Asked] = []
        self.ours: dict[str, Request] = {}
        self.loads: dict[
            str, tuple[Asked, int, int, int]
        ] = {}  # request, its hit, tokens then, step in which they came
        self.flight: deque[Step] = deque()
        self.counts: Counter[str] = Counter()
        self.number = 0

    def add(self, name: str, prompt: list[int]) -> Asked:
        """Queue a request."""
        self.waiting.append(Asked(name, list(prompt), self.size))
        return self.waiting[-1]

    def step(self) -> None:
        """One step is scheduled; then the one before it runs, and its tokens become known."""
        step = Step(self.number)
        self.cache.engine.begin_step(self.number)
        self.number += 1
        self.arrive()
        self.go_on(step)
        self.let_in(step)
        self.cache.engine.end_step()
        self.cache.fields.take_transfers()  # blocks are shared whole here: there is nothing to copy
        self.flight.append(step)
        if len(self.flight) == 2 or not step.runs:
            self.run(self.flight.popleft())

    def arrive(self) -> None:
        """Transfers that are over: the request goes on behind what came, or begins anew."""
        for name, (request, hit, tokens, when) in list(self.loads.items()):
            if when > self.number:
                continue
            del self.loads[name]
            self.counts["loads"] += 1
            failed = self.counts["loads"] % FAILS == 0
            came = hit + (tokens - hit) // 2 if failed else tokens
            self.write(request, hit, came - hit)
            request.computed = self.cache.engine.finish_load(self.ours[name], came)
            self.counts["loads that brought half"] += failed
            self.waiting.appendleft(request)

    def go_on(self, step: Step) -> None:
        """Allocate the next token of every running request in one call; preempt the last one if blocks run out."""
        ready = [one for one in self.running if one.num_tokens + one.unknown - one.prompt < OUTPUTS]
        while ready:
            rows = np.array([self.ours[one.name].row for one in ready])
            counts = np.array([(one.num_tokens, one.computed, one.in_flight) for one in ready])
            self.cache.engine.synchronise(
                rows, num_tokens=counts[:, 0], num_computed=counts[:, 1], in_flight=counts[:, 2]
            )
            self.counts["calls saved"] += int((self.cache.engine.next_events(rows) > counts[:, 1] + 1).sum())
            if self.cache.allocate_batch(rows, 1).accepted == len(ready):
                break
            self.preempt(ready.pop())
        for one in ready:
            self.schedule(step, one, 1)

    def let_in(self, step: Step) -> None:
        """Who waits, in order: behind what is here, or loaded where the neighbour has more; computed in chunks."""
        while self.waiting and len(self.running) + len(self.loads) < SEATS:
            request = self.waiting[0]
            mine = self.ours.get(request.name)
            if mine is None:
                lent = Lent(request, request.prompt, request.hashes)
                mine = self.ours[request.name] = Request(request.name, lent, hasher=self.cache.hasher)
            hit, blocks = 0, None
            if not request.computed:
                blocks, hit = self.cache.get_computed_blocks(mine)
                found = self.store.get(tuple(request.all_token_ids[: request.prompt]), 0)
                if found > hit:
                    if not self.load(request, mine, found, hit):
                        return
                    continue
            count = min(request.num_tokens - request.computed - hit, CHUNK)
            whole = Admission(RequestLimits(request.num_tokens, CHUNK), chunk_reserve=1)
            self.cache.engine.synchronise_one(mine, request.computed, request.in_flight)
            planned = self.cache.plan_slots(mine, count, hit, blocks, admission=whole)
            if isinstance(planned, Refusal):
                return  # it waits for somebody to end
            self.cache.commit(planned)
            self.counts["tokens hit"] += hit
            request.computed += hit
            self.schedule(step, request, count)
            self.waiting.popleft()
            if request.computed < request.num_tokens:  # the rest of its prompt, chunk by chunk
                self.waiting.appendleft(request)
                return
            self.running.append(request)

    def load(self, request: Asked, mine: Request, tokens: int, hit: int) -> bool:
        """Blocks for what the neighbour has, which nobody finds before it is there."""
        blocks, _ = self.cache.get_computed_blocks(mine)
        external = tokens - hit
        taken = self.cache.allocate_slots(
            mine, 0, hit, blocks, delay_cache_blocks=True, num_external_computed_tokens=external
        )
        if taken is not None:
            self.store.pop(tuple(request.all_token_ids[: request.prompt]))  # a load is tried once
            self.loads[request.name] = self.waiting.popleft(), hit, tokens, self.number + TAKES
        return taken is not None

    def schedule(self, step: Step, request: Asked, count: int) -> None:
        """``count`` tokens run in ``step``; behind the last known one a token comes that nobody knows yet."""
        step.runs.append((request, request.computed, count))
        request.computed += count
        request.in_flight += count
        request.unknown += request.computed >= request.num_tokens

    def preempt(self, request: Asked) -> None:
        """Restart the request with its output so far; steps in flight still run."""
        while self.flight:
            self.run(self.flight.popleft())
        if request in self.running:
            self.cache.free(request.name)
            self.running.remove(request)
            del self.ours[request.name]
            request.computed = request.in_flight = request.unknown = 0
            self.waiting.appendleft(request)
            self.counts["preemptions"] += 1

    def run(self, step: Step) -> None:
        """Run the forward and process its results."""
        for request, start, count in step.runs:
            self.write(request, start, count)
            request.in_flight -= count
            if start + count == request.num_tokens:
                request.take(self.read(request, start + count) % VOCABULARY)
                request.unknown -= 1
                self.counts["tokens said"] += 1
        self.cache.engine.settle(step.number)
        self.publish([request for request, _, _ in step.runs if request in self.running])
        for request, _, _ in step.runs:
            if request in self.running and request.num_tokens - request.prompt == OUTPUTS:
                lock = self.cache.engine.lock(request.name)  # say, for a transfer to the neighbour
                self.cache.free(request.name)
                self.cache.engine.unlock(lock)
                self.running.remove(request)

    def publish(self, ran: list[Asked]) -> None:
        """Tokens that are known by now fill blocks: one comparison says whose."""
        rows = np.array([self.ours[one.name].row for one in ran], np.int64)
        counts = [(one.num_tokens, one.computed, one.in_flight, one.computed - one.in_flight) for one in ran]
        known, computed, in_flight, settled = np.array(counts, np.int64).reshape(-1, 4).T
        self.cache.engine.synchronise(rows, num_tokens=known, num_computed=computed, in_flight=in_flight)
        for place in np.flatnonzero(np.minimum(settled, known) >= self.cache.engine.publish_boundaries(rows)).tolist():
            self.cache.cache_blocks(self.ours[ran[place].name], int(min(settled[place], known[place])))
            self.counts["blocks published when known"] += 1

    def write(self, request: Asked, start: int, count: int) -> None:
        """Write a digest for each of ``count`` tokens to its slot, in place of keys and values."""
        (table,) = self.cache.get_block_ids(request.name)
        for place in range(start, start + count):
            kept = digest(request.all_token_ids[: place + 1])
            self.memory[table[place // self.size], place % self.size] = kept

    def read(self, request: Asked, tokens: int) -> int:
        """Return the result of attention over the first ``tokens`` tokens."""
        (table,) = self.cache.get_block_ids(request.name)
        return digest([self.memory[table[place // self.size], place % self.size] for place in range(tokens)])


def plain(prompt: list[int]) -> list[int]:
    """Run the same model without a cache."""
    tokens = list(prompt)
    kept = [digest(tokens[: place + 1]) for place in range(len(tokens))]
    for _ in range(OUTPUTS):
        tokens.append(digest(kept) % VOCABULARY)
        kept.append(digest(tokens))
    return tokens[len(prompt) :]


def main() -> None:
    """Questions behind a few heads, some of which a neighbour has computed, in a memory too small for all of them."""
    heads = [[1000 * head + i for i in range(96)] for head in range(3)]
    prompts = [heads[n % 3] + [7 * n + i for i in range(5 + 9 * n)] for n in range(12)]
    planned = plan(read_model("llama-3-8b"), "60MiB", max_model_len=400, layout="reference")
    size = planned.config.groups[0].spec.block_size
    store = {tuple(prompt): (len(prompt) - 1) // size * size for prompt in prompts[1::2]}
    engine = Engine(planned, store)
    asked = [(engine.add(str(n), prompt), prompt) for n, prompt in enumerate(prompts)]
    while engine.waiting or engine.running or engine.loads:
        engine.step()
        engine.cache.check()
    for request, prompt in asked:
        if request.all_token_ids[len(prompt) :] != plain(prompt):
            raise SystemExit(f"{request.name} read what is not its own")
    for name in sorted(engine.counts):
        print(f"{name}: {engine.counts[name]}")
    print(f"{len(asked)} outputs as without a cache, {engine.cache.usage:.0%} of the memory in use")


if __name__ == "__main__":
    main()
