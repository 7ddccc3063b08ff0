"""A model whose KV of a token says everything about the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import starmap

DIGEST_BYTES = 8


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


class DigestModel:
    """KV of token p in a layer: the digest of (KV of token p - 1 in that layer, token p).

    layers: names, each of which begins its chain with the digest of its own name, so that layers cannot be
    confused. vocabulary: number of token ids; a small one makes prefixes repeat.
    The sampled token is a function of the digests of all layers, so wrong content leads to other tokens.
    """

    def __init__(self, layers: Sequence[str], vocabulary: int = 4) -> None:
        self.layers = tuple(layers)
        self.vocabulary = vocabulary
        self._root = {layer: _digest(layer.encode()) for layer in self.layers}
        self._known: dict[tuple[int, ...], tuple[bytes, ...]] = {(): tuple(self._root.values())}

    def root(self, layer: str) -> bytes:
        """What stands before token 0 of ``layer``."""
        return self._root[layer]

    @staticmethod
    def extend(previous: bytes, token: int) -> bytes:
        """The KV of ``token`` behind ``previous``."""
        return _digest(previous + token.to_bytes(4, "big"))

    def sample(self, digests: Sequence[bytes]) -> int:
        """The token behind the one whose KV is ``digests``, one a layer."""
        return int.from_bytes(_digest(b"".join(digests))) % self.vocabulary

    def digests(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """KV of the last of ``tokens``, one a layer, computed without any cache. O(tokens)."""
        prefix = tuple(tokens)
        start = len(prefix)
        while prefix[:start] not in self._known:
            start -= 1
        found = self._known[prefix[:start]]
        for end in range(start, len(prefix)):
            found = tuple(starmap(self.extend, ((one, prefix[end]) for one in found)))
            self._known[prefix[: end + 1]] = found
        return found

    def next_token(self, tokens: Sequence[int]) -> int:
        """The token that follows ``tokens``."""
        return self.sample(self.digests(tokens))
