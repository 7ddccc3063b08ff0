"""The scheduler's side of TierConnector: which prefixes are looked for, loaded and stored. It imports nothing of vLLM.

    request    waits for its turn | asked: workers look for its prefix | answered: they hold it | admitted: they load it
    block      full after this step: copied to staging memory after the forward, and stored under its hash
    state      the same, if vLLM's scheduler reports that it keeps the state of a boundary in this block

A request waits for turn and answer without holding up others. After PATIENCE_S and a few steps it is computed instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_bytes
from time import monotonic
from typing import Any, Final, NamedTuple

from hybridkv.stores.prefetch import PrefixRules
from hybridkv.vllm.tier_events import EPOCH_BYTES, TierChange, TierEvents

PATIENCE_S: Final = 2.0
"""Longest wait for a turn, and for the answer to a look-up. A slow tier then counts as a miss."""
PATIENCE_STEPS: Final = 4
"""Steps that a request waits in any case: an answer comes with a step's output, and steps can be slow."""
MOST_LOOKING: Final = 8
"""Most requests whose prefixes are looked for or held at once; the memory of what is held is bounded."""
_MOST_KNOWN: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Find:
    """A prefix to look for.

    Attributes:
        number: The look-up.
        start: Tokens that the device has.
        most: Most tokens of the prefix.
        hashes: The hash of each hash block from ``start`` on.
    """

    number: int
    start: int
    most: int
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class Load:
    """Copies from what a look-up holds to the device.

    Attributes:
        request_id: The request that waits for them.
        number: The look-up.
        end: Tokens of the prefix.
        blocks: For each group, the block of each column that is loaded.
    """

    request_id: str
    number: int
    end: int
    blocks: tuple[dict[int, int], ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Blocks of a group to store after the forward, and the hashes of their prefixes."""

    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TierWork:
    """The workers' part of a step.

    Attributes:
        epoch: Part of each key. It changes when the cache is reset.
        finds: Prefixes to look for.
        drops: Look-ups that nobody waits for any longer.
        loads: Copies to the device.
        stores: Blocks to store, by group.
        runs: Whether a forward runs in this step.
    """

    epoch: bytes
    finds: list[Find]
    drops: list[int]
    loads: list[Load]
    stores: dict[int, Store]
    runs: bool


class _Moment(NamedTuple):
    seconds: float
    step: int


@dataclass(slots=True)
class _LookUp:
    """A look-up of a request.

    Attributes:
        number: Its number.
        start: Tokens that the device had when it began.
        most: Most tokens.
        since: When the request began to wait for it.
        tokens: The prefix; ``None`` before all ranks have answered.
        answers: Of ranks.
        local: Tokens that the device had when vLLM asked last.
        is_held: Whether workers look for it or hold it.
    """

    number: int
    start: int
    most: int
    since: _Moment
    tokens: int | None = None
    answers: list[int] = field(default_factory=list)
    local: int = 0
    is_held: bool = True


class TierRequests:
    """Decides what workers look for, load and store.

    Args:
        rules: Which prefixes can be resumed.
        ranks: Number of workers.
        remembers: Whether a store has blocks of other processes, so that unknown prefixes may be there.
        events: Makes events of what ranks report; ``None`` without events.
        clock: Seconds.
    """

    def __init__(
        self,
        rules: PrefixRules,
        ranks: int,
        *,
        remembers: bool,
        events: TierEvents | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._rules, self._ranks, self._events = rules, ranks, events
        self._remembers, self._clock = remembers, clock
        self._smallest = min(group.block_tokens for group in rules.groups)
        self._epoch = bytes(EPOCH_BYTES)
        self._next = self._step = 0
        self._requests = dict[str, Any]()
        self._look_ups = dict[str, _LookUp]()
        self._numbers = dict[int, str]()  # those that workers look for or hold
        self._hopeful = dict[str, _Moment]()  # requests that wait for their turn
        self._stored_tokens = dict[str, int]()
        self._known: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._finds, self._drops, self._loads = list[Find](), list[int](), list[Load]()

    # -- look-ups

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:  # noqa: ANN401 - vLLM's
        """Return vLLM's answer: the tokens to load beyond the device's, ``None`` for later, and whether steps go on.

        O(blocks) for a request that was not seen before.

        Args:
            request: vLLM's Request.
            local: Tokens that the device has, a multiple of the unit.
        """
        self._requests[request.request_id] = request
        found = 0 if request.skip_reading_prefix_cache else self._found(request, local)
        return found, bool(found)

    def _found(self, request: Any, local: int) -> int | None:  # noqa: ANN401 - vLLM's
        look_up = self._look_ups.get(request.request_id)
        if look_up is not None and look_up.is_held and local < look_up.start:
            self._settle(look_up)  # the device lost blocks on which the prefix builds
            look_up = None
        if look_up is None:
            return None if self._begin(request, local) else 0
        if look_up.is_held and look_up.tokens is None and not self._is_over(look_up.since):
            return None
        if not look_up.is_held or look_up.tokens is None or look_up.tokens <= local:
            self._settle(look_up)
            return 0
        look_up.local = local
        return look_up.tokens - local

    def allocated(self, request: Any, blocks: Any, external: int) -> None:  # noqa: ANN401 - vLLM's
        """Load the prefix into the blocks of an admitted request, or forget it. O(blocks).

        Args:
            request: vLLM's Request.
            blocks: All its blocks.
            external: Tokens to load.
        """
        self._hopeful.pop(request.request_id, None)
        look_up = self._look_ups.pop(request.request_id, None)
        if look_up is None or not external:
            if look_up is not None:
                self._settle(look_up)
            return
        end = look_up.local + external
        ids = blocks.get_block_ids()
        placed = tuple(
            {column: own[column] for column in group.columns(look_up.local, end)}
            for group, own in zip(self._rules.groups, ids, strict=True)
        )
        self._loads.append(Load(request.request_id, look_up.number, end, placed))
        del self._numbers[look_up.number]

    def heard(self, answers: Mapping[int, Sequence[int]]) -> None:
        """Note answers to look-ups. Ranks that found different prefixes are asked again for the shortest. O(answers).

        Args:
            answers: The tokens that ranks found, by look-up.
        """
        for number, tokens in answers.items():
            name = self._numbers.get(number)
            if name is None:
                continue
            look_up, request = self._look_ups[name], self._requests[name]
            look_up.answers += tokens
            if len(look_up.answers) < self._ranks or look_up.tokens is not None:
                continue
            shortest = min(look_up.answers)
            self._note(request, look_up.start, look_up.most, shortest)
            if shortest in {max(look_up.answers), look_up.start}:
                look_up.tokens = shortest
            else:
                self._settle(look_up)
                self._ask(request, look_up.start, shortest)

    def changed(self, changes: Mapping[int, Sequence[TierChange]]) -> None:
        """Note what the stores of ranks got and lost. O(changes).

        Args:
            changes: By rank, in order.
        """
        if self._events is not None:
            for rank, some in changes.items():
                self._events.heard(self._epoch, rank, some)

    def failed(self, names: Iterable[str]) -> None:
        """Note loads that failed: their requests are computed, without another look-up. O(names).

        Args:
            names: Ids of requests.
        """
        for name in names:
            if name in self._requests:
                self._look_ups[name] = _LookUp(-1, 0, 0, self._now(), is_held=False)

    def finished(self, request: Any) -> None:  # noqa: ANN401 - vLLM's
        """Forget a request.

        Args:
            request: vLLM's Request.
        """
        name = request.request_id
        self._requests.pop(name, None)
        self._stored_tokens.pop(name, None)
        self._hopeful.pop(name, None)
        look_up = self._look_ups.pop(name, None)
        if look_up is not None:
            self._settle(look_up)

    @property
    def is_busy(self) -> bool:
        """False: blocks are stored in the steps that fill them."""
        return False

    def reset(self) -> bool:
        """Forget all blocks: later keys differ from all earlier ones, those of other processes included."""
        self._epoch = token_bytes(EPOCH_BYTES)
        if self._events is not None:
            self._events.reset()
        self._known.clear()
        self._stored_tokens.clear()
        for look_up in self._look_ups.values():
            self._settle(look_up)
        self._look_ups.clear()
        self._hopeful.clear()
        return True

    def _begin(self, request: Any, local: int) -> bool:  # noqa: ANN401 - as above
        """Look for the prefix of a request if it is its turn; return whether it waits."""
        name = request.request_id
        most = (request.num_tokens - 1) // self._rules.unit * self._rules.unit
        if name not in self._hopeful and not self._may_have(request, local, most):
            return False
        since = self._hopeful.setdefault(name, self._now())
        if len(self._numbers) < MOST_LOOKING:
            del self._hopeful[name]
            self._ask(request, local, most)
            return True
        return not self._is_over(since)

    def _now(self) -> _Moment:
        return _Moment(self._clock(), self._step)

    def _is_over(self, since: _Moment) -> bool:
        """Return whether a request has waited long enough."""
        now = self._now()
        return now.seconds - since.seconds >= PATIENCE_S and now.step - since.step >= PATIENCE_STEPS

    def _ask(self, request: Any, start: int, most: int) -> None:  # noqa: ANN401 - as above
        number, self._next = self._next, self._next + 1
        self._look_ups[request.request_id] = _LookUp(number, start, most, self._now())
        self._numbers[number] = request.request_id
        size = self._rules.hash_tokens
        self._finds.append(Find(number, start, most, list(request.block_hashes[start // size : most // size])))
        if self._events is not None:  # what comes up from a slower tier is kept in faster ones, too
            for group, needs in enumerate(self._rules.groups):
                for column in range(start // needs.block_tokens, most // needs.block_tokens):
                    self._events.describe(request, group, column)

    def _settle(self, look_up: _LookUp) -> None:
        """End a look-up. Its request is not looked up again before it is admitted."""
        if look_up.is_held:
            look_up.is_held = False
            self._drops.append(look_up.number)
            self._numbers.pop(look_up.number, None)

    def _may_have(self, request: Any, start: int, most: int) -> bool:  # noqa: ANN401 - as above
        """Return whether a store may have a prefix of more than ``start`` tokens."""
        if self._remembers:
            return most > start
        if not self._known or most <= start:
            return False
        return self._rules.longest(start, most, lambda *at: self._place(request, *at) in self._known) > start

    def _note(self, request: Any, start: int, most: int, end: int) -> None:  # noqa: ANN401 - as above
        """Note which blocks a look-up found: those that it did not find are stored again."""
        for number, group in enumerate(self._rules.groups):
            for column in group.columns(start, end) if end > start else ():
                self._remember(self._place(request, number, column))
            for column in range(end // group.block_tokens, most // group.block_tokens):
                self._known.pop(self._place(request, number, column), None)

    def _place(self, request: Any, group: int, column: int) -> tuple[int, bytes]:  # noqa: ANN401 - as above
        return group, self._rules.hash_of(request.block_hashes, 0, group, column)

    def _remember(self, place: tuple[int, bytes]) -> None:
        self._known[place] = None
        self._known.move_to_end(place)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    # -- steps

    def work(self, output: Any, manager: Any) -> TierWork:  # noqa: ANN401 - vLLM's
        """Return the workers' part of a step. O(requests in the step + blocks that it fills).

        Args:
            output: vLLM's SchedulerOutput, with the states that are kept.
            manager: vLLM's cache manager.
        """
        self._step += 1
        stores = dict[int, Store]()
        for name, num_tokens in output.num_scheduled_tokens.items():
            request = self._requests.get(name)
            if request is not None:
                self._store_filled(request, num_tokens, manager, stores)
        kept = output.kv_connector_block_state
        for name, states in {} if kept is None else kept.boundary_state_offloads.items():
            request = self._requests.get(name)
            if request is None or name not in output.num_scheduled_tokens:
                continue  # its blocks may have been given to another request
            for group, block, tokens in states:
                size = self._rules.groups[group].block_tokens
                if tokens % size == 0 and tokens // self._rules.hash_tokens <= len(request.block_hashes):
                    self._add(stores, request, group, tokens // size - 1, block)
        work = TierWork(
            self._epoch, self._finds, self._drops, self._loads, stores, runs=output.total_num_scheduled_tokens > 0
        )
        self._finds, self._drops, self._loads = [], [], []
        return work

    def _store_filled(self, request: Any, num_tokens: int, manager: Any, stores: dict[int, Store]) -> None:  # noqa: ANN401 - as above
        """Store attention blocks that are full after this step and that vLLM publishes."""
        name = request.request_id
        # draft tokens and tokens that are not sampled yet have no hash
        computed = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        stored = self._stored_tokens.get(name, 0)
        if computed // self._smallest <= stored // self._smallest:
            return
        self._stored_tokens[name] = computed
        blocks = manager.get_blocks(name).blocks
        for group, needs in enumerate(self._rules.groups):
            if needs.is_state:
                continue
            size = needs.block_tokens
            for column in range(stored // size, min(computed // size, len(blocks[group]))):
                block = blocks[group][column]
                if not block.is_null and block.block_hash is not None:
                    self._add(stores, request, group, column, block.block_id)

    def _add(self, stores: dict[int, Store], request: Any, group: int, column: int, block: int) -> None:  # noqa: ANN401 - as above
        place = self._place(request, group, column)
        if place not in self._known:
            self._remember(place)
            if self._events is not None:
                self._events.describe(request, group, column)
            store = stores.setdefault(group, Store())
            store.blocks.append(block)
            store.hashes.append(place[1])


def key(identity: bytes, epoch: bytes, group: int, block_hash: bytes) -> bytes:
    """Return the key of a block: at most 64 bytes, with hashes of 32 and an epoch of 8.

    Args:
        identity: Hash of the configuration, 16 bytes.
        epoch: Changes when the cache is reset.
        group: Its group.
        block_hash: vLLM's hash of the tokens up to its end.
    """
    return identity + epoch + group.to_bytes(2, "little") + block_hash
