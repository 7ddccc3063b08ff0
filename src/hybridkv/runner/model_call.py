"""How the forward of a model is called: what it has for the cache and the positions, and which logits it can give.

Encoder-decoders (T5, Whisper) differ:

    encoder(values) -> output [1, tokens, width]
    decoder(ids, cache), cache = EncoderDecoderCache(self attention, cross attention)

The decoder's cross attention asks its cache whether keys and values are there (``is_updated``); if not, it projects the
encoder's output and hands them over, as self attention does with its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, Final

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

from hybridkv.runner.attention.formulas import attention_modules

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class ModelCall:
    """The forward of ``model``, looked at once: signatures of large models take longer to read than a Step to plan.

    cache_parameter: the cache's name; models of recurrent layers alone call it ``cache_params``.
    takes_positions: whether it is told where tokens stand. One that hands on whatever it gets is given positions where
    there is attention. keeps_logits: whether it computes only those asked for.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        known, hands_on = _parameters(model)
        self.model = model
        self.cache_parameter = "cache_params" if "cache_params" in known else "past_key_values"
        self.takes_positions = "position_ids" in known or (hands_on and any(attention_modules(model)))
        self.keeps_logits = "logits_to_keep" in known

    def arguments(self, cache: Cache, positions: torch.Tensor | None) -> dict[str, Any]:
        """``cache`` and int64[rows, tokens] ``positions``, if taken, by name. None: the model makes its own."""
        arguments: dict[str, Any] = {self.cache_parameter: cache}
        if positions is not None and self.takes_positions:
            arguments["position_ids"] = positions
        return arguments

    def logits_behind(
        self,
        tokens: torch.Tensor,
        keep: torch.Tensor,
        cache: Cache,
        positions: torch.Tensor | None,
        more: Mapping[str, Any] = _NOTHING,
    ) -> torch.Tensor:
        """Logits [k, vocabulary] of a forward over int64[tokens] ``tokens`` behind those at int64[k] ``keep``.

        positions: int64[tokens], as in ``arguments``. more: arguments beside these, or in their place.
        """
        arguments = self.arguments(cache, None if positions is None else positions[None])
        if self.keeps_logits:
            arguments["logits_to_keep"] = keep
        logits: torch.Tensor = self.model(input_ids=tokens[None], use_cache=True, **{**arguments, **more}).logits[0]
        return logits if self.keeps_logits else logits[keep]


def _parameters(model: PreTrainedModel) -> tuple[set[str], bool]:
    """What the forward of ``model`` takes by name, and whether it takes anything else, too.

    One that does, in a subclass or on the instance, hands it on to the forward that it replaced: to the next class's.
    """
    classes = [vars(one) for one in type(model).__mro__ if issubclass(one, PreTrainedModel)]
    known: set[str] = set()
    for forward in (model.forward, *(one["forward"] for one in classes if "forward" in one)):
        parameters = inspect.signature(forward).parameters
        known |= set(parameters)
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            return known, False
    return known, True


def is_encoder_decoder(model: torch.nn.Module) -> bool:
    """Whether ``model`` has an encoder whose output its decoder attends to."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def auto_class(config: Any) -> Any:  # noqa: ANN401  # configs and auto classes of transformers are not typed
    """Transformers' class that builds the generating model of ``config``: of a multimodal one the whole, if need be."""
    if not getattr(config, "is_encoder_decoder", False):
        kind = type(config)
        of_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
        return AutoModelForImageTextToText if of_images else AutoModelForCausalLM
    return AutoModelForSpeechSeq2Seq if config.model_type == "whisper" else AutoModelForSeq2SeqLM


def encode(model: PreTrainedModel, values: torch.Tensor) -> torch.Tensor:
    """The encoder's output [1, tokens, width] for token ids [1, tokens] or features [1, bins, frames], unpadded."""
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
    """Logits [tokens, vocabulary] of the decoder behind ``ids``, int64[tokens] at ``positions``, as one request.

    encoded: the encoder's output [1, n, width]; None where cross attention has it. caches: of self and of cross
    attention. keep: int64[k], the tokens whose logits are wanted; None for all.
    """
    if encoded is None:  # never read, but cross attention runs only where there is one
        encoded = torch.zeros((1, 1, model.config.hidden_size), dtype=model.dtype, device=model.device)
    more: dict[str, Any] = {}
    if "decoder_position_ids" in inspect.signature(model.forward).parameters:
        more["decoder_position_ids"] = positions[None]
    # the forward has no argument for what is to be kept: the output head sees these tokens alone
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
            past_key_values=EncoderDecoderCache(*caches),
            use_cache=True,
            **more,
        )
    logits: torch.Tensor = out.logits[0]
    return logits
