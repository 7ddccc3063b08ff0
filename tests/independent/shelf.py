"""A store of blocks by key, behind host memory: a dictionary that forgets, and look-ups that take their time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import numpy as np

TAILS = 8
"""Rows of a mark: each has the number of its tokens, one more than there are, and the tokens; 0 for none."""


class Shelf:
    """At most ``most_bytes``; any block may go for a new one. Keeps what processes leave, until the next one."""

    def __init__(self, most_bytes: int, rng: random.Random) -> None:
        self._most, self._rng = most_bytes, rng
        self._blocks: dict[bytes, bytes] = {}
        self._used = 0
        self.forgotten = 0

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each is there."""
        return [key in self._blocks for key in keys]

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Whether each is there and as long as its buffer, which it fills."""
        found = []
        for key, buffer in zip(keys, into, strict=True):
            block = self._blocks.get(key)
            found.append(block is not None and len(block) == len(buffer))
            if block is not None and found[-1]:
                buffer[:] = block
        return found

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bool]:
        """Whether each has room."""
        return [self._put(key, bytes(block)) for key, block in zip(keys, blocks, strict=True)]

    def close(self) -> None:
        """Nothing to do."""

    def _put(self, key: bytes, block: bytes) -> bool:
        self._used -= len(self._blocks.pop(key, b""))
        while self._blocks and self._used + len(block) > self._most:
            self._used -= len(self._blocks.pop(self._rng.choice(list(self._blocks))))
            self.forgotten += 1
        if self._used + len(block) > self._most:
            return False
        self._blocks[key] = block
        self._used += len(block)
        return True


def with_tail(mark: bytes, tail: bytes, tokens: int) -> bytes:
    """``mark``, or an empty one, with ``tail`` first, and the others after it as far as there is room."""
    rows = np.frombuffer(mark or bytes(4 * tokens * TAILS), np.int32).reshape(TAILS, tokens)
    known = [row[1 : row[0]].tobytes() for row in rows if row[0]]
    made = np.zeros((TAILS, tokens), np.int32)
    for row, one in zip(made, [tail, *(other for other in known if other != tail)], strict=False):
        row[0], row[1 : 1 + len(one) // 4] = 1 + len(one) // 4, np.frombuffer(one, np.int32)
    return made.tobytes()


class Slow(Executor):
    """Answers when it likes to."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._asked: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:  # noqa: ANN401 - Executor's
        """Note the question."""
        answer = Future[Any]()
        self._asked.append((answer, partial(fn, *args, **more)))
        return answer

    def work(self) -> None:
        """Answer some."""
        left = []
        for answer, call in self._asked:
            if self._rng.random() < 0.4:
                answer.set_result(call())
            else:
                left.append((answer, call))
        self._asked = left
