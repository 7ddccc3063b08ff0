"""A request as an engine has it that drives the cache, vLLM's."""

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

SIZE = 4
"""Tokens of a block that it hashes."""


@dataclass
class Sampling:
    extra_args: dict[str, Any] | None = None


class Asked:
    """By the names that hybridkv.vllm reads.

    finished: whether it ended. stale: tokens in flight from before it was preempted.
    """

    def __init__(self, name: str, prompt: list[int]) -> None:
        self.request_id, self.all_token_ids = name, list(prompt)
        self.num_prompt_tokens, self.num_computed_tokens, self.num_in_flight_tokens = len(prompt), 0, 0
        self.num_preemptions = self.shared_prefix_boundary = self.num_output_placeholders = 0
        self.drafts, self.max_tokens, self.is_prefill_chunk = 0, 1000, False
        self.finished, self.stale = False, 0
        self.skip_reading_prefix_cache = False
        self.cache_salt: str | None = None
        self.lora_request = None
        self.prompt_embeds: Any = None
        self.sampling_params: Sampling | None = None
        self.mm_features: list[Any] = []
        self.block_hashes: list[bytes] = []
        self.append()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens + self.drafts

    def append(self, *tokens: int) -> None:
        self.all_token_ids += tokens
        for end in range(SIZE * (len(self.block_hashes) + 1), self.num_tokens + 1, SIZE):
            self.block_hashes.append(sha256(bytes(self.all_token_ids[:end])).digest())
