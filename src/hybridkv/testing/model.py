"""A model whose KV of a token, and whose state, say everything about the tokens before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b

DIGEST_BYTES = 8
ZERO_STATE = bytes(DIGEST_BYTES)

Origin = str | None | tuple[str | None, str]
"""What tells equal tokens apart: the salt, or the salt and the digest of the encoder's input."""
Prefix = tuple[Origin, tuple[int, ...]]
"""What a key stands for: the origin and all tokens up to the end of the block.

In a group of cross attention, instead of tokens: those of the encoder's output, and the block's column.
"""


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


class DigestModel:
    """KV of token p in a layer: the digest of (KV of token p - 1 in that layer, token p, what the encoder heard).

    A recurrent layer's state after n tokens is the digest of (its state after n - 1, token n - 1), the first one
    being zero bytes. layers: names, which enter all digests, so that layers cannot be confused. states: those of
    them that are recurrent. vocabulary: number of token ids; a small one makes prefixes repeat.
    The sampled token is a function of the digests of all layers, so wrong content leads to other tokens.
    """

    def __init__(self, layers: Sequence[str], vocabulary: int = 4, states: Collection[str] = ()) -> None:
        self.layers = tuple(layers)
        self.vocabulary = vocabulary
        self._name = {layer: _digest(layer.encode()) for layer in self.layers}
        self._root = {layer: ZERO_STATE if layer in states else self._name[layer] for layer in self.layers}
        self._known: dict[tuple[str, tuple[int, ...]], tuple[bytes, ...]] = {}

    def root(self, layer: str) -> bytes:
        """What stands before token 0 of ``layer``."""
        return self._root[layer]

    def extend(self, layer: str, previous: bytes, token: int, heard: str = "") -> bytes:
        """The KV of ``token`` in ``layer`` behind ``previous``, or the state behind it. heard: see ``digests``."""
        return _digest(self._name[layer] + previous + token.to_bytes(4, "big") + heard.encode())

    def encode(self, layer: str, heard: str, position: int) -> bytes:
        """What cross attention ``layer``, none of ``layers``, reads of the encoder's output at ``position``."""
        return _digest(f"{layer} hears {heard} at {position}".encode())

    def sample(self, digests: Sequence[bytes]) -> int:
        """The token behind the one whose KV is ``digests``, one a layer."""
        return int.from_bytes(_digest(b"".join(digests))) % self.vocabulary

    def digests(self, tokens: Sequence[int], heard: str = "") -> tuple[bytes, ...]:
        """KV of the last of ``tokens``, or the state behind it, one a layer, without any cache. O(tokens).

        heard: the digest of the encoder's input, which all of them depend on.
        """
        prefix = tuple(tokens)
        start = len(prefix)
        while start and (heard, prefix[:start]) not in self._known:
            start -= 1
        found = self._known[heard, prefix[:start]] if start else tuple(self._root.values())
        for end in range(start, len(prefix)):
            found = tuple(
                self.extend(layer, one, prefix[end], heard) for layer, one in zip(self.layers, found, strict=True)
            )
            self._known[heard, prefix[: end + 1]] = found
        return found

    def next_token(self, tokens: Sequence[int], heard: str = "") -> int:
        """The token that follows ``tokens``."""
        return self.sample(self.digests(tokens, heard))
