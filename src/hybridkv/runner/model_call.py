"""Calls the forward of a model: the names of its cache and position arguments, and the logits that it computes.

Encoder-decoders (T5, Whisper) are called in two parts:

    encoder(values) -> output [1, tokens, width]
    decoder(ids, cache), cache = EncoderDecoderCache(self attention, cross attention)

The decoder's cross attention asks its cache whether keys and values are there (``is_updated``). If not, it projects the
encoder's output and hands them to the cache, as self attention does with its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Final, get_args

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, EncoderDecoderCache

from hybridkv.errors import HybridKVError, UnsupportedModelError
from hybridkv.runner.attention.formulas import attention_modules
from hybridkv.runner.step_context import EmptyCache

CACHES: Final = ("cache", "cache_params", "past_key_values")
"""Names of the cache argument: of transformers 5.24, and of earlier recurrent and other models."""
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class ModelCall:
    """The forward of ``model``. Its signature is read once: for large models that takes longer than to plan a Step.

    Attributes:
        model: the model.
        cache_parameter: name of the cache argument, one of CACHES. None if it takes no Cache of transformers: such a
            model keeps states of its own (states/passing.py).
        takes_positions: whether the forward gets position ids. A forward that passes unknown arguments on gets them if
            the model has attention.
        keeps_logits: whether it can compute the logits of selected tokens alone.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        known, passes_on = _parameters(model)
        self.model = model
        name = _cache_name(known)
        own = _own_cache(model, name)
        self.cache_parameter = name if own is None or issubclass(own, Cache) else None
        self._poses_as = own if self.cache_parameter is not None else None
        self.takes_positions = "position_ids" in known or (passes_on and any(attention_modules(model)))
        self.keeps_logits = "logits_to_keep" in known

    def arguments(self, cache: EmptyCache, positions: torch.Tensor | None) -> dict[str, Any]:
        """Return the arguments for ``cache`` and, if the model takes them, int64[rows, tokens] ``positions``."""
        arguments = dict[str, Any]()
        if self.cache_parameter is not None:
            cache.poses_as = self._poses_as
            arguments[self.cache_parameter] = cache
        if positions is not None and self.takes_positions:
            arguments["position_ids"] = positions
        return arguments

    def logits_after(
        self,
        tokens: torch.Tensor,
        keep: torch.Tensor,
        cache: EmptyCache,
        positions: torch.Tensor | None,
        more: Mapping[str, Any] = _NOTHING,
    ) -> torch.Tensor:
        """Run ``tokens``, and return the logits after some of them, [k, vocabulary].

        Args:
            tokens: int64[tokens].
            keep: indices of the tokens after which logits are needed, int64[k].
            cache: the cache.
            positions: int64[tokens]; None if the model makes its own.
            more: further arguments, which take precedence.
        """
        arguments = self.arguments(cache, None if positions is None else positions[None])
        if self.keeps_logits:
            arguments["logits_to_keep"] = keep
        arguments["use_cache"] = self.cache_parameter is not None
        logits: torch.Tensor = self.model(input_ids=tokens[None], **{**arguments, **more}).logits[0]
        return logits if self.keeps_logits else logits[keep]


def _parameters(model: PreTrainedModel) -> tuple[set[str], bool]:
    """Return the parameter names of the forward of ``model``, and whether it takes any other name, too.

    A forward that takes any name passes it on to the forward that it replaced. So the forwards of the base classes are
    read, too.
    """
    classes = [vars(one) for one in type(model).__mro__ if issubclass(one, PreTrainedModel)]
    known: set[str] = set()
    for forward in (model.forward, *(one["forward"] for one in classes if "forward" in one)):
        parameters = inspect.signature(forward).parameters
        known |= set(parameters)
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            return known, False
    return known, True


def _cache_name(parameters: Container[str]) -> str:
    """Return the name of the cache among the ``parameters`` of a forward; the last of CACHES if it is not there."""
    return next((one for one in CACHES if one in parameters), CACHES[-1])


