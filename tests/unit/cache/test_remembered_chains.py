"""Chains of long prompts: what came before is compared, and hashes are those that hashing gives."""

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridkv.cache.hashing import LEAST_BLOCKS, BlockHasher, Extras, RememberedChains
from hybridkv.errors import ConfigError

SIZE = 2
PLAIN = BlockHasher(SIZE, remembered_bytes=0)
LONG = LEAST_BLOCKS * SIZE


class Counting(BlockHasher):
    """Counts the blocks that it hashes."""

    hashed = 0

    def _chunks(
        self, parent: bytes | None, tokens: NDArray[np.integer], extras: Extras | None
    ) -> Iterator[list[bytes]]:
        for hashes in super()._chunks(parent, tokens, extras):
            self.hashed += len(hashes)
            yield hashes


class Interrupted(BlockHasher):
    """What another thread does while this one hashes."""

    meanwhile: Sequence[NDArray[np.int32]] = ()

    def _chunks(
        self, parent: bytes | None, tokens: NDArray[np.integer], extras: Extras | None
    ) -> Iterator[list[bytes]]:
        coming, self.meanwhile = self.meanwhile, ()
        for prompt in coming:
            self.hash_chain(None, prompt)
        return super()._chunks(parent, tokens, extras)


def ids(count: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def test_remembered_chain_is_not_hashed_again() -> None:
    hasher, prompt = Counting(SIZE), ids(LONG + 5)
    first = hasher.hash_chain(None, prompt)
    assert hasher.hashed == LEAST_BLOCKS + 2
    assert hasher.hash_chain(None, prompt) == first == PLAIN.hash_chain(None, prompt)
    assert hasher.hashed == LEAST_BLOCKS + 2
    longer = np.concatenate((prompt[:-1], ids(8, 1)))
    assert hasher.hash_chain(None, longer) == PLAIN.hash_chain(None, longer)
    assert hasher.hashed == LEAST_BLOCKS + 2 + 4


def test_short_or_continued_chain_is_not_remembered() -> None:
    hasher, prompt = Counting(SIZE), ids(LONG)
    for _ in range(2):
        assert hasher.hash_chain(None, prompt[:-1]) == PLAIN.hash_chain(None, prompt[:-1])
        assert hasher.hash_chain(b"p" * 32, prompt) == PLAIN.hash_chain(b"p" * 32, prompt)
    assert hasher.hashed == 2 * (2 * LEAST_BLOCKS - 1)
    assert hasher.remembered.num_bytes == 0


@pytest.mark.parametrize("max_bytes", [0, 30_000, 200_000, 1 << 30])
def test_remembered_chains_of_random_prompts_match_plain_hashes(max_bytes: int) -> None:
    """They share beginnings, with other extra keys, too; what is remembered stays within its bytes."""
    random = Random(max_bytes)
    hasher = BlockHasher(SIZE, remembered_bytes=max_bytes)
    prompts: list[tuple[NDArray[np.int32], list[str | None]]] = [(ids(LONG), [None] * LEAST_BLOCKS)]
    for number in range(150):
        tokens, names = random.choice(prompts)
        cut = random.randrange(len(tokens) + 1)
        tokens = np.concatenate((tokens[:cut], ids(random.choice((0, 1, 40, LONG)), number)))
        blocks = len(tokens) // SIZE
        names = [*names, *[None] * blocks][:blocks]
        if random.random() < 0.3 and blocks:
            names[random.randrange(blocks)] = random.choice((None, "a", "b"))
        prompts.append((tokens, names))
        extras = [None if name is None else (("mm", name, 0),) for name in names]
        given = extras if any(extras) or random.random() < 0.5 else None
        assert hasher.hash_chain(None, tokens, given) == PLAIN.hash_chain(None, tokens, extras), number
        assert hasher.remembered.num_bytes <= max_bytes
        assert hasher.remembered.num_bytes == sum(run.size_bytes() for run in hasher.remembered._used)
    assert (hasher.remembered.num_bytes > 0) == (max_bytes > 0)


def hashes_of(count: int) -> list[bytes]:
    return [i.to_bytes(4, "big") * 8 for i in range(count)]


def test_remembered_chain_used_least_recently_is_dropped_first() -> None:
    known = RememberedChains(SIZE, 2 * (LONG * 4 + 80 * LEAST_BLOCKS + 1000))
    hashes = hashes_of(LEAST_BLOCKS)

    def remember(tokens: NDArray[np.int32]) -> None:
        known.remember(tokens, None, known.find(tokens, None)[1], bytearray(b"".join(hashes)))

    a, b, c = (ids(LONG, seed) for seed in range(3))
    remember(a)
    remember(b)
    assert known.find(a, None)[0] == hashes
    remember(c)
    assert [len(known.find(one, None)[0]) for one in (a, b, c)] == [LEAST_BLOCKS, 0, LEAST_BLOCKS]


@pytest.mark.parametrize("max_bytes", [1 << 20, 40_000])
def test_remembered_chains_of_two_threads_stay_correct(max_bytes: int) -> None:
    """The same prompt, a longer one, one that parts from it, and, where there is little room, strangers."""
    base = ids(LONG)
    longer = [np.concatenate((base, ids(80, seed))) for seed in (1, 2)]
    parted = [np.concatenate((base[: LONG - 6], ids(80, seed))) for seed in (3, 4)]
    strangers = [ids(LONG, seed) for seed in range(10, 14)]
    for before in ([], [base], [longer[0]]):
        for mine in (base, longer[0], longer[1], parted[0]):
            for meanwhile in ([mine], [longer[0]], [parted[1]], strangers, [*strangers, mine], [parted[1], longer[1]]):
                hasher = Interrupted(SIZE, remembered_bytes=max_bytes)
                for prompt in before:
                    hasher.hash_chain(None, prompt)
                hasher.meanwhile = meanwhile
                for prompt in (mine, mine, *meanwhile, *before, mine):
                    assert hasher.hash_chain(None, prompt) == PLAIN.hash_chain(None, prompt)
                    assert hasher.remembered.num_bytes <= max_bytes
                    assert hasher.remembered.num_bytes == sum(run.size_bytes() for run in hasher.remembered._used)


def test_remembered_chain_is_a_copy() -> None:
    """Neither the caller's array nor a request's own list changes it."""
    hasher, prompt = BlockHasher(SIZE), ids(LONG)
    given = prompt.copy()
    hashes = hasher.hash_chain(None, given)
    given[:] = 0
    del hashes[3:]
    hasher.hash_chain(None, prompt).clear()
    assert hasher.hash_chain(None, prompt) == PLAIN.hash_chain(None, prompt)
    assert hasher.hash_chain(None, given) == PLAIN.hash_chain(None, given)


def test_remembered_bytes_below_zero_are_rejected() -> None:
    with pytest.raises(ConfigError, match="remembered_bytes"):
        BlockHasher(SIZE, remembered_bytes=-1)
