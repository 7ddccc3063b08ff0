"""Natural plans as the planner makes them: every token and state that a step reads is the row's own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.models import read_model
from hybridkv.planner import KVCacheConfig, plan
from hybridkv.schedule import SchedulerLimits
from oracles import Rig, RigOptions
from oracles.random_models import PLACEMENTS
from oracles.strategies import limits, prompts

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

MAX_MODEL_LEN = 40
BASE: dict[str, object] = {
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 64,
    "vocab_size": 4,
    "dtype": "float32",
}
LLAMA: dict[str, object] = {**BASE, "model_type": "llama", "hidden_size": 4, "num_hidden_layers": 3}
GEMMA: dict[str, object] = {
    **BASE,
    "model_type": "gemma3_text",
    "hidden_size": 4,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 9,
}
LFM: dict[str, object] = {
    **BASE,
    "model_type": "lfm2",
    "hidden_size": 640,  # a state is ten blocks of attention
    "num_hidden_layers": 5,
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
    "conv_L_cache": 3,
}


def planned(facts: dict[str, object], slabs: int, kernel_block_size: int | None) -> KVCacheConfig:
    """What the planner makes of a model for ``slabs`` slabs."""
    model = read_model(facts, block_size=4)
    large = plan(
        model, 2**18, max_model_len=MAX_MODEL_LEN, layout="natural", kernel_block_size=kernel_block_size
    ).config
    assert large.slabs is not None
    return plan(
        model,
        slabs * large.slabs.slab_bytes,
        max_model_len=MAX_MODEL_LEN,
        layout="natural",
        kernel_block_size=kernel_block_size,
    ).config


@settings(max_examples=settings().max_examples * 2 // 3)
@given(
    st.sampled_from(((LLAMA, 30), (GEMMA, 60), (LFM, 12), (LFM, 20))),
    st.sampled_from((None, 4, 2, 1)),
    st.sampled_from(PLACEMENTS),
    limits(),
    st.lists(
        st.tuples(
            prompts(longest=33),
            st.integers(1, 12),
            st.lists(st.integers(1, 30), max_size=1),
            st.integers(1, 2),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=10,
    ),
)
def test_planned_models_read_what_they_wrote(
    model: tuple[dict[str, object], int],
    kernel_block_size: int | None,
    placement: str,
    bounds: SchedulerLimits,
    arrivals: list[tuple[list[int], int, list[int], int, int]],
) -> None:
    config = planned(*model, kernel_block_size)
    options = RigOptions(config.num_blocks, max_model_len=MAX_MODEL_LEN, limits=bounds, placement=placement)
    rig = Rig(options, config=config)
    for prompt, max_tokens, marks, n, steps in arrivals:
        rig.add(prompt, max_tokens, marks=marks, n=n)
        for _ in range(steps):
            if rig.num_in_flight == bounds.max_in_flight:
                rig.update()
            rig.schedule()
    rig.drain()
    assert rig.worker.tokens_checked > 0
