"""Faults put on purpose into the control plane of tiers, or into the worker: one a bug of another project, and our own.

Each is a function that patches one thing. ``FAULTS`` has those that a random run must show, ``HARMLESS`` those against
which a second check protects the content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tier_runs import ENCODERS, RINGS, SLABS, Run

from hybridkv.cache import KVCacheManager
from hybridkv.cache.engine_side import EngineSide
from hybridkv.extra_keys import ExtraKeys
from hybridkv.request import Request
from hybridkv.schedule import Scheduler
from hybridkv.schedule.admission import AdmissionControl
from hybridkv.specs import Keeps
from hybridkv.step import NO_TIER_COPIES, Int32, Step, TierCopies
from hybridkv.testing.fake_tier import FakeTier
from hybridkv.tiers import HostTier, Prefixes, StoreLookups
from hybridkv.tiers import host as host_module
from hybridkv.tiers.behind import StoreBehind
from hybridkv.tiers.carriers import NO_COLUMNS, Carried, Carriers, Way
from hybridkv.tiers.prefixes import Part

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault.

    Attributes:
        name: What is wrong.
        bug: Where the same was wrong; "own" for faults that we thought of.
        patch: Puts it in.
        stored: It needs a store behind the host.
        seeds: Runs that show it, to be tried first.
        failing: Probability that a step fails.
        kinds: The models of its runs.
    """

    name: str
    bug: str
    patch: Patch
    stored: bool = False
    seeds: tuple[int, ...] = ()
    failing: float = 0.03
    kinds: Any = field(default_factory=lambda: SLABS)

    def run(self, seed: int, steps: int = 150) -> None:
        """Make one random run."""
        run = Run(seed, stored=self.stored, kinds=self.kinds)
        run.failing = self.failing
        run.run(steps)


FAULTS: list[Fault] = []
HARMLESS: list[Fault] = []


def fault(name: str, bug: str = "own", **more: Any) -> Callable[[Patch], Patch]:  # noqa: ANN401 - as Fault
    """Add a fault that a run must show."""

    def add(patch: Patch) -> Patch:
        FAULTS.append(Fault(name, bug, patch, **more))
        return patch

    return add


def harmless(name: str, bug: str = "own") -> Callable[[Patch], Patch]:
    """Add a fault that costs hits alone."""

    def add(patch: Patch) -> Patch:
        HARMLESS.append(Fault(name, bug, patch, stored=True))
        return patch

    return add


def _part(copies: TierCopies, kept: NDArray[np.int64]) -> TierCopies:
    return TierCopies(copies.transfer[kept], copies.group[kept], copies.source[kept], copies.destination[kept])


def _states(manager: KVCacheManager) -> list[int]:
    return [rule.group for rule in manager.engine.resume_rules if rule.is_state]


# -- bugs of other projects


@fault("the second half of a state stays on the device", "sglang#39830", seeds=(2,))
def half_a_state(patch: pytest.MonkeyPatch) -> None:
    read = FakeTier._read

    def of(self: FakeTier, copies: TierCopies, source: Any, target: Any) -> Any:  # noqa: ANN401 - private
        for one in read(self, copies, source, target):
            for _, parts in one.blocks:
                parts[:] = [part[:4] + bytes(len(part) - 4) for part in parts]
            yield one

    patch.setattr(FakeTier, "_read", of)


@fault("tokens of a block come up in another order than they went down", "LMCache#4463")
def other_layout(patch: pytest.MonkeyPatch) -> None:
    read = FakeTier._read

    def of(self: FakeTier, copies: TierCopies, source: Any, target: Any) -> Any:  # noqa: ANN401 - private
        for one in read(self, copies, source, target):
            for _, parts in one.blocks if target is self._device else ():
                parts[:] = [part[8:16] + part[:8] + part[16:] for part in parts]
            yield one

    patch.setattr(FakeTier, "_read", of)


@fault("the state after E tokens is stored as that of E - 1, so a token is applied twice", "LMCache#5249", stored=True)
def applied_twice(patch: pytest.MonkeyPatch) -> None:
    spill = StoreBehind.spill

    def of(self: StoreBehind, one: Carried) -> None:
        spill(self, replace(one, wanted=one.wanted._replace(tokens=one.wanted.tokens - 1)))

    patch.setattr(StoreBehind, "spill", of)


