"""The worker's side of a host tier, and of a store behind it: transfers that end on time, late, or never."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from content import demand
from executor import Arena, Places
from shelf import TAILS, Shelf, with_tail

from hybridkv.planner import KVCacheConfig
from hybridkv.step import Step, StepResult, StoreTransfer, TierCopies


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


@dataclass(slots=True, eq=False)
class Errand:
    """A way to or from the shelf. It reads or writes when it ends, and the places are its own until then.

    done: whether it arrived; None before it ends.
    """

    of: StoreTransfer
    places: list[Places]
    fetches: bool
    arrives: bool
    late: int
    done: bool | None = None


class HostMemory:
    """Executes transfers between ``device`` and an arena of ``config``, in order, after whatever ``rng`` says.

    counts: of what happened. shelf: the store behind it, if any. hash_block: tokens of a hash block.
    """

    def __init__(
        self,
        device: Arena,
        config: KVCacheConfig,
        rng: np.random.Generator,
        shelf: Shelf | None = None,
        hash_block: int = 1,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.arena = Arena(config, device.ranks, device.interleave, rng)
        self._device, self._rng = device, rng
        self._lost, self._late = rng.choice([0.0, 0.1, 0.3]), rng.choice([0.0, 0.3, 0.8])
        self._away, self._errands = list[Journey](), list[Errand]()
        self._shelf, self._hash_block = shelf, hash_block
        self._told = dict[int, dict[int, bool]]()
        self._last = -1

    def start(self, step: Step, what: str) -> None:
        """Before anything changes on the device: what goes down, and what moves below."""
        if step.after < self._last:
            for one in self._away:  # nobody holds its blocks any longer
                one.late = 0
                self._arrive(one)
            for errand in self._errands:
                errand.late = 0
                self._run(errand)
        self._last = step.id
        down = self._leave(step.stores, self._device, self.arena, f"{what} stores")
        for copy in step.tier_copies:
            self.arena.check_ids(copy.group, np.array([copy.source, copy.destination]), f"{what} copies in the tier")
            for block in (copy.source, copy.destination):
                self._refuse_away(self.arena, self.arena.block_places(copy.group, block), f"{what} moves")
            self._refuse_spilled(self.arena.block_places(copy.group, copy.destination), f"{what} moves")
            self.arena.copy(copy.group, copy.source, copy.destination)
        self._depart(down)
        self.counts["blocks moved in host memory"] += len(step.tier_copies)

    def load(self, step: Step, what: str) -> None:
        """After the device's blocks are clear, before any row runs: what comes up."""
        self._depart(self._leave(step.loads, self.arena, self._device, f"{what} loads"))
        for fetches, errands in ((False, step.spills), (True, step.fetches)):
            for one in errands:
                self._send(one, what, fetches=fetches)

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
        for errand in self._errands:
            if not errand.late:
                told[errand.of.number] = self._run(errand)
                what = "fetches" if errand.fetches else "spills"
                self.counts[f"{what} {'arrived' if told[errand.of.number] else 'lost'}"] += 1
        self._away = [one for one in self._away if one.number not in told]
        self._errands = [one for one in self._errands if one.of.number not in told]
        for journey in self._away:
            journey.late -= 1
        for errand in self._errands:
            errand.late -= 1
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
            demand(number not in self._numbers(), f"{what}: transfer {number} twice")
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
            if target is self.arena:
                self._refuse_spilled(journey.places, f"{what} to")
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
        for errand in self._errands:
            if errand.fetches and arena is self.arena:
                demand(not _touch(places, errand), f"{what}: what fetch {errand.of.number} still writes")

    def _refuse_spilled(self, places: Places, what: str) -> None:
        """Nobody may write what is still on its way to the shelf."""
        for errand in self._errands:
            demand(errand.fetches or not _touch(places, errand), f"{what}: what spill {errand.of.number} still reads")

    def _numbers(self) -> set[int]:
        return {one.number for one in self._away} | {one.of.number for one in self._errands}

    # -- to and from the shelf

    def _send(self, of: StoreTransfer, what: str, *, fetches: bool) -> None:
        what = f"{what} {'fetches' if fetches else 'spills'}"
        demand(self._shelf is not None, f"{what}, and nobody has a store")
        demand(of.number not in self._numbers(), f"{what}: transfer {of.number} twice")
        demand(len(of.group) == len(of.block) == len(of.keys) == len({*of.keys}), f"{what}: keys of its blocks")
        places = list[Places]()
        for group, block in zip(of.group.tolist(), of.block.tolist(), strict=True):
            self.arena.check_ids(group, np.array([block]), what)
            places.append(self.arena.block_places(group, block))
            self._refuse_away(self.arena, places[-1], what)
            if fetches:
                self._refuse_spilled(places[-1], what)
        errand = Errand(of, places, fetches, bool(self._rng.random() >= self._lost), 0)
        if self._rng.random() < self._late:
            errand.late = int(self._rng.integers(1, 4))
        if fetches:
            self.arena.spoil(places)
            for one in places:
                self.arena.note_written(one)
        self._errands.append(errand)

    def _run(self, errand: Errand) -> bool:
        if errand.done is None:
            errand.done = (self._fetch if errand.fetches else self._spill)(errand)
        return errand.done

    def _fetch(self, errand: Errand) -> bool:
        assert self._shelf is not None  # _send demands it
        for key, places in zip(errand.of.keys, errand.places, strict=True):
            block = bytearray(len(places))
            if not (errand.arrives or self._rng.random() < 0.7) or not self._shelf.get([key], [memoryview(block)])[0]:
                return False
            self.arena.put(places, np.frombuffer(block, np.uint8))
        return errand.arrives

    def _spill(self, errand: Errand) -> bool:
        assert self._shelf is not None  # _send demands it
        of = errand.of
        for group, block, key in zip(of.group.tolist(), of.block.tolist(), of.keys, strict=True):
            if not errand.arrives and self._rng.random() < 0.3:
                return False
            if not self._shelf.exists([key])[0]:
                content = memoryview(self.arena.snapshot(group, block))
                if not self._shelf.put([key], [content])[0]:
                    return False
        mark = bytearray(4 * TAILS * self._hash_block)
        known = self._shelf.get([of.mark], [memoryview(mark)])[0]
        new = with_tail(bytes(mark) if known else b"", of.tail, self._hash_block)
        return errand.arrives and self._shelf.put([of.mark], [memoryview(new)])[0]


def _touch(places: Places, errand: Errand) -> bool:
    return errand.done is None and any(np.isin(places, one).any() for one in errand.places)
