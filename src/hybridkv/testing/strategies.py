"""Hypothesis strategies: pools, limits, and prompts that share prefixes. Needs the package hypothesis."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from hybridkv.schedule import SchedulerLimits
from hybridkv.testing.random_run import BLOCK_SIZES
from hybridkv.testing.rig import RigOptions

SALTS = st.sampled_from((None, None, None, "tenant"))
_LONGEST_BASE = 24


def limits() -> st.SearchStrategy[SchedulerLimits]:
    """Few rows, small budgets, up to three steps in flight."""
    return st.builds(
        SchedulerLimits,
        max_running=st.integers(1, 6),
        max_batched_tokens=st.integers(1, 20),
        max_in_flight=st.integers(1, 3),
        watermark=st.sampled_from((0.0, 0.0, 0.1, 0.3)),
    )


@st.composite
def rig_options(draw: st.DrawFn, block_sizes: tuple[tuple[int, ...], ...] = BLOCK_SIZES) -> RigOptions:
    """Small pools, so that preemption and eviction are frequent."""
    sizes = draw(st.sampled_from(block_sizes))
    return RigOptions(
        num_blocks=draw(st.integers(2, 12 * len(sizes))),
        block_sizes=sizes,
        max_model_len=draw(st.integers(2, 40)),
        limits=draw(limits()),
        caching=draw(st.sampled_from((True, True, True, False))),
        events=draw(st.booleans()),
        layers_per_group=draw(st.integers(1, 2)),
        vocabulary=draw(st.integers(2, 4)),
    )


@st.composite
def prompts(draw: st.DrawFn, vocabulary: int = 4, longest: int = 28, bases: int = 2) -> list[int]:
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
    random = Random(number)  # noqa: S311 - any tokens will do, but always the same
    return [random.randrange(vocabulary) for _ in range(_LONGEST_BASE)]