@fault("states of decoding are not stored, though their tokens are", "vllm#56972", stored=True, seeds=(4, 10))
def no_decode_states(patch: pytest.MonkeyPatch) -> None:
    named = StoreBehind._named

    def of(self: StoreBehind, carrier: Request, tokens: int, held: Sequence[Int32], columns: list[Int32]) -> Any:  # noqa: ANN401
        if carrier.request_id.startswith("store") and tokens >= carrier.num_prompt_tokens:
            for group in _states(self._host):
                columns[group] = columns[group][:0]
        return named(self, carrier, tokens, held, columns)

    patch.setattr(StoreBehind, "_named", of)


@fault("a state is stored by its place in the table of a running request", "vllm#54736", seeds=(10, 18))
def state_by_place(patch: pytest.MonkeyPatch) -> None:
    store = HostTier._store

    def of(self: HostTier, request: Request, tokens: int) -> None:
        at = len(self._stores)
        store(self, request, tokens)
        if len(self._stores) == at or request.request_id not in {
            one.request_id for one in self.device.engine.resident_requests()
        }:
            return
        for group in _states(self.device):
            place = self.device.get_blocks(request.request_id).ids[group][:1]
            begun = self._stores[at]
            begun[2, begun[1] == group] = self.device.block_pool.local(group, place)

    patch.setattr(HostTier, "_store", of)


@fault("a hit is answered before all pools have arrived", "sglang#39147", stored=True, seeds=(7,))
def partial_fetch(patch: pytest.MonkeyPatch) -> None:
    get = FakeTier._get

    def of(self: FakeTier, store: Any, work: Any) -> bool:  # noqa: ANN401 - private
        get(self, store, work)
        return True

    patch.setattr(FakeTier, "_get", of)


def _keeps_loads(patch: pytest.MonkeyPatch) -> None:
    """Let requests keep the blocks that were loaded for them until they begin."""
    free, begins = KVCacheManager.free, HostTier.begins
    kept = list[tuple[KVCacheManager, Request]]()

    def of(self: KVCacheManager, request: Request | str) -> None:
        if isinstance(request, Request) and request.request_id.startswith("load"):
            kept.append((self, request))
        else:
            free(self, request)

    def begin(self: HostTier, request: Request) -> None:
        for manager, one in kept:
            if manager is self.device:
                free(manager, one)
        kept.clear()
        begins(self, request)

    patch.setattr(KVCacheManager, "free", of)
    patch.setattr(HostTier, "begins", begin)


@fault("loaded requests hold their blocks, and none has room for the rest of its prompt", "vllm#45388", seeds=(10,))
def loads_held(patch: pytest.MonkeyPatch) -> None:
    _keeps_loads(patch)
    patch.setattr(Scheduler, "check", lambda self: None)  # noqa: ARG005 - it sees this at once


@fault("a request whose load has landed stays in the queue as if it had not", "vllm#57104")
def never_promoted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "_answer", lambda *_, **__: None)


@fault("the scan of waiting requests stops at the first that does not begin", "vllm#57841")
def scan_stops(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdmissionControl, "_passes", lambda *_, **__: False)


@fault("a request that lacked memory once lets none pass while it is loaded", "vllm#57841", seeds=(16, 15))
def none_passes(patch: pytest.MonkeyPatch) -> None:
    passes = AdmissionControl._passes

    def of(self: AdmissionControl, entry: Any, now: float, *, lacks_memory: bool = False, loads: bool = False) -> bool:  # noqa: ANN401, ARG001
        return passes(self, entry, now, lacks_memory=lacks_memory)

    patch.setattr(AdmissionControl, "_passes", of)


# -- our own, in the control plane


