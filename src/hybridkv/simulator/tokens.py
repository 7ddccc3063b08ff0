"""Token ids out of pieces: token k of a piece is a function of (kind, segment, offset + k) alone.

    piece   (segment, offset, length)  ->  ids of positions offset .. offset + length - 1 of that segment
    id      mix(start(kind, segment) + position * G) >> 33                         31 bits, so >= 0 as int32

``mix`` is the finaliser of SplitMix64 and G its increment (Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014). ``start`` is the same finaliser over segment and kind, one
to one in the segment for a given kind. Equal pieces give equal ids; two different stretches of 16
positions agree with probability 2**-496, two different single positions with 2**-31.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]

_GOLDEN: Final = np.array([0x9E3779B97F4A7C15], np.uint64)
_FIRST: Final = np.array([0xBF58476D1CE4E5B9], np.uint64)
_SECOND: Final = np.array([0x94D049BB133111EB], np.uint64)
_TOP_31_BITS: Final = np.array([33], np.uint64)

PROMPT_SEGMENT: Final = 0
"""Kind of the segments that a trace names itself (token-exact traces, generated workloads)."""
HASHED_BLOCK: Final = 1
"""Kind of a block known by its hash id (Mooncake)."""
NEW_OUTPUT: Final = 2
"""Kind of an output that occurs nowhere else; the segment is the line's number."""
NEW_PROMPT: Final = 3
"""Kind of a prompt of which only the length is known; the segment is the line's number."""
_CHANCE: Final = 4
"""Kind of no tokens: of chances along other streams."""


def _mix(z: UInt64) -> UInt64:
    """SplitMix64's finaliser, in place; one to one on 64 bits."""
    z ^= z >> np.uint64(30)
    z *= _FIRST
    z ^= z >> np.uint64(27)
    z *= _SECOND
    z ^= z >> np.uint64(31)
    return z


def stream_starts(kind: int, segments: UInt64) -> UInt64:
    """Where the ids of each segment start, uint64[n]: for ``token_ids_at``."""
    salt = _mix(np.array([kind + 1], np.uint64) * _GOLDEN)
    return _mix((segments + _GOLDEN) ^ salt)


def token_ids_at(starts: UInt64, positions: UInt64) -> NDArray[np.int32]:
    """Return the id at ``positions[i]`` of the stream at ``starts[i]``, int32[n]. O(n)."""
    z = positions * _GOLDEN
    z += starts
    z ^= z >> np.uint64(30)
    z *= _FIRST
    z ^= z >> np.uint64(27)
    z *= _SECOND
    z >>= _TOP_31_BITS
    return z.astype(np.int32)


def chances_at(starts: UInt64, positions: UInt64) -> NDArray[np.float64]:
    """Return a number in [0, 1) for ``positions[i]`` of the stream at ``starts[i]``, float64[n]. O(n).

    It does not depend on the token id there.
    """
    drawn = stream_starts(_CHANCE, starts ^ (positions * _GOLDEN))
    return (drawn >> np.uint64(11)).astype(np.float64) / (1 << 53)  # the top 53 bits


Piece = tuple[int, int, int]
"""(segment, offset, length), in tokens."""


@dataclass(frozen=True)
class Pieces:
    """A run of tokens described by pieces; the ids are made when asked for and not kept.

    kind: which family of segments the pieces name. pieces: every length at least 1.
    """

    kind: int
    pieces: tuple[Piece, ...]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens in all pieces."""
        return sum(length for _, _, length in self.pieces)

    def token_ids(self) -> NDArray[np.int32]:
        """All ids, int32[num_tokens]. O(num_tokens), a dozen numpy passes."""
        total = self.num_tokens
        if not total:
            return np.empty(0, np.int32)
        starts, first_positions, lengths = self.columns()
        begins = np.cumsum(lengths) - lengths
        positions = np.arange(total, dtype=np.uint64)
        positions += np.repeat(first_positions - begins.astype(np.uint64), lengths)  # wraps where it must
        return token_ids_at(np.repeat(starts, lengths), positions)

    def columns(self) -> tuple[UInt64, UInt64, NDArray[np.int64]]:
        """(start of the stream, first position, length) of every piece."""
        segments = np.array([segment for segment, _, _ in self.pieces], np.uint64)
        offsets = np.array([offset for _, offset, _ in self.pieces], np.uint64)
        lengths = np.array([length for _, _, length in self.pieces], np.int64)
        return stream_starts(self.kind, segments), offsets, lengths
