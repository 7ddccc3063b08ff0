"""Hypothesis strategies: models, pools, limits, and prompts that share prefixes. Needs the package hypothesis."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from hybridkv.schedule import SchedulerLimits
from hybridkv.specs import KVCacheSpec, MambaSpec
from hybridkv.testing.configs import ENCODERS
from oracles.random_models import PLACEMENTS, specs_of
from oracles.rig import RigOptions

SALTS = st.sampled_from((None, None, None, "tenant"))
INPUTS = st.sampled_from((*ENCODERS, *ENCODERS, None))
"""Of encoders; models without cross attention get none of them."""
SIZES = ((4,), (2,), (1,), (3,), (2, 4), (4, 8), (2, 6), (1, 3), (1, 2, 4))
"""Block sizes that the groups of one model choose from."""
KINDS = ("full", "state", "window", "chunk")
"""Kinds that can be hit. Others come less often."""
DRAFTS = (0, 1, 2, 3)
_LONGEST_BASE = 30


def limits() -> st.SearchStrategy[SchedulerLimits]:
    """Few rows, small budgets, up to three steps in flight."""
    return st.builds(
        SchedulerLimits,
        max_running=st.integers(1, 6),
        max_batched_tokens=st.integers(1, 24),
        max_in_flight=st.integers(1, 3),
        watermark=st.sampled_from((0.0, 0.0, 0.1, 0.3)),
        policy=st.sampled_from(("fcfs", "priority")),
        max_overtaken=st.sampled_from((64, 0, 1, 3)),
        max_overtaken_seconds=st.sampled_from((1.0, 0.0, 5.0)),
        num_lookahead_tokens=st.sampled_from((0, 0, 1, 2, 3)),
        short_share=st.sampled_from((None, None, 0.0, 0.3, 0.5, 0.9)),
    )


@st.composite
def layer_specs(draw: st.DrawFn, kind: str, block_size: int) -> KVCacheSpec:
    """A group of ``kind``."""
    return draw(st.sampled_from(specs_of(kind, block_size)))


@st.composite
def model_specs(draw: st.DrawFn, kinds: tuple[str, ...] | None = None) -> tuple[KVCacheSpec, ...]:
    """One to four groups. kinds: instead of any."""
    sizes = draw(st.sampled_from(SIZES))
    usual = st.sampled_from(kinds or KINDS)
    rare = usual if kinds else st.sampled_from(("sink", "encoder_only", "scratch", "cross", *KINDS, *KINDS))
    chosen = [draw(usual), *draw(st.lists(st.one_of(usual, usual, rare), max_size=3))]
    return tuple(draw(layer_specs(kind, draw(st.sampled_from(sizes)))) for kind in chosen)


@st.composite
def rig_options(draw: st.DrawFn, kinds: tuple[str, ...] | None = None) -> RigOptions:
    """Small pools, so that preemption and eviction are frequent."""
    specs = draw(model_specs(kinds))
    sinks = sum(spec.reserved_blocks(1) for spec in specs)
    dcp, pcp = draw(st.sampled_from(((1, 1),) * 7 + ((2, 1), (1, 2), (2, 2))))
    options = RigOptions(
        num_blocks=sinks + draw(st.integers(3, 6 + 12 * len(specs))),
        specs=specs,
        max_model_len=draw(st.integers(2, 44)),
        limits=draw(limits()),
        caching=draw(st.sampled_from((True, True, True, True, False))),
        events=draw(st.booleans()),
        layers_per_group=draw(st.integers(1, 2)),
        vocabulary=draw(st.integers(2, 4)),
        eagle=draw(st.sampled_from((False, False, False, True))),
        dcp=dcp,
        pcp=pcp,
    )
    return options.with_drafts(draw(st.sampled_from(DRAFTS)))


@st.composite
def natural_rig_options(draw: st.DrawFn, kinds: tuple[str, ...] | None = None) -> RigOptions:
    """The natural layout in few slabs: states mostly in a class of their own, blocks that move."""
    specs = draw(model_specs(kinds))
    attention = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=2, unique=True))
    states = draw(st.sampled_from((1, 1, 2, 3)))
    ks = tuple(states if isinstance(spec, MambaSpec) else draw(st.sampled_from(attention)) for spec in specs)
    sinks = sum(spec.reserved_blocks(1) for spec in specs)
    options = draw(rig_options(kinds))
    natural = replace(
        options,
        specs=specs,
        blocks_per_slab=ks,
        num_blocks=1 + sinks + draw(st.integers(3, 39)),
        limits=replace(options.limits, segments=draw(st.booleans())),
        placement=draw(st.sampled_from(PLACEMENTS)),
    )
    return natural.with_drafts(draw(st.sampled_from(DRAFTS)))


def verdicts(most: int = 3) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Drafts for requests in order: how many are what the model will draw, then how many are not."""
    return st.lists(st.tuples(st.integers(0, most), st.integers(0, 2)), min_size=1, max_size=6)


@st.composite
def prompts(draw: st.DrawFn, vocabulary: int = 4, longest: int = 34, bases: int = 2) -> list[int]:
    """A piece of one of ``bases`` fixed token sequences and a few tokens of its own: prefixes are shared often."""
    base = _base(draw(st.integers(0, bases - 1)), vocabulary)
    own = draw(st.lists(st.integers(0, vocabulary - 1), max_size=3))
    prompt = base[: draw(st.integers(1, _LONGEST_BASE))] + own
    return prompt[:longest]


def stop_token_ids(vocabulary: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Mostly none."""
    some = st.lists(st.integers(0, vocabulary - 1), max_size=2, unique=True).map(tuple)
    return st.one_of(st.just(()), st.just(()), some)


def _base(number: int, vocabulary: int) -> list[int]:
    random = Random(number)
    return [random.randrange(vocabulary) for _ in range(_LONGEST_BASE)]
