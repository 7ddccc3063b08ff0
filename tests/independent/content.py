"""What every token of every request must leave behind, and what the model says next: no cache, no blocks, no Steps.

The model is a hash. Keys and values of token p, and a recurrent state after p + 1 tokens, are one digest of all that
the request told the model so far: tenant, adapter, encoder input, tokens 0 .. p, images and embeddings among them.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from hybridkv.extra_keys import EncoderInput, LoraAdapter
from hybridkv.request import Request

Digests = NDArray[np.uint64]
Embeds = NDArray[np.float32]


class DifferenceError(AssertionError):
    """The library did what its documents do not say."""


def demand(right: object, what: str) -> None:
    """DifferenceError unless ``right``."""
    if not right:
        raise DifferenceError(what)


def digest(*parts: object) -> int:
    """64 bits of all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _tenant(salt: str | None, lora: LoraAdapter | None) -> tuple[object, ...]:
    return (salt, None if lora is None else (lora.name, lora.path))


class Story:
    """One request as it must come out, whatever the cache does.

    tokens: known from the start, and all that were drawn since. embeds: those that the caller gave with the prompt.
    """

    def __init__(self, request: Request, vocab: int, embeds: Embeds | None) -> None:
        self.request, self.vocab, self.embeds = request, vocab, embeds
        self.sampling, self.encoder = request.sampling, request.encoder
        self.tokens: list[int] = request.token_ids().tolist()
        self.given = len(self.tokens)
        self.cut_short = False
        self._tenant = _tenant(request.cache_salt, request.lora)
        encoder = None if self.encoder is None else self.encoder.digest
        self._start = digest("start", *self._tenant, encoder)
        self._chain = np.empty(64, np.uint64)
        self._done = 0
        self._marks: dict[int, object] = {}
        for item in request.multimodal:
            self._marks |= {item.offset + i: (item.id, i) for i in range(item.length)}
        for place, row in enumerate(() if embeds is None else embeds):
            self._marks[place] = self._marks.get(place), row.tobytes()

    def token(self, place: int) -> int:
        """The token at ``place``, drawn if it is not known yet."""
        while place >= len(self.tokens):
            last = int(self.digests(len(self.tokens))[-1])
            self.tokens.append(digest("draw", last, self.sampling.seed) % self.vocab)
        return self.tokens[place]

    def digests(self, count: int) -> Digests:
        """Of tokens 0 .. count - 1: what each leaves behind."""
        if count > len(self._chain):
            self._chain = np.concatenate((self._chain, np.empty(count, np.uint64)))
        while self._done < count:
            place = self._done
            self._chain[place] = self._after(int(self._chain[place - 1]) if place else self._start, place)
            self._done = place + 1
        return self._chain[:count]

    def with_drafts(self, count: int, drafts: list[int]) -> Digests:
        """``digests(count)``, and of ``drafts`` behind them as if they were the request's tokens."""
        known = self.digests(count)
        tail = []
        last = int(known[-1])
        for draft in drafts:
            last = digest(last, draft, None)
            tail.append(last)
        return np.concatenate((known, np.array(tail, np.uint64)))

    def encoded(self) -> Digests:
        """What the encoder leaves for cross attention, uint64[encoder tokens]."""
        read = self.encoder
        return np.empty(0, np.uint64) if read is None else encoder_output(read, self._tenant)

    def _after(self, last: int, place: int) -> int:
        return digest(last, self.token(place), self._marks.get(place))

    def output(self, max_model_len: int) -> list[int]:
        """The whole output of a plain run: to a stop token, max_tokens or max_model_len."""
        prompt, found = self.request.num_prompt_tokens, list[int]()
        stops = self.request.stop_ids
        limit = min(prompt + self.sampling.max_tokens, max_model_len)
        for place in range(prompt, limit):
            found.append(self.token(place))
            if place >= self.given and found[-1] in stops:
                break
        return found


def encoder_output(read: EncoderInput, tenant: tuple[object, ...]) -> Digests:
    """Of one encoder input, for one tenant and adapter."""
    whole = digest("encoder", read.digest, read.num_tokens, tenant)
    return np.array([digest(whole, i) for i in range(read.num_tokens)], np.uint64)
