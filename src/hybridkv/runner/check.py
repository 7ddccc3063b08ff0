"""Compare completions with plain transformers: the ``--check`` of `hybridkv generate`.

Greedy requests are compared with ``model.generate``, each alone. Two kinds of tokens are compared by teacher forcing
instead: sampled ones, and greedy ones after a first difference. One plain forward over prompt and output gives the
logits, and the same sampler draws from them. Up to a first difference, that is the sampler's own output.

A difference is a near-tie if both of these hold; all others are errors of the cache:

- the two best scores of the reference are closer than 4 times the measured difference of the logits at that position;
- that measured difference is within rounding (hybridkv.runner.self_check.tolerance).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.nn import functional
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hybridkv.request import SamplingParams
from hybridkv.runner.completion import Completion
from hybridkv.runner.images import OF_TEXT, TOKEN_KINDS, Images
from hybridkv.runner.inputs import with_word_ids
from hybridkv.runner.load import LoadedModel
from hybridkv.runner.model_call import plain_transformers
from hybridkv.runner.probe import attention_implementation
from hybridkv.runner.sampling.draws import Draws
from hybridkv.runner.sampling.sampler import Edits, RowEdits, SamplingBatch, scores
from hybridkv.runner.sampling.structured import Grammars, Masked
from hybridkv.runner.self_check import tolerance
from hybridkv.schedule import FinishReason
from hybridkv.step import Step

NEAR_TIE_FACTOR: Final = 4.0
"""A near-tie's largest distance of two scores, as a multiple of the measured difference; chosen by hand."""

_KEPT_LOGITS: Final = 1024
_NOTHING: Final[Mapping[str, torch.Tensor]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Difference:
    """A token that differs from the reference.

    Attributes:
        request_id: id of the request.
        at: index of the token in the output.
        token: the token.
        expected: the token of the reference.
        margin: distance of the reference's two best scores.
        measured: largest difference of the logits, in units of the scores.
        rounding: largest difference that rounding may cause, in units of the scores.
    """

    request_id: str
    at: int
    token: int
    expected: int
    margin: float
    measured: float
    rounding: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.margin < NEAR_TIE_FACTOR * self.measured and self.measured <= self.rounding


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of a check.

    Attributes:
        requests: number of requests.
        tokens: number of compared tokens.
        differences: tokens that differ from the reference.
        wrong_ends: a line for each request that ended wrongly.
    """

    requests: int
    tokens: int
    differences: tuple[Difference, ...]
    wrong_ends: tuple[str, ...]

    @property
    def near_ties(self) -> int:
        """Number of differences that rounding explains."""
        return sum(one.near_tie for one in self.differences)

    @property
    def ok(self) -> bool:
        """Whether all differences are near-ties, and every request ended where it should."""
        return not self.wrong_ends and all(one.near_tie for one in self.differences)


class LogitRecorder:
    """An Observer that keeps the largest logits of every sampled position of every request.

    It keeps up to _KEPT_LOGITS of them, 8 bytes each, so that the check of a large vocabulary needs little memory.
    """

    def __init__(self) -> None:
        self._request_of_row: dict[int, str] = {}
        self._kept: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, step: Step, logits: torch.Tensor) -> None:
        """Record the logits from which the tokens of ``step`` are drawn, float32[n, vocabulary].

        Logits after a rejected draft are overwritten once the token drawn instead has run.
        """
        for new in step.new_rows:
            self._request_of_row[new.row] = new.request_id
        draws = Draws.of(step)
        best = logits.topk(min(_KEPT_LOGITS, logits.shape[-1]), dim=-1)
        rows, at = step.rows[draws.row].tolist(), draws.position.tolist()
        for row, position, values, ids in zip(rows, at, best.values.cpu(), best.indices.cpu(), strict=True):
            self._kept[self._request_of_row[row], position] = ids.int(), values

    def difference(self, request_id: str, position: int, reference: torch.Tensor) -> float:
        """Return the largest |logit - reference| over the kept logits of the token at ``position``.

        reference: [vocabulary].
        """
        ids, values = self._kept[request_id, position]
        return float((values - reference[ids.long()]).abs().max())


def check_completions(
    loaded: LoadedModel,
    completions: Sequence[Completion],
    sampling: Sequence[SamplingParams],
    recorder: LogitRecorder,
    encoders: Sequence[torch.Tensor | None] | None = None,
    *,
    images: Sequence[Images | None] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> CheckReport:
    """Compare each completion with plain transformers. It costs one ``generate`` or one forward for each request.

    ``sampling`` holds the parameters that each request ran with; ``recorder`` has observed them. ``encoders`` holds
    each request's encoder input (EncoderFeed.values), ``images`` the processor's output for each request's pictures,
    with its kinds of tokens. ``advance`` is called after each request. The model's own attention is in place meanwhile.
    """
    differences: list[Difference] = []
    ends: list[str] = []
    inputs = [None] * len(completions) if encoders is None else encoders
    seen = [None] * len(completions) if images is None else images
    grammars = Grammars(loaded)
    with attention_implementation(loaded.model, "eager"), torch.inference_mode():
        for completion, params, encoder, pictures in zip(completions, sampling, inputs, seen, strict=True):
            given = {"encoder": encoder, "images": _tensors(pictures, loaded.model)}
            differences += _differences(
                loaded, completion, with_word_ids(params, loaded), recorder, given, grammars=grammars
            )
            ends += _wrong_end(loaded, completion, params, grammars)
            advance()
    tokens = sum(len(one.token_ids) for one in completions)
    return CheckReport(len(completions), tokens, tuple(differences), tuple(ends))


def _tensors(images: Images | None, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return ``images`` as tensors on the device of ``model``, floats in its dtype; an empty dict without images."""
    if not isinstance(images, Mapping):
        return {}
    found = {name: torch.as_tensor(value, device=model.device) for name, value in images.items()}
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in found.items()}


