"""Check the arguments of an engine: models, prompts, sampling, drafts, encoder inputs, and Steps.

Invalid values raise ConfigError; invalid Steps raise WorkerError.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from hybridkv.arguments import instance, text
from hybridkv.errors import ConfigError, WorkerError
from hybridkv.extra_keys import EncoderInput
from hybridkv.request import Request, SamplingParams, token_array
from hybridkv.runner.load import LoadedModel, TextModel, wrap
from hybridkv.runner.model_call import is_encoder_decoder
from hybridkv.runner.probe import planner_model
from hybridkv.step import Step
from hybridkv.units import shown
from hybridkv.worker import BlockTable

if TYPE_CHECKING:
    from hybridkv.runner.images import Images

Int64 = NDArray[np.int64]
Given = str | Sequence[int] | NDArray[np.generic] | torch.Tensor
"""An encoder's input from a caller: text, token ids, or features [bins, frames]."""
Prompt = str | Sequence[int]

_PROMPT: Final = "must be text or a list of token ids"

_MOST_DIGITS: Final = 18
"""Digits of a request id that is read as a number: longer ones would not fit into 64 bits."""


def loaded_of(model: PreTrainedModel | LoadedModel, tokenizer: Any) -> LoadedModel:  # noqa: ANN401  # transformers' tokenizers share no typed base
    """Return ``model`` as a LoadedModel. Raises ConfigError for a second tokenizer, and as ``wrap`` does."""
    if not isinstance(model, LoadedModel):
        return wrap(model, tokenizer, type(model).__name__)
    if tokenizer is not None:
        raise ConfigError(f"{model.name} was loaded with its tokenizer: leave the argument tokenizer out")
    return model


def one_each(
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams | None] | None,
    encoders: Sequence[Given] | None = None,
    images: Sequence[Images | None] | None = None,
) -> list[tuple[Prompt, SamplingParams | None, Given | None, Images | None]]:
    """Return each prompt with its sampling, its encoder input and its images. One sampling may serve all prompts.

    Raises ConfigError if the numbers differ, or if an argument is not a list of the right kind.
    """
    if isinstance(prompts, str | bytes | bytearray) or not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts must be a list of texts or of lists of token ids, got {_kind(prompts)}")
    asked = sampling if isinstance(sampling, list | tuple) else [checked_sampling(sampling)] * len(prompts)
    params = [*map(checked_sampling, asked)]
    if encoders is not None and not _is_listed(encoders):
        raise ConfigError(f"encoders must be a list with an encoder input for each prompt, got {shown(encoders)}")
    if not isinstance(images, list | tuple | None):
        raise ConfigError(f"images must be a list with an entry for each prompt, got {shown(images)}")
    inputs, pictures = ([None] * len(prompts) if given is None else list(given) for given in (encoders, images))
    counts = {"{} sampling parameters": params, "{} encoder inputs": inputs, "images of {} prompts": pictures}
    for what, given in counts.items():
        if len(given) != len(prompts):
            raise ConfigError(f"got {what.format(len(given))} for {len(prompts)} prompts: give one for each prompt")
    return list(zip(prompts, params, inputs, pictures, strict=True))


def _is_listed(values: object) -> bool:
    """Return whether ``values`` is a sequence, or an array of at least one dimension."""
    if isinstance(values, np.ndarray | torch.Tensor):
        return bool(values.ndim)
    return isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray)


def ready_sampling(sampling: SamplingParams | None, loaded: LoadedModel) -> SamplingParams:
    """Return ``sampling`` for a request to ``loaded``, with bad words as token ids.

    Raises ConfigError as ``checked_sampling``, ``with_word_ids`` and ``require_vocabulary``.
    """
    params = with_word_ids(checked_sampling(sampling) or SamplingParams(), loaded)
    require_vocabulary(params, loaded)
    return params


