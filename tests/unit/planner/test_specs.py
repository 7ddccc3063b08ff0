"""The kinds of docs/contracts.md, 1: bytes, blocks of a request, merging, uniform type."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import ConfigError
from hybridkv.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RequestLimits,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="bfloat16")
SLIDING = SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="bfloat16", sliding_window=8)
LATENT = SlidingWindowMLASpec(block_size=4, head_size=24, dtype="bfloat16", sliding_window=8)
CHUNKED = ChunkedLocalAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="bfloat16", attention_chunk_size=8)
SINK = SinkFullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="bfloat16", sink_len=4)
CROSS = CrossAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="bfloat16")
ENCODER = EncoderOnlyAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="bfloat16")
MAMBA = MambaSpec(block_size=4, shapes=((3, 10), (2, 4, 8)), dtypes=("bfloat16", "float32"))
MLA = MLAAttentionSpec(block_size=4, head_size=24, dtype="bfloat16")
ALL: list[KVCacheSpec] = [FULL, MLA, SINK, SLIDING, LATENT, CHUNKED, CROSS, ENCODER, MAMBA]


def kind(spec: KVCacheSpec) -> str:
    return type(spec).__name__


def test_spec_page_bytes_match_the_contract() -> None:
    for spec in (FULL, SLIDING, CHUNKED, SINK, CROSS, ENCODER):
        assert spec.page_size_bytes == 2 * 4 * 2 * 8 * 2
    # one latent vector a token
    assert LATENT.page_size_bytes == MLA.page_size_bytes == 4 * 24 * 2
    # whatever the block size
    assert MAMBA.page_size_bytes == 3 * 10 * 2 + 2 * 4 * 8 * 4
    assert replace(MAMBA, block_size=4096).page_size_bytes == MAMBA.page_size_bytes
    assert replace(SLIDING, dtype="fp8").page_size_bytes == SLIDING.page_size_bytes // 2
    assert replace(FULL, dtype="float32").page_size_bytes == 2 * FULL.page_size_bytes
    # a value head of its own width
    assert replace(FULL, head_size_v=4).page_size_bytes == 4 * 2 * (8 + 4) * 2
    assert replace(FULL, head_size_v=8).page_size_bytes == FULL.page_size_bytes


@pytest.mark.parametrize("spec", ALL, ids=kind)
def test_spec_page_padded_below_its_size_is_rejected(spec: KVCacheSpec) -> None:
    padded = replace(spec, page_size_padded=4096)
    assert (padded.page_size_bytes, padded.content_bytes) == (4096, spec.page_size_bytes)
    assert replace(spec, page_size_padded=spec.page_size_bytes).page_size_bytes == spec.page_size_bytes
    with pytest.raises(ConfigError, match=f"page_size_padded {spec.page_size_bytes - 1} is smaller"):
        replace(spec, page_size_padded=spec.page_size_bytes - 1)


@pytest.mark.parametrize(
    ("spec", "limits", "blocks"),
    [
        (FULL, RequestLimits(1), 1),
        (MLA, RequestLimits(4), 1),
        # what is in flight is part of the request already
        (FULL, RequestLimits(8192, max_in_flight_tokens=4096), 2048),
        # each of 2 * 2 ranks keeps a quarter of the tokens: ceil(ceil(130 / 4) / 4)
        (MLA, RequestLimits(130, dcp=2, pcp=2), 9),
        (SINK, RequestLimits(17), 5),
        # window 8, blocks of 4: 7 tokens before the one that runs need 2 blocks, and one for a start off the edge
        (SLIDING, RequestLimits(100), 3),
        (SLIDING, RequestLimits(100, max_in_flight_tokens=1), 3),
        (SLIDING, RequestLimits(100, max_in_flight_tokens=2), 4),
        (SLIDING, RequestLimits(5, max_in_flight_tokens=64), 3),
        (SLIDING, RequestLimits(1), 2),
        (LATENT, RequestLimits(100, max_in_flight_tokens=2), 4),
        # 2 * 2 ranks: a block covers 16 tokens
        (SLIDING, RequestLimits(100, max_in_flight_tokens=10, dcp=2, pcp=2), 3),
        (CHUNKED, RequestLimits(100), 2),
        (CHUNKED, RequestLimits(100, max_in_flight_tokens=1), 3),
        (CHUNKED, RequestLimits(3, max_in_flight_tokens=64), 1),
        (CHUNKED, RequestLimits(100, max_in_flight_tokens=9, dcp=4), 2),
        (CROSS, RequestLimits(100, max_encoder_tokens=1500), 375),
        (CROSS, RequestLimits(100, max_encoder_tokens=5, dcp=2), 2),
        (CROSS, RequestLimits(100), 0),
        (ENCODER, RequestLimits(100, max_encoder_tokens=1500), 0),
        (MAMBA, RequestLimits(100), 1),
        (replace(MAMBA, cache_mode="align"), RequestLimits(100), 2),
        (replace(MAMBA, num_speculative_blocks=3), RequestLimits(100, num_speculative_tokens=3), 4),
        (
            replace(MAMBA, num_speculative_blocks=3, cache_mode="align"),
            RequestLimits(100, num_speculative_tokens=2, dcp=2, pcp=2),
            5,
        ),
    ],
)
def test_spec_max_request_blocks_match_the_contract(spec: KVCacheSpec, limits: RequestLimits, blocks: int) -> None:
    assert spec.max_request_blocks(limits) == blocks
    assert spec.max_memory_usage_bytes(limits) == blocks * spec.page_size_bytes
    padded = replace(spec, page_size_padded=4096)
    assert padded.max_memory_usage_bytes(limits) == blocks * 4096


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 4), st.integers(1, 4))
def test_spec_max_bytes_hold_every_token_without_a_spare_page(length: int, block_size: int, dcp: int, pcp: int) -> None:
    spec = replace(FULL, block_size=block_size)
    limits = RequestLimits(length, dcp=dcp, pcp=pcp)
    pages = spec.max_memory_usage_bytes(limits) // spec.page_size_bytes
    assert pages * block_size * dcp * pcp >= length
    assert (pages - 1) * block_size < -(-length // (dcp * pcp))


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 20), st.integers(0, 50), st.integers(1, 3))
def test_spec_window_with_tokens_in_flight_fits_at_any_start(
    length: int, window: int, block: int, in_flight: int, dcp: int
) -> None:
    spec = replace(SLIDING, block_size=block, sliding_window=window)
    blocks = spec.max_request_blocks(RequestLimits(length, max_in_flight_tokens=in_flight, dcp=dcp))
    step = max(1, in_flight)
    for settled in range(length):
        first, end = max(0, settled - window + 1), min(length, settled + step)
        held = -(-end // (block * dcp)) - first // (block * dcp)
        # without anything in flight the token that runs is the one of the + 1
        assert held <= blocks


@pytest.mark.parametrize(
    ("spec", "limits", "columns"),
    [
        (FULL, RequestLimits(100), 25),
        (SLIDING, RequestLimits(100), 25),
        (CHUNKED, RequestLimits(100, dcp=2, pcp=2), 7),
        (FULL, RequestLimits(4, num_speculative_tokens=3), 4),
        (CROSS, RequestLimits(100, max_encoder_tokens=9), 3),
        (MAMBA, RequestLimits(100), 1),
        (replace(MAMBA, num_speculative_blocks=2, cache_mode="align"), RequestLimits(101, dcp=2), 28),
        (replace(MAMBA, num_speculative_blocks=2), RequestLimits(101, dcp=2), 3),
    ],
)
def test_spec_row_columns_match_the_contract(spec: KVCacheSpec, limits: RequestLimits, columns: int) -> None:
    assert spec.max_row_blocks(limits) == columns


def test_spec_with_too_many_drafts_is_rejected() -> None:
    limits = RequestLimits(100, num_speculative_tokens=2)
    for ask in (MAMBA.max_request_blocks, MAMBA.max_memory_usage_bytes, MAMBA.max_row_blocks):
        with pytest.raises(ConfigError, match=r"2 speculative tokens .* the layer has 0"):
            ask(limits)


@pytest.mark.parametrize("spec", ALL, ids=kind)
def test_spec_merge_of_equal_specs_gives_a_copy(spec: KVCacheSpec) -> None:
    merged = type(spec).merge([spec, replace(spec), spec])
    assert merged == spec
    assert merged is not spec
    assert type(merged) is type(spec)
    assert hash(merged) == hash(spec)


@pytest.mark.parametrize(
    "pair",
    [
        (SLIDING, replace(SLIDING, sliding_window=16)),
        (LATENT, replace(LATENT, sliding_window=16)),
        (CHUNKED, replace(CHUNKED, attention_chunk_size=16)),
        (SINK, replace(SINK, sink_len=8)),
        (SINK, FULL),
        (FULL, SINK),
        (MAMBA, replace(MAMBA, num_speculative_blocks=1)),
        (MAMBA, replace(MAMBA, page_size_padded=4096)),
        (FULL, replace(FULL, page_size_padded=4096)),
        (CROSS, replace(CROSS, dtype="float32")),
        (SLIDING, FULL),
        (CROSS, FULL),
        (FULL, replace(FULL, num_kv_heads=4)),
        (FULL, replace(FULL, block_size=32)),
        (FULL, MLA),
        (MLA, replace(MLA, head_size=512)),
    ],
)
def test_spec_merge_of_different_specs_is_rejected(pair: tuple[KVCacheSpec, KVCacheSpec]) -> None:
    with pytest.raises(ConfigError, match="differ"):
        type(pair[0]).merge(list(pair))


def test_spec_merge_of_full_attention_keeps_one_window_or_chunk() -> None:
    window, chunk = replace(FULL, sliding_window=1024), replace(FULL, attention_chunk_size=512)
    assert FullAttentionSpec.merge([FULL, window, FULL, window]) == window
    assert FullAttentionSpec.merge([chunk, FULL]) == chunk


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([{"sliding_window": 1024}, {"sliding_window": 512}], r"\[512, 1024\].*separate groups"),
        ([{"attention_chunk_size": 64}, {"attention_chunk_size": 32}], "separate groups"),
        ([{"sliding_window": 1024}, {"attention_chunk_size": 512}], "window of 1024 and a chunk of 512"),
        ([], "at least one"),
    ],
)
def test_spec_merge_of_two_windows_or_chunks_is_rejected(others: list[dict[str, int]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FullAttentionSpec.merge([replace(FULL, **one) for one in others])  # type: ignore[arg-type]  # integers


def test_spec_merge_window_sizes_gives_the_one_size() -> None:
    assert FullAttentionSpec.merge_window_sizes(set()) is None
    assert FullAttentionSpec.merge_window_sizes({7}) == 7
    with pytest.raises(ConfigError):
        FullAttentionSpec.merge_window_sizes({7, 8})


def test_spec_is_an_immutable_value() -> None:
    assert hash(FULL) == hash(replace(FULL))
    assert replace(FULL, dtype="torch.bfloat16") == FULL
    with pytest.raises(FrozenInstanceError):
        FULL.block_size = 32  # type: ignore[misc]  # what is tested


def test_spec_of_sink_attention_merges_as_full_attention() -> None:
    # D3: the reference cannot build one
    windowed = replace(SINK, sliding_window=32)
    assert SinkFullAttentionSpec.merge([SINK, windowed]) == windowed
    assert SINK.max_request_blocks(RequestLimits(100)) == FULL.max_request_blocks(RequestLimits(100))
    with pytest.raises(ConfigError, match="separate groups"):
        SinkFullAttentionSpec.merge([windowed, replace(SINK, sliding_window=64)])


@pytest.mark.parametrize(
    ("specs", "uniform"),
    [
        ([FULL, replace(FULL, num_kv_heads=4)], True),
        ([FULL, MLA, SINK], True),
        # two windows that kernels mask do not change what is kept
        ([replace(FULL, sliding_window=8), replace(FULL, sliding_window=16)], True),
        ([FULL, replace(FULL, block_size=8)], False),
        ([FULL, SLIDING], False),
        ([SLIDING, replace(SLIDING, num_kv_heads=4)], True),
        ([SLIDING, replace(SLIDING, sliding_window=16)], False),
        ([SLIDING, LATENT], False),
        ([LATENT, replace(LATENT, head_size=8)], True),
        ([CHUNKED, replace(CHUNKED, num_kv_heads=4)], True),
        ([CHUNKED, replace(CHUNKED, attention_chunk_size=16)], False),
        ([CHUNKED, SLIDING], False),
        # states of different sizes; the reference asks for equal pages
        ([MAMBA, replace(MAMBA, shapes=((3, 11), (2, 4, 8)))], True),
        ([MAMBA, replace(MAMBA, num_speculative_blocks=1)], False),
        ([MAMBA, replace(MAMBA, cache_mode="align")], False),
        ([CROSS, replace(CROSS, num_kv_heads=4)], True),
        ([CROSS, FULL], False),
        ([ENCODER, FULL], False),
        ([FULL, MAMBA], False),
    ],
)
def test_uniform_type_of_matching_specs_is_made(specs: list[KVCacheSpec], uniform: bool) -> None:
    named = {f"layer{i}": spec for i, spec in enumerate(specs)}
    assert UniformTypeKVCacheSpecs.is_uniform_type(named) is uniform
    assert UniformTypeKVCacheSpecs.is_uniform_type(dict(reversed(named.items()))) is uniform
    made = UniformTypeKVCacheSpecs.from_specs(named)
    assert (made is not None) is uniform
    if made is not None:
        assert made.kv_cache_specs == named
        assert made.page_size_bytes == sum(spec.page_size_bytes for spec in specs)
        assert made.keeps == specs[0].keeps


def test_uniform_type_takes_the_most_pages_of_any_layer() -> None:
    made = UniformTypeKVCacheSpecs.from_specs({"a": FULL, "b": replace(FULL, num_kv_heads=6), "c": MLA})
    assert made is not None
    page = FULL.page_size_bytes * 4 + MLA.page_size_bytes
    assert made.page_size_bytes == page
    assert made.max_memory_usage_bytes(RequestLimits(17)) == 5 * page
    assert made.max_row_blocks(RequestLimits(17)) == 5
    assert hash(made) == hash(replace(made))
    assert made.layer_spec("c") == MLA
    with pytest.raises(ConfigError, match="'d' is not one of a, b, c"):
        made.layer_spec("d")
    assert FULL.layer_spec("d") is FULL
    assert UniformTypeKVCacheSpecs.merge([made, made]) == made


def test_uniform_type_of_invalid_specs_is_rejected() -> None:
    with pytest.raises(ConfigError, match="not of one type"):
        UniformTypeKVCacheSpecs(block_size=4, layers=(("a", FULL), ("b", SLIDING)))
    with pytest.raises(ConfigError, match="not of one type"):
        UniformTypeKVCacheSpecs(block_size=8, layers=(("a", FULL),))
    with pytest.raises(ConfigError, match="at least one layer"):
        UniformTypeKVCacheSpecs.from_specs({})
    with pytest.raises(ConfigError, match="layer by layer"):
        UniformTypeKVCacheSpecs(block_size=4, layers=(("a", FULL),), page_size_padded=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownSpec(AttentionSpec):
    def max_request_blocks(self, limits: RequestLimits) -> int:
        return limits.max_model_len


def test_uniform_type_of_unknown_spec_names_it() -> None:
    unknown = UnknownSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="bfloat16")
    with pytest.raises(ConfigError, match="layer b: UnknownSpec is not a known kind"):
        UniformTypeKVCacheSpecs.from_specs({"a": FULL, "b": unknown})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: replace(FULL, block_size=0), "block_size must be at least 1"),
        (lambda: replace(FULL, num_kv_heads=0), "num_kv_heads must be at least 1"),
        (lambda: replace(FULL, head_size=-1), "head_size must be at least 1"),
        (lambda: replace(FULL, dtype="int3"), "unknown cache dtype 'int3'"),
        (lambda: RequestLimits(0), "max_model_len must be at least 1"),
        (lambda: RequestLimits(16, dcp=0), "dcp must be at least 1"),
        (lambda: RequestLimits(16, pcp=0), "pcp must be at least 1"),
        (lambda: RequestLimits(16, max_in_flight_tokens=-1), "max_in_flight_tokens must not be negative"),
        (lambda: replace(SLIDING, sliding_window=0), "sliding_window must be at least 1"),
        (lambda: replace(CHUNKED, attention_chunk_size=0), "attention_chunk_size must be at least 1"),
        (lambda: replace(SINK, sink_len=0), "sink_len must be at least 1"),
        (lambda: replace(MAMBA, shapes=()), "0 state shapes and 2 dtypes"),
        (lambda: replace(MAMBA, dtypes=("float32",)), "2 state shapes and 1 dtypes"),
        (lambda: replace(MAMBA, shapes=((3, 0), (1,))), "sizes of at least 1"),
        (lambda: replace(MAMBA, shapes=((), (1,))), "sizes of at least 1"),
        (lambda: replace(MAMBA, dtypes=("float32", "int3")), "unknown cache dtype 'int3'"),
        (lambda: replace(MAMBA, mamba_type="mamba3"), "unknown mamba_type 'mamba3': use one of mamba1"),
        (lambda: replace(MAMBA, cache_mode="all"), "unknown cache_mode 'all': use one of none, align"),
        (lambda: replace(MAMBA, num_speculative_blocks=-1), "num_speculative_blocks must not be negative"),
        (lambda: RequestLimits(16, max_encoder_tokens=-1), "max_encoder_tokens must not be negative"),
        (lambda: RequestLimits(16, num_speculative_tokens=-1), "num_speculative_tokens must not be negative"),
    ],
)
def test_spec_with_invalid_size_is_rejected(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wrong()


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_spec_state_bytes_are_the_sum_over_states(shapes: list[list[int]]) -> None:
    spec = MambaSpec(block_size=1, shapes=tuple(map(tuple, shapes)), dtypes=("float32",) * len(shapes))
    assert spec.page_size_bytes == 4 * sum(prod(shape) for shape in shapes)
