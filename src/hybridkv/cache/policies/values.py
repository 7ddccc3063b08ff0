"""Values that policies answer with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Index(Protocol):
    """The prefix index of the policy's own group; see hybridkv.cache.index.PrefixIndex."""

    def get(self, key: bytes) -> int | None:
        """The block behind ``key``."""
        ...

    def leading_run(self, keys: Sequence[bytes], stop: int | None = None) -> NDArray[np.int32]:
        """Blocks of the leading keys that are all known, at most ``stop``."""
        ...


class Hit(NamedTuple):
    """A cached prefix in one group: how many tokens, and the block of each column, int32[columns]."""

    tokens: int
    blocks: NDArray[np.int32]


class GroupPlan(NamedTuple):
    """What a request needs in one group to hold some number of tokens.

    columns of the row after the commit:
    [ held already | reuse: hit blocks, touched | take: new blocks ]
             [ publish: columns first .. last-1 become hits ]
    """

    reuse: NDArray[np.int32]
    take: int
    publish_first: int
    publish_last: int