@fault("a state's key leaves out its last tokens: a stale state under a right key", stored=True, seeds=(4,))
def key_without_tail(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Prefixes, "_end", lambda self, request, tokens: request.hashes[tokens // self._hash_block - 1] + b"\1"
    )


@fault("two blocks of a spill have each other's keys", stored=True)
def swapped_keys(patch: pytest.MonkeyPatch) -> None:
    named = StoreBehind._named

    def of(self: StoreBehind, carrier: Request, *of: Any) -> Any:  # noqa: ANN401
        group, block, keys = named(self, carrier, *of)
        if carrier.request_id.startswith("store") and len(keys) > 1 and group[0] == group[1]:
            keys = (keys[1], keys[0], *keys[2:])
        return group, block, keys

    patch.setattr(StoreBehind, "_named", of)


@fault("two blocks of a transfer are swapped")
def swapped_blocks(patch: pytest.MonkeyPatch) -> None:
    copies = host_module._copies

    def of(*route: Any) -> NDArray[np.int32]:  # noqa: ANN401
        made = copies(*route)
        if made.shape[1] > 1 and made[0, 0] == made[0, 1]:
            made[1, [0, 1]] = made[1, [1, 0]]
        return made

    patch.setattr(host_module, "_copies", of)


@fault("a null block is published", stored=True)
def null_block(patch: pytest.MonkeyPatch) -> None:
    named = StoreBehind._named

    def of(self: StoreBehind, carrier: Request, *of: Any) -> Any:  # noqa: ANN401
        group, block, keys = named(self, carrier, *of)
        if carrier.request_id.startswith("store"):
            block[-1:] = 0
        return group, block, keys

    patch.setattr(StoreBehind, "_named", of)


def _leaves_out(patch: pytest.MonkeyPatch, kept: Keeps) -> None:
    """Leave the blocks of some groups out of transfers between the managers."""
    copies = host_module._copies

    def of(route: Any, *more: Any) -> NDArray[np.int32]:  # noqa: ANN401
        made = copies(route, *more)
        groups = [number for number, group in enumerate(route.target.config.groups) if group.spec.keeps is kept]
        return made[:, ~np.isin(made[0], groups)]

    patch.setattr(host_module, "_copies", of)


@fault("the raw keys of a ring stay behind", kinds=RINGS)
def rings_left_out(patch: pytest.MonkeyPatch) -> None:
    _leaves_out(patch, Keeps.RING)


@fault("the output of an encoder stays behind", kinds=ENCODERS)
def encoded_left_out(patch: pytest.MonkeyPatch) -> None:
    _leaves_out(patch, Keeps.ENCODER)


@fault("the output of an encoder can be read before it has arrived", kinds=ENCODERS)
def encoded_too_early(patch: pytest.MonkeyPatch) -> None:
    begin = EngineSide.begin_load

    def of(self: EngineSide, request: Request, *more: Any) -> Any:  # noqa: ANN401
        begun = begin(self, request, *more)
        if begun is not None:
            self._publisher.publish_encoded(request)
        return begun

    patch.setattr(EngineSide, "begin_load", of)


@fault("the output of an encoder is found under its length, whatever the encoder read", kinds=ENCODERS)
def encoded_by_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Request, "encoder_keys", lambda self, size: [bytes([at]) for at in range(-(-self.num_encoder_tokens // size))]
    )


@fault("keys do not contain the tenant")
def key_without_salt(patch: pytest.MonkeyPatch) -> None:
    make = ExtraKeys.__init__
    patch.setattr(
        ExtraKeys, "__init__", lambda self, *args, **options: make(self, *args, **(options | {"cache_salt": None}))
    )


@fault("keys do not contain the identity of the model", stored=True)
def key_without_identity(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefixes, "_start", lambda self, group: b"16 bytes for all" + group.to_bytes(1, "little"))  # noqa: ARG005


@fault("keys do not contain the group", stored=True, seeds=(25,))
def key_without_group(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefixes, "_start", lambda self, group: self._identity + bytes([group == 0xFF]))


@fault("the blocks of a spill are not locked", stored=True, seeds=(1,))
def no_lock(patch: pytest.MonkeyPatch) -> None:
    spill = StoreBehind.spill

    def of(self: StoreBehind, one: Carried) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(EngineSide, "lock", lambda engine, _: engine._locks.add([NO_COLUMNS] * len(engine._groups)))
            spill(self, one)

    patch.setattr(StoreBehind, "spill", of)


@fault("a fetch begins in a step whose loads have yet to read the host", stored=True, seeds=(1,))
def fetch_beside_loads(patch: pytest.MonkeyPatch) -> None:
    waits = StoreBehind.waits

    def of(self: StoreBehind, request: Request, least: int, *, may_begin: bool) -> bool:  # noqa: ARG001
        return waits(self, request, least, may_begin=True)

    patch.setattr(StoreBehind, "waits", of)


@fault("a prefix can be hit before its bytes have arrived")
def hit_before_arrival(patch: pytest.MonkeyPatch) -> None:
    begin = Carriers.begin

    def of(self: Carriers, way: Way, wanted: Any, *more: Any) -> Any:  # noqa: ANN401
        begun = begin(self, way, wanted, *more)
        if begun is not None:
            wanted.target.engine.finish_load(wanted.carrier)
            wanted.target.keep_resume_point(wanted.carrier)
        return begun

    def ends(self: Carriers, number: int, before: Callable[[Carried], None] | None = None) -> Carried:
        one = self.by_number.pop(number)
        if before is not None:
            before(one)
        one.wanted.target.free(one.wanted.carrier)
        return one

    patch.setattr(Carriers, "begin", of)
    patch.setattr(Carriers, "keep", ends)
    patch.setattr(Carriers, "cancel", ends)


@fault("a lost transfer is kept as a resume point")
def lost_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Carriers, "cancel", lambda self, number: self.keep(number, lambda one: None))  # noqa: ARG005


@fault("transfers of steps that failed are kept", seeds=(3, 2))
def failed_is_kept(patch: pytest.MonkeyPatch) -> None:
    def of(self: HostTier, first_step: int) -> None:
        failed = [number for number, one in self._carriers.by_number.items() if one.step >= first_step]
        for number in failed:
            self._keep(number)
        self._cancelled.update(failed, [] if self._behind is None else self._behind.fail(first_step))

    patch.setattr(HostTier, "fail", of)


@fault("blocks that a failed step moved on the host stay published", failing=0.3, seeds=(4, 21))
def moved_stays(patch: pytest.MonkeyPatch) -> None:
    fail = HostTier.fail

    def of(self: HostTier, first_step: int) -> None:
        self._moved.clear()
        fail(self, first_step)

    patch.setattr(HostTier, "fail", of)


@fault("a hit on the host is not looked up again after evictions there", seeds=(7, 10))
def stale_hit(patch: pytest.MonkeyPatch) -> None:
    waits = HostTier.waits

    def of(self: HostTier, request: Request, hit: Any) -> bool:  # noqa: ANN401
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(KVCacheManager, "is_longest_hit", lambda *_: True)
            return waits(self, request, hit)

    patch.setattr(HostTier, "waits", of)


@fault("a request gets the answer of another one", stored=True)
def other_answer(patch: pytest.MonkeyPatch) -> None:
    ask = StoreLookups.ask

    def of(self: StoreLookups, request: Request, least: int, now: float) -> int | None:
        ask(self, request, least, now)
        for name, asked in self._asked.items():
            if name != request.request_id and asked.answer.done():
                return min(asked.answer.result(), request.num_tokens - 1)
        return ask(self, request, least, now)

    patch.setattr(StoreLookups, "ask", of)


# -- our own, in the worker


@fault("a store copies a block less")
def skipped_store(patch: pytest.MonkeyPatch) -> None:
    begin = FakeTier.begin

    def of(self: FakeTier, step: Step) -> None:
        number, at = np.unique(step.stores.transfer, return_index=True)
        skipped = at[np.isin(number, step.stores.transfer[np.setdiff1d(np.arange(len(step.stores)), at)])][:1]
        begin(self, replace(step, stores=_part(step.stores, np.delete(np.arange(len(step.stores)), skipped))))

    patch.setattr(FakeTier, "begin", of)


@fault("loads run before blocks are moved, cleared and copied", seeds=(12, 3))
def loads_first(patch: pytest.MonkeyPatch) -> None:
    begin, load = FakeTier.begin, FakeTier.load

    def of(self: FakeTier, step: Step) -> None:
        begin(self, step)
        load(self, replace(step, spills=(), fetches=()))

    patch.setattr(FakeTier, "begin", of)
    patch.setattr(FakeTier, "load", lambda self, step: load(self, replace(step, loads=NO_TIER_COPIES)))


@fault("stores read the device after the step")
def stores_last(patch: pytest.MonkeyPatch) -> None:
    begin, finish = FakeTier.begin, FakeTier.finish

    def of(self: FakeTier, step: Step) -> None:
        begin(self, replace(step, stores=NO_TIER_COPIES))
        _LATE[id(self)] = step.stores

    def end(self: FakeTier) -> tuple[Int32, Int32]:
        self._issue(list(self._read(_LATE.pop(id(self), NO_TIER_COPIES), self._device, self._host)))
        return finish(self)

    patch.setattr(FakeTier, "begin", of)
    patch.setattr(FakeTier, "finish", end)


_LATE: dict[int, TierCopies] = {}


@fault("lost transfers are reported as arrived")
def lost_silently(patch: pytest.MonkeyPatch) -> None:
    finish = FakeTier.finish

    def of(self: FakeTier) -> tuple[Int32, Int32]:
        arrived, lost = finish(self)
        return np.append(arrived, lost), lost[:0]

    patch.setattr(FakeTier, "finish", of)


@fault("copies within the host are not made", seeds=(1,))
def no_tier_copies(patch: pytest.MonkeyPatch) -> None:
    begin = FakeTier.begin
    patch.setattr(FakeTier, "begin", lambda self, step: begin(self, replace(step, tier_copies=())))


@fault("a block is put under its key in half", stored=True, seeds=(1,))
def half_a_block(patch: pytest.MonkeyPatch) -> None:
    put = FakeTier._put_under_keys

    def of(self: FakeTier, store: Any, work: Any) -> bool:  # noqa: ANN401 - private
        def half(keys: Sequence[bytes], blocks: Sequence[memoryview]) -> object:
            cut = [memoryview(bytes(one[:4]) + bytes(len(one) - 4)) for one in blocks]
            return store.put(keys, blocks if keys == [work.of.mark] else cut)

        wrong: Any = SimpleNamespace(exists=store.exists, get=store.get, put=half)
        return put(self, wrong, work)

    patch.setattr(FakeTier, "_put_under_keys", of)


@fault("a fetch writes its blocks in the order of another", stored=True, seeds=(1,))
def swapped_fetch(patch: pytest.MonkeyPatch) -> None:
    get = FakeTier._get

    def of(self: FakeTier, store: Any, work: Any) -> bool:  # noqa: ANN401 - private
        same = len(work.blocks) > 1 and work.of.group[0] == work.of.group[1]
        blocks = [work.blocks[1], work.blocks[0], *work.blocks[2:]] if same else work.blocks
        return get(self, store, replace(work, blocks=blocks))

    patch.setattr(FakeTier, "_get", of)


# -- against which the content is protected


@harmless("a mark is written before its blocks")
def mark_first(patch: pytest.MonkeyPatch) -> None:
    put = FakeTier._put_under_keys

    def of(self: FakeTier, store: Any, work: Any) -> bool:  # noqa: ANN401 - private
        put(self, store, replace(work, of=replace(work.of, keys=()), blocks=[]))
        return put(self, store, work)

    patch.setattr(FakeTier, "_put_under_keys", of)


@harmless("a look-up asks for full attention alone, and for no window or state", "sglang#39147")
def look_up_of_one_pool(patch: pytest.MonkeyPatch) -> None:
    def of(self: Prefixes, store: Any, request: Any, tokens: int, least: int) -> bool:  # noqa: ANN401
        keys = [key for part in self._whole for key in self.keys(request, tokens, part, part.columns(tokens))]
        return all(store.exists(keys)) or least < 0

    patch.setattr(Prefixes, "_has", of)


@harmless("a look-up compares no tails of marks")
def look_up_without_tails(patch: pytest.MonkeyPatch) -> None:
    marked = Prefixes._marked

    def of(self: Prefixes, store: Any, request: Any, least: int, limit: int) -> list[int]:  # noqa: ANN401
        found = marked(self, store, request, least, limit)
        return sorted({*found, *(one + 1 for one in found if one < limit)})

    patch.setattr(Prefixes, "_marked", of)


@harmless("a fetch lacks the first column of a window")
def short_window(patch: pytest.MonkeyPatch) -> None:
    columns = Part.columns

    def of(self: Part, tokens: int) -> range:
        found = columns(self, tokens)
        return found if self.reads_all or self.is_state else found[1:]

    patch.setattr(Part, "columns", of)
