"""Several stores of blocks as one, the fastest first. A block that a slower one has is kept in the faster ones, too."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from time import perf_counter

from hybridkv.errors import ConfigError
from hybridkv.stores.calls import check_keys, checked_blocks, checked_into
from hybridkv.stores.changes import Change, Changes
from hybridkv.stores.store import BlockStore


class Counts:
    """Counts by name, to which several threads add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = defaultdict[str, float](int)

    def add(self, prefix: str = "", **counts: float) -> None:
        """Add to counts. Zeros are left out.

        Args:
            prefix: Put before each name.
            **counts: By name.
        """
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._counts[prefix + name] += count

    def take(self) -> dict[str, float]:
        """Return the counts since the last call."""
        with self._lock:
            counts, self._counts = dict(self._counts), defaultdict(int)
        return counts


class StoreStack:
    """A BlockStore made of several, which counts what each of them answers.

    Several threads may call it at once if they may call each store.

    Args:
        stores: Stores by name, the fastest first. They are closed with the stack.
        changes: What they tell of their blocks; ``None`` if they do not.

    Attributes:
        names: Their names.

    Raises:
        ConfigError: There is no store.
    """

    def __init__(self, stores: Mapping[str, BlockStore], changes: Changes | None = None) -> None:
        if not stores:
            raise ConfigError("a stack needs at least one store: give host memory")
        self.names = tuple(stores)
        self._stores = tuple(stores.values())
        self._counts, self._changes = Counts(), changes

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a store has its block. O(keys * stores).

        Args:
            keys: Keys of 1 to 64 bytes.
        """
        check_keys(keys)
        found = [False] * len(keys)
        for store in self._stores:
            left = [place for place, is_found in enumerate(found) if not is_found]
            if not left:
                break
            for place, is_found in zip(left, store.exists([keys[place] for place in left]), strict=True):
                found[place] = is_found
        return found

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Read blocks, each from the fastest store that has it, and return for each whether it arrived. O(bytes).

        Args:
            keys: Keys of 1 to 64 bytes.
            into: A writable buffer for each key, as long as its block.
        """
        buffers = checked_into(keys, into)
        found = [False] * len(keys)
        for number, (name, store) in enumerate(zip(self.names, self._stores, strict=True)):
            left = [place for place, is_found in enumerate(found) if not is_found]
            if not left:
                break
            began = perf_counter()
            answers = store.get([keys[place] for place in left], [buffers[place] for place in left])
            here = [place for place, is_found in zip(left, answers, strict=True) if is_found]
            num_bytes = sum(len(buffers[place]) for place in here)
            self._counts.add(
                f"{name}_", found_blocks=len(here), found_bytes=num_bytes, missed_blocks=len(left) - len(here),
                found_seconds=perf_counter() - began if here else 0,
            )  # fmt: skip
            for place in here:
                found[place] = True
            for faster in self._stores[:number] if here else ():
                faster.put([keys[place] for place in here], [buffers[place] for place in here])
        return found

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bool]:
        """Write blocks to each store that lacks them, and return for each whether a store has it now. O(bytes).

        Args:
            keys: Keys of 1 to 64 bytes.
            blocks: The bytes of each block. They may change after the call.
        """
        buffers = checked_blocks(keys, blocks)
        kept = [False] * len(keys)
        for name, store in zip(self.names, self._stores, strict=True):
            there = store.exists(keys)
            left = [place for place, is_there in enumerate(there) if not is_there]
            began = perf_counter()
            answers = store.put([keys[place] for place in left], [buffers[place] for place in left]) if left else []
            for place, is_kept in zip(left, answers, strict=True):
                there[place] = is_kept
            stored = [place for place in left if there[place]]
            self._counts.add(
                f"{name}_", stored_blocks=len(stored), stored_bytes=sum(len(buffers[place]) for place in stored),
                dropped_blocks=len(left) - len(stored), stored_seconds=perf_counter() - began if left else 0,
            )  # fmt: skip
            kept = [one or other for one, other in zip(kept, there, strict=True)]
        return kept

    def close(self) -> None:
        """Close all stores."""
        for store in self._stores:
            store.close()

    def take_counts(self) -> dict[str, float]:
        """Return the counts since the last call, as ``NAME_found_blocks``, ``NAME_found_bytes`` and so on."""
        return self._counts.take()

    def take_changes(self) -> list[Change]:
        """Return the blocks that stores got and lost since the last call; those of a store are in order."""
        return [] if self._changes is None else self._changes.take()
