"""Which of several replicas a request goes to.

    round-robin     one after the other
    least-loaded    where the fewest requests run and wait
    prefix          where the fewest tokens must run before its first one comes out: those of its prompt that are not
                    cached there, and those of prompts that have no token out yet; then as least-loaded
    prefix:S        the same, by what replicas told of their caches S seconds ago

``prefix`` asks each cache itself. ``prefix:S`` keeps an index of its own of KV events, as routers outside an engine do:
they tell of attention's blocks alone, so that in the natural layout it believes in prefixes whose state is gone, and
knows no part of a block.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from hybridkv.cache.journal import BlockRemoved, BlockStored, KVCacheEvent
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.simulator.loop import Replica
from hybridkv.units import shown

ROUND_ROBIN: Final = "round-robin"
LEAST_LOADED: Final = "least-loaded"
PREFIX: Final = "prefix"
ROUTERS: Final = (ROUND_ROBIN, LEAST_LOADED, PREFIX, f"{PREFIX}:SECONDS")
_MOST_DELAY_S: Final = 1e6


class Router(Protocol):
    """Chooses among replicas, and hears of their steps. events: whether it wants what caches tell."""

    @property
    def events(self) -> bool: ...  # noqa: D102  # above

    def choose(self, request: Request, replicas: Sequence[Replica], now_s: float) -> int:
        """The index of the replica for ``request``."""
        ...

    def heard(self, at: int, replica: Replica) -> None:
        """Replica ``at`` took steps."""
        ...


def router_named(name: str) -> Callable[[], Router]:
    """What makes a fresh router of that name. ConfigError for one that is none."""
    if name == ROUND_ROBIN:
        return _RoundRobin
    if name == LEAST_LOADED:
        return _LeastLoaded
    if name == PREFIX:
        return lambda: _PrefixAware(None)
    kind, _, said = name.partition(":")
    try:
        delay_s = float(said)
    except ValueError:
        delay_s = -1.0
    if kind != PREFIX or not 0 <= delay_s <= _MOST_DELAY_S:
        raise ConfigError(f"unknown router {shown(name)}: use one of {', '.join(ROUTERS)}, as prefix:0.5")
    return lambda: _PrefixAware(_Told(delay_s))


class _RoundRobin:
    events = False

    def __init__(self) -> None:
        self._chosen = 0

    def choose(self, _request: Request, replicas: Sequence[Replica], _now_s: float) -> int:
        self._chosen += 1
        return (self._chosen - 1) % len(replicas)

    def heard(self, at: int, replica: Replica) -> None:
        """Nothing depends on it."""


class _LeastLoaded:
    events = False

    def __init__(self) -> None:
        self._sent = Counter[int]()

    def choose(self, _request: Request, replicas: Sequence[Replica], _now_s: float) -> int:
        chosen = min(range(len(replicas)), key=lambda at: (len(replicas[at].live), self._sent[at], at))
        self._sent[chosen] += 1
        return chosen

    def heard(self, at: int, replica: Replica) -> None:
        """Nothing depends on it."""


class _PrefixAware:
    """told: what is known of caches; None: they are asked."""

    def __init__(self, told: _Told | None) -> None:
        self._told = told
        self.events = told is not None
        self._sent = Counter[int]()
        self._pending: dict[int, dict[str, int]] = {}

    def choose(self, request: Request, replicas: Sequence[Replica], now_s: float) -> int:
        costs = []
        for at, replica in enumerate(replicas):
            pending = self._pending.setdefault(at, {})
            for request_id in [one for one in pending if one not in replica.live or replica.live[one].has_begun]:
                del pending[request_id]
            known = self._known(request, at, replica, now_s)
            missing = request.num_prompt_tokens - known
            costs.append((missing + sum(pending.values()), len(replica.live), self._sent[at], at, missing))
        *_, chosen, missing = min(costs)
        self._pending[chosen][request.request_id] = missing
        self._sent[chosen] += 1
        return chosen

    def _known(self, request: Request, at: int, replica: Replica, now_s: float) -> int:
        """Tokens of the prompt that are thought to be cached there."""
        if self._told is not None:
            return min(self._told.known_tokens(request, at, now_s), request.num_prompt_tokens - 1)
        cache = replica.scheduler.cache
        return cache.find_hit(request).tokens if cache.enable_caching else 0

    def heard(self, at: int, replica: Replica) -> None:
        if self._told is not None:
            self._told.hear(at, replica.scheduler.cache.take_events(), replica.clock.now_s)


class _Told:
    """Blocks of each replica, as its events told ``delay_s`` ago."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._coming: dict[int, deque[tuple[float, KVCacheEvent]]] = {}
        self._blocks: dict[int, Counter[tuple[int, bytes]]] = {}
        self._sizes: dict[int, int] = {}

    def hear(self, at: int, events: Sequence[KVCacheEvent], now_s: float) -> None:
        """``events`` of replica ``at`` were told now."""
        self._coming.setdefault(at, deque()).extend((now_s + self._delay_s, one) for one in events)

    def known_tokens(self, request: Request, at: int, now_s: float) -> int:
        """Tokens that ``request`` begins with, in blocks of any one group."""
        coming, blocks = self._coming.get(at, deque()), self._blocks.setdefault(at, Counter())
        while coming and coming[0][0] <= now_s:
            self._believe(blocks, coming.popleft()[1])
        hash_block = 1 if request.hasher is None else request.hasher.block_size
        known = 0
        for group, size in self._sizes.items():
            stride = size // hash_block
            leading = 0
            for key in request.hashes[stride - 1 :: stride]:
                if not blocks[group, key]:
                    break
                leading += 1
            known = max(known, leading * size)
        return known

    def _believe(self, blocks: Counter[tuple[int, bytes]], event: KVCacheEvent) -> None:
        match event:
            case BlockStored():
                self._sizes[event.group_idx] = event.block_size
                blocks.update((event.group_idx, key) for key in event.block_hashes)
            case BlockRemoved():
                blocks.subtract((event.group_idx, key) for key in event.block_hashes)
            case _:
                blocks.clear()
