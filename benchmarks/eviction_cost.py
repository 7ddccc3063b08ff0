"""What an eviction costs: seconds of CPU a request beside ``lru``, and of a ranking alone, by ends that are kept.

    python eviction_cost.py [--ends 1000 10000] [--ranked 1000 10000 100000]

A request of 48 tokens, 16 of which a fortieth of all share, comes, is computed and goes in a cache that is full; two
ends are kept of each. A ranking alone gives up its lowest end, keeps a new one and sees a hit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from random import Random

from eviction_table import serve_alone

from hybridkv.cache import KVCacheManager
from hybridkv.cache.placement import EVICTIONS, EndsPlacement, eviction_named
from hybridkv.cache.placement.ends import End, Kind
from hybridkv.request import Request
from hybridkv.testing.configs import full_spec, natural_model_config, state_spec

_TIMED = 400
_OUTPUTS = list(range(5))


def a_request(eviction: str, ends: int) -> float:
    """Seconds of CPU a request with ``ends`` ends kept."""
    seconds = [0.0]
    cache = KVCacheManager(
        natural_model_config(ends * 2, (full_spec(16), state_spec(16)), (4, 1)),
        100,
        placement=EndsPlacement(),
        eviction=eviction_named(eviction),
        clock=lambda: seconds[0],
    )
    requests = ends + _TIMED  # twice as many ends as fit, with their blocks
    begun = 0.0
    for number in range(requests):
        if number == ends:
            begun = time.process_time()
        seconds[0] += 0.1
        template = number % 40
        prompt = [template] * 16 + [100 + number % 30_000, number // 30_000] * 16
        serve_alone(cache, Request(str(number), prompt, hasher=cache.hasher), _OUTPUTS, number)
    return (time.process_time() - begun) / _TIMED


def a_turn(eviction: str, ends: int) -> Iterator[float]:
    """Seconds of CPU to give up an end, keep one and see one hit, of ``ends`` ranked; then, to learn, a request."""
    made = eviction_named(eviction).ranking
    if made is None:
        return
    ranking, random, now = made(), Random(1), 0.0  # noqa: S311 - seeded
    kept: dict[int, End] = {}
    for serial in range(ends + _TIMED):
        now += 0.1
        end = End(serial, random.choice(list(Kind)), 100, now, random.choice([None, 0.5, 20.0, 300.0]))
        end.saved = random.lognormvariate(0.0, 2.0)
        if serial == ends:
            begun = time.process_time()
        if serial >= ends and (lowest := ranking.lowest(now)) is not None:
            ranking.remove(lowest)
            ranking.given_up(lowest, None, now, declined=False)
            ranking.forget(lowest, now)
            del kept[lowest.serial]
            hit = next(iter(kept.values()))
            ranking.remove(hit)
            ranking.hit(hit, now)
            ranking.add(hit, now)
        ranking.add(end, now)
        kept[serial] = end
    yield (time.process_time() - begun) / _TIMED
    begun = time.process_time()
    for _ in range(_TIMED):
        ranking.note_request(now)
    yield (time.process_time() - begun) / _TIMED


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ends", type=int, nargs="*", default=[1000, 10_000])
    parser.add_argument("--ranked", type=int, nargs="*", default=[1000, 10_000, 100_000])
    asked = parser.parse_args()
    for ends in asked.ranked:
        for eviction in EVICTIONS:
            times = [f"{seconds * 1e6:.0f} us" for seconds in a_turn(eviction, ends)]
            if times:
                print(f"{ends:>7,} ranked, {eviction}: a turn {times[0]}, to learn {times[1]} a request", flush=True)
    for ends in asked.ends:
        for eviction in EVICTIONS:
            print(f"{ends:>7,} kept, {eviction}: {a_request(eviction, ends) * 1e6:.0f} us a request", flush=True)


if __name__ == "__main__":
    main()
