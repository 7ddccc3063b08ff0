"""A model for tests: keys and values of a token, and recurrent states, identify all tokens before them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b

DIGEST_BYTES = 8
ZERO_STATE = bytes(DIGEST_BYTES)

Origin = str | None | tuple[str | None, str]
"""Distinguishes prompts with equal tokens: the salt, or the salt and the digest of the encoder's input."""
Prefix = tuple[Origin, tuple[int, ...]]
"""The meaning of a key: the origin and all tokens up to the end of the block.

In a group of cross attention: the origin, the number of tokens of the encoder's output, and the block's column.
"""


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


class DigestModel:
    """A deterministic model made of digests of 8 bytes.

    In an attention layer, the KV of token p is the digest of (KV of token p - 1, token p, encoder input). In a
    recurrent layer, the state after n tokens is the digest of (state after n - 1 tokens, token n - 1, encoder input);
    the state after 0 tokens is zero bytes. The sampled token is a function of the digests of all layers, so a layer
    that reads wrong content samples other tokens.

    Args:
        layers: names of the layers. A name is part of each digest, so no layer accepts another layer's digests.
        vocabulary: number of token ids. In a small vocabulary prefixes repeat often.
        states: names of the recurrent layers.
    """

    def __init__(self, layers: Sequence[str], vocabulary: int = 4, states: Collection[str] = ()) -> None:
        self.layers = tuple(layers)
        self.vocabulary = vocabulary
        self._name = {layer: _digest(layer.encode()) for layer in self.layers}
        self._root = {layer: ZERO_STATE if layer in states else self._name[layer] for layer in self.layers}
        self._known: dict[tuple[str, tuple[int, ...]], tuple[bytes, ...]] = {}

    def root(self, layer: str) -> bytes:
        """Return the digest that token 0 of a layer extends.

        Args:
            layer: name of the layer.
        """
        return self._root[layer]

    def extend(self, layer: str, previous: bytes, token: int, heard: str = "") -> bytes:
        """Return the KV of a token in a layer, or the recurrent state after it.

        Args:
            layer: name of the layer.
            previous: digest of the token before, or the result of ``root``.
            token: the token id.
            heard: digest of the encoder's input; empty without an encoder.
        """
        return _digest(self._name[layer] + previous + token.to_bytes(4, "big") + heard.encode())

    def encode(self, layer: str, heard: str, position: int) -> bytes:
        """Return the encoder output that cross attention reads.

        Args:
            layer: name of the cross attention layer.
            heard: digest of the encoder's input.
            position: position in the encoder's output.
        """
        return _digest(f"{layer} hears {heard} at {position}".encode())

    def sample(self, digests: Sequence[bytes]) -> int:
        """Return the token that follows.

        Args:
            digests: KV of the last token, or the state after it, one entry for each layer.
        """
        return int.from_bytes(_digest(b"".join(digests))) % self.vocabulary

    def digests(self, tokens: Sequence[int], heard: str = "") -> tuple[bytes, ...]:
        """Return the KV of the last token, or the state after it, for each layer. O(tokens that are new).

        Args:
            tokens: all tokens of a request.
            heard: digest of the encoder's input; empty without an encoder.
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
        """Return the token that follows. O(tokens that are new).

        Args:
            tokens: all tokens of a request.
            heard: digest of the encoder's input; empty without an encoder.
        """
        return self.sample(self.digests(tokens, heard))