def checked_sampling(sampling: object) -> SamplingParams | None:
    """Return ``sampling``. Raises ConfigError unless it is SamplingParams or None."""
    if not isinstance(sampling, SamplingParams | None):
        raise ConfigError(f"sampling must be SamplingParams or None, got {_kind(sampling)}")
    return sampling


def require_callable(**values: object) -> None:
    """Raise ConfigError that names the argument unless it is None or callable."""
    for name, value in values.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name} must be a function, got {shown(value)}")


def require_drafter(name: str, given: object) -> None:
    """Raise ConfigError that names the argument unless ``given`` has all methods of a Drafter."""
    missing = [one for one in ("num_speculative_tokens", "require", "propose", "close") if not hasattr(given, one)]
    if missing:
        raise ConfigError(f"{name} must be a Drafter, got {shown(given)}, which has no {missing[0]}")


def as_list(values: Any) -> Any:  # noqa: ANN401  # the function that takes the values checks them
    """Return an array or tensor as Python numbers; anything else unchanged."""
    return values.tolist() if isinstance(values, np.ndarray | torch.Tensor) else values


def is_empty(prompt: object) -> bool:
    """Return whether ``prompt`` has no token. False for a value that is not a prompt."""
    if isinstance(prompt, np.ndarray | torch.Tensor):
        return tuple(prompt.shape) == (0,)
    return isinstance(prompt, Sequence) and not prompt


def number_in(request_id: str) -> int:
    """Return the number that a request id, or the id that it branches off (``7`` of ``7#1``), consists of; else -1."""
    number = request_id.partition("#")[0]
    return int(number) if number.isdecimal() and len(number) <= _MOST_DIGITS else -1


def require_vocabulary(params: SamplingParams, loaded: LoadedModel) -> None:
    """Raise ConfigError if ``params`` needs a tokenizer that is missing, or names tokens outside the vocabulary."""
    if params.stop and loaded.tokenizer is None:
        raise ConfigError("stop strings need a tokenizer: load the model with one, or use stop_token_ids")
    for name, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if wanted is not None and wanted > loaded.vocab_size:
            raise ConfigError(
                f"{name} is {wanted}, but the vocabulary of {loaded.name} has {loaded.vocab_size} tokens: ask for fewer"
            )
    most = max(params.named_tokens, default=0)
    if most >= loaded.vocab_size:
        raise ConfigError(
            f"logit_bias and bad_words name token {most}, which is outside the vocabulary of {loaded.name}: "
            f"ids are 0 .. {loaded.vocab_size - 1}"
        )


def with_word_ids(params: SamplingParams, loaded: LoadedModel) -> SamplingParams:
    """Return ``params`` with its bad words as token ids, each at the beginning of a text and after a space.

    As in vLLM, the ids after a space count only if they begin with another token and are as many. Raises ConfigError
    for text without a tokenizer, and for a word without a token.
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
            raise ConfigError(f"the tokenizer makes no token of {word!r} in bad_words: leave it out")
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return replace(params, bad_words=tuple(dict.fromkeys(found)))


def encode(
    loaded: LoadedModel | TextModel,
    prompt: str | Sequence[int] | np.ndarray[Any, Any] | torch.Tensor,
    *,
    what: str = "prompt",
) -> list[int]:
    """Convert a prompt to token ids.

    Args:
        loaded: the model with its tokenizer.
        prompt: text, or token ids in a sequence or in a one-dimensional array or tensor of integers.
        what: the name of ``prompt`` in messages.

    Returns:
        The token ids, at least one.

    Raises:
        ConfigError: the prompt has another type, is empty, or has ids outside the vocabulary; or it is text and there
            is no tokenizer.
    """
    if not isinstance(loaded, TextModel):
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
    vocab_size = loaded.vocab_size  # read once: the model's embedding takes microseconds to find it
    wrong = [one for one in ids if not 0 <= one < vocab_size]
    if wrong:
        raise ConfigError(
            f"token id {wrong[0]} is outside the vocabulary of {loaded.name}: ids are 0 .. {vocab_size - 1}"
        )
    return ids


def _token_ids(prompt: object, what: str) -> list[int]:
    """Return the token ids of a prompt that is not text."""
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
    """Describe ``value`` in a few words, for a message."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__} {tuple(value.shape)} of {value.dtype}"
    if isinstance(value, str | int | float | None):
        return repr(value)[:40]
    return type(value).__name__


