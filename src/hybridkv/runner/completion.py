"""What one request came to, and what is known of it while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.request import Request
from hybridkv.runner.detokenize import Detokenizer
from hybridkv.schedule import FinishReason


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request.

    token_ids: the output, the stop token or the tokens of the stop string included. text: the output decoded,
    special tokens left out, cut in front of the stop string; None without a tokenizer.
    hit_tokens: prompt tokens found in the cache at its first admission. computed_tokens: all that ran for it,
    recomputation included.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    hit_tokens: int
    computed_tokens: int
    preemptions: int


@dataclass(slots=True)
class Progress:
    """A request that is not finished; detokenizer is None without a tokenizer. Counts in tokens."""

    request: Request
    detokenizer: Detokenizer | None
    computed_tokens: int = 0

    def completed(self, reason: FinishReason) -> Completion:
        """The request has ended."""
        request = self.request
        tokens = request.token_ids().tolist()
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=tuple(tokens[: request.num_prompt_tokens]),
            token_ids=tuple(tokens[request.num_prompt_tokens :]),
            text=self.detokenizer.finish() if self.detokenizer is not None else None,
            finish_reason=reason,
            hit_tokens=request.first_hit_tokens or 0,
            computed_tokens=self.computed_tokens,
            preemptions=request.num_preemptions,
        )
