"""Seeded random runs of a Rig, for counting, for controls and for long runs without hypothesis."""

from __future__ import annotations

from random import Random

from hybridkv.extra_keys import EncoderInput
from hybridkv.testing.configs import ENCODERS
from oracles.rig import Rig

_WEIGHTS = {
    "add": 5.0,
    "schedule": 9.0,
    "update": 8.0,
    "abort": 0.6,
    "fail": 0.6,
    "finish": 0.4,
    "reset": 0.3,
    "probe": 1.0,
    "wait": 0.5,
}


def random_run(rig: Rig, random: Random, actions: int = 60) -> None:
    """``actions`` random actions, then everything is drained."""
    vocabulary = rig.options.vocabulary
    shared = [[random.randrange(vocabulary) for _ in range(random.randint(4, 36))] for _ in range(2)]
    weights = _WEIGHTS | ({"fork": 0.8} if rig.is_natural else {})
    for action in random.choices(list(weights), list(weights.values()), k=actions):
        match action:
            case "add":
                random_add(rig, random, shared)
            case "probe":
                prompt, salt = random_prompt(rig, random, shared), random_salt(random)
                rig.probe(prompt, salt, reads=random.random() < 0.95, encoder=random_encoder(rig, random))
            case "reset":
                rig.reset_prefix_cache()
            case "wait":
                rig.wait(random.choice((0.4, 0.7, 3.0)))
            case "fork":
                rig.fork(random.choice(rig.live_ids or ["nobody"]), random.randint(1, 3))
            case "abort" | "finish":
                getattr(rig, action)(random.choice(rig.live_ids or ["nobody"]))
            case _:
                random_step(rig, random, action)
    rig.drain()


def random_step(rig: Rig, random: Random, action: str) -> None:
    """A step is scheduled, brings its result or fails, where that is possible."""
    if action == "schedule" and rig.num_in_flight < rig.options.limits.max_in_flight:
        random_drafts(rig, random)
        rig.schedule()
    elif action == "update" and rig.num_in_flight:
        rig.update()
    elif action == "fail" and rig.num_in_flight:
        rig.fail(random.randrange(rig.num_in_flight), random)


def random_drafts(rig: Rig, random: Random) -> None:
    """Most requests get drafts, of which the first few are what the model will draw, where the scheduler takes any."""
    most = rig.options.limits.num_speculative_tokens
    for name in rig.live_ids if most else ():
        if random.random() < 0.8:
            rig.propose(name, random.randint(0, most), random.randint(0, 2))


def random_add(rig: Rig, random: Random, shared: list[list[int]]) -> None:
    """A request that may begin like another one, and may keep out of the prefix cache."""
    vocabulary = rig.options.vocabulary
    rig.add(
        random_prompt(rig, random, shared),
        random.randint(1, 20),
        stop_token_ids=(random.randrange(vocabulary),) if random.random() < 0.2 else (),
        salt=random_salt(random),
        priority=random.choice((0, 0, 1, 2)),
        arrival_time=rig.now + random.choice((0.0, 0.0, 0.5)),
        reads=random.random() < 0.95,
        writes=random.random() < 0.95,
        marks=random_marks(random) if rig.is_natural else (),
        n=random.choice((1, 1, 1, 1, 1, 2, 3)) if rig.is_natural else 1,
        encoder=random_encoder(rig, random),
    )


def random_encoder(rig: Rig, random: Random) -> EncoderInput | None:
    """Mostly one of few, where there is cross attention."""
    return random.choice((None, *ENCODERS, *ENCODERS)) if rig.has_cross else None


def random_marks(random: Random) -> list[int]:
    """Mostly none."""
    return random.sample(range(1, 30), random.choice((0, 0, 0, 1, 2)))


def random_prompt(rig: Rig, random: Random, shared: list[list[int]]) -> list[int]:
    """The beginning of one of ``shared`` or of another request, its output included; then tokens of its own."""
    vocabulary = rig.options.vocabulary
    base = random.choice(shared)
    if rig.requests and random.random() < 0.3:
        base = random.choice([expected.tokens for _, expected in rig.requests.values()])
        if rig.is_natural and random.random() < 0.6:  # the next turn of a conversation
            return base + [random.randrange(vocabulary) for _ in range(random.randint(1, 4))]
    length = len(base) if random.random() < 0.3 else random.randint(1, len(base))
    tail = [random.randrange(vocabulary) for _ in range(random.randint(0, 3))]
    return base[:length] + tail


def random_salt(random: Random) -> str | None:
    """Mostly none."""
    return random.choice((None, None, None, None, "tenant"))
