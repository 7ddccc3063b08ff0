"""Stores and devices that fail, which must harm nothing; and faults of TierConnector, which tier_duel must see."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any, Final

from hybridkv.stores.memory import MemoryStore
from hybridkv.stores.prefetch import GroupNeeds, Prefetcher, PrefixRules
from hybridkv.vllm import tier_requests
from hybridkv.vllm.tier_requests import TierRequests, TierWork


def _put(owner: Any, name: str, made: Any) -> None:  # noqa: ANN401 - of any class or module
    setattr(owner, name, made)


# -- what must harm nothing


def lost_blocks() -> None:
    """Every seventh block is gone when it is read, and what lay in the buffer stays there."""
    get, numbers = MemoryStore.get, count(1)

    def lossy(self: MemoryStore, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        for buffer in into:
            buffer[:] = bytes([7]) * len(buffer)
        there = [number % 7 > 0 for number, _ in zip(numbers, keys, strict=False)]
        found = iter(get(self, [key for key, one in zip(keys, there, strict=True) if one],
                         [buffer for buffer, one in zip(into, there, strict=True) if one]))  # fmt: skip
        return [one and next(found) for one in there]

    _put(MemoryStore, "get", lossy)


def failed_loads() -> None:
    """Every third write of a group breaks off with an error of the device, after half of the blocks."""
    from hybridkv.vllm.tier_worker import DevicePages  # noqa: PLC0415 - imports torch

    write, numbers = DevicePages.write, count(1)

    def failing(self: DevicePages, group: int, blocks: Any, rows: Any) -> None:  # noqa: ANN401 - tensors
        if next(numbers) % 3:
            return write(self, group, blocks, rows)
        half = len(blocks) // 2
        write(self, group, blocks[:half], rows[:half])
        raise RuntimeError("a device failed")

    _put(DevicePages, "write", failing)


def slow_store() -> None:
    """No look-up is ever answered; requests do not wait long."""
    _put(tier_requests, "PATIENCE_S", 0.05)
    _put(Prefetcher, "answers", lambda *_: {})


def lost_transfers() -> None:
    """Every third transfer between device and host is reported as lost, in the natural layout."""
    from hybridkv.vllm.natural_tier import NaturalTierWorker  # noqa: PLC0415 - imports torch

    answers = NaturalTierWorker.answers

    def lossy(self: NaturalTierWorker) -> dict[int, int]:
        return {number: arrived if number % 3 else 0 for number, arrived in answers(self).items()}

    _put(NaturalTierWorker, "answers", lossy)


# -- faults


def empty_loads() -> None:
    """Loads of the natural layout bring zeros."""
    from hybridkv.worker.tier import HostTierCopier  # noqa: PLC0415 - imports torch

    load = HostTierCopier.load

    def wrong(self: HostTierCopier, step: Any) -> None:  # noqa: ANN401 - a Step
        if len(step.loads):
            self.arena.zero_()
        load(self, step)

    _put(HostTierCopier, "load", wrong)


def _kept(change: Callable[[TierRequests, Any, int, int, int], tuple[int, int]]) -> None:
    """Store another (column, block) of each block of a state's group."""
    add = TierRequests._add

    def wrong(self: TierRequests, stores: Any, request: Any, *at: int) -> None:  # noqa: ANN401
        group, column, block = at
        if self._rules.groups[group].is_state:
            column, block = change(self, request, group, column, block)
        if column >= 0:
            add(self, stores, request, group, column, block)

    _put(TierRequests, "_add", wrong)


def other_boundary() -> None:
    """A state is stored under the hash of the boundary before its own."""
    _kept(lambda _, __, ___, column, block: (column - 1, block))


def by_place() -> None:
    """States are taken from the place after a boundary: they have gone on (vllm#54736, vllm#56972)."""
    filled = TierRequests._store_filled

    def wrong(self: TierRequests, request: Any, num_tokens: int, manager: Any, stores: Any) -> None:  # noqa: ANN401
        filled(self, request, num_tokens, manager, stores)
        computed = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        for group, needs in enumerate(self._rules.groups):
            blocks = manager.get_blocks(request.request_id).blocks[group]
            whole = computed // needs.block_tokens
            if needs.is_state and 0 < whole < len(blocks) and not blocks[whole].is_null:
                self._add(stores, request, group, whole - 1, blocks[whole].block_id)

    def states(self: TierRequests, output: Any, manager: Any) -> TierWork:  # noqa: ANN401
        output.kv_connector_block_state.boundary_state_offloads.clear()
        return work(self, output, manager)

    work = TierRequests.work
    _put(TierRequests, "work", states)
    _put(TierRequests, "_store_filled", wrong)


def full_hits() -> None:
    """A prompt is hit with its last token, which is then computed again from a state that has it (LMCache#5249)."""
    begin = TierRequests._begin

    class Longer:
        def __init__(self, request: Any) -> None:  # noqa: ANN401 - vLLM's
            self._request, self.num_tokens = request, request.num_tokens + 1

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - vLLM's
            return getattr(self._request, name)

    _put(TierRequests, "_begin", lambda self, request, local: begin(self, Longer(request), local))


def half_a_state() -> None:
    """The second half of a state stays on the host."""
    _written(lambda needs, blocks, rows: (blocks, _halved(rows) if needs.is_state else rows))


