"""One request, as the library and as the oracle get it."""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.extra_keys import EncoderInput
from hybridkv.request import Hasher, Request, SamplingParams
from hybridkv.testing.model import Origin
from oracles.cache import OracleRequest


@dataclass(frozen=True, slots=True)
class RigRequest:
    """What is asked of both. reads, writes: whether it uses the prefix cache. n: outputs wanted.

    encoder: its digest is text.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    salt: str | None = None
    priority: int = 0
    arrival_time: float = 0.0
    reads: bool = True
    writes: bool = True
    marks: tuple[int, ...] = ()
    n: int = 1
    encoder: EncoderInput | None = None

    def request(self, name: str, hasher: Hasher | None) -> Request:
        """For the scheduler."""
        return Request(
            name,
            self.prompt,
            SamplingParams(max_tokens=self.max_tokens, stop_token_ids=self.stop_token_ids, n=self.n),
            hasher=hasher,
            cache_salt=self.salt,
            eos_token_ids=self.eos_token_ids,
            arrival_time=self.arrival_time,
            priority=self.priority,
            skip_reading_prefix_cache=not self.reads,
            skip_writing_prefix_cache=not self.writes,
            marks=self.marks,
            encoder=self.encoder,
        )

    @property
    def origin(self) -> Origin:
        """What tells its tokens from equal ones."""
        return self.salt if self.encoder is None else (self.salt, str(self.encoder.digest))

    def expected(self, name: str, max_model_len: int) -> OracleRequest:
        """For the oracle."""
        return OracleRequest(
            name,
            list(self.prompt),
            len(self.prompt),
            limit=min(len(self.prompt) + self.max_tokens, max_model_len),
            stops=frozenset(self.stop_token_ids + self.eos_token_ids),
            salt=self.origin,
            encoder=0 if self.encoder is None else self.encoder.num_tokens,
            priority=self.priority,
            reads=self.reads,
            writes=self.writes,
            marks=tuple(sorted(self.marks)),
        )
