"""Seeded random runs of a Rig, for counting, for controls and for long runs without hypothesis."""

from __future__ import annotations

from random import Random

from hybridkv.schedule import SchedulerLimits
from hybridkv.testing.rig import Rig, RigOptions

_WEIGHTS = {
    "add": 5.0,
    "schedule": 9.0,
    "update": 8.0,
    "abort": 0.7,
    "fail": 0.7,
    "finish": 0.4,
    "reset": 0.4,
    "probe": 0.6,
}
BLOCK_SIZES = ((1,), (2,), (3,), (4,), (2, 4), (2, 6), (4, 4, 8), (1, 3))


def random_options(random: Random) -> RigOptions:
    """Small pools, so that preemption and eviction are frequent."""
    sizes = random.choice(BLOCK_SIZES)
    return RigOptions(
        num_blocks=random.randint(3, 12 * len(sizes)),
        block_sizes=sizes,
        max_model_len=random.randint(5, 40),
        limits=SchedulerLimits(
            max_running=random.randint(1, 6),
            max_batched_tokens=random.randint(1, 20),
            max_in_flight=random.randint(1, 3),
            watermark=random.choice((0.0, 0.0, 0.1, 0.3)),
        ),
        caching=random.random() < 0.85,
        events=random.random() < 0.5,
        layers_per_group=random.randint(1, 2),
        vocabulary=random.choice((2, 3, 4)),
    )


def random_run(rig: Rig, random: Random, actions: int = 60) -> None:
    """``actions`` random actions, then everything is drained."""
    vocabulary, limits = rig.options.vocabulary, rig.options.limits
    shared = [[random.randrange(vocabulary) for _ in range(random.randint(1, 24))] for _ in range(2)]
    for action in random.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=actions):
        someone = random.choice(rig.live_ids or ["nobody"])
        base = random.choice(shared)
        tail = [random.randrange(vocabulary) for _ in range(random.randint(0, 3))]
        prompt = base[: random.randint(1, len(base))] + tail
        salt = random.choice((None, None, None, "tenant"))
        stop_token_ids = (random.randrange(vocabulary),) if random.random() < 0.2 else ()
        match action:
            case "add":
                rig.add(prompt, random.randint(1, 20), stop_token_ids=stop_token_ids, salt=salt)
            case "probe":
                rig.probe(prompt, salt)
            case "schedule" if rig.num_in_flight < limits.max_in_flight:
                rig.schedule()
            case "update" if rig.num_in_flight:
                rig.update()
            case "fail" if rig.num_in_flight:
                rig.fail(random.randrange(rig.num_in_flight), random)
            case "abort":
                rig.abort(someone)
            case "finish":
                rig.finish(someone)
            case "reset":
                rig.reset_prefix_cache()
    rig.drain()
