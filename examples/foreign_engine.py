"""A cache manager in another engine's loop, without our Scheduler, Step or worker.

    python examples/foreign_engine.py

The engine has its own queue, batch and memory. It asks the manager for blocks, makes the pending copies before each
forward pass (``take_transfers``), and frees everything at the end. The model is a stand-in for a hybrid one: attention
and recurrent layers store digests of all tokens so far. So a request that reads a wrong block, or one that was not
copied, samples another token. The output is compared with a run without a cache.
"""

from __future__ import annotations

from collections import Counter, deque
from hashlib import blake2b

import numpy as np

from hybridkv import KVCacheManager, Plan, Request, SamplingParams, plan, read_model
from hybridkv.cache import Checkpoint
from hybridkv.specs import Keeps

BUDGET, SEATS, VOCABULARY = 96, 4, 50_000  # tokens of a step, requests at once
SYSTEM = list(range(1000, 1150))  # what all prompts begin with


def digest(*parts: object) -> int:
    """64 bits of what was said."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class Engine:
    """All of an engine but the arithmetic. counts: what happened."""

    def __init__(self, planned: Plan) -> None:
        self.cache = KVCacheManager(planned)
        self.memory = [dict[int, dict[int, int]]() for _ in planned.config.groups]  # by group: block -> what is in it
        for one in planned.config.slabs.classes if planned.config.slabs is not None else ():
            for group in one.groups:
                self.memory[group] = self.memory[one.groups[0]]  # blocks of equal bytes share ids and memory
        self.states = [g for g, one in enumerate(planned.config.groups) if one.spec.keeps is Keeps.STATE]
        self.sizes = [one.spec.block_size for one in planned.config.groups]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counts: Counter[str] = Counter()
        self.number = 0

    def add(self, name: str, prompt: list[int], outputs: int) -> Request:
        """Queue a request, hashed as the manager's other requests are."""
        request = Request(name, prompt, SamplingParams(max_tokens=outputs), hasher=self.cache.hasher)
        self.waiting.append(request)
        return request

    def step(self) -> None:
        """One batch: whoever runs, then whoever comes in; copies; a forward; samples."""
        self.number += 1
        with self.cache.step(self.number):  # what this step is to write is not copied before it has run
            batch = self.go_on()
            self.let_in(batch)
            checkpoints = self.copy(batch)
        for request, count in batch.items():
            self.forward(request, count, checkpoints)
        self.cache.mark_written(self.number)
        for request, count in batch.items():
            self.take(request, count)

    def go_on(self) -> dict[Request, int]:
        """Tokens for those that run; the last one gives way where blocks run out."""
        batch: dict[Request, int] = {}
        for request in list(self.running):
            if request not in self.running:
                continue  # it gave way
            count = min(BUDGET - sum(batch.values()), request.num_tokens - request.num_computed_tokens)
            while count and self.cache.allocate_slots(request, count) is None:
                count = 0 if request is self.running[-1] else count
                self.preempt(self.running[-1], batch)
            if count:
                batch[request] = count
        return batch

    def let_in(self, batch: dict[Request, int]) -> None:
        """Those that wait, in order, while there are blocks, seats and budget."""
        while self.waiting and sum(batch.values()) < BUDGET and len(self.running) < SEATS:
            request = self.waiting[0]
            blocks, hit = self.cache.get_computed_blocks(request)
            count = min(BUDGET - sum(batch.values()), request.num_tokens - hit)
            if self.cache.allocate_slots(request, count, hit, blocks) is None:
                break  # it waits for somebody to end
            request.num_computed_tokens = hit
            self.running.append(self.waiting.popleft())
            self.counts["tokens hit"] += hit
            batch[request] = count

    def preempt(self, request: Request, batch: dict[Request, int]) -> None:
        """Restart the request later; its computed prefix can be hit until its blocks are needed."""
        batch.pop(request, None)
        self.cache.keep_resume_point(request)
        self.cache.free(request)
        request.num_computed_tokens = 0
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.counts["preemptions"] += 1

    def copy(self, batch: dict[Request, int]) -> list[Checkpoint]:
        """Everything that has to be in place before the forward; the states that the forward is to store."""
        rows = np.array([request.row for request in batch], np.int64)
        computed = np.array([request.num_computed_tokens for request in batch], np.int64)
        self.cache.store_checkpoints(rows, computed, computed + np.array(list(batch.values()), np.int64))
        transfers = self.cache.fields.take_transfers()
        for one in transfers.copies:  # in this order: a block may be the source of one and the target of the next
            kept = self.memory[one.group].get(one.source, {})  # nothing yet: taken in this very step, and moved
            self.memory[one.group][one.destination] = dict(kept)
            self.counts[f"blocks copied: {one.kind}"] += 1
        self.counts["checkpoints"] += len(transfers.checkpoints)
        return list(transfers.checkpoints)

    def forward(self, request: Request, count: int, checkpoints: list[Checkpoint]) -> None:
        """Every layer of ``count`` tokens: attention writes where the table says, a state goes on in place."""
        tables, tokens = self.cache.get_block_ids(request.request_id), request.token_ids().tolist()
        start = request.num_computed_tokens
        for place in range(start, start + count):
            for group, size in enumerate(self.sizes):
                if group in self.states:
                    block = tables[group][0]
                    before = self.memory[group][block][0] if place else 0
                    self.memory[group][block] = {0: digest(before, tokens[place])}
                else:
                    cells = self.memory[group].setdefault(tables[group][place // size], {})
                    cells[place % size] = digest("token", tokens[: place + 1])
            for one in checkpoints:
                if (one.row, one.tokens) == (request.row, place + 1):
                    self.memory[one.group][one.block] = dict(self.memory[one.group][tables[one.group][0]])

    def take(self, request: Request, count: int) -> None:
        """``count`` more tokens are computed; a token is sampled behind the last one that is known."""
        request.num_computed_tokens += count
        self.counts["tokens run"] += count
        if request.num_computed_tokens < request.num_tokens:
            return
        tables, length = self.cache.get_block_ids(request.request_id), request.num_tokens
        read = list[int]()
        for group, size in enumerate(self.sizes):
            places = [0] if group in self.states else range(length)
            read += [self.memory[group][tables[group][place // size]][place % size] for place in places]
        if length - request.num_prompt_tokens < request.sampling.max_tokens:
            request.append(digest(read) % VOCABULARY)
        if request.num_tokens - request.num_prompt_tokens == request.sampling.max_tokens:
            self.cache.keep_resume_point(request)  # its last state, and its last block in part, may be hit
            self.cache.free(request)
            self.running.remove(request)

    def plain(self, prompt: list[int], outputs: int) -> list[int]:
        """Run the same model without a cache."""
        tokens = list(prompt)
        for _ in range(outputs):
            state = 0
            for token in tokens:
                state = digest(state, token)
            kept = [digest("token", tokens[: place + 1]) for place in range(len(tokens))]
            read = list[int]()
            for group in range(len(self.sizes)):
                read += [state] if group in self.states else kept
            tokens.append(digest(read) % VOCABULARY)
        return tokens[len(prompt) :]


def main() -> None:
    """Questions behind one system prompt, asked twice, in a memory that is too small for all of them."""
    planned = plan(read_model("qwen3.5-35b-a3b"), "1100MiB", max_model_len=400, placement="ends")
    engine = Engine(planned)
    questions = [SYSTEM + [10 * number + i for i in range(20 + 7 * number)] for number in range(8)]
    asked = []
    for turn in range(2):
        asked += [(engine.add(f"{turn}.{n}", prompt, 6), prompt) for n, prompt in enumerate(questions)]
        while engine.waiting or engine.running:
            engine.step()
            engine.cache.check()
    for request, prompt in asked:
        if request.output_token_ids != engine.plain(prompt, 6):
            raise SystemExit(f"{request.request_id} read what is not its own")
    for name in sorted(engine.counts):
        print(f"{name}: {engine.counts[name]}")
    print(f"{len(asked)} outputs as without a cache, {engine.cache.usage:.0%} of the memory in use")


if __name__ == "__main__":
    main()