def _differences(
    loaded: LoadedModel,
    completion: Completion,
    params: SamplingParams,
    recorder: LogitRecorder,
    given: dict[str, Any],
    *,
    grammars: Grammars,
) -> list[Difference]:
    """Compare with ``generate`` if it can draw the same way; otherwise, and after a first difference, by forcing."""
    prompt, ours, said, start = completion.prompt_token_ids, completion.token_ids, list[int](), 0
    plain = params.temperature == 0 and params.structured is None
    if ours and plain and not RowEdits.wanted(replace(params, repetition_penalty=1.0)):
        said = generate_greedy(loaded.model, prompt, len(ours), params.repetition_penalty, **given)
        start = next((i for i, (a, b) in enumerate(zip(ours, said, strict=True)) if a != b), len(ours))
    if start == len(ours):
        return []
    logits = forced_logits(loaded.model, prompt, ours, **given)
    held = (*loaded.eos_token_ids, *params.stop_token_ids)  # tokens that are not drawn before min_tokens outputs
    best = scores(logits, _sampling_of(params, prompt, ours, logits, held, grammars=grammars)).topk(2, dim=-1)
    expected = best.indices[:, 0].tolist()
    if said:
        expected[start] = said[start]
    unit = max(params.repetition_penalty, 1 / params.repetition_penalty)
    if params.temperature > 0:
        unit /= params.temperature
    rounding = unit * tolerance(loaded.model.dtype) * float(logits.abs().max())
    return [
        Difference(
            request_id=completion.request_id,
            at=at,
            token=ours[at],
            expected=expected[at],
            margin=float(best.values[at, 0] - best.values[at, 1]),
            measured=unit * recorder.difference(completion.request_id, len(prompt) + at, logits[at].cpu()),
            rounding=rounding,
        )
        for at in range(start, len(ours))
        if ours[at] != expected[at]
    ]


