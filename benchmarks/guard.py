"""Count the work of each row of the control-plane benchmark, and compare it with the last declared counts.

    python guard.py            a table; status 1 if a row grew by more than 5%, or has no declared count
    python guard.py --write    writes work.json anew, to be committed with the change that makes a count grow

Counts are Python bytecodes and calls of C functions in one operation, in hybridkv and in all code that it calls,
numpy's own Python included. They do not depend on the machine or its load, but on the versions of Python and numpy,
which work.json names. Scenarios are small versions of the benchmark's (kv_adapter.py), and one of named tenants. The
cost inside an array operation and the memory are not counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
from kv_adapter import HybridKVAdapter
from shared_prefix import SharedPrefix

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import EndsPlacement
from hybridkv.eviction import HAZARD, Share, TenantShares
from hybridkv.request import Request
from hybridkv.testing.configs import full_spec, natural_model_config, state_spec

HERE: Final = Path(__file__).parent
DECLARED: Final = HERE / "work.json"
MOST_GROWTH: Final = 1.05
_LEAST_GROWTH: Final = 8  # bytecodes: a row of a few may grow by one

BLOCK: Final = 16
Rows = dict[str, tuple[int, int]]
"""Of each row: bytecodes and calls of C functions, of one operation."""


@dataclass(frozen=True)
class Group:
    """As the benchmark's own Group."""

    kind: str
    block_size: int = BLOCK
    window: int = 0


FULL, WINDOW, STATES = Group("full"), Group("swa", BLOCK, 64), Group("mamba_align", 2 * BLOCK)


