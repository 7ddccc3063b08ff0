from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import ConfigError
from hybridkv.specs import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, RequestLimits

FULL = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
MLA = MLAAttentionSpec(block_size=16, head_size=576, dtype="bfloat16")


def test_page_bytes() -> None:
    assert FULL.page_size_bytes == 2 * 16 * 8 * 128 * 2
    # one latent vector a token: coefficient 1
    assert MLA.page_size_bytes == 16 * 576 * 2
    assert replace(FULL, dtype="float32").page_size_bytes == 2 * FULL.page_size_bytes
    assert replace(FULL, dtype="fp8").page_size_bytes == FULL.page_size_bytes // 2


def test_a_value_head_of_its_own_width() -> None:
    assert replace(FULL, head_size_v=64).page_size_bytes == 16 * 8 * (128 + 64) * 2
    assert replace(FULL, head_size_v=128).page_size_bytes == FULL.page_size_bytes


@pytest.mark.parametrize("spec", [FULL, MLA])
@pytest.mark.parametrize(
    ("limits", "pages"),
    [
        (RequestLimits(1), 1),
        (RequestLimits(16), 1),
        (RequestLimits(17), 2),
        (RequestLimits(8192), 512),
        # what is in flight is part of the request already
        (RequestLimits(8192, max_in_flight_tokens=4096), 512),
        # each of 2 * 2 ranks keeps a quarter of the tokens: ceil(ceil(130 / 4) / 16)
        (RequestLimits(130, dcp=2, pcp=2), 3),
    ],
)
def test_most_bytes_of_a_request(spec: KVCacheSpec, limits: RequestLimits, pages: int) -> None:
    assert spec.max_memory_usage_bytes(limits) == pages * spec.page_size_bytes


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 4), st.integers(1, 4))
def test_most_bytes_hold_every_token_and_no_page_more(length: int, block_size: int, dcp: int, pcp: int) -> None:
    spec = replace(FULL, block_size=block_size)
    limits = RequestLimits(length, dcp=dcp, pcp=pcp)
    pages = spec.max_memory_usage_bytes(limits) // spec.page_size_bytes
    assert pages * block_size * dcp * pcp >= length
    assert (pages - 1) * block_size < -(-length // (dcp * pcp))


@pytest.mark.parametrize("spec", [FULL, MLA])
def test_equal_specs_merge_into_a_copy(spec: KVCacheSpec) -> None:
    merged = type(spec).merge([spec, replace(spec)])
    assert merged == spec
    assert merged is not spec
    assert type(merged) is type(spec)


def test_full_attention_merges_with_one_window_or_one_chunk() -> None:
    window, chunk = replace(FULL, sliding_window=1024), replace(FULL, attention_chunk_size=512)
    assert FullAttentionSpec.merge([FULL, window, FULL, window]) == window
    assert FullAttentionSpec.merge([chunk, FULL]) == chunk


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([replace(FULL, sliding_window=1024), replace(FULL, sliding_window=512)], r"\[512, 1024\].*separate groups"),
        ([replace(FULL, attention_chunk_size=64), replace(FULL, attention_chunk_size=32)], "separate groups"),
        (
            [replace(FULL, sliding_window=1024), replace(FULL, attention_chunk_size=512)],
            "window of 1024 and a chunk of 512",
        ),
        ([FULL, replace(FULL, num_kv_heads=4)], "differ"),
        ([FULL, replace(FULL, dtype="float16")], "differ"),
        ([FULL, replace(FULL, block_size=32)], "differ"),
        ([FULL, MLA], "differ"),
        ([], "at least one"),
    ],
)
def test_what_does_not_merge(other: list[FullAttentionSpec], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FullAttentionSpec.merge(other)


def test_mla_merges_only_with_its_equal() -> None:
    with pytest.raises(ConfigError, match="MLAAttentionSpec"):
        MLAAttentionSpec.merge([MLA, replace(MLA, head_size=512)])


def test_merge_window_sizes() -> None:
    assert FullAttentionSpec.merge_window_sizes(set()) is None
    assert FullAttentionSpec.merge_window_sizes({7}) == 7
    with pytest.raises(ConfigError):
        FullAttentionSpec.merge_window_sizes({7, 8})


def test_specs_are_values() -> None:
    assert hash(FULL) == hash(replace(FULL))
    assert replace(FULL, dtype="torch.bfloat16") == FULL
    with pytest.raises(FrozenInstanceError):
        FULL.block_size = 32  # type: ignore[misc]  # what is tested


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"num_kv_heads": 0}, {"head_size": -1}, {"dtype": "int3"}])
def test_sizes_that_cannot_be(wrong: dict[str, object]) -> None:
    sizes: dict[str, object] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=next(iter(wrong)).split("_")[0]):
        FullAttentionSpec(**{**sizes, **wrong})  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("wrong", [{"max_model_len": 0}, {"max_in_flight_tokens": -1}, {"dcp": 0}, {"pcp": 0}])
def test_limits_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RequestLimits(**{"max_model_len": 16, **wrong})
