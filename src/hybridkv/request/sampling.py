"""Sampling parameters: how the tokens of a request are sampled, and when it stops."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from numbers import Integral
from types import NoneType
from typing import Any, Final

from hybridkv.arguments import Check, check_fields, flag, integer, or_none, real, text
from hybridkv.errors import ConfigError
from hybridkv.request.structured import StructuredOutput, checked_structured
from hybridkv.request.tokens import MAX_TOKEN_ID, check_ids, is_integer, is_number
from hybridkv.units import shown

_LEAST_TEMPERATURE: Final = 1e-200
"""Float32 logits divided by it are finite in float64. Far larger temperatures already sample only the best token."""
_MOST_SEED: Final = (1 << 255) - 1  # the larger seeds of branches must fit the wire format, too
_MOST_TOKENS: Final = (1 << 63) - 1
MOST_BIAS: Final = 1e30  # float32 holds its sum with a logit
_ID_DIGITS: Final = 10
MOST_OUTPUTS: Final = 1 << 14  # each is a request of its own

LogitsProcessor = Callable[..., Any]
"""(output ids, logits) -> logits, or (prompt ids, output ids, logits) -> logits: lists, and float32[vocabulary]."""
Word = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled and when to stop. Names and meanings as in vLLM and transformers.

    Logits are changed in this order: structured, bad_words, min_tokens, logit_bias, logits_processors, repetition,
    frequency and presence penalty, temperature, top_k, top_p, min_p. Values of another type or outside their range
    raise ConfigError; numpy numbers are accepted as Python numbers.

    Attributes:
        temperature: 0 is greedy; else at least 1e-200.
        top_k: Sample among so many best tokens; 0 is off.
        top_p: Sample among the best tokens with so much probability; 1 is off.
        min_p: Drop tokens with less than this share of the best token's probability; 0 is off.
        repetition_penalty: 1e-6 to 1e6, 1 is off; counts prompt and output (CTRL, arXiv 1909.05858).
        seed: The seed and the position of a token alone decide its draw, independent of other requests.
        max_tokens: Most output tokens.
        stop_token_ids: Each ends the output and is part of it. A single value counts as a tuple of one.
        stop: Strings that end the output; found by the code that turns tokens into text. A single one counts as a tuple
            of one.
        ignore_eos: Go on after an end token of the model.
        logprobs: Log probabilities to return with each output token; ``None`` is off.
        prompt_logprobs: Log probabilities to return with each prompt token, which must then be computed; ``None`` is
            off.
        n: Outputs of one prompt, at most 16384; their seeds are seed, seed + 1, ...
        presence_penalty: Subtracted once from the logit of each token in the output; -2 to 2, 0 is off.
        frequency_penalty: Subtracted for each time that a token is in the output; -2 to 2, 0 is off.
        min_tokens: Before so many output tokens no end token (ignored or not) and no token of ``stop_token_ids`` is
            sampled, and no stop string ends the output; at most ``max_tokens``.
        logit_bias: token id -> number added to its logit, at most 1e30 either way; kept as pairs, by ascending id.
        bad_words: Texts, or their token ids. Where the output ends in all ids but the last, the last one is not
            sampled. An engine turns text into ids, at the beginning of a word and inside of one.
        logits_processors: Functions of (output ids, logits), or of (prompt ids, output ids, logits), that return new
            logits. They may be called for proposed tokens that are then rejected, and again for the same ones, so the
            result must depend on the arguments only. They stay in this process.
        structured: The form of the output; ``None`` for any. Once nothing can follow, the output ends.
        skip_special_tokens: Leave special tokens out of the text; the model's end tokens are never part of it.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[Word, ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    structured: StructuredOutput | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, (kind, least, most, rule) in _NUMBERS.items():
            value = getattr(self, name)
            plain = type(value) is kind
            if plain and (value is None or least <= value <= most):
                continue  # the usual case, without the cost of the checks below
            check_fields(self, _CHECKS[kind], name)
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} must be {rule}, got {shown(value)}")
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature must be 0 (greedy), or {_LEAST_TEMPERATURE} or more, got {self.temperature}"
            )
        check_fields(self, flag, "ignore_eos")
        check_fields(self, flag, "skip_special_tokens")
        if self.structured is not None:
            check_fields(self, checked_structured, "structured")
        for name, check in _LISTS.items():
            if (given := getattr(self, name)) is None and name in _MAY_BE_NONE:
                object.__setattr__(self, name, ())
            elif type(given) is not tuple or given:
                check_fields(self, check, name)
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens must be at most max_tokens, {self.max_tokens}, got {shown(self.min_tokens)}")

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as it is kept: pairs, by ascending token id."""
        return tuple(self.logit_bias)  # type: ignore[arg-type]  # a mapping only until it is checked

    @property
    def named_tokens(self) -> set[int]:
        """Token ids in ``logit_bias`` and ``bad_words``, to be checked against a vocabulary. O(number of ids)."""
        words = (word for word in self.bad_words if not isinstance(word, str))
        return {token for token, _ in self.biases}.union(*words)

    def of_branch(self, number: int) -> SamplingParams:
        """Return the parameters of a branch: one output, with a seed of its own.

        Args:
            number: Number of the branch.
        """
        return replace(self, n=1, seed=self.seed + number)


def _listed(
    name: str, value: object, single: type | tuple[type, ...], holds: Callable[[Any], object], wanted: str
) -> tuple[Any, ...]:
    """Return ``value`` as a tuple of items that satisfy ``holds``; a ``single`` one becomes a tuple of one.

    Else ConfigError.
    """
    given = (value,) if isinstance(value, single) and not isinstance(value, tuple) else _items(value)
    if given is None or not all(map(holds, given)):
        raise ConfigError(f"{name} must be {wanted}, got {shown(value)}")
    return given


