"""What callers hand to an engine, checked: a model, prompts, sampling, drafts. Bad ones raise ConfigError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

import numpy as np
import torch
from transformers import PreTrainedModel

from hybridkv.arguments import instance, text
from hybridkv.errors import ConfigError
from hybridkv.request import Request, SamplingParams, token_array
from hybridkv.runner.detokenize import Detokenizer
from hybridkv.runner.load import LoadedModel, wrap
from hybridkv.units import shown

_PROMPT: Final = "must be text or a list of token ids"
_PROMPTS: Final = "prompts must be a list, each of them text or a list of token ids"

_MOST_DIGITS: Final = 18
"""Of a number that requests without an id are counted up to."""


def loaded_of(model: PreTrainedModel | LoadedModel, tokenizer: Any) -> LoadedModel:  # noqa: ANN401  # transformers' tokenizers share no typed base
    """``model`` as a LoadedModel. Raises ConfigError for a second tokenizer, and as ``wrap`` does."""
    if not isinstance(model, LoadedModel):
        return wrap(model, tokenizer, type(model).__name__)
    if tokenizer is not None:
        raise ConfigError(f"{model.name} was loaded with its tokenizer: leave the tokenizer out")
    return model


def one_each(
    prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams | None] | None
) -> list[tuple[str | Sequence[int], SamplingParams | None]]:
    """Each prompt with its sampling: one for all, or one each.

    Raises ConfigError when the numbers differ, and for what is no list of prompts or no sampling.
    """
    if isinstance(prompts, str | bytes | bytearray) or not isinstance(prompts, Sequence):
        raise ConfigError(f"{_PROMPTS}, got {_kind(prompts)}")
    params: list[SamplingParams | None]
    if sampling is None or isinstance(sampling, SamplingParams):
        params = [sampling] * len(prompts)
    else:
        params = list(sampling) if isinstance(sampling, list | tuple) else _no_sampling(sampling)
    if len(params) != len(prompts):
        raise ConfigError(f"{len(params)} sampling parameters for {len(prompts)} prompts: give one for each")
    for one in params:
        require_sampling(one)
    return list(zip(prompts, params, strict=True))


def require_sampling(sampling: object) -> None:
    """Raise ConfigError unless it is SamplingParams or None."""
    if not isinstance(sampling, SamplingParams | None):
        _no_sampling(sampling)


def _no_sampling(given: object) -> NoReturn:
    raise ConfigError(f"sampling must be SamplingParams or None, got {_kind(given)}")


def require_callable(**values: object) -> None:
    """Raise ConfigError, naming it, for a value that is neither None nor can be called."""
    for name, value in values.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name} must be a function, got {shown(value)}")


def require_drafter(name: str, given: object) -> None:
    """Raise ConfigError, naming it, unless it has all that a Drafter has."""
    missing = [one for one in ("num_speculative_tokens", "require", "propose", "close") if not hasattr(given, one)]
    if missing:
        raise ConfigError(f"{name} must be a Drafter, got {shown(given)}, which has no {missing[0]}")


def as_list(values: Any) -> Any:  # noqa: ANN401  # whoever takes it judges it
    """An array or tensor as Python's own numbers; anything else as it is."""
    return values.tolist() if isinstance(values, np.ndarray | torch.Tensor) else values


def is_empty(prompt: object) -> bool:
    """Whether there is nothing in a prompt; False for what is none."""
    if isinstance(prompt, np.ndarray | torch.Tensor):
        return tuple(prompt.shape) == (0,)
    return isinstance(prompt, Sequence) and not prompt


def number_in(request_id: str) -> int:
    """The number that a request's id is, or that the id it branches off is; -1 without one."""
    number = request_id.partition("#")[0]
    return int(number) if number.isdecimal() and len(number) <= _MOST_DIGITS else -1


def refuse_what_it_lacks(params: SamplingParams, loaded: LoadedModel) -> None:
    """Raise ConfigError for stop strings without a tokenizer, and where tokens are meant that are not there."""
    if params.stop and loaded.tokenizer is None:
        raise ConfigError("stop strings need a tokenizer: load the model with one, or use stop_token_ids")
    for name, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if wanted is not None and wanted > loaded.vocab_size:
            raise ConfigError(f"{name} is {wanted}, but {loaded.name} has {loaded.vocab_size} tokens: ask for fewer")
    most = max(params.named_tokens, default=0)
    if most >= loaded.vocab_size:
        raise ConfigError(
            f"logit_bias and bad_words name token {most}, which lies outside the vocabulary of {loaded.name}: "
            f"ids are 0 .. {loaded.vocab_size - 1}"
        )


