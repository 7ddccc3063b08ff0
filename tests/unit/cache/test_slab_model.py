"""The space of slabs is its model in plain lists, whatever happens; what fits can be taken; check() sees corruption."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridkv.cache.spaces.slabs import SlabSpace
from hybridkv.errors import BlockError, CacheError
from hybridkv.planner.config import ALIGNMENT_BYTES, SlabClass, SlabLayout
from oracles.slabs import CACHED, HELD, HOLE, OracleSlabs, holes_of

ACTIONS = ("take",) * 4 + ("append",) * 3 + ("prepend",) * 3 + ("room", "room", "remove", "age_first", "lock", "unlock")
Event = tuple[str, int]

blocks_per_slab = st.one_of(st.integers(1, 9), st.integers(2, 70))
classes = st.one_of(*(st.lists(blocks_per_slab, min_size=n, max_size=n) for n in (1, 2, 3, 3, 4)))


def random_history(length: int, seed: int) -> list[Event]:
    """Uniformly random, which meets more than what hypothesis draws; a shorter one is the beginning of a longer."""
    random = Random(seed)
    return [(random.choice((*ACTIONS, *ACTIONS, "forget")), random.randrange(2**16)) for _ in range(length)]


histories = st.builds(random_history, st.integers(40, 100), st.integers(0, 2**32))


def ids(blocks: Sequence[int]) -> NDArray[np.int32]:
    return np.array(blocks, np.int32)


def space_of(num_slabs: int, ks: Sequence[int]) -> SlabSpace:
    slab_bytes = ALIGNMENT_BYTES * math.lcm(*ks)
    parts = tuple(SlabClass(slab_bytes // k, k, (group,)) for group, k in enumerate(ks))
    return SlabSpace(SlabLayout(slab_bytes, num_slabs, parts, (1,) * len(ks)))


def some(random: Random, blocks: Sequence[int]) -> list[int]:
    """One of ``blocks``, or many, in any order or ascending."""
    if not blocks:
        return []
    n = random.choice((1, random.randint(1, len(blocks)), (len(blocks) + 1) // 2))
    chosen = random.sample(blocks, n)
    return sorted(chosen) if random.random() < 0.5 else chosen


class Twins:
    """A space, its model, and the holders that a pool would count."""

    def __init__(self, num_slabs: int, ks: Sequence[int], *, locks: bool = True) -> None:
        self.space, self.oracle = space_of(num_slabs, ks), OracleSlabs(num_slabs, ks)
        self.ref = np.zeros(self.space.num_blocks, np.int32)
        self.ks = list(ks)
        self.locks = locks
        self.met: Counter[str] = Counter()
        self.last_evicted: int | None = None

    def blocks(self, state: str, of: int | None = None) -> list[int]:
        """Blocks in ``state``, unlocked ones."""
        return [
            block
            for block, its in self.oracle.state.items()
            if its == state and block not in self.oracle.locks and of in (None, self.oracle.class_of(block))
        ]

    def act(self, event: Event) -> None:
        """Do it on both sides and compare all there is."""
        action, random = event[0], Random(event[1])
        of = random.randrange(len(self.ks))
        group = of if random.random() < 0.7 else None  # blocks of one class, or of any
        if action == "take":
            n = random.choice((1, 2, self.ks[of], random.randint(0, 5 * self.ks[of])))
            if len(self.take(n, of)) < n and random.random() < 0.8 and self.make_room(of):
                assert self.take(1, of)
        elif action == "room":
            self.make_room(of)
        elif action in ("append", "prepend"):
            self.release(action, some(random, self.blocks(HELD, group)))
        elif action == "remove":
            self.hold(some(random, self.blocks(CACHED, group)))
        elif action == "age_first":
            self.both(action, some(random, self.blocks(CACHED, group))[:3])
        elif action == "lock" and self.locks:
            self.both(action, some(random, [*self.blocks(HELD, group), *self.oracle.locks])[:3])
        elif action == "unlock":
            self.both(action, some(random, list(self.oracle.locks)))
        elif action == "forget":
            self.space.forget_all()
            self.oracle.forget_all()
        self.compare()
        self.foretell(random)

    def both(self, action: str, blocks: list[int]) -> None:
        getattr(self.space, action)(ids(blocks))
        getattr(self.oracle, action)(blocks)
        self.met[action] += bool(blocks)

    def take(self, n: int, of: int) -> list[int]:
        taken = self.space.take(n, of).tolist()
        assert taken == self.oracle.take(n, of)
        self.ref[taken] = 1
        return list(taken)

    def release(self, action: str, blocks: list[int]) -> None:
        self.ref[blocks] = 0
        self.both(action, blocks)

    def hold(self, blocks: list[int]) -> None:
        self.ref[blocks] = 1
        self.both("remove", blocks)

    def make_room(self, of: int) -> bool:
        """Whether there was any to be made."""
        try:
            evicted, moves = self.oracle.make_room(of)
        except IndexError:
            with pytest.raises(CacheError):
                self.space.make_room(of, self.ref)
            self.met["none"] += 1
            return False
        room = self.space.make_room(of, self.ref)
        assert room.evicted.tolist() == evicted
        assert [tuple(move) for move in room.moves.tolist()] == moves
        assert not {source for source, _ in moves} & set(evicted)
        for source, target in moves:
            self.ref[target], self.ref[source] = self.ref[source], 0
        self.last_evicted = evicted[-1] if evicted else None
        self.met["evicted"] += len(evicted)
        self.met["moved"] += len(moves)
        return True

    def take_oldest(self, n: int, of: int) -> int:
        """How many blocks are taken as they are evicted: those that room is made of one by one."""
        taken = self.space.take_oldest(n, of).tolist()
        for block in taken:
            assert self.oracle.make_room(of) == ([block], [])
            assert self.oracle.take(1, of) == [block]
        self.ref[taken] = 1
        self.met["oldest"] += len(taken)
        self.compare()
        return len(taken)

    def compare(self) -> None:
        space, oracle = self.space, self.oracle
        assert space.free_slabs() == oracle.free_slabs()
        assert space.now == oracle.now
        assert (space.moved_blocks, space.transfers) == (oracle.moved, oracle.transfers)
        for of in range(len(self.ks)):
            assert space.lru(of).tolist() == oracle.lru(of)
            assert [space.stamps.item(block) for block in oracle.lru(of)] == [oracle.stamp[b] for b in oracle.lru(of)]
            counts = (space.referenced[of], space.holes[of], space.cached[of], space.slabs[of])
            assert counts == (*(oracle.count(of, state) for state in (HELD, HOLE, CACHED)), len(oracle.slabs_of(of)))
        for slab in range(1, oracle.num_slabs):
            owner = oracle.owner[slab]
            assert space.owner(slab) == (-1 if owner is None else owner)
            assert holes_of(space, slab) == oracle.blocks_of(slab, HOLE)
        assert len(space) == sum(state != HELD for state in oracle.state.values())
        assert list(space.check(self.ref, self.keyed())) == []

    def keyed(self) -> NDArray[np.bool_]:
        """Blocks that have a key, as the oracle knows."""
        keyed = np.zeros(self.space.num_blocks, np.bool_)
        keyed[[block for block, state in self.oracle.state.items() if state == CACHED]] = True
        return keyed

    def foretell(self, random: Random) -> list[int]:
        """What is said to fit is said on both sides. Some need, of at least a block."""
        more = [random.choice((0, 1, k, random.randint(0, k * self.oracle.num_slabs))) for k in self.ks]
        more[random.randrange(len(more))] += 1
        assert self.space.needed_slabs(more) == self.oracle.needed_slabs(more)
        assert self.space.fits(more) == self.oracle.fits(more)
        assert self.space.fits_without_moves(more) == self.oracle.fits_without_moves(more)
        assert self.space.fits(more) or not self.space.fits_without_moves(more)
        return more

    def serve(self, more: Sequence[int]) -> bool:
        """Take ``more[c]`` blocks of each class c, room being made as often as needed: whether they were there."""
        for of, n in enumerate(more):
            missing, rooms = n - len(self.take(n, of)), 0
            while missing := missing - self.take_oldest(missing, of):
                if not self.make_room(of):
                    return False
                assert self.last_evicted is None or self.oracle.class_of(self.last_evicted) != of
                rooms += 1
                taken = len(self.take(missing, of))
                assert taken, "room was made and nothing can be taken"
                missing -= taken
            assert rooms <= n
        return True


@given(classes, st.integers(2, 8), histories)
def test_slab_space_matches_the_model(ks: list[int], num_slabs: int, history: list[Event]) -> None:
    twins = Twins(num_slabs, ks)
    for event in history:
        twins.act(event)


@pytest.mark.parametrize("ks", [(1,), (1, 2)])
def test_slab_space_with_many_slabs_matches_the_model(ks: tuple[int, ...]) -> None:
    """Many slabs at once are counted by arrays, and those of one block without any."""
    met: Counter[str] = Counter()
    for seed in range(3):
        twins = Twins(90, ks)
        twins.take(60, 0)
        for event in random_history(40, seed):
            twins.act(event)
        met += twins.met
    assert min(met[what] for what in ("append", "prepend", "remove", "evicted")) > 0


@given(classes, st.integers(2, 8), histories, st.integers(0, 2**16), st.booleans())
def test_slab_space_takes_exactly_what_fits(
    ks: list[int], num_slabs: int, history: list[Event], seed: int, locks: bool
) -> None:
    twins, random = Twins(num_slabs, ks, locks=locks), Random(seed)
    for event in history:
        twins.act(event)
    needs = [twins.foretell(random) for _ in range(20)]
    more = next((need for need in needs if twins.space.fits(need)), needs[0])
    fits = twins.space.fits(more)
    assert twins.serve(more) == fits
    twins.compare()


def test_slab_histories_reach_every_block_state() -> None:
    """Blocks in every state, a locked one among them, and free slabs."""
    met: Counter[str] = Counter()
    for seed in range(20):
        random = Random(seed)
        ks = [random.randint(2, 9), random.randint(1, 70), random.randint(1, 4)]
        twins = Twins(random.randint(4, 9), ks)
        for event in random_history(60, seed):
            twins.act(event)
        met += twins.met
    expected = {"append", "prepend", "remove", "age_first", "lock", "unlock", "evicted", "moved", "none"}
    assert {what for what, count in met.items() if count > 10} >= expected


# -- what is refused


@pytest.mark.parametrize(
    ("call", "blocks", "message"),
    [
        ("remove", (2,), "block 2 is not cached"),
        ("remove", (4, 6), "block 6 is not cached"),
        ("age_first", (5,), "block 5 is not cached"),
        ("append", (4,), "block 4 is cached"),
        ("append", (7,), "block 7 is free"),
        ("prepend", (2, 5), "block 5 is free"),
        ("prepend", (8,), "block 8 is free"),
        ("prepend", (0,), "block 0 is free"),
        ("lock", (4,), "block 4 is cached"),
        ("unlock", (2,), "block 2 is not locked"),
        ("append", (12,), "block 12 is not one of the 12 blocks"),
        ("remove", (-1,), "block -1 is not one of the 12 blocks"),
        ("append", (3,), "block 3 is locked"),
        ("prepend", (2, 3), "block 3 is locked"),
    ],
)
@pytest.mark.parametrize("times", [1, 33])
def test_slab_space_rejects_blocks_in_another_state(
    call: str, blocks: tuple[int, ...], message: str, times: int
) -> None:
    """Before anything changes. With many ids too, which are looked at with arrays."""
    twins = Twins(6, (2,))
    twins.take(5, 0)
    twins.release("append", [4])
    twins.release("prepend", [5])
    twins.both("lock", [3])
    with pytest.raises(BlockError, match=message):
        getattr(twins.space, call)(ids(blocks * times))
    twins.compare()


# -- controls: corruption is seen, and so are other rules


def rich_twins() -> Twins:
    """Class 0 of k = 4: slabs 1 and 2 full, but for a hole each, cached blocks in 2; class 1 of k = 1; 5 and 6 free."""
    twins = Twins(7, (4, 1))
    twins.take(8, 0)
    twins.take(2, 1)
    twins.release("prepend", [4, 8])
    twins.release("append", [10, 9])
    twins.both("lock", [5])
    twins.compare()
    return twins


Corruption = Callable[[SlabSpace, NDArray[np.int32]], object]


def put(target: object, key: object, value: object) -> None:
    """An assignment as an expression."""
    target[key] = value  # type: ignore[index]


CORRUPTIONS: dict[str, Corruption] = {
    "block 7 of class 0 lies in a slab of class 0 and is nothing": lambda _, ref: put(ref, 7, 0),
    "block 9 of class 0 lies in a slab of class 0 and is cached and referenced": lambda _, ref: put(ref, 9, 1),
    "block 21 of class 0 lies in a slab without owner and is referenced": lambda _, ref: put(ref, 21, 1),
    "block 0 of class 0 lies in a slab without owner and is referenced": lambda _, ref: put(ref, 0, 1),
    "block 29 of class 1 lies in a slab of class 0 and is referenced": lambda _, ref: put(ref, 29, 1),
    "block 8 of class 0 lies in a slab of class 0 and is nothing": lambda space, _: put(space._holes.is_hole, 8, 0),
    "slab 2 of class 0 counts 2 holes": lambda space, _: put(space._holes.num_holes, 2, 2),
    "slab 1 of class 0 counts 1 referenced blocks": lambda space, _: put(space._holes.num_held, 1, 1),
    "slab 5 has no owner and counts 1 holes": lambda space, _: put(space._holes.num_holes, 5, 1),
    "slab 0 has no owner and counts 1 referenced blocks": lambda space, _: put(space._holes.num_held, 0, 1),
    "class 0 counts 3 slabs, there are 2": lambda space, _: put(space.slabs, 0, 3),
    "class 0 counts 1 holes, there are 2": lambda space, _: put(space.holes, 0, 1),
    "class 1 counts 0 referenced blocks, there are 2": lambda space, _: put(space.referenced, 1, 0),
    "class 0 counts 3 cached blocks, there are 2": lambda space, _: setattr(space._lru[0], "count", 3),
    "slab 1 is in queue 13 of class 0, not in 14": lambda space, _: put(space._holes.queues, 1, 13),
    "slab 5 is in queue 2 of class 0, not in -1": lambda space, _: put(space._holes.queues, 5, 2),
    r"the queues of class 0 have \[\(2, 14\)\]": lambda space, _: space._holes.heaps[14].remove(1),
    r"slabs \[5, 6\] are on the stack, \[4, 5, 6\]": lambda space, _: put(space._holes.owner, 4, -1),
    r"slabs \[6\] are on the stack": lambda space, _: setattr(space._holes, "num_free", 1),
    "the null slab belongs to class 1": lambda space, _: put(space._holes.owner, 0, 1),
    "not in the order of its stamps": lambda space, _: put(space.stamps, 10, 2**20),
    "block 4 of class 0 is locked but not referenced": lambda space, _: put(space.locks, 4, 1),
    "slab 1 of class 0 counts 0 locks": lambda space, _: put(space.slab_locks, 1, 0),
    "slab 3 has no owner and counts 7 locks|slab 3 of class 1 counts 7 locks": lambda space, _: put(
        space.slab_locks, 3, 7
    ),
    "class 0 counts 0 slabs with locks, there are 1": lambda space, _: put(space.locked_slabs, 0, 0),
    "holders of 3 blocks were given, the space has 35": lambda _, ref: ref.resize(3, refcheck=False),
}


@pytest.mark.parametrize("message", CORRUPTIONS)
def test_slab_space_check_reports_corruption(message: str) -> None:
    twins = rich_twins()
    CORRUPTIONS[message](twins.space, twins.ref)
    assert re.search(message, "\n".join(twins.space.check(twins.ref, twins.keyed())))
