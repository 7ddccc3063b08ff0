"""Work of several clients, in turns: who waits for whom, and who does not."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from serve_support import WAIT

from hybridkv.serve.tokens import SHORT, Piece, Turns


class Held:
    """Work that takes until it is let go. begun: names, in order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._go = threading.Event()

    def piece(self, name: str, size: int = SHORT + 1) -> Piece[str]:
        def work() -> str:
            self.begun.append(name)
            assert self._go.wait(WAIT)
            return name

        return Piece(size, work)

    def let_go(self) -> None:
        self._go.set()


def run(work: Callable[[Turns, Held], Any], *, parallel: bool = True) -> None:
    async def whole() -> None:
        turns, held = Turns(parallel=parallel), Held()
        try:
            async with asyncio.timeout(WAIT):
                await work(turns, held)
        finally:
            held.let_go()
            turns.close()

    asyncio.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # nothing tells
        await asyncio.sleep(0.001)


def test_short_work_waits_for_no_long_work() -> None:
    async def work(turns: Turns, held: Held) -> None:
        long = asyncio.create_task(turns.run("a", [held.piece(f"long {one}", 1 << 20) for one in range(3)]))
        await until(lambda: held.begun == ["long 0"])
        assert await turns.run("a", [Piece(SHORT, lambda: "short")]) == ["short"]
        assert held.begun == ["long 0"]
        held.let_go()
        assert await long == ["long 0", "long 1", "long 2"]

    run(work)


def test_a_client_leaves_a_thread_to_others() -> None:
    async def work(turns: Turns, held: Held) -> None:
        first = [asyncio.create_task(turns.run("a", [held.piece("a")])) for _ in range(9)]
        await until(lambda: held.begun == ["a"])
        other = asyncio.create_task(turns.run("b", [held.piece("b")]))
        await until(lambda: held.begun == ["a", "b"])
        held.let_go()
        await asyncio.gather(other, *first)

    run(work)


@pytest.mark.parametrize("parallel", [False, True])
def test_clients_take_turns(*, parallel: bool) -> None:
    """One that asked nine times before waits no more than one that asked once."""

    async def work(turns: Turns, held: Held) -> None:
        blockers = ["x", "y"][: 1 + parallel]  # which hold all threads
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(turns.run(one, [held.piece(one)])) for one in blockers]
        await until(lambda: held.begun == blockers)
        order: list[str] = []

        def piece(name: str) -> Piece[None]:
            return Piece(SHORT + 1, lambda: order.append(name))

        tasks += [asyncio.create_task(turns.run("a", [piece("a")])) for _ in range(9)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(turns.run(name, [piece(name)] * 2)) for name in ("b", "c")]
        await asyncio.sleep(0)
        held.let_go()
        await asyncio.gather(*tasks)
        assert len(order) == 13
        assert max(order.index("b"), order.index("c")) <= 3

    run(work, parallel=parallel)


def test_work_that_nobody_waits_for_never_begins() -> None:
    async def work(turns: Turns, held: Held) -> None:
        running = asyncio.create_task(turns.run("a", [held.piece("first"), held.piece("second")]))
        await until(lambda: held.begun == ["first"])
        waiting = asyncio.create_task(turns.run("a", [held.piece("third")]))
        await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        held.let_go()
        assert await turns.run("a", [held.piece("last")]) == ["last"]
        assert held.begun == ["first", "last"]

    run(work)


def test_what_work_raises_is_raised() -> None:
    async def work(turns: Turns, held: Held) -> None:
        def failing() -> str:
            raise KeyError("no such word")

        with pytest.raises(KeyError, match="no such word"):
            await turns.run("a", [Piece(1, failing), held.piece("never", 1)])
        assert not held.begun

    run(work)


def test_a_tokenizer_for_one_thread_is_used_by_one() -> None:
    async def work(turns: Turns, held: Held) -> None:
        at_once, most = [0], [0]

        def busy() -> None:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
            threading.Event().wait(0.002)
            at_once[0] -= 1

        sizes = (1, SHORT + 1, 1 << 20) * 4
        await asyncio.gather(*(turns.run(f"client {number}", [Piece(n, busy)]) for number, n in enumerate(sizes)))
        assert most == [1]
        assert not held.begun

    run(work, parallel=False)


def test_what_waits_is_cancelled_at_the_end() -> None:
    async def work(turns: Turns, held: Held) -> None:
        tasks = [asyncio.create_task(turns.run("a", [held.piece(str(one))])) for one in range(2)]
        await until(lambda: held.begun == ["0"])
        turns.close()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        held.let_go()
        assert await tasks[0] == ["0"]

    run(work)
