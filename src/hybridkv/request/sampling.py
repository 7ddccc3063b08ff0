"""How the tokens of a request are drawn, and when it stops."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridkv.errors import ConfigError
from hybridkv.request.token_ids import check_ids


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when to stop. Names and meaning as in vLLM and transformers.

    temperature: 0 is greedy. top_k: 0 is off. top_p, min_p: probabilities; 1 and 0 are off.
    repetition_penalty: 1 is off; counts prompt and output (CTRL, arXiv 1909.05858).
    seed: with the position of a token it alone decides the draw, whatever runs beside it.
    max_tokens: most output tokens. stop_token_ids: each ends the output and is part of it.
    stop: strings that end the output; found by whoever turns tokens into text.
    ignore_eos: go on behind the model's end token.
    n: outputs wanted of one prompt, each by a seed of its own: seed, seed + 1, ...
    logprobs, prompt_logprobs: how many log probabilities are wanted with each output token, and with each
    token of the prompt (which must then be computed); None is none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        checks = (
            (self.temperature >= 0, "temperature must be 0 (greedy) or more", self.temperature),
            (self.top_k >= 0, "top_k must be 0 (off) or more", self.top_k),
            (0 < self.top_p <= 1, "top_p must be above 0 and at most 1 (off)", self.top_p),
            (0 <= self.min_p <= 1, "min_p must be between 0 (off) and 1", self.min_p),
            (self.repetition_penalty > 0, "repetition_penalty must be above 0 (1 is off)", self.repetition_penalty),
            ((self.logprobs or 0) >= 0, "logprobs must be 0 or more, or None (off)", self.logprobs),
            (
                (self.prompt_logprobs or 0) >= 0,
                "prompt_logprobs must be 0 or more, or None (off)",
                self.prompt_logprobs,
            ),
            (self.max_tokens >= 1, "max_tokens must be at least 1", self.max_tokens),
            (self.n >= 1, "n must be at least 1", self.n),
        )
        check_ids(self.stop_token_ids, "stop_token_ids")
        for good, message, value in checks:
            if not good:
                raise ConfigError(f"{message}, got {value}")

    def of_branch(self, number: int) -> SamplingParams:
        """Those of the ``number``-th branch of a request: one output, by a seed of its own."""
        return replace(self, n=1, seed=self.seed + number)
