"""What is compared: a cache's groups and limits, drawn at random, the same for both sides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random


class Kind(StrEnum):
    FULL = "full"
    MLA = "mla"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    ALIGN = "mamba-align"
    NONE = "mamba-none"
    CROSS = "cross"
    RING = "ring"


@dataclass(frozen=True)
class Group:
    """span: the window or the chunk in tokens. drafts: speculative state blocks. eagle: flagged by itself.

    rate: tokens of a state. retained: tokens that are kept before a window. whole: on each rank of context parallelism.
    replayed: hits leave the window out.
    """

    kind: Kind
    block_size: int
    span: int = 0
    drafts: int = 0
    eagle: bool = False
    rate: int = 1
    retained: int = 0
    whole: bool = False
    replayed: bool = False


@dataclass(frozen=True)
class Case:
    """retention: None publishes densely. ranks: of context parallelism.

    stepless: share of operations that do not begin a step. overlapped: steps are in flight when the next is planned.
    """

    groups: tuple[Group, ...]
    num_blocks: int
    max_model_len: int
    caching: bool = True
    use_eagle: bool = False
    retention: int | None = None
    ranks: int = 1
    stepless: float = 0.0
    overlapped: bool = False

    @property
    def alignment(self) -> int:
        more = [group.block_size for group in self.groups if group.kind is Kind.RING or group.replayed]
        return math.lcm(*self._columns(), *more)

    @property
    def hash_block(self) -> int:
        return math.gcd(*self._columns())

    @property
    def whole_states(self) -> int:
        """Tokens of which the end of a hit, or of a load, is a multiple. In vLLM, no block ends inside a state."""
        return math.lcm(*(group.rate for group in self.groups))

    @property
    def has_states(self) -> bool:
        return any(group.kind is Kind.ALIGN for group in self.groups)

    @property
    def dropping(self) -> tuple[int, ...]:
        """Numbers of the groups that drop a block of a hit for EAGLE."""
        flagged = any(group.eagle for group in self.groups)
        return tuple(
            i
            for i, group in enumerate(self.groups)
            if group.kind in ATTENTION and (group.eagle or (self.use_eagle and not flagged))
        )

    @property
    def drafts(self) -> int:
        return min((g.drafts for g in self.groups if g.kind in {Kind.ALIGN, Kind.NONE}), default=3)

    def _columns(self) -> list[int]:
        """Tokens of a column, of the groups that publish; of all groups where nothing is published."""
        published = (group for group in self.groups if group.kind in PUBLISHED and not group.replayed)
        return [self.column_tokens(group) for group in (published if self.caching else self.groups)]

    @property
    def wide(self) -> tuple[Group, ...]:
        """The groups, each with the blocks of all ranks as one."""
        return tuple(replace(group, block_size=self.column_tokens(group)) for group in self.groups)

    def column_tokens(self, group: Group) -> int:
        return group.block_size * (self.ranks if group.kind in {Kind.FULL, Kind.MLA} and not group.whole else 1)


ATTENTION = frozenset({Kind.FULL, Kind.MLA, Kind.SLIDING})  # what EAGLE may drop; vLLM asserts that chunks do not
PUBLISHED = ATTENTION | {Kind.CHUNKED, Kind.ALIGN}
WHOLE_MODEL = 512  # tokens of the longest request; a block of a state that is kept nowhere else


def _window(random: Random, size: int) -> Group:
    return Group(Kind.SLIDING, size, span=random.choice((2, size, size + 1, size + 2, 2 * size, 3 * size + 2, 40)))


def _chunk(random: Random, size: int) -> Group:
    return Group(Kind.CHUNKED, size, span=random.choice((size, 2 * size, 3 * size, 4 * size, size + size // 2)))


def _state(random: Random, size: int) -> Group:
    return Group(Kind.ALIGN, size, drafts=random.choice((0, 0, 1, 2, 3)))


def _single(random: Random) -> tuple[Group, ...]:
    size = random.choice((4, 8))
    draw = random.choice((Kind.FULL, Kind.MLA, Kind.SLIDING, Kind.SLIDING, Kind.CHUNKED, Kind.ALIGN, Kind.ALIGN))
    match draw:
        case Kind.SLIDING:
            return (_window(random, size),)
        case Kind.CHUNKED:
            return (_chunk(random, size),)
        case Kind.ALIGN:
            return (_state(random, size),)
        case _:
            return (Group(draw, size),)


def _several(random: Random) -> tuple[Group, ...]:
    size = random.choice((4, 8))
    full = Group(random.choice((Kind.FULL, Kind.FULL, Kind.MLA)), random.choice((size, size, 2 * size, 4 * size)))
    other = random.choice((4, 8, 16))
    shapes: tuple[tuple[Group, ...], ...] = (
        (full, _window(random, size)),
        (full, _window(random, size), _window(random, other)),
        (full, _state(random, full.block_size)),
        (full, _state(random, full.block_size), _window(random, size)),
        (full, _state(random, 2 * full.block_size)),
        (full, Group(Kind.FULL, other)),
        (full, full, _window(random, size)),
        (_window(random, size), _window(random, other)),
        (_window(random, size), _state(random, other)),
        (_window(random, size), _state(random, other), _window(random, other)),
        (_state(random, size), full),
        (Group(Kind.FULL, size), _chunk(random, size)),
        (Group(Kind.FULL, size), _chunk(random, 2 * size)),
        (Group(Kind.FULL, size), _chunk(random, size), _window(random, size)),
        (full, _state(random, full.block_size), _state(random, full.block_size)),
    )
    groups = list(random.choice(shapes))
    if random.random() < 0.2:
        random.shuffle(groups)
    return tuple(groups)


def _uncached(random: Random) -> tuple[Group, ...]:
    """Kinds that vLLM runs without prefix caching only."""
    state = Group(Kind.NONE, WHOLE_MODEL, drafts=random.choice((0, 1, 2)))
    full = Group(Kind.FULL, random.choice((4, 8)))
    return random.choice(((state,), (full, state), (full, Group(Kind.CROSS, 4)), (Group(Kind.CROSS, 8), full)))


def random_case(random: Random, kinds: Sequence[Kind] = tuple(Kind), *, plain: bool = False) -> Case:
    """A case whose groups are all of ``kinds``. plain: one rank, no EAGLE, dense publishing."""
    while True:
        case = _any_case(random)
        if all(group.kind in kinds for group in case.groups):
            return _plain(case) if plain else case


def compressed(random: Random, case: Case) -> Case:
    """``case`` with rates, windows of more kinds, a ring, and layers whole on each rank; unchanged without caching."""
    if not case.caching:
        return case
    groups = [_compressed(random, group) for group in case.groups]
    chunked = any(group.kind is Kind.CHUNKED for group in groups)  # vLLM wants their blocks to be the common alignment
    if not chunked and random.random() < 0.3:
        groups = [replace(one, whole=one.kind is Kind.SLIDING or random.random() < 0.2) for one in groups]
        case = replace(case, ranks=2)
    windows = [at for at, group in enumerate(groups) if group.kind is Kind.SLIDING]
    if len(windows) < len(groups) and not case.has_states and not chunked and random.random() < 0.5:
        for at in windows:  # one run computes the ends of all again
            groups[at] = replace(groups[at], replayed=True, span=groups[windows[0]].span, eagle=False)
    if not chunked and any(group.rate > 1 for group in groups) and random.random() < 0.6:
        groups.insert(random.randrange(len(groups) + 1), Group(Kind.RING, random.choice((4, 7, 8, 16))))
    made = replace(case, groups=tuple(groups), num_blocks=case.num_blocks + 20)
    return made if made.retention is None else replace(made, retention=made.alignment * random.choice((0, 1, 2)))


def _compressed(random: Random, group: Group) -> Group:
    if group.kind in {Kind.FULL, Kind.MLA}:
        return replace(group, rate=random.choice([rate for rate in (1, 2, 4, 8) if group.block_size % rate == 0]))
    return replace(group, retained=random.choice((0, 1, 3, 9))) if group.kind is Kind.SLIDING else group


def _plain(case: Case) -> Case:
    groups = tuple(replace(group, eagle=False) for group in case.groups)
    return replace(case, groups=groups, use_eagle=False, retention=None, ranks=1)


def _any_case(random: Random) -> Case:
    draw = random.random()
    if draw < 0.1:
        groups, caching = _uncached(random), False
    else:
        groups, caching = (_single if draw < 0.45 else _several)(random), random.random() < 0.92
    tokens = all(group.kind in {Kind.FULL, Kind.MLA} for group in groups)
    case = Case(
        groups,
        num_blocks=random.choice((12, 24, 24, 40, 60, 120)) * len(groups),
        max_model_len=WHOLE_MODEL,
        caching=caching,
        ranks=random.choice((1, 1, 1, 1, 2)) if tokens else 1,
        stepless=random.choice((0.0,) * 9 + (0.3,)),
        overlapped=random.random() < 0.3,
    )
    return _with_retention(random, _with_eagle(random, case))


def _with_eagle(random: Random, case: Case) -> Case:
    """Drafts from EAGLE: all groups, or those flagged.

    Not where no group could drop (states alone): nothing of a hit is dropped there, but vLLM still publishes
    under retention as if it were, and so keeps other boundaries than those where a request is resumed.
    Not all groups where one is chunked: vLLM's look-up asserts that chunks never drop. Groups of equal specs are
    looked up together there and share the flag.
    """
    able = list(dict.fromkeys(group for group in case.groups if group.kind in ATTENTION))
    if not able or random.random() >= 0.35:
        return case
    chunked = any(group.kind is Kind.CHUNKED for group in case.groups)
    if not chunked and random.random() < 0.5:
        return replace(case, use_eagle=True)
    flagged = random.sample(able, random.randint(1, len(able)))
    groups = tuple(replace(group, eagle=group in flagged) for group in case.groups)
    return replace(case, groups=groups, use_eagle=random.random() < 0.5)


def _with_retention(random: Random, case: Case) -> Case:
    sparse = any(group.kind in {Kind.SLIDING, Kind.ALIGN} for group in case.groups)
    if not sparse or not case.caching or random.random() < 0.6:
        return case
    interval = random.choice((0, 0, case.alignment, 2 * case.alignment, 3 * case.alignment))
    return replace(case, retention=interval)
