"""How the tokens of a request are drawn, and when it stops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Final

from hybridkv.arguments import flag, integer, real, text
from hybridkv.errors import ConfigError
from hybridkv.frozen import Check, check_fields, or_none
from hybridkv.request.token_ids import MAX_TOKEN_ID, check_ids, is_number
from hybridkv.units import shown

_LEAST_TEMPERATURE: Final = 1e-200
"""Float32 logits over it are finite in float64. It is far below what still draws anything but the best token."""
_MOST_SEED: Final = (1 << 255) - 1  # a branch's is larger, and must go on the wire, too
_MOST_TOKENS: Final = (1 << 63) - 1
MOST_OUTPUTS: Final = 1 << 14  # each is a request of its own


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when to stop. Names and meaning as in vLLM and transformers.

    temperature: 0 is greedy; else at least 1e-200. top_k: 0 is off. top_p, min_p: probabilities; 1 and 0 are off.
    repetition_penalty: 1 is off; counts prompt and output (CTRL, arXiv 1909.05858); 1e-6 to 1e6.
    seed: with the position of a token it alone decides the draw, whatever runs beside it.
    max_tokens: most output tokens. stop_token_ids: each ends the output and is part of it.
    stop: strings that end the output; found by whoever turns tokens into text. One alone, of either kind, is taken as
    a tuple of one; any iterable becomes a tuple.
    ignore_eos: go on behind the model's end token.
    n: outputs wanted of one prompt, at most 16384, each by a seed of its own: seed, seed + 1, ...
    logprobs, prompt_logprobs: how many log probabilities are wanted with each output token, and with each
    token of the prompt (which must then be computed); None is none.
    Raises ConfigError for values of another type or outside their range; numbers of numpy are taken as Python's.
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
        for name, (typed, least, most, rule) in _NUMBERS.items():
            check_fields(self, typed, name)
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} must be {rule}, got {shown(value)}")
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature must be 0 (greedy), or {_LEAST_TEMPERATURE} or more, got {self.temperature}"
            )
        check_fields(self, _strings, "stop")
        check_fields(self, _ids, "stop_token_ids")
        check_fields(self, flag, "ignore_eos")

    def of_branch(self, number: int) -> SamplingParams:
        """Those of the ``number``-th branch of a request: one output, by a seed of its own."""
        return replace(self, n=1, seed=self.seed + number)


def _strings(name: str, value: object) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else _items(value)
    if given is None or not all(isinstance(one, str) and one for one in given):
        raise ConfigError(f"{name} must be a list of strings that are not empty, got {shown(value)}")
    for one in given:
        text(name, one)
    return given


def _ids(name: str, value: object) -> tuple[int, ...]:
    given = (value,) if not isinstance(value, tuple) and isinstance(value, Integral) else _items(value)
    if given is None or not all(not isinstance(one, bool) and isinstance(one, Integral) for one in given):
        raise ConfigError(f"{name} must be a list of token ids, got {shown(value)}")
    check_ids(given, name)
    return given if all(type(one) is int for one in given) else tuple(map(int, given))


def _items(value: object) -> tuple[Any, ...] | None:
    """What ``value`` holds; None where it is no collection of single things."""
    if isinstance(value, tuple):
        return value
    if not isinstance(value, Iterable) or isinstance(value, bytes | bytearray | Mapping) or is_number(value):
        return None
    return tuple(value)


_LOGPROBS: Final = (or_none(integer), 0, MAX_TOKEN_ID, "0 or more and below 2**31, or None (off)")
_NUMBERS: Final[Mapping[str, tuple[Check, float, float, str]]] = {
    "temperature": (real, 0, math.inf, "0 (greedy) or more"),
    "top_k": (integer, 0, MAX_TOKEN_ID, "0 (off) or more, below 2**31"),
    "top_p": (real, math.ulp(0), 1, "above 0 and at most 1 (off)"),
    "min_p": (real, 0, 1, "between 0 (off) and 1"),
    "repetition_penalty": (real, 1e-6, 1e6, "above 0 (1 is off), between 1e-6 and 1e6"),  # float32 holds the product
    "seed": (integer, -_MOST_SEED, _MOST_SEED, "of at most 255 bits"),
    "max_tokens": (integer, 1, _MOST_TOKENS, "at least 1, and below 2**63"),
    "n": (integer, 1, MOST_OUTPUTS, f"at least 1 and at most {MOST_OUTPUTS}"),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
}
"""Of each number: its type, the least and the most that it may be, and how that is said."""
