"""Encoder-decoder models (T5, Whisper): what differs in how they are built and called.

    encoder(values) -> output [1, tokens, width]
    decoder(ids, cache), cache = EncoderDecoderCache(self attention, cross attention)

The decoder's cross attention asks its cache whether keys and values are there (``is_updated``); if not, it projects the
encoder's output and hands them over, as self attention does with its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    with _only(model, keep):
        out = model(
            decoder_input_ids=ids[None],
            encoder_outputs=(encoded,),
            past_key_values=EncoderDecoderCache(*caches),
            use_cache=True,
            **more,
        )
    logits: torch.Tensor = out.logits[0]
    return logits


@contextmanager
def _only(model: PreTrainedModel, keep: torch.Tensor | None) -> Iterator[None]:
    """The output head of ``model`` sees the tokens ``keep`` alone: its forward has no argument for that."""
    if keep is None:
        yield
        return

    def select(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0][:, keep], *inputs[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
