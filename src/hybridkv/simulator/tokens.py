"""Token ids of pieces. The id of token ``k`` of a piece depends only on (kind, segment, offset + k).

    piece   (segment, offset, length)  ->  ids of positions offset .. offset + length - 1 of that segment
    id      mix(start(kind, segment) + position * G) >> 33           31 bits: an int32 id is not negative

``mix`` is the finaliser of SplitMix64 and ``G`` its increment (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). ``start`` applies ``mix`` to segment and kind; for one kind, it is one-to-one in the segment.
Equal pieces give equal ids. Two different runs of 16 positions agree with probability 2**-496, and two different single
positions with probability 2**-31.
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
"""Kind of segments that the source names: token-exact traces and generated workloads."""
HASHED_BLOCK: Final = 1
"""Kind of a block that a trace names by a hash id (Mooncake)."""
NEW_OUTPUT: Final = 2
"""Kind of an output that no other request has; the segment is the number of the line."""
NEW_PROMPT: Final = 3
"""Kind of a prompt with a known length only; the segment is the number of the line."""
_CHANCE: Final = 4
"""Kind of the random numbers of ``chances_at``; no token has it."""


def _mix(z: UInt64) -> UInt64:
    """Apply the finaliser of SplitMix64 in place, and return ``z``. It is one-to-one on 64 bits."""
    z ^= z >> np.uint64(30)
    z *= _FIRST
    z ^= z >> np.uint64(27)
    z *= _SECOND
    z ^= z >> np.uint64(31)
    return z


def stream_starts(kind: int, segments: UInt64) -> UInt64:
    """Return the start of each segment's stream of ids, uint64[n], for ``token_ids_at``. O(n).

    Args:
        kind: kind of the segments.
        segments: the segments, uint64[n].
    """
    salt = _mix(np.array([kind + 1], np.uint64) * _GOLDEN)
    return _mix((segments + _GOLDEN) ^ salt)


def token_ids_at(starts: UInt64, positions: UInt64) -> NDArray[np.int32]:
    """Return the id at ``positions[i]`` of the stream ``starts[i]``, int32[n]. O(n).

    Args:
        starts: starts of streams, from ``stream_starts``, uint64[n].
        positions: positions in the streams, uint64[n].
    """
    z = positions * _GOLDEN
    z += starts
    z ^= z >> np.uint64(30)
    z *= _FIRST
    z ^= z >> np.uint64(27)
    z *= _SECOND
    z >>= _TOP_31_BITS
    return z.astype(np.int32)


def chances_at(starts: UInt64, positions: UInt64) -> NDArray[np.float64]:
    """Return a pseudorandom number in [0, 1) for ``positions[i]`` of the stream ``starts[i]``, float64[n]. O(n).

    It is independent of the token id at this position.

    Args:
        starts: starts of streams, from ``stream_starts``, uint64[n].
        positions: positions in the streams, uint64[n].
    """
    drawn = stream_starts(_CHANCE, starts ^ (positions * _GOLDEN))
    return (drawn >> np.uint64(11)).astype(np.float64) / (1 << 53)  # the top 53 bits


Piece = tuple[int, int, int]
"""(segment, offset, length), in tokens."""


@dataclass(frozen=True)
class Pieces:
    """A run of tokens, described by pieces. Token ids are computed on each call and not stored.

    Attributes:
        kind: kind of all segments, for example PROMPT_SEGMENT.
        pieces: the pieces in order; each has at least one token.
    """

    kind: int
    pieces: tuple[Piece, ...]

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens of all pieces."""
        return sum(length for _, _, length in self.pieces)

    def token_ids(self) -> NDArray[np.int32]:
        """Return all token ids, int32[num_tokens]. O(num_tokens), about a dozen numpy passes."""
        total = self.num_tokens
        if not total:
            return np.empty(0, np.int32)
        starts, first_positions, lengths = self.columns()
        begins = np.cumsum(lengths) - lengths
        positions = np.arange(total, dtype=np.uint64)
        positions += np.repeat(first_positions - begins.astype(np.uint64), lengths)  # modulo 2**64
        return token_ids_at(np.repeat(starts, lengths), positions)

    def columns(self) -> tuple[UInt64, UInt64, NDArray[np.int64]]:
        """Return the stream start, first position and length of each piece: uint64[n], uint64[n], int64[n]. O(n)."""
        segments = np.array([segment for segment, _, _ in self.pieces], np.uint64)
        offsets = np.array([offset for _, offset, _ in self.pieces], np.uint64)
        lengths = np.array([length for _, _, length in self.pieces], np.int64)
        return stream_starts(self.kind, segments), offsets, lengths
