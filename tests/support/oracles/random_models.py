"""Random models, in either layout: one to four groups of any kinds, so small that everything rare happens soon."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from hybridkv.schedule import SchedulerLimits
from hybridkv.specs import EncoderOnlyAttentionSpec, KVCacheSpec, MambaSpec, SinkFullAttentionSpec
from hybridkv.testing.configs import chunk_spec, cross_spec, full_spec, state_spec, window_spec
from oracles.rig import RigOptions

_KINDS = {"full": 8, "window": 6, "chunk": 3, "state": 7, "sink": 1, "scratch": 0.7, "cross": 0.3, "encoder_only": 0.7}
_SIZES = ((1,), (2,), (3,), (4,), (1, 2, 4), (2, 4), (2, 6), (3, 6), (4, 8), (1, 3), (4, 12))


def random_specs(random: Random, most_groups: int = 4) -> tuple[KVCacheSpec, ...]:
    """Groups of a model, at least one of which depends on the tokens of a request."""
    sizes = random.choice(_SIZES)
    count = random.choice([1, 1, 2, 2, 2, 3, 3, 4])
    kinds = random.choices(list(_KINDS), list(_KINDS.values()), k=min(count, most_groups))
    if set(kinds) <= {"cross", "encoder_only"}:
        kinds[0] = "full"
    return tuple(random_spec(random, kind, random.choice(sizes)) for kind in kinds)


def random_spec(random: Random, kind: str, block_size: int) -> KVCacheSpec:
    """A group of ``kind``."""
    return random.choice(specs_of(kind, block_size))


def specs_of(kind: str, block_size: int) -> list[KVCacheSpec]:
    """Groups of ``kind`` that are worth trying."""
    head: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": "float32"}
    edges = (block_size, 2 * block_size, 3 * block_size, 4 * block_size)
    made: dict[str, Iterable[KVCacheSpec]] = {
        "full": [full_spec(block_size)],
        "window": (window_spec(block_size, window) for window in (2, 3, 4, 5, 8, 9, 13, 20)),
        "chunk": (chunk_spec(block_size, chunk) for chunk in (1, 2, 3, 8, *edges)),
        "state": (state_spec(block_size, drafts) for drafts in (0, 0, 0, 1, 2)),
        "scratch": (state_spec(block_size, drafts, "none") for drafts in (0, 1, 2)),
        "sink": (SinkFullAttentionSpec(**head, sink_len=tokens) for tokens in (1, *edges[:2])),
        "cross": [cross_spec(block_size)],
        "encoder_only": [EncoderOnlyAttentionSpec(**head)],
    }
    return list(made[kind])


def random_limits(random: Random) -> SchedulerLimits:
    """Few rows, small budgets, up to three steps in flight."""
    return SchedulerLimits(
        max_running=random.randint(1, 6),
        max_batched_tokens=random.randint(1, 24),
        max_in_flight=random.choice((1, 1, 2, 3)),
        watermark=random.choice((0.0, 0.0, 0.1, 0.3)),
        policy=random.choice(("fcfs", "fcfs", "priority")),
        max_overtaken=random.choice((0, 1, 3, 64)),
        max_overtaken_seconds=random.choice((0.0, 1.0, 1.0, 5.0)),
        num_lookahead_tokens=random.choice((0, 0, 0, 1, 2, 3)),
        short_share=random.choice((None, None, 0.0, 0.3, 0.5, 0.9)),
    )


def random_options(random: Random, specs: tuple[KVCacheSpec, ...] | None = None) -> RigOptions:
    """Small pools, so that preemption and eviction are frequent. specs: instead of random ones."""
    specs = random_specs(random) if specs is None else specs
    ranks = random.choice(((1, 1),) * 8 + ((2, 1), (1, 2), (2, 2)))
    options = RigOptions(
        num_blocks=sum(spec.reserved_blocks(1) for spec in specs) + random.randint(4, 6 + 12 * len(specs)),
        specs=specs,
        max_model_len=random.randint(5, 44),
        limits=random_limits(random),
        caching=random.random() < 0.88,
        events=random.random() < 0.4,
        layers_per_group=random.choice((1, 1, 1, 2)),
        vocabulary=random.choice((2, 2, 3, 4)),
        eagle=random.random() < 0.2,
        dcp=ranks[0],
        pcp=ranks[1],
    )
    return options.with_drafts(random.choice((0, 0, 1, 2, 3)))


# -- the natural layout

_NATURAL_KINDS = {
    "full": 8,
    "window": 6,
    "chunk": 4,
    "state": 9,
    "sink": 1,
    "scratch": 0.5,
    "cross": 2,
    "encoder_only": 0.4,
}
PLACEMENTS = ("ends", "ends", "ends", "interval:3", "interval:5", "align:4", "align:2", "none")


def random_natural_options(random: Random, specs: tuple[KVCacheSpec, ...] | None = None) -> RigOptions:
    """Few slabs of several blocks each: slabs change hands, and blocks move. specs: instead of random ones."""
    specs = random_natural_specs(random) if specs is None else specs
    ks = random_ks(random, specs)
    parts = tuple(random_parts(random, spec) for spec in specs)
    needed = dict.fromkeys(ks, 0)
    for k, spec in zip(ks, specs, strict=True):
        needed[k] += spec.reserved_blocks(1)
    sinks = sum(-(-blocks // k) for k, blocks in needed.items())
    options = random_options(random, specs)
    natural = replace(
        options,
        specs=specs,
        num_blocks=1 + sinks + random.choice((random.randint(3, 10), random.randint(4, 24), random.randint(8, 39))),
        limits=replace(options.limits, segments=random.random() < 0.6),
        eagle=random.random() < 0.12,
        blocks_per_slab=ks,
        kernel_blocks=parts if random.random() < 0.15 else (),
        placement=random.choice(PLACEMENTS),
    )
    return natural.with_drafts(random.choice((0, 0, 1, 2, 3)))


def random_natural_specs(random: Random) -> tuple[KVCacheSpec, ...]:
    """Groups of a model."""
    sizes = random.choice(((2,), (3,), (4,), (4,), (8,), (2, 4), (3, 6), (4, 8), (1, 3), (1,)))
    kinds = random.choices(list(_NATURAL_KINDS), list(_NATURAL_KINDS.values()), k=random.choice((1, 2, 2, 2, 3, 3, 4)))
    if set(kinds) <= {"encoder_only", "cross"}:
        kinds[0] = "full"
    return tuple(random_spec(random, kind, random.choice(sizes)) for kind in kinds)


def random_ks(random: Random, specs: Sequence[KVCacheSpec]) -> tuple[int, ...]:
    """Blocks in a slab of every group: mostly, states lie in a class of their own."""
    attention, states = random.sample((1, 2, 3, 4, 5, 6), 2), random.choice((1, 1, 2, 3))
    apart = random.random() < 0.8
    return tuple(states if apart and isinstance(spec, MambaSpec) else random.choice(attention) for spec in specs)


def random_parts(random: Random, spec: KVCacheSpec) -> int:
    """Kernel blocks of a block: a divisor of its tokens."""
    if isinstance(spec, MambaSpec):
        return 1
    return random.choice([part for part in range(1, spec.block_size + 1) if spec.block_size % part == 0])