def wrong_block() -> None:
    """The first block of a load has the bytes of the last. (Attention does not see two that only changed places.)"""
    _written(lambda _, blocks, rows: (blocks, rows[[len(rows) - 1, *range(1, len(rows))]] if len(rows) else rows))


def _halved(rows: Any) -> Any:  # noqa: ANN401 - a tensor
    rows = rows.clone()
    rows[:, rows.shape[1] // 2 :] = 0
    return rows


def _written(change: Callable[[GroupNeeds, Any, Any], tuple[Any, Any]]) -> None:
    from hybridkv.vllm import tier_worker  # noqa: PLC0415 - imports torch

    write, made = tier_worker.DevicePages.write, tier_worker.TierWorker.__init__
    rules = list[PrefixRules]()

    def init(self: Any, config: Any, caches: Any, given: PrefixRules, **more: Any) -> None:  # noqa: ANN401
        rules.append(given)
        made(self, config, caches, given, **more)

    def wrong(self: Any, group: int, blocks: Any, rows: Any) -> None:  # noqa: ANN401
        write(self, group, *change(rules[-1].groups[group], blocks, rows))

    _put(tier_worker.TierWorker, "__init__", init)
    _put(tier_worker.DevicePages, "write", wrong)


def before_the_forward() -> None:
    """Blocks are copied before the step that fills them."""
    from hybridkv.vllm.tier_worker import TierWorker  # noqa: PLC0415 - imports torch

    begin, store = TierWorker.begin, TierWorker.store

    def early(self: TierWorker, work: TierWork) -> None:
        begin(self, work)
        store(self, work)

    _put(TierWorker, "begin", early)
    _put(TierWorker, "store", lambda self, work: None)  # noqa: ARG005


def unnoticed_losses() -> None:
    """Blocks that did not arrive count as there."""
    lost_blocks()
    _put(Prefetcher, "_whole", lambda self, places, answers: set(places))  # noqa: ARG005


def unnoticed_failures() -> None:
    """Loads that failed count as done."""
    failed_loads()
    from hybridkv.vllm import tier_worker  # noqa: PLC0415 - imports torch

    loaded = tier_worker.TierWorker.loaded
    _put(tier_worker.TierWorker, "loaded", lambda self: loaded(self)._replace(failed=set()))


def keys_without_groups() -> None:
    """All groups share a key."""
    key = tier_requests.key

    def wrong(identity: bytes, epoch: bytes, group: int, block_hash: bytes) -> bytes:
        del group
        return key(identity, epoch, 0, block_hash)

    from hybridkv.vllm import tier_worker  # noqa: PLC0415 - imports torch

    _put(tier_worker, "key", wrong)


def short_windows() -> None:
    """Of a window, only the last block is loaded."""
    columns = GroupNeeds.columns

    def wrong(self: GroupNeeds, start: int, end: int) -> range:
        found = columns(self, start, end)
        return found if self.window is None else found[-1:]

    _put(GroupNeeds, "columns", wrong)


def keys_without_salt() -> None:
    """Tenants share keys: those of their tokens alone."""
    matched = TierRequests.matched

    class Plain:
        def __init__(self, request: Any) -> None:  # noqa: ANN401 - vLLM's
            self._request = request

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - vLLM's
            return getattr(self._request, name)

        @property
        def block_hashes(self) -> list[bytes]:
            tokens = list(self._request.all_token_ids)
            return [blake2b(str(tokens[:end]).encode()).digest()[:32] for end in range(32, len(tokens) + 1, 32)]

    _put(TierRequests, "matched", lambda self, request, local: matched(self, Plain(request), local))


HARMLESS: Final[Mapping[str, Callable[[], None]]] = {
    "blocks are lost": lost_blocks,
    "loads fail": failed_loads,
    "no answers": slow_store,
    "transfers are lost": lost_transfers,
}
OF_STATES: Final[Mapping[str, Callable[[], None]]] = {
    "a state under the hash of another boundary": other_boundary,
    "states by their place in the table": by_place,
    "half a state": half_a_state,
    "the last token applied twice": full_hits,
}
OF_WINDOWS: Final[Mapping[str, Callable[[], None]]] = {"one block of a window": short_windows}
OF_ALL: Final[Mapping[str, Callable[[], None]]] = {
    "another block's bytes": wrong_block,
    "stored before the forward": before_the_forward,
    "lost blocks unnoticed": unnoticed_losses,
    "failed loads unnoticed": unnoticed_failures,
    "keys without the salt": keys_without_salt,
}
OF_GROUPS: Final[Mapping[str, Callable[[], None]]] = {"keys without the group": keys_without_groups}
OF_NATURAL: Final[Mapping[str, Callable[[], None]]] = {"loads of the natural layout bring zeros": empty_loads}
_EVERY: Final = {**OF_NATURAL, **HARMLESS, **OF_STATES, **OF_WINDOWS, **OF_ALL, **OF_GROUPS}


def commit(name: str) -> None:
    """From now on."""
    _EVERY[name]()


def names(*parts: Mapping[str, Any]) -> Iterator[str]:
    """Of faults."""
    for part in parts:
        yield from part


def faults_of(*, states: bool, windows: bool, groups: bool) -> Iterable[str]:
    """Those that a model with such groups must see."""
    return [*names(OF_ALL, OF_NATURAL), *(names(OF_STATES) if states else ()), *(names(OF_WINDOWS) if windows else ()),
            *(names(OF_GROUPS) if groups else ())]  # fmt: skip