def _items(value: object) -> tuple[Any, ...] | None:
    """Return the items of ``value``; ``None`` if it is no collection."""
    if isinstance(value, tuple):
        return value
    if not isinstance(value, Iterable) or isinstance(value, bytes | bytearray | Mapping) or is_number(value):
        return None
    return tuple(value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    given = _listed(name, value, str, lambda one: isinstance(one, str) and one, "a list of strings that are not empty")
    return tuple(text(name, one) for one in given)


def _ids(name: str, value: object) -> tuple[int, ...]:
    given = _listed(name, value, Integral, is_integer, "a list of token ids")
    check_ids(given, name)
    return given if all(type(one) is int for one in given) else tuple(map(int, given))


def _biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    wanted = "a mapping of token ids to what is added to their logits"
    found: dict[int, float] = {}
    for token, bias in _listed(name, pairs, (), lambda one: isinstance(one, tuple | list) and len(one) == 2, wanted):
        # JSON's keys are strings
        whole = int(token) if isinstance(token, str) and token.isdecimal() and len(token) <= _ID_DIGITS else token
        added = real(f"{name} of token {shown(token)}", bias)
        if abs(added) > MOST_BIAS:
            raise ConfigError(f"{name} must lie between {-MOST_BIAS:g} and {MOST_BIAS:g}, got {shown(added)}")
        (at,) = _ids(f"token ids of {name}", (whole,))
        if at in found:
            raise ConfigError(f"{name} has token {at} twice")
        found[at] = added
    return tuple(sorted(found.items()))


def _words(name: str, value: object) -> tuple[Word, ...]:
    words: list[Word] = []
    for one in _listed(name, value, str, lambda _: True, "a list of words"):
        word: Word | None = text(name, one) if isinstance(one, str) else _items(one)
        if not word:
            raise ConfigError(f"each of {name} must be text or a list of token ids, and not empty, got {shown(one)}")
        words.append(word if isinstance(word, str) else _ids(name, word))
    return tuple(words)


def _processors(name: str, value: object) -> tuple[LogitsProcessor, ...]:
    given = _listed(name, (value,) if callable(value) else value, (), callable, "a list of functions")
    for one in given:
        takes_prompt(one)
    return given


def takes_prompt(processor: LogitsProcessor) -> bool:
    """Return whether a logits processor is called with prompt ids, too.

    Args:
        processor: The function.

    Raises:
        ConfigError: It takes neither two arguments nor three.
    """
    for count in (2, 3):
        try:
            signature(processor).bind(*[None] * count)
        except (TypeError, ValueError):
            continue
        return count == 3
    raise ConfigError(
        f"logits_processors must take (output ids, logits) or (prompt ids, output ids, logits), got {shown(processor)}"
    )


_LISTS: Final[Mapping[str, Check]] = {
    "stop": _strings,
    "stop_token_ids": _ids,
    "logit_bias": _biases,
    "bad_words": _words,
    "logits_processors": _processors,
}
_MAY_BE_NONE: Final = ("logit_bias", "bad_words", "logits_processors")
"""Fields for which None means an empty list."""
_CHECKS: Final[Mapping[type, Check]] = {float: real, int: integer, NoneType: or_none(integer)}
"""Check of each number, by the type of its default."""
_LOGPROBS: Final = (NoneType, 0, MAX_TOKEN_ID, "0 or more and below 2**31, or None (off)")
_NUMBERS: Final[Mapping[str, tuple[type, float, float, str]]] = {
    "temperature": (float, 0, sys.float_info.max, "0 (greedy) or more"),
    "top_k": (int, 0, MAX_TOKEN_ID, "0 (off) or more, below 2**31"),
    "top_p": (float, math.ulp(0), 1, "above 0 and at most 1 (off)"),
    "min_p": (float, 0, 1, "between 0 (off) and 1"),
    "repetition_penalty": (float, 1e-6, 1e6, "above 0 (1 is off), between 1e-6 and 1e6"),  # float32 holds the product
    "seed": (int, -_MOST_SEED, _MOST_SEED, "of at most 255 bits"),
    "presence_penalty": (float, -2, 2, "between -2 and 2 (0 is off)"),
    "frequency_penalty": (float, -2, 2, "between -2 and 2 (0 is off)"),
    "min_tokens": (int, 0, _MOST_TOKENS, "0 (off) or more, and below 2**63"),
    "max_tokens": (int, 1, _MOST_TOKENS, "at least 1, and below 2**63"),
    "n": (int, 1, MOST_OUTPUTS, f"at least 1 and at most {MOST_OUTPUTS}"),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
}
"""For each number: type of its default, least and most value, and the rule in words."""


# -- ids of the outputs of one request


def branch_id(request_id: str, number: int) -> str:
    """Return the id of a branch of a request.

    Args:
        request_id: Id of the request.
        number: Number of the branch.
    """
    return f"{request_id}#{number}"


def output_ids(request_id: str, n: int) -> list[str]:
    """Return the ids of the outputs of a request: its own, then those of its branches.

    Args:
        request_id: Id of the request.
        n: Number of outputs.

    Raises:
        ConfigError: ``n`` is out of range.
    """
    text("request_id", request_id)
    integer("n", n, 1, MOST_OUTPUTS)
    return [request_id, *(branch_id(request_id, number) for number in range(1, n))]