def generate_greedy(
    model: PreTrainedModel,
    prompt: Sequence[int],
    count: int,
    penalty: float = 1.0,
    *,
    encoder: torch.Tensor | None = None,
    images: Mapping[str, torch.Tensor] = _NOTHING,
) -> list[int]:
    """Return ``count`` tokens that ``model.generate`` adds to ``prompt``, without an end token.

    ``encoder`` is the encoder input of an encoder-decoder; ``prompt`` is then the decoder's. ``images`` is the
    processor's output for the prompt's pictures.
    """
    ids = torch.tensor([list(prompt)], device=model.device)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=count, min_new_tokens=count, repetition_penalty=penalty, pad_token_id=0
    )
    with _plain_generation_config(model), plain_transformers(model):
        if encoder is None:
            given = {**images, "attention_mask": torch.ones_like(ids)}
            out = model.generate(ids, generation_config=config, **given)
        else:
            config.decoder_start_token_id = prompt[0]  # without it, generate inserts a start token
            # the plain loop: Whisper's own generate cuts sound into windows and suppresses tokens
            out = GenerationMixin.generate(
                model, encoder.to(model.device), decoder_input_ids=ids, generation_config=config
            )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


@contextmanager
def _plain_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Take away the model's generation config: its defaults fill the fields that an explicit config leaves open."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def forced_logits(
    model: PreTrainedModel,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    encoder: torch.Tensor | None = None,
    images: Mapping[str, torch.Tensor] = _NOTHING,
) -> torch.Tensor:
    """Return the logits that predict ``output``, float32[len(output), vocabulary], from one forward without a cache.

    ``encoder`` and ``images`` are as in ``generate_greedy``.
    """
    ids = torch.tensor([[*prompt, *output[:-1]]], device=model.device)
    if encoder is not None:
        given = {"decoder_input_ids": ids, model.main_input_name: encoder.to(model.device)}
    else:
        generated = ids.shape[1] - len(prompt)
        given = {"input_ids": ids} | {name: value for name, value in images.items() if name not in OF_TEXT}
        # kind 0, text, for the generated tokens
        given |= {name: functional.pad(images[name], (0, generated)) for name in TOKEN_KINDS if name in images}
    with plain_transformers(model):
        logits: torch.Tensor = model(use_cache=False, **given).logits[0, -len(output) :].float()
    return logits


def _sampling_of(
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    logits: torch.Tensor,
    held: Sequence[int],
    *,
    grammars: Grammars,
) -> SamplingBatch:
    """Return a batch with one entry for each token of ``output``; each knows the tokens before it."""
    edits, grammar, masks = Edits(), grammars.of(params.structured), None
    if grammar is not None:
        masks = grammars.masks([Masked(0, grammar.parser(), [*output[:-1]])], *logits.shape)
    if RowEdits.wanted(params):
        own = RowEdits(params, prompt, len(prompt), held, logits.shape[-1])
        for at, token in enumerate(output):
            edits.add(at, own)
            own.add([token])
    positions = range(len(prompt), len(prompt) + len(output))
    return replace(SamplingBatch.of([params] * len(output), positions, edits), masks=masks)


def _wrong_end(loaded: LoadedModel, completion: Completion, params: SamplingParams, grammars: Grammars) -> list[str]:
    """Return a line that describes a wrong end of the output, or an empty list. Aborted requests are not checked."""
    if completion.finish_reason is FinishReason.ABORT:
        return []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(loaded.eos_token_ids))
    output = completion.token_ids
    name = f"request {completion.request_id}"
    if stops & set(output[:-1]):
        return [f"{name} continued after a stop token"]
    whole = ""
    unstopped = 0
    if params.stop and loaded.tokenizer is not None:
        whole = loaded.tokenizer.decode(list(output), skip_special_tokens=True)
        unstopped = len(loaded.tokenizer.decode(list(output[: params.min_tokens]), skip_special_tokens=True))
    found = [one for one in params.stop if whole.find(one, max(0, unstopped + 1 - len(one))) >= 0]
    grammar = grammars.of(params.structured)
    over = grammar is not None and grammar.parser(output).is_stopped()
    stopped = bool(stops & set(output[-1:])) or bool(found) or over
    if stopped != (completion.finish_reason is FinishReason.STOP):
        return [f"{name} ended by {completion.finish_reason}, but its output {'has a' if stopped else 'has no'} stop"]
    return []