def drafts_by_request(
    drafts: Sequence[Sequence[int]], requests: Sequence[Request], loaded: LoadedModel
) -> dict[str, Sequence[int]]:
    """Return the ``drafts`` of each request by its id.

    Raises ConfigError unless there is a list of token ids for each.
    """
    if len(drafts) != len(requests):
        raise ConfigError(
            f"the drafter gave {len(drafts)} lists of drafts for {len(requests)} requests: give one for each, even if "
            "it is empty"
        )
    for request, tokens in zip(requests, drafts, strict=True):
        ids = token_array(tokens)
        if ids and max(ids) >= loaded.vocab_size:
            raise ConfigError(
                f"draft {max(ids)} of {request.request_id!r} is outside the vocabulary of {loaded.name}: ids are 0 .. "
                f"{loaded.vocab_size - 1}"
            )
    return {request.request_id: tokens for request, tokens in zip(requests, drafts, strict=True)}


# -- encoder inputs


@dataclass(frozen=True, slots=True, eq=False)
class EncoderFeed:
    """An encoder input.

    Attributes:
        values: token ids [1, tokens] or features [1, bins, frames], on the CPU.
        read: the digest of the content, and the number of encoder tokens.
    """

    values: torch.Tensor
    read: EncoderInput


def feed_if_read(
    loaded: LoadedModel, given: Given | None, most_tokens: int, digest: bytes | str | None, cache_salt: str | None
) -> EncoderFeed | None:
    """Return the encoder input of a request as ``encoder_feed`` does; None for a model without an encoder.

    Raises ConfigError if it is missing, or if the model has no encoder.
    """
    if given is None and not is_encoder_decoder(loaded.model):
        return None
    if given is None:
        raise ConfigError(f"{loaded.name} is an encoder-decoder: give the input of its encoder")
    return encoder_feed(loaded, given, most_tokens, digest=digest, cache_salt=cache_salt)


def encoder_feed(
    loaded: LoadedModel,
    given: Given,
    most_tokens: int,
    *,
    digest: bytes | str | None = None,
    cache_salt: str | None = None,
) -> EncoderFeed:
    """Check an encoder input, and give it a digest. O(values).

    ``digest`` is the caller's own name of the content; it is valid for one ``cache_salt`` and one number of tokens.
    Without it, the content is hashed. ``most_tokens`` is the number of encoder tokens that the plan has room for.
    Raises ConfigError for a model without an encoder, text without a tokenizer, ids outside the vocabulary, features of
    another shape, and more tokens than planned.
    """
    if digest is not None:
        if not isinstance(digest, bytes | str):
            raise ConfigError(f"encoder_digest must be bytes or text, got {shown(digest)}")
        EncoderInput(digest, 1)  # ConfigError for an empty one
    if not is_encoder_decoder(loaded.model):
        raise ConfigError(f"{loaded.name} has no encoder: leave the encoder input out")
    values: NDArray[Any]
    if loaded.model.main_input_name == "input_ids":
        values = np.array(encode(loaded, given, what="encoder input"), np.int64)
        tokens = len(values)
    else:
        values = _features(loaded, given)
        tokens = int(loaded.model.config.max_source_positions)
    if tokens > most_tokens:
        raise ConfigError(
            f"an encoder input of {tokens} tokens exceeds the {most_tokens} that the plan has room for: shorten it, or "
            "plan with a larger max_encoder_tokens"
        )
    named = hashlib.sha256(f"{values.dtype.str} {values.shape}".encode())
    if digest is None:
        named.update(values.view(np.uint8).data)
    else:
        named = hashlib.sha256(repr((digest, cache_salt, tokens)).encode())
    return EncoderFeed(torch.from_numpy(values)[None], EncoderInput(named.digest(), tokens))