def detokenizer_of(loaded: LoadedModel, params: SamplingParams) -> Detokenizer | None:
    """Of one output; None without a tokenizer."""
    tokenizer = loaded.tokenizer
    return None if tokenizer is None else Detokenizer(tokenizer, params.stop, params.min_tokens)


def with_word_ids(params: SamplingParams, loaded: LoadedModel) -> SamplingParams:
    """``params`` with bad words as the ids of their tokens: at the beginning of a word, and behind a space.

    Behind a space as vLLM has it: where that begins with another token, and is as many.
    Raises ConfigError for text without a tokenizer, and for a word of no token.
    """
    if not any(isinstance(word, str) for word in params.bad_words):
        return params
    if loaded.tokenizer is None:
        raise ConfigError("bad_words of text need a tokenizer: load the model with one, or give their token ids")
    found: list[tuple[int, ...]] = []
    for word in params.bad_words:
        if not isinstance(word, str):
            found.append(word)
            continue
        bare, spaced = (
            tuple(map(int, loaded.tokenizer.encode(before + word.lstrip(), add_special_tokens=False)))
            for before in ("", " ")
        )
        if not bare:
            raise ConfigError(f"bad_words has {word!r}, which is no token: leave it out")
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return replace(params, bad_words=tuple(dict.fromkeys(found)))


def encode(
    loaded: LoadedModel, prompt: str | Sequence[int] | np.ndarray[Any, Any] | torch.Tensor, *, what: str = "prompt"
) -> list[int]:
    """Token ids of ``prompt``: text, or ids in a sequence, an integer array or tensor of one dimension.

    what: it is, for messages.

    Raises ConfigError for anything else, for an empty one, and for ids outside the vocabulary.
    """
    instance("the loaded model", loaded, LoadedModel)
    instance("what", what, str)
    if isinstance(prompt, str):
        if prompt:
            text(f"the {what}", prompt)
        if loaded.tokenizer is None:
            raise ConfigError(f"a {what} of text needs a tokenizer: load the model with one, or give token ids")
        ids = [int(one) for one in loaded.tokenizer.encode(prompt)]
    else:
        ids = _token_ids(prompt, what)
    if not ids:
        raise ConfigError(f"the {what} is empty: give it at least one token")
    vocab_size = loaded.vocab_size  # asked of the model's embedding, which takes microseconds
    wrong = [one for one in ids if not 0 <= one < vocab_size]
    if wrong:
        raise ConfigError(
            f"token id {wrong[0]} lies outside the vocabulary of {loaded.name}: ids are 0 .. {vocab_size - 1}"
        )
    return ids


def _token_ids(prompt: object, what: str) -> list[int]:
    """Those of a prompt that is no text."""
    if isinstance(prompt, torch.Tensor | np.ndarray):
        whole = str(prompt.dtype).removeprefix("torch.").startswith(("int", "uint"))
        if prompt.ndim != 1 or not whole:
            raise ConfigError(f"a {what} {_PROMPT}, got {_kind(prompt)}: give one row of integers")
        prompt = prompt.tolist()
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        hint = ": give its input_ids" if isinstance(prompt, Mapping) and "input_ids" in prompt else ""
        raise ConfigError(f"a {what} {_PROMPT}, got {_kind(prompt)}{hint}")
    for one in prompt:
        if isinstance(one, bool) or not isinstance(one, int | np.integer):
            raise ConfigError(f"a {what} {_PROMPT}, got {_kind(one)} in it")
    return [int(one) for one in prompt]


def _kind(value: object) -> str:
    """What it is, in a few words."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__} {tuple(value.shape)} of {value.dtype}"
    if isinstance(value, str | int | float | None):
        return repr(value)[:40]
    return type(value).__name__


def drafts_by_request(
    drafts: Sequence[Sequence[int]], requests: Sequence[Request], loaded: LoadedModel
) -> dict[str, Sequence[int]]:
    """What a drafter proposes for ``requests``. ConfigError unless it is a list of token ids for each."""
    if len(drafts) != len(requests):
        raise ConfigError(f"{len(drafts)} lists of drafts for {len(requests)} requests: give one each, maybe empty")
    for request, tokens in zip(requests, drafts, strict=True):
        ids = token_array(tokens)
        if ids and max(ids) >= loaded.vocab_size:
            raise ConfigError(
                f"drafts of {request.request_id!r} lie outside the vocabulary of {loaded.name}: ids are 0 .. "
                f"{loaded.vocab_size - 1}"
            )
    return {request.request_id: tokens for request, tokens in zip(requests, drafts, strict=True)}
