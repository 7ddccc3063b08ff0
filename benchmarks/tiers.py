"""Compare caches with a host tier: hit rates of replays, as CSV.

    python tiers.py OUT.csv STREAM [STREAM ...] [--device GIB] [--host GIB] [--hours H] [--limit N] [--ways WAY ...]

A stream is a trace file or workload:NAME. Each cell replays one stream on a machine whose memory has no bound besides
the cache. A cell that stands in OUT.csv is not run again.

    device     the device alone                     tiers      device and host, the defaults of the library
    sum        a device of the sum of both          lru        device and host, each in the order of last use
    endless    a device of 4 TiB                    arc        device and host, each with ARC over resume points

ARC (Megiddo and Modha, FAST 2003, figure 4) counts resume points, as the paper counts pages. Each tier has its own
lists. A resume point that was evicted and would have been hit is a hit in B1 or B2, also if it is not kept again.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Final

from hybridkv.cache import CacheOptions, KVCacheManager, placement_of
from hybridkv.eviction.choice import HAZARD, Eviction
from hybridkv.eviction.resume_points import ResumePoint, note_hit
from hybridkv.models import read_model
from hybridkv.planner import Plan, tier_plan
from hybridkv.schedule import Scheduler
from hybridkv.simulator import (
    H100_UNBOUNDED,
    Progress,
    ReplaySettings,
    RequestSource,
    Simulation,
    TraceFile,
    Workload,
    plan_for_trace,
    simulation_of,
)
from hybridkv.simulator.transfers import TierTransfers
from hybridkv.tiers import HostTier

MODEL: Final = "qwen3.5-35b-a3b"
WAYS: Final = ("device", "tiers", "sum", "endless", "lru", "arc")
FIELDS: Final = ("stream", "model", "device_GiB", "host_GiB", "way", "requests", "hit_rate", "from_host", "refused")
_ENDLESS: Final = 4096
_WORKLOAD: Final = "workload:"


class Arc:
    """A ranking of resume points (hybridkv.eviction.hazard.Ranking) that evicts as ARC does.

    The cache holds as many resume points as fit, so ``c`` of the paper is the number of those kept now. Of those, only
    the ranked ones may be evicted.
    """

    def __init__(self) -> None:
        self.kept_in = OrderedDict[int, ResumePoint](), OrderedDict[int, ResumePoint]()  # T1 and T2, the oldest first
        self.ghosts = OrderedDict[int, None](), OrderedDict[int, None]()  # B1 and B2
        self.target = 0.0  # p of the paper
        self._ranked = set[int]()
        self._asked_again = set[int]()  # were hit in B1 or B2, and go to T2 if they are kept again
        self._in_b2 = False  # the last of them was

    def note_request(self, now: float) -> None:
        """Nothing: only resume points count."""

    def note_hint(self, point: ResumePoint, hint: int, now: float) -> None:  # noqa: ARG002 - the signature of a ranking
        """Nothing to learn."""
        point.hint = hint

    def add(self, point: ResumePoint, now: float) -> None:  # noqa: ARG002 - as above
        """Let it be evicted."""
        self._ranked.add(point.serial)

    def remove(self, point: ResumePoint) -> None:
        """Do not let it be evicted now; its place stays."""
        self._ranked.discard(point.serial)

    def kept(self, point: ResumePoint, now: float) -> None:
        """Put what comes in at the end of T2 if it is in B1 or B2, else of T1."""
        point.used = now
        self._find_ghost(point)
        again = point.serial in self._asked_again or any(point.serial in kept for kept in self.kept_in)
        self._asked_again.discard(point.serial)
        self._place(point, at=1 if again else 0)
        self._in_b2 = False
        held = sum(map(len, self.kept_in))
        while self.ghosts[0] and len(self.kept_in[0]) + len(self.ghosts[0]) > held:
            self.ghosts[0].popitem(last=False)
        while self.ghosts[1] and sum(map(len, self.ghosts)) > held:
            self.ghosts[1].popitem(last=False)

    def hit(self, point: ResumePoint, now: float) -> None:
        """Move it to the end of T2, or note a hit in B1 or B2."""
        note_hit(point, now)
        if any(point.serial in kept for kept in self.kept_in):
            self._place(point, at=1)
        else:
            self._find_ghost(point)

    def _place(self, point: ResumePoint, *, at: int) -> None:
        for kept in self.kept_in:
            kept.pop(point.serial, None)
        self.kept_in[at][point.serial] = point

    def _find_ghost(self, point: ResumePoint) -> None:
        """Move the target if ``point`` is in B1 or B2, and take it out."""
        for at, ghosts in enumerate(self.ghosts):
            if point.serial in ghosts:
                step = max(len(self.ghosts[1 - at]) / len(ghosts), 1.0)
                most = float(sum(map(len, self.kept_in)))
                self.target = min(self.target + step, most) if at == 0 else max(self.target - step, 0.0)
                del ghosts[point.serial]
                self._asked_again.add(point.serial)
                self._in_b2 = at == 1

    def evicted(self, point: ResumePoint, parent: ResumePoint | None, now: float, *, declined: bool) -> None:  # noqa: ARG002 - as above
        """Move it from T1 to B1, or from T2 to B2."""
        for kept, ghosts in zip(self.kept_in, self.ghosts, strict=True):
            if kept.pop(point.serial, None) is not None:
                ghosts[point.serial] = None

    def forget(self, point: ResumePoint, now: float) -> None:  # noqa: ARG002 - as above
        """Take it out of every list."""
        for held in (*self.kept_in, *self.ghosts):
            held.pop(point.serial, None)
        self._asked_again.discard(point.serial)

    def lowest(self, now: float) -> ResumePoint | None:  # noqa: ARG002 - as above
        """Return the oldest of T1 if that is above its target, else of T2. O(those that may not be evicted)."""
        above = len(self.kept_in[0]) - self.target
        first = self.kept_in if above > 0 or (above == 0 and self._in_b2) else self.kept_in[::-1]
        return next((point for kept in first for number, point in kept.items() if number in self._ranked), None)

    def prefers(self, point: ResumePoint, other: ResumePoint, now: float) -> bool:  # noqa: ARG002 - as above
        """Return True: what is new always comes in."""
        return True

    def check(self) -> list[str]:
        """Return a line for each resume point in two lists."""
        lists = (*self.kept_in, *self.ghosts)
        serials = [serial for held in lists for serial in held]
        return [f"{serial} is in two lists" for serial in {*serials} if serials.count(serial) > 1]


ARC: Final = Eviction("arc", Arc, HAZARD.prefix_multiple)


def with_tiers(plan: Plan, host_bytes: int, eviction: Eviction, settings: ReplaySettings) -> Simulation:
    """Return what ``simulation_of`` does with a host tier, but for the eviction."""
    made = simulation_of(plan, replace(settings, host_memory=host_bytes))
    if made.transfers is None:
        raise SystemExit("the replay has no host tier")
    options = CacheOptions(placement=placement_of(plan), eviction=eviction, clock=made.clock)
    device = KVCacheManager(plan, options=replace(options, log_resume_points=True))
    host = KVCacheManager(tier_plan(plan, host_bytes), hasher=device.hasher, options=options)
    tier = HostTier(device, host, made.transfers.tier.limits)
    scheduler = Scheduler(device, made.scheduler.limits, clock=made.clock, tier=tier)
    return replace(made, scheduler=scheduler, transfers=TierTransfers(tier, made.cost.host_bytes_per_s))


def simulation(way: str, source: RequestSource, device: int, host: int) -> Simulation:
    """Return a replay of ``source``; ``device`` and ``host`` are in GiB."""
    memory = {"sum": device + host, "endless": _ENDLESS}.get(way, device)
    plan = plan_for_trace(source.summary(), read_model(MODEL), memory << 30)
    settings = ReplaySettings(hardware=H100_UNBOUNDED)
    if way == "arc":
        return with_tiers(plan, host << 30, ARC, settings)
    if way in {"tiers", "lru"}:
        settings = replace(settings, host_memory=host << 30, eviction="lru" if way == "lru" else None)
    return simulation_of(plan, settings)


def cell(way: str, source: RequestSource, device: int, host: int) -> tuple[int, float, float, int]:
    """Return requests, the share of hit tokens, the share loaded from the host, and refused transfers."""
    begun = said = time.monotonic()

    def show(now: Progress) -> None:
        nonlocal said
        if time.monotonic() - said >= 60:
            said = time.monotonic()
            print(f"{way}: {now.requests} requests after {said - begun:.0f} s", file=sys.stderr, flush=True)

    report = simulation(way, source, device, host).run(source, on_progress=show)
    if report.hit_rate is None:
        raise SystemExit(f"{source.name} holds only lengths")
    tier = report.host_tier
    loaded, refused = (0, 0) if tier is None else (tier.loaded_tokens, tier.stores_refused + tier.loads_refused)
    print(f"{way}: {tier}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return report.requests, report.hit_rate, loaded / report.prompt_tokens, refused


def main() -> None:
    """Run the cells that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("streams", nargs="+")
    parser.add_argument("--device", type=int, default=10)
    parser.add_argument("--host", type=int, default=40)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    asked = parser.parse_args()
    rows = list(csv.DictReader(asked.out.open(encoding="utf-8"))) if asked.out.exists() else []
    known = {tuple(row[name] for name in FIELDS[:5]) for row in rows}
    with asked.out.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for stream in asked.streams:
            source: RequestSource
            if stream.startswith(_WORKLOAD):
                kind = stream.removeprefix(_WORKLOAD)
                source, name = Workload(kind, limit=asked.limit, hours=asked.hours), f"{kind} {asked.hours:g} h"
            else:
                source, name = TraceFile(stream, limit=asked.limit), Path(stream).name.removesuffix(".jsonl.gz")
            for way in asked.ways:
                cells = (name, MODEL, str(asked.device), str(asked.host), way)
                if cells in known:
                    continue
                requests, hit_rate, loaded, refused = cell(way, source, asked.device, asked.host)
                found = (requests, f"{hit_rate:.4f}", f"{loaded:.4f}", refused)
                writer.writerow(dict(zip(FIELDS, (*cells, *found), strict=True)))
                file.flush()


if __name__ == "__main__":
    main()
