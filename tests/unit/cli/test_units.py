import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import ConfigError
from hybridkv.units import GiB, KiB, MiB, TiB, ceil_div, dtype_bytes, dtype_name, format_bytes, parse_bytes, round_up


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("40GiB", 40 * GiB),
        ("40 gib", 40 * GiB),
        ("40G", 40 * GiB),
        ("40GB", 40 * 10**9),
        ("1.5GiB", 3 * GiB // 2),
        ("0.5 MB", 500_000),
        (" 512MiB ", 512 * MiB),
        ("2TiB", 2 * TiB),
        ("64k", 64 * KiB),
        ("1000000", 1_000_000),
        ("7b", 7),
        (123, 123),
        # more than a float holds exactly
        ("9007199254740993", 9007199254740993),
    ],
)
def test_size_text_is_parsed(text: str | int, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "40 GiBs", "-4GiB", "1e9", "4,0GiB", "0", "0GiB", "0.0001KiB", -5, "nan"])
def test_size_text_that_is_invalid_is_rejected(text: str | int) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (5 * MiB, "5 MiB"),
        (40 * GiB, "40 GiB"),
        (-MiB, "-1 MiB"),
    ],
)
def test_size_is_formatted(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_size_rounding_is_exact(n: int, unit: int) -> None:
    blocks = ceil_div(n, unit)
    assert (blocks - 1) * unit < n <= blocks * unit
    assert round_up(n, unit) == blocks * unit


def test_dtype_names_are_parsed() -> None:
    assert dtype_name("torch.bfloat16") == "bfloat16"
    assert [dtype_bytes(one) for one in ("bfloat16", "float16", "float32", "fp8", "float8_e4m3fn")] == [2, 2, 4, 1, 1]
    with pytest.raises(ConfigError, match="bfloat16"):
        dtype_name("float12")
