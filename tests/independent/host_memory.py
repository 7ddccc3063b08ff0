"""The worker's side of a host tier: a second arena, and transfers that end on time, late, or never."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from content import demand
from executor import Arena, Places

from hybridkv.planner import KVCacheConfig
from hybridkv.step import Step, StepResult, TierCopies


@dataclass(slots=True, eq=False)
class Journey:
    """A transfer on its way. content: of all its blocks, as they were when it left. late: it ends so many Steps later.

    there: it writes nothing more.
    """

    number: int
    target: Arena
    places: Places
    content: bytes
    arrives: bool
    late: int
    there: bool = False


class HostMemory:
    """Executes transfers between ``device`` and an arena of ``config``, in order, after whatever ``rng`` says.

    counts: of what happened.
    """

    def __init__(self, device: Arena, config: KVCacheConfig, rng: np.random.Generator) -> None:
        self.counts: Counter[str] = Counter()
        self.arena = Arena(config, device.ranks, device.interleave, rng)
        self._device, self._rng = device, rng
        self._lost, self._late = rng.choice([0.0, 0.1, 0.3]), rng.choice([0.0, 0.3, 0.8])
        self._away = list[Journey]()
        self._told = dict[int, dict[int, bool]]()
        self._last = -1

    def start(self, step: Step, what: str) -> None:
        """Before anything changes on the device: what goes down, and what moves below."""
        if step.after < self._last:
            for one in self._away:  # nobody holds its blocks any longer
                one.late = 0
                self._arrive(one)
        self._last = step.id
        down = self._leave(step.stores, self._device, self.arena, f"{what} stores")
        for copy in step.tier_copies:
            self.arena.check_ids(copy.group, np.array([copy.source, copy.destination]), f"{what} copies in the tier")
            self._refuse_away(self.arena, self.arena.block_places(copy.group, copy.destination), f"{what} moves")
            self.arena.copy(copy.group, copy.source, copy.destination)
        self._depart(down)
        self.counts["blocks moved in host memory"] += len(step.tier_copies)

    def load(self, step: Step, what: str) -> None:
        """After the device's blocks are clear, before any row runs: what comes up."""
        self._depart(self._leave(step.loads, self.arena, self._device, f"{what} loads"))

    def report(self, step: Step, result: StepResult) -> StepResult:
        """``result`` with what has ended; and once more what results named that never got home."""
        told = dict[int, bool]()
        for number in [number for number in self._told if number > step.after]:
            told |= self._told.pop(number)
        for one in self._away:
            if not one.late:
                self._arrive(one)
                told[one.number] = one.arrives
                self.counts["transfers arrived" if one.arrives else "transfers lost"] += 1
        self._away = [one for one in self._away if one.number not in told]
        for one in self._away:
            one.late -= 1
        self._told[step.id] = told
        arrived, lost = ([number for number, whole in told.items() if whole is wanted] for wanted in (True, False))
        return StepResult(
            result.id,
            result.sampled,
            result.num_accepted,
            arrived=np.array(arrived, np.int32),
            lost=np.array(lost, np.int32),
        )

    def _leave(self, copies: TierCopies, source: Arena, target: Arena, what: str) -> list[Journey]:
        journeys, taken = list[Journey](), np.empty(0, np.int64)
        numbers = copies.transfer.tolist()
        for number in dict.fromkeys(numbers):
            mine = np.flatnonzero(copies.transfer == number)
            demand(mine[-1] - mine[0] + 1 == len(mine), f"{what}: transfer {number} is in pieces")
            demand(all(one.number != number for one in self._away), f"{what}: transfer {number} twice")
            places, content = list[Places](), list[bytes]()
            for group, read, to in zip(
                copies.group[mine].tolist(),
                copies.source[mine].tolist(),
                copies.destination[mine].tolist(),
                strict=True,
            ):
                source.check_ids(group, np.array([read]), f"{what} from")
                target.check_ids(group, np.array([to]), f"{what} to")
                self._refuse_away(source, source.block_places(group, read), f"{what} from")
                places.append(target.block_places(group, to))
                content.append(source.snapshot(group, read))
            journey = Journey(
                number, target, np.concatenate(places), b"".join(content), bool(self._rng.random() >= self._lost), 0
            )
            self._refuse_away(target, journey.places, f"{what} to")
            if self._rng.random() < self._late:
                journey.late = int(self._rng.integers(1, 4))
                self.counts["transfers late"] += 1
            taken = np.concatenate((taken, journey.places))
            journeys.append(journey)
        demand(len(np.unique(taken)) == len(taken), f"{what} two blocks to one place")
        return journeys

    def _depart(self, journeys: list[Journey]) -> None:
        for one in journeys:
            one.target.spoil([one.places])
            one.target.note_written(one.places)
            if not one.late:
                self._arrive(one)
        self._away += journeys

    def _arrive(self, one: Journey) -> None:
        """All of it, or for a lost one any part."""
        if one.there:
            return
        one.there = True
        content = np.frombuffer(one.content, np.uint8)
        part = len(content) if one.arrives else int(self._rng.integers(0, len(content)))
        one.target.put(one.places[:part], content[:part])

    def _refuse_away(self, arena: Arena, places: Places, what: str) -> None:
        """Nobody may touch what is still on its way."""
        for one in self._away:
            if one.target is arena and not one.there:
                demand(not np.isin(places, one.places).any(), f"{what}: what transfer {one.number} still writes")
