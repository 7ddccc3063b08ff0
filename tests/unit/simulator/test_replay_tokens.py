"""Token ids out of pieces: equal pieces give equal ids, different ones practically never collide."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.simulator.tokens import HASHED_BLOCK, NEW_OUTPUT, PROMPT_SEGMENT, Pieces, stream_starts, token_ids_at

_segments = st.integers(0, 2**64 - 1)
_pieces = st.lists(st.tuples(_segments, st.integers(0, 2**31 - 1), st.integers(1, 50)), min_size=1, max_size=6)
_MASK = 2**64 - 1


def mix(z: int) -> int:
    """SplitMix64's finaliser in plain integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def token(kind: int, segment: int, position: int) -> int:
    """The definition, one token at a time."""
    golden = 0x9E3779B97F4A7C15
    start = mix((segment + golden & _MASK) ^ mix((kind + 1) * golden & _MASK))
    return mix(start + position * golden & _MASK) >> 33


@given(st.integers(0, 2), _pieces)
def test_token_ids_depend_on_segment_and_position_only(kind: int, pieces: list[tuple[int, int, int]]) -> None:
    ids = Pieces(kind, tuple(pieces)).token_ids()
    assert ids.dtype == np.int32
    wanted = [token(kind, segment, offset + k) for segment, offset, length in pieces for k in range(length)]
    assert ids.tolist() == wanted


@given(_segments, st.integers(0, 2**31 - 100), st.integers(1, 40), st.integers(1, 40))
def test_token_ids_of_split_piece_are_the_same(segment: int, offset: int, first: int, second: int) -> None:
    whole = Pieces(PROMPT_SEGMENT, ((segment, offset, first + second),))
    cut = Pieces(PROMPT_SEGMENT, ((segment, offset, first), (segment, offset + first, second)))
    assert whole.token_ids().tolist() == cut.token_ids().tolist()
    assert whole.num_tokens == cut.num_tokens == first + second


def test_token_ids_match_the_known_values() -> None:
    # a report made yesterday must come out the same tomorrow
    assert Pieces(PROMPT_SEGMENT, ((0, 0, 3),)).token_ids().tolist() == [token(0, 0, k) for k in range(3)]
    assert Pieces(PROMPT_SEGMENT, ((7, 5, 2),)).token_ids().tolist() == [183706615, 81237938]


def test_token_ids_of_different_blocks_differ() -> None:
    ids = np.stack([Pieces(HASHED_BLOCK, ((segment, 0, 512),)).token_ids() for segment in range(1000)])
    blocks = {row.tobytes() for row in ids.reshape(-1, 16)}
    assert len(blocks) == ids.size // 16
    # 512,000 draws of 31 bits: 61 pairs expected, 8 is their standard deviation
    doubles = ids.size - len(np.unique(ids))
    assert 30 < doubles < 95
    # shifted stretches do not line up either: no pair of neighbours occurs twice
    flat = ids.astype(np.int64)
    pairs = (flat[:, :-1] << 31 | flat[:, 1:]).ravel()
    assert len(np.unique(pairs)) == pairs.size
    assert abs(float(ids.mean()) / 2**30 - 1) < 0.01


def test_token_ids_of_different_kinds_differ() -> None:
    made = {
        kind: Pieces(kind, ((3, 0, 64),)).token_ids().tolist() for kind in (PROMPT_SEGMENT, HASHED_BLOCK, NEW_OUTPUT)
    }
    flat = [one for ids in made.values() for one in ids]
    assert len(set(flat)) == len(flat)


def test_token_ids_of_single_positions_match_whole_pieces() -> None:
    segments, positions = np.arange(5, dtype=np.uint64), np.array([9, 0, 4, 4, 30], np.uint64)
    ids = token_ids_at(stream_starts(NEW_OUTPUT, segments), positions)
    wanted = [
        Pieces(NEW_OUTPUT, ((s, 0, 31),)).token_ids()[p] for s, p in zip(range(5), positions.tolist(), strict=True)
    ]
    assert ids.tolist() == wanted


def test_token_ids_of_no_pieces_are_empty() -> None:
    assert Pieces(PROMPT_SEGMENT, ()).token_ids().shape == (0,)
