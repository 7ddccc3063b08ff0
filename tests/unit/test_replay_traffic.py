"""Bytes of the cache that a step moves, by hand for every kind of layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hybridkv.models import Layer, Model, read_model
from hybridkv.planner import Plan, plan
from hybridkv.simulator import CacheTraffic
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from hybridkv.step import Cells, Copy, Csr, Step

# 2 * 1 head * 8 elements * 2 bytes = 32 bytes a token
HEADS: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=10)
CHUNK = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=12)
SINK = SinkFullAttentionSpec(**HEADS, sink_len=6)
CROSS = CrossAttentionSpec(**HEADS)
ENCODER = EncoderOnlyAttentionSpec(**HEADS)
STATE = MambaSpec(block_size=4, shapes=((5, 10),), dtypes=("float32",))  # 200 bytes


def step(*rows: tuple[int, int], copies: tuple[Copy, ...] = ()) -> Step:
    """A Step of rows (computed, scheduled)."""
    computed, scheduled = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    total = int(scheduled.sum())
    return Step(
        id=0,
        after=-1,
        rows=np.arange(len(rows), dtype=np.int32),
        num_computed=computed,
        num_scheduled=scheduled,
        samples=np.ones(len(rows), np.bool_),
        token_ids=Csr(np.concatenate(([0], np.cumsum(scheduled))), np.zeros(total, np.int32)),
        drafts=Csr.empty(len(rows)),
        cells=Cells.empty(),
        finished_rows=np.empty(0, np.int32),
        copies=copies,
    )


def planned(*specs: KVCacheSpec, encoder_tokens: int = 0, **limits: object) -> Plan:
    """A plan of layers of these specs."""
    layers = tuple(Layer(f"layers.{i}", spec, i) for i, spec in enumerate(specs))
    model = Model("m", "m", layers, 1000, 9, "bfloat16", 1, 1, 4, max_encoder_tokens=encoder_tokens)
    return plan(model, "1MiB", **limits)  # type: ignore[arg-type]  # of this file


@pytest.mark.parametrize(
    ("spec", "rows", "moved"),
    [
        (FULL, [(0, 50)], 50 * 32),
        (FULL, [(30, 1), (44, 2)], (31 + 46) * 32),
        # a token reads itself and 9 before it; 5 queries reach 13 tokens back from the last
        (WINDOW, [(30, 1)], 10 * 32),
        (WINDOW, [(30, 5)], 14 * 32),
        (WINDOW, [(3, 1), (0, 50), (9, 1), (10, 1)], (4 + 50 + 10 + 10) * 32),
        # token 30 is in the chunk of 24 .. 35
        (CHUNK, [(30, 1)], 7 * 32),
        (CHUNK, [(35, 1), (36, 1), (30, 10)], (12 + 1 + 16) * 32),
        (SINK, [(30, 1), (0, 4)], (31 + 4 + 2 * 6) * 32),
        (STATE, [(30, 1), (0, 500)], 2 * 2 * 200),
        (CROSS, [(30, 1), (0, 7)], 2 * 20 * 32),
        (ENCODER, [(30, 1)], 0),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, KVCacheSpec) else str(one),
)
def test_what_each_kind_of_layer_moves(spec: KVCacheSpec, rows: Sequence[tuple[int, int]], moved: int) -> None:
    traffic = CacheTraffic.of(planned(spec, encoder_tokens=20))
    assert traffic.bytes_of(step(*rows)) == moved


def test_layers_add_up_and_equal_windows_are_one() -> None:
    other = SlidingWindowSpec(**HEADS, sliding_window=3)
    traffic = CacheTraffic.of(planned(FULL, WINDOW, FULL, STATE, WINDOW, other))
    assert list(traffic.windows) == [(3, 32), (10, 64)]
    assert traffic.bytes_of(step((30, 1))) == 31 * 64 + 10 * 64 + 3 * 32 + 400


def test_copies_read_and_write_a_block_of_their_group() -> None:
    plan = planned(FULL, STATE, STATE)
    group = next(i for i, one in enumerate(plan.config.groups) if isinstance(one.spec, MambaSpec))
    states = len(plan.config.groups[group].layer_names)
    copies = (Copy("before", group, 1, 2, "state"), Copy("before", group, 3, 4, "state"))
    traffic = CacheTraffic.of(plan)
    assert traffic.bytes_of(step((8, 1), copies=copies)) == 9 * 32 + 2 * 400 + 2 * 2 * 200 * states


def test_windows_managed_as_full_attention_are_masked_all_the_same() -> None:
    kept, dropped = (
        CacheTraffic.of(planned(FULL, WINDOW, CHUNK, windows_as_full=as_full)) for as_full in (True, False)
    )
    assert kept.bytes_of(step((30, 1))) == dropped.bytes_of(step((30, 1))) == (31 + 10 + 7) * 32
    remembered = FullAttentionSpec(**HEADS, sliding_window=10)
    assert CacheTraffic.of(planned(remembered)).bytes_of(step((30, 1))) == 10 * 32


def test_context_parallel_ranks_share_tokens_but_not_states() -> None:
    traffic = CacheTraffic.of(planned(FULL, WINDOW, STATE, CROSS, encoder_tokens=20, dcp=2, pcp=2))
    assert traffic.bytes_of(step((31, 1))) == (32 + 10) * 8 + 400 + 20 * 32


def test_real_models() -> None:
    qwen = CacheTraffic.of(plan(read_model("qwen3.5-35b-a3b"), "40GiB", max_model_len=8192))
    # 10 layers of 2 * 2 heads * 256 * 2 bytes; 64,389,120 bytes of states, read and written
    assert (qwen.token_bytes, qwen.row_bytes) == (20_480, 2 * 64_389_120)
    gemma = CacheTraffic.of(plan(read_model("gemma-3-27b"), "40GiB", max_model_len=8192))
    assert (gemma.token_bytes, gemma.windows) == (81_920, ((1024, 425_984),))
    whisper = CacheTraffic.of(plan(read_model("whisper-large-v3"), "4GiB"))
    assert whisper.row_bytes == 1500 * 163_840