def _own_cache(model: PreTrainedModel, name: str) -> type | None:
    """Return the class of caches of its own that ``model`` asks for in the argument ``name``; None without one."""
    parts = {type(one) for one in model.modules() if isinstance(one, PreTrainedModel)}
    for part in parts:
        parameter = inspect.signature(part.forward).parameters.get(name)
        kinds = () if parameter is None else (parameter.annotation, *get_args(parameter.annotation))
        for kind in kinds:
            if isinstance(kind, type) and kind.__module__ == part.__module__:
                return kind
    return None


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the number of token ids that ``model`` reads.

    Raises UnsupportedModelError for a model that reads several tokens at once, each with an embedding of its own.
    """
    table = model.get_input_embeddings()
    if isinstance(table, torch.nn.ModuleList):
        if len(table) != 1:
            raise UnsupportedModelError(
                f"{type(model).__name__} reads {len(table)} tokens at once, one of each codebook, which is not "
                "supported: run this model with plain transformers"
            )
        table = table[0]
    size: int = table.num_embeddings
    return size


def is_encoder_decoder(model: torch.nn.Module) -> bool:
    """Return whether ``model`` has an encoder, to whose output its decoder attends."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


@contextmanager
def plain_transformers(model: PreTrainedModel) -> Iterator[None]:
    """Run ``model`` as transformers alone runs it. Raises UnsupportedModelError, in one line, if it fails.

    Named errors of this library and torch.OutOfMemoryError pass through.
    """
    try:
        yield
    except (HybridKVError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model's code may raise any error
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedModelError(
            f"{type(model).__name__} fails in plain transformers, without pages: {said}: correct the model or its "
            "config, or install the version of transformers that it was written for"
        ) from error


def auto_class(config: Any) -> Any:  # noqa: ANN401  # configs and auto classes of transformers are not typed
    """Return transformers' class that builds the generating model of ``config``; with all parts if it is multimodal."""
    if not getattr(config, "is_encoder_decoder", False):
        kind = type(config)
        of_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
        return AutoModelForImageTextToText if of_images else AutoModelForCausalLM
    return AutoModelForSpeechSeq2Seq if config.model_type == "whisper" else AutoModelForSeq2SeqLM


def encode(model: PreTrainedModel, values: torch.Tensor) -> torch.Tensor:
    """Return the encoder's output [1, tokens, width].

    Args:
        model: an encoder-decoder.
        values: unpadded token ids [1, tokens] or features [1, bins, frames].
    """
    if values.is_floating_point():
        values = values.to(model.dtype)
    output: torch.Tensor = model.get_encoder()(values.to(model.device)).last_hidden_state
    return output


def decode(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    encoded: torch.Tensor | None,
    *,
    caches: tuple[Cache, Cache],
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the decoder over the tokens of one request, and return logits [tokens, vocabulary].

    Args:
        model: an encoder-decoder.
        ids: int64[tokens].
        positions: int64[tokens].
        encoded: the encoder's output [1, n, width]; None if cross attention has it already.
        caches: the caches of self attention and of cross attention.
        keep: indices of the tokens after which logits are needed, int64[k]; None for all.
    """
    if encoded is None:  # its values are never read, but without an output no cross attention runs
        encoded = torch.zeros((1, 1, model.config.hidden_size), dtype=model.dtype, device=model.device)
    more: dict[str, Any] = {}
    if "decoder_position_ids" in inspect.signature(model.forward).parameters:
        more["decoder_position_ids"] = positions[None]
    # the forward has no argument for the tokens to keep, so a hook passes only these tokens to the output head
    head = (
        nullcontext()
        if keep is None
        else model.get_output_embeddings().register_forward_pre_hook(
            lambda _, inputs: (inputs[0][:, keep], *inputs[1:])
        )
    )
    with head:
        out = model(
            decoder_input_ids=ids[None],
            encoder_outputs=(encoded,),
            use_cache=True,
            **{_cache_name(inspect.signature(model.forward).parameters): EncoderDecoderCache(*caches)},
            **more,
        )
    logits: torch.Tensor = out.logits[0]
    return logits
