"""Host memory behind the worker of natural_engine: what a step's transfers say, done late, and some of them lost."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.step import Step, TierCopies
from hybridkv.vllm.natural_tier import NaturalTierRequests
from natural_engine import Worker

Block = dict[int, int]


@dataclass
class Load:
    """Blocks on their way to the device, each with its class. waits: steps."""

    number: int
    blocks: list[tuple[int, int, Block]]
    waits: int


class Host:
    """delay: steps until a transfer is told. loses: of every so many-th nothing comes. sees: may change each step.

    The bytes of a load come when it is told; until then nobody may read its blocks.
    """

    def __init__(
        self, requests: NaturalTierRequests, delay: int = 0, loses: int = 0, sees: Callable[[Step], Step] = lambda s: s
    ) -> None:
        self.requests, self.delay, self.loses, self.sees = requests, delay, loses, sees
        self.memory = dict[tuple[int, int], Block]()
        self.loads, self.stores = list[Load](), deque[tuple[int, int]]()
        self.begun = self.lost = 0
        self.step: Step | None = None

    def begin(self, step: Step, worker: Worker) -> None:
        """Before the moves of a step."""
        self.step = step = self.sees(step)
        read = [
            (worker.class_of[group], target, dict(worker.memory[worker.class_of[group]].get(source, {})))
            for _, group, source, target in rows(step.stores)
        ]
        for one in step.tier_copies:
            of = worker.class_of[one.group]
            self.memory[of, one.destination] = dict(self.memory.get((of, one.source), {}))
        for of, target, block in read:
            self.memory[of, target] = block
        self.stores += [(number, self.delay) for number in dict.fromkeys(number for number, *_ in rows(step.stores))]

    def load(self, worker: Worker) -> None:
        """After the copies of a step."""
        if self.step is None:
            raise AssertionError("begin comes first")
        blocks = dict[int, list[tuple[int, int, Block]]]()
        for number, group, source, target in rows(self.step.loads):
            of = worker.class_of[group]
            worker.memory[of][target] = {0: -1, 1: -1}
            blocks.setdefault(number, []).append((of, target, dict(self.memory.get((of, source), {}))))
        self.loads += [Load(number, some, self.delay) for number, some in blocks.items()]

    def end(self, worker: Worker) -> None:
        """Tell the scheduler what has ended by now."""
        answers = dict[int, list[int]]()
        over = [one for one in self.loads if one.waits <= 0]
        self.loads = [Load(one.number, one.blocks, one.waits - 1) for one in self.loads if one.waits > 0]
        for load in over:
            answers[load.number] = [self.arrives()]
            for of, target, block in load.blocks if answers[load.number] == [1] else ():
                worker.memory[of][target] = block
        waiting = deque[tuple[int, int]]()
        for number, waits in self.stores:
            if waits <= 0:
                answers[number] = [self.arrives()]
            else:
                waiting.append((number, waits - 1))
        self.stores = waiting
        self.requests.heard(answers)

    def arrives(self) -> int:
        self.begun += 1
        gone = self.loses > 0 and self.begun % self.loses == 0
        self.lost += gone
        return int(not gone)


def rows(copies: TierCopies) -> list[tuple[int, int, int, int]]:
    columns = (copies.transfer, copies.group, copies.source, copies.destination)
    return list(zip(*(column.tolist() for column in columns), strict=True))