def _features(loaded: LoadedModel, given: Any) -> NDArray[np.floating[Any]]:  # noqa: ANN401  # arrays and tensors
    """Return a copy of features [bins, frames]. Their shape must be the encoder's: it attends to all frames."""
    config = loaded.model.config
    # the encoder's two convolutions halve the number of frames
    wanted = (int(config.num_mel_bins), 2 * int(config.max_source_positions))
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu().float().numpy()
    if not isinstance(given, np.ndarray) or given.shape != wanted or not np.issubdtype(given.dtype, np.floating):
        raise ConfigError(
            f"{loaded.name} takes float features of shape {wanted}, got {_kind(given)}: give one input at a time, "
            "padded as its feature extractor does"
        )
    if not np.isfinite(given).all():
        raise ConfigError(f"the features for {loaded.name} contain NaN or infinity: give finite numbers")
    return np.ascontiguousarray(given).copy()


def read_encoder_input(loaded: LoadedModel, given: str | Sequence[int], folder: Path) -> EncoderFeed:
    """Read an encoder input of a file of prompts.

    ``given`` is text, token ids, or the name of a .npy file of features in ``folder``. Raises ConfigError as
    ``encoder_feed`` does, and for a file that cannot be read.
    """
    most = planner_model(loaded.model, block_size=16, name=loaded.name).max_encoder_tokens
    if loaded.model.main_input_name == "input_ids":
        return encoder_feed(loaded, given, most)
    if not isinstance(given, str):
        raise ConfigError(f"the encoder of {loaded.name} reads features: give the name of a .npy file")
    try:
        features = np.load(folder / given, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"cannot read the features in {folder / given}: {error}") from None
    return encoder_feed(loaded, features, most)


class EncoderInputs(dict[bytes | str, torch.Tensor]):
    """Encoder inputs by digest. Each stays while a request holds it.

    Requests with equal digests share the input of the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._holders: Counter[bytes | str] = Counter()

    def hold(self, feed: EncoderFeed) -> None:
        """Count one more holder of ``feed``."""
        self.setdefault(feed.read.digest, feed.values)
        self.hold_again(feed.read.digest)

    def hold_again(self, digest: bytes | str) -> None:
        """Count one more holder of an input that is here. An unknown digest is ignored."""
        if digest in self:
            self._holders[digest] += 1

    def release(self, digest: bytes | str) -> None:
        """Count one holder less; the last one removes the input. An unknown digest is ignored."""
        self._holders[digest] -= 1
        if self._holders[digest] <= 0:
            del self._holders[digest]
            self.pop(digest, None)


# -- Steps


def require_blocks(step: Step, table: BlockTable, group: int, tokens: Int64, what: str) -> None:
    """Raise WorkerError unless every row of ``step`` has blocks for its tokens after its cells are written.

    O(rows + cells).

    Args:
        step: the Step.
        table: the block table of ``group``.
        group: number of the group.
        tokens: tokens of each row, int64[rows of the step].
        what: the name of the tokens in the message.
    """
    held = table.num_blocks_per_row.astype(np.int64)
    held[np.concatenate((step.finished_rows, [new.row for new in step.new_rows])).astype(np.int64)] = 0
    mine = step.cells.group == group
    np.maximum.at(held, step.cells.row[mine], step.cells.column[mine] + 1)
    short = np.flatnonzero(held[step.rows] * table.block_size < tokens)
    if len(short):
        row = step.rows[short[0]]
        raise WorkerError(
            f"Step {step.id}: row {row} needs blocks for {tokens[short[0]]} {what} in group {group}, but it has "
            f"{held[row]} blocks of {table.block_size}: give it cells for the missing blocks"
        )