class Counter:
    """Counts what is executed while ``counted`` is entered. The bench's own files are left out."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}
        self._bytecodes = self._calls = 0

    @contextmanager
    def counted(self, row: str, operations: int = 1) -> Iterator[None]:
        """Count the work inside for ``row``, which is this many operations."""
        self._bytecodes = self._calls = 0
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            sys.settrace(None)
            self.add(row, (self._bytecodes, self._calls, operations))

    def add(self, row: str, work: Sequence[int]) -> None:
        """``work``, bytecodes, calls and operations, belongs to ``row``."""
        sums = self.rows.setdefault(row, [0, 0, 0])
        for place, more in enumerate(work):
            sums[place] += more

    def per_operation(self) -> Rows:
        """Return the counts per operation, rounded up."""
        return {row: (-(-codes // count), -(-calls // count)) for row, (codes, calls, count) in self.rows.items()}

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:  # noqa: ARG002 - as it is called
        if frame.f_code.co_filename.startswith(str(HERE)):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:  # noqa: ARG002 - as it is called
        self._bytecodes += event == "opcode"
        return self._opcode

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        self._calls += event == "c_call" and not frame.f_code.co_filename.startswith(str(HERE))


class Bench:
    """One adapter, and tokens that come in the same order in every run."""

    def __init__(self, counter: Counter) -> None:
        self.adapter = HybridKVAdapter()
        self.hasher = self.adapter.hasher("sha256_cbor", BLOCK)
        self._rng = np.random.default_rng(3)
        self._counter = counter
        self.number = 0

    def tokens(self, count: int) -> list[int]:
        """Return new requests."""
        ids: list[int] = self._rng.integers(0, 150_000, count).tolist()
        return ids

    def request(self, tokens: list[int]) -> Any:  # noqa: ANN401 - the adapter's own
        """Return a new request."""
        self.number += 1
        return self.adapter.request(f"r{self.number}", tokens, self.hasher)

    def call(self, row: str, operations: int, act: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401 - any
        """``act`` counted."""
        with self._counter.counted(row, operations):
            return act(*given)

    # -- scenarios

    def hashing(self) -> None:
        """Prompts as lists and as arrays, that come once and again."""
        prompt, blocks = self.tokens(300 * BLOCK), 300
        self.call("hash.list.per_block", blocks, self.adapter.hash_prompt, self.hasher, prompt)
        other = np.array(self.tokens(300 * BLOCK), np.int32)
        self.call("hash.int32.per_block", blocks, self.adapter.hash_prompt, self.hasher, other)
        self.call("hash.again.per_call", 1, self.adapter.hash_prompt, self.hasher, other)

    def lookups(self) -> None:
        """Hits, of requests made anew and of runs that are known, and misses."""
        adapter, prompt = self.adapter, self.tokens(300 * BLOCK)
        cache = adapter.manager([FULL], 400, 8192)
        self.allocated(cache, prompt)
        for row in ("lookup.hit.first.per_call", "lookup.hit.per_call"):
            self.call(row, 1, adapter.lookup, cache, self.request([*prompt, 1, 2]))
        again = self.call("lookup.request_again", 1, adapter.request, "again", [*prompt, 3], self.hasher)
        self.call("lookup.hit.per_call", 1, adapter.lookup, cache, again)
        for _ in range(3):
            self.call("lookup.miss.per_call", 1, adapter.lookup, cache, self.request(self.tokens(64)))

    def allocated(self, cache: Any, prompt: list[int]) -> Any:  # noqa: ANN401 - the adapter's own
        """Return a request that holds the blocks of its prompt."""
        one = self.request(prompt)
        self.adapter.step(cache)
        if self.adapter.allocate(cache, one, len(prompt)) is False:
            raise RuntimeError("the pool is too small for the scenario")
        return one

    def prefill(self) -> None:
        """Allocate a long prompt at once, in chunks, after a hit, and while evicting; free it."""
        adapter, blocks = self.adapter, 64
        cache, prompt = adapter.manager([FULL], 2 * blocks + 4, 8192), self.tokens(blocks * BLOCK)
        one = self.request(prompt)
        self.call("prefill.one_shot.per_call", 1, adapter.allocate, cache, one, len(prompt))
        self.call("free.per_call", 1, adapter.free, cache, one)
        two = self.request(prompt)
        hit, found = self.call("prefill.adopt_hit.per_call", 1, adapter.lookup, cache, two)
        self.call("prefill.adopt_hit.per_call", 0, adapter.allocate, cache, two, len(prompt) - found, found, hit)
        adapter.free(cache, two)
        for row in ("prefill.chunk.per_call", "prefill.evicting.per_call"):
            one = self.request(self.tokens(blocks * BLOCK))
            for _ in range(4):
                self.call(row, 1, adapter.allocate, cache, one, blocks * BLOCK // 4)
            adapter.free(cache, one)
        self.call("pool.construct", 1, adapter.manager, [FULL], 1000, 8192)

    def chain(self) -> None:
        """Grow a prompt turn by turn, each a request that names the one it continues."""
        adapter, prompt, before = self.adapter, self.tokens(8 * 64), None
        cache = adapter.manager([FULL], 100, 8192)
        for turn in range(1, 9):
            given = prompt[: turn * 64]
            before = self.call("chain.request", 1, adapter.request, f"t{turn}", given, self.hasher, before)
            hit, found = self.call("chain.lookup", 1, adapter.lookup, cache, before)
            self.call("chain.allocate", 1, adapter.allocate, cache, before, len(given) - found, found, hit)
            self.call("chain.free", 1, adapter.free, cache, before)

    def decode(self, row: str, groups: list[Group], *, observe: bool = False, singly: bool = False) -> None:
        """One token for each of eight requests, two blocks long."""
        adapter, requests = self.adapter, []
        cache = adapter.manager(groups, 400, 8192, observe)
        for place in range(8):
            one = self.allocated(cache, self.tokens(80 + 2 * place))
            adapter.append(one, 7)
            requests.append(one)
        if observe:
            adapter.observe(cache)
        for _ in range(2 * BLOCK):
            self._decode_step(row, cache, requests, singly=singly)
            if observe:
                self.call(f"{row}.observe.per_step", 1, adapter.observe, cache)
        if singly:
            for one in requests:
                self.call(f"{row}.free.per_call", 1, adapter.free, cache, one)
        else:
            self.call(f"{row}.free.per_step", 1, adapter.free_many, cache, requests)

    def _decode_step(self, row: str, cache: Any, requests: list[Any], *, singly: bool) -> None:  # noqa: ANN401 - as above
        adapter = self.adapter
        if not singly:
            self.call(f"{row}.allocate.per_step", 1, adapter.decode_many, cache, requests)
            self.call(f"{row}.append.per_step", 1, adapter.append_many, requests, self.tokens(len(requests)))
            return
        for one, token in zip(requests, self.tokens(len(requests)), strict=True):
            epoch = cache.block_pool.epoch
            with (found := Counter()).counted("one"):
                adapter.allocate(cache, one, 1)
            event = "event" if cache.block_pool.epoch > epoch else "no_event"
            self._counter.add(f"{row}.allocate.{event}.per_call", found.rows["one"])
            self.call(f"{row}.append.per_call", 1, adapter.append, one, token)

    def hybrid(self, row: str, groups: list[Group]) -> None:
        """Allocate a prompt in chunks, adopt its hit, miss once, and free it."""
        adapter, prompt = self.adapter, self.tokens(32 * BLOCK)
        cache, one = adapter.manager(groups, 400, 8192), self.request([*prompt, 5])
        for _ in range(4):
            self.call(f"{row}.prefill_chunk.per_call", 1, adapter.allocate, cache, one, len(prompt) // 4)
        two = self.request(prompt + self.tokens(24))
        hit, found = self.call(f"{row}.lookup_hit.per_call", 1, adapter.lookup, cache, two)
        missing = len(prompt) + 24 - found
        self.call(f"{row}.adopt_hit.per_call", 1, adapter.allocate, cache, two, missing, found, hit)
        self.call(f"{row}.lookup_miss.per_call", 1, adapter.lookup, cache, self.request(self.tokens(256)))
        self.call(f"{row}.free.per_call", 1, adapter.free, cache, one)

    def churn(self) -> None:
        """Short requests through a pool too small for them: admission, decode, preemption."""
        adapter, waiting, running = self.adapter, [self.request(self.tokens(40)) for _ in range(16)], list[Any]()
        cache = adapter.manager([FULL], 30, 8192)
        for _ in range(60):
            if running:
                out = self.call("churn.per_step", 0, adapter.decode_many, cache, running)
                for _ in range(len(running) - out.accepted):
                    waiting.insert(0, running.pop())
                    self.call("churn.per_step", 0, adapter.preempt, cache, waiting[0])
                self.call("churn.per_step", 0, adapter.append_many, running, self.tokens(len(running)))
            while waiting and len(running) < 8:
                one = waiting[0]
                hit, found = self.call("churn.per_step", 0, adapter.lookup, cache, one)
                new = one.num_tokens - found
                if self.call("churn.per_step", 0, adapter.allocate, cache, one, new, found, hit) is False:
                    break
                adapter.append(one, 9)
                running.append(waiting.pop(0))
            self.call("churn.per_step", 1, adapter.step, cache)

    def tables(self) -> None:
        """Rows written, appended to, sent; slots of prompts and of decoding rows."""
        adapter = self.adapter
        table = adapter.table(BLOCK, 16, 128, 1024)
        for row in range(16):
            self.call("table.add_row.per_call", 1, adapter.table_add_row, table, self.tokens(64), row)
        for row in range(16):
            self.call("table.append_row.per_call", 1, adapter.table_append_row, table, [row + 1], row)
        many = list(range(16))
        self.call("table.append_many.per_call", 1, adapter.table_append_many, table, many, many)
        self.call("table.commit.per_call", 1, adapter.table_commit, table, 16)
        for kind, count, each in (("prefill", 2, 512), ("decode", 16, 1)):
            starts = np.arange(count + 1) * each
            positions = np.tile(np.arange(each), count)
            prepared = adapter.table_prepare(starts, positions)
            self.call(f"table.slots_{kind}.per_call", 1, adapter.table_compute_slots, table, count, prepared)

    def tenants(self, row: str, count: int) -> None:
        """Shares of ``count`` named tenants; requests of 32 of them in a full cache, each gives up what others kept."""
        each = [Share(f"tenant-{number}", 0.5 / count) for number in range(count)]
        shares = self.call(f"{row}.shares", 1, TenantShares, (Share(None, 0.1), *each))
        now, config = [0.0], natural_model_config(40, (full_spec(4), state_spec(4)), (4, 1))
        options = CacheOptions(placement=EndsPlacement(), eviction=HAZARD, shares=shares, clock=lambda: now[0])
        cache = self.call(f"{row}.manager", 1, partial(KVCacheManager, config, 200, options=options))
        active = [each[number * count // 32].name for number in range(32)]
        for place in range(96):
            now[0] += 1.0
            told = f"{row}.request.per_call" if place >= 64 else "warm.request"
            self.call(told, 1, self._serve, cache, f"{place}", active[place % 32])

    def _serve(self, cache: KVCacheManager, name: str, tenant: str) -> None:
        """Run a request: it computes its prompt in one step, gets one more token, and ends."""
        request = Request(name, self.tokens(14), hasher=cache.hasher, tenant=tenant)
        hit = cache.look_up(request)
        cache.allocate_slots(request, 14, hit.tokens, hit)
        cache.store_checkpoints(np.array([request.row]), np.array([0]), np.array([14]))
        request.num_computed_tokens = 14
        cache.fields.take_transfers()
        request.append(9)
        cache.cache_blocks(request, 14)
        cache.keep_resume_point(request)
        cache.free(request)

    def steps(self, row: str, groups: list[Group]) -> None:
        """Run the scheduler with eight decoding requests."""
        adapter = self.adapter
        scheduler = adapter.scheduler(groups, 8, 2048, 6000)
        for place in range(8):
            adapter.sched_add(scheduler, f"s{place}", self.tokens(64 + place), self.hasher)
        for step in range(4 + 2 * BLOCK):
            told = row if step >= 4 else "warm"
            made, names = self.call(f"{told}.schedule.per_step", 1, adapter.sched_schedule, scheduler)
            result = adapter.sched_prepare(scheduler, made, names, 9)
            self.call(f"{told}.update.per_step", 1, adapter.sched_update, scheduler, made, result)

    def shared_prefix(self) -> None:
        """Run requests with one system prompt and a short rest, after 100 and after 500 similar ones."""
        server = SharedPrefix("qwen3-next-80b-a3b", "natural")
        for behind, more in ((100, 100), (500, 380)):
            server.serve(more)
            self.call(f"shared_prefix.behind_{behind}.per_request", 20, server.serve, 20)


def scenarios() -> Mapping[str, Callable[[Bench], None]]:
    """All of them by name."""
    return {
        "hashing": Bench.hashing,
        "lookups": Bench.lookups,
        "prefill": Bench.prefill,
        "chain": Bench.chain,
        "decode": lambda bench: bench.decode("decode", [FULL]),
        "decode_one": lambda bench: bench.decode("decode_one", [FULL], singly=True),
        "decode_observed": lambda bench: bench.decode("decode_observed", [FULL], observe=True),
        "decode_one_states": lambda bench: bench.decode("decode_one_states", [FULL, WINDOW, STATES], singly=True),
        "decode_window": lambda bench: bench.decode("decode_window", [FULL, WINDOW]),
        "decode_states": lambda bench: bench.decode("decode_states", [FULL, WINDOW, STATES]),
        "hybrid_window": lambda bench: bench.hybrid("hybrid_window", [FULL, WINDOW]),
        "hybrid_states": lambda bench: bench.hybrid("hybrid_states", [FULL, WINDOW, STATES]),
        "churn": Bench.churn,
        "tables": Bench.tables,
        "tenants": lambda bench: bench.tenants("tenants_100", 100),
        "tenants_many": lambda bench: bench.tenants("tenants_10k", 10_000),
        "sched": lambda bench: bench.steps("sched", [FULL]),
        "shared_prefix": Bench.shared_prefix,
        "sched_hybrid": lambda bench: bench.steps("sched_hybrid", [FULL, WINDOW, STATES, STATES]),
    }


def measure(names: list[str] | None = None) -> Rows:
    """Count the work of all scenarios, or of the named ones, after each ran once without being counted."""
    found: Rows = {}
    for name, run in scenarios().items():
        if names is None or name in names:
            run(Bench(Counter()))
            counter = Counter()
            run(Bench(counter))
            found |= counter.per_operation()
    return {row: work for row, work in sorted(found.items()) if not row.startswith("warm.")}


def versions() -> dict[str, str]:
    """Return the versions on which the counts depend."""
    return {"python": "{}.{}".format(*sys.version_info), "numpy": ".".join(np.__version__.split(".")[:2])}


def grown(before: Mapping[str, list[int]], now: Rows) -> list[str]:
    """Yield a line for each row that grew too far, or that only one of the two has."""
    lines = [f"{row}: not declared" for row in now if row not in before]
    for row, (codes, calls) in now.items():
        if row not in before:
            continue
        for what, old, new in zip(("bytecodes", "C calls"), before[row], (codes, calls), strict=True):
            if new > old * MOST_GROWTH and new > old + _LEAST_GROWTH * (what == "bytecodes"):
                lines.append(f"{row}: {old} {what}, now {new} ({new / max(old, 1) - 1:+.0%})")
    return lines


def main() -> int:
    """See the module."""
    now = measure()
    if "--write" in sys.argv[1:]:
        rows = {row: list(work) for row, work in now.items()}
        DECLARED.write_text(json.dumps(versions() | {"rows": rows}, indent=1) + "\n")
        return 0
    declared = json.loads(DECLARED.read_text())
    print(f"{'':40}{'bytecodes':>20}{'C calls':>16}")
    for row, (codes, calls) in now.items():
        old = declared["rows"].get(row, (0, 0))
        print(f"{row:40}{old[0]:>10}{codes:>10}{old[1]:>8}{calls:>8}")
    if declared != declared | versions():
        print(f"declared with {declared['python']}, numpy {declared['numpy']}: not compared")
        return 0
    lines = [*grown(declared["rows"], now), *(f"{row}: gone" for row in declared["rows"] if row not in now)]
    print("\n".join(lines) or "nothing grew")
    if lines:
        print("faster again, or declared: python guard.py --write, and say so in the commit")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
