"""What transformers' own models keep between calls, measured: the oracle that plans are held against.

    transformers config -> the model, on the meta device -> calls of a few tokens with transformers' own cache
        -> every tensor that is left behind -> what grows with tokens, what ends at a window, what never grows

It never asks ``hybridkv.models``. The meta device computes shapes and no numbers, so a model of any size is built and
run in a second or two. What is left behind is looked for in the cache handed in, in what the call returned, and in
attributes of modules. Tokens are told from other sizes by calls of SHORT and of LONG ones.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

SHORT, LONG = 6, 11
"""Tokens of two calls."""
ENCODED = 9
"""Tokens of the encoder's output."""
OWN_CACHES = ("minimax", "reformer", "rwkv", "xlnet", "xlstm")
"""Model types that make a cache of a class of their own and take no other."""
HANDED_ON = ("state", "mems", "cache_params", "past_buckets_states", "past_key_values")
"""What an output is called that the next call is given."""
KEPT_BY_MODULES = ("recurrent_states", "conv1d_state")
"""Attributes of modules that hold states, and hold them into the next request unless someone clears them."""

Path = tuple[str | int, ...]


class NotMeasured(Exception):  # noqa: N818 - the reason is its text
    """The model cannot be built or run, or keeps what this module cannot read."""


@dataclass(frozen=True)
class LayerCache:
    """What one layer of the cache keeps of one request.

    token_bytes, window_bytes, encoder_bytes: that a token of the request, one within the window, or one of the
    encoder's output adds. window: tokens that the last one reads, itself included. states: (shape, dtype) of what
    never grows.
    """

    token_bytes: int = 0
    window_bytes: int = 0
    window: int | None = None
    encoder_bytes: int = 0
    states: tuple[tuple[tuple[int, ...], str], ...] = ()


@dataclass(frozen=True)
class _Tensor:
    """A tensor that was left behind; shape: without the batch."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def layer(self) -> int:
        """The first number on the path."""
        index = next((part for part in self.path if isinstance(part, int)), None)
        if index is None:
            raise NotMeasured(f"no layer owns {self.path}")
        return index

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class _Left:
    """What one call left behind. windows: of the cache's layers that slide, by index.

    crossed: layers that read an encoder's output instead of tokens.
    """

    tensors: dict[Path, _Tensor] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    crossed: tuple[int, ...] = ()


def measured_cache(config: PreTrainedConfig, *, device: str = "meta", long_run: bool = False) -> dict[int, LayerCache]:
    """What each layer of the model of ``config`` keeps, by its index in the cache; nothing of layers that keep nothing.

    The model's dtype is bfloat16. long_run: windows are proved by a call of more tokens than any of them has; else they
    are what the layers of the cache say. Raises NotMeasured.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old models about themselves
            model = _build(config, device)
            short, long = _run(model, SHORT), _run(model, LONG)
            past = _run(model, 2 * max(long.windows.values()) + 1) if long_run and long.windows else None
    except NotMeasured:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        raise NotMeasured(f"{type(error).__name__}: {reason[0][:160]}") from error
    layers: dict[int, list[_Tensor]] = {}
    for tensor in long.tensors.values():
        layers.setdefault(tensor.layer, []).append(tensor)
    found = {index: _layer(index, tensors, short, long, past) for index, tensors in sorted(layers.items())}
    return {index: layer for index, layer in found.items() if layer != LayerCache()}


def _build(config: PreTrainedConfig, device: str) -> PreTrainedModel:
    """The model as generation would use it."""
    for part in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values():
        part.use_cache = True
    known: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    if config.is_encoder_decoder:
        known = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, *known)
    auto = next((one for one in known if type(config) in one._model_mapping), AutoModelForCausalLM)
    decoder = getattr(config, "decoder", None)
    with torch.device(device), installed_parts():
        if isinstance(decoder, PreTrainedConfig) and type(config) in AutoModelForCausalLM._model_mapping:
            made = AutoModelForCausalLM._model_mapping[type(config)]._from_config(decoder, dtype=torch.bfloat16)
            return made.eval()
        return auto.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()


@contextmanager
def installed_parts() -> Iterator[None]:
    """Leave out the parts of models that need a package that is not installed: gemma3n's for images, never called."""
    made = AutoModel.from_config

    def if_installed(config: PreTrainedConfig) -> torch.nn.Module:
        try:
            part: torch.nn.Module = made(config)
        except ImportError:
            return torch.nn.Identity()
        return part

    with patch.object(AutoModel, "from_config", if_installed):
        yield


def _run(model: PreTrainedModel, tokens: int) -> _Left:
    """One call of ``tokens`` tokens on an empty cache.

    Without a mask some models look for padding in the tokens, with one others do.
    """
    try:
        return _call(model, tokens, masked=False)
    except RuntimeError as error:
        if "meta tensors" not in str(error):
            raise
        return _call(model, tokens, masked=True)


def _call(model: PreTrainedModel, tokens: int, *, masked: bool) -> _Left:
    cache = _cache(model)
    before = {tensor.path for tensor in _of_modules(model)}
    with torch.no_grad():
        output = model(**_arguments(model, cache, tokens, masked=masked), use_cache=True)
    text = model.config.get_text_config(decoder=True)
    left = _Left(crossed=tuple(getattr(text, "cross_attention_layers", None) or ()))
    handed_on = {name: output[name] for name in HANDED_ON if isinstance(output, Mapping) and name in output}
    seen: set[int] = set()
    for name, value in {"cache": cache, **handed_on}.items():
        for tensor in _tensors(value, (name,), seen):
            left.tensors[tensor.path] = tensor
    left.tensors |= {tensor.path: tensor for tensor in _of_modules(model) if tensor.path not in before}
    for index, layer in enumerate(getattr(cache, "layers", ())):
        if hasattr(layer, "compressed_kv"):
            raise NotMeasured("the bytes that a token adds depend on its place in a group of tokens")
        if getattr(layer, "is_sliding", False):
            left.windows[index] = layer.sliding_window
    for module in model.modules():
        for name in KEPT_BY_MODULES:
            if isinstance(vars(module).get(name), torch.Tensor):
                setattr(module, name, None)
    return left


def _cache(model: PreTrainedModel) -> Cache:
    """As ``generate`` makes it; an encoder-decoder's layers are made as they are met."""
    if _reads_encoder(model):
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    return DynamicCache(config=model.config)


def _reads_encoder(model: PreTrainedModel) -> bool:
    """Whether the model is one of an encoder and a decoder, and not the decoder alone."""
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def _arguments(model: PreTrainedModel, cache: Cache, tokens: int, *, masked: bool) -> dict[str, Any]:
    """What the forward is given."""
    known = inspect.signature(model.forward).parameters
    # one row, or one for each of the sounds that a token is made of
    ids = torch.zeros((getattr(model, "num_codebooks", 1), tokens), dtype=torch.int64, device=model.device)
    width = model.config.get_text_config(decoder=True).hidden_size if _reads_encoder(model) or masked else 0
    if "cross_attention_states" in known:
        width = model.config.get_text_config(decoder=True).hidden_size
    encoded = torch.zeros((1, ENCODED, width), dtype=model.dtype, device=model.device)
    if _reads_encoder(model):
        return {"encoder_outputs": BaseModelOutput(encoded), "decoder_input_ids": ids, "past_key_values": cache}
    arguments: dict[str, Any] = {"input_ids": ids}
    if masked:
        arguments["attention_mask"] = torch.ones_like(ids)
    if "cross_attention_states" in known:
        arguments["cross_attention_states"] = encoded
    if model.config.model_type not in OWN_CACHES:
        arguments["cache_params" if "cache_params" in known else "past_key_values"] = cache
    return arguments


def _of_modules(model: PreTrainedModel) -> Iterator[_Tensor]:
    """Attributes of modules that are neither weights nor buffers."""
    for name, module in model.named_modules():
        index = next((int(part) for part in name.split(".") if part.isdigit()), 0)
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield _Tensor((index, name, attribute), tuple(value.shape[1:]), value.dtype)


def _tensors(value: object, path: Path, seen: set[int]) -> Iterator[_Tensor]:
    """Every tensor below ``value``; counters are none. RWKV stacks its layers along the last axis."""
    if isinstance(value, torch.Tensor):
        if path[0] == "state":
            for index in range(value.shape[-1]):
                yield _Tensor((index, *map(str, path)), tuple(value.shape[1:-1]), value.dtype)
        elif value.numel() > 1 or value.is_floating_point():
            yield _Tensor(path, tuple(value.shape[1:]), value.dtype)
        return
    if isinstance(value, torch.nn.Module | PreTrainedConfig | type) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inside = list(value.items())
    elif isinstance(value, list | tuple):
        inside = list(enumerate(value))
    else:
        inside = list(getattr(value, "__dict__", {}).items())
    for key, one in inside:
        yield from _tensors(one, (*path, key), seen)


def _layer(index: int, tensors: list[_Tensor], short: _Left, long: _Left, past: _Left | None) -> LayerCache:
    """The tensors of one layer by what they count."""
    bytes_of = {"token_bytes": 0, "window_bytes": 0, "encoder_bytes": 0}
    states = []
    for tensor in sorted(tensors, key=lambda one: str(one.path)):
        if tensor.path not in short.tensors:
            raise NotMeasured(f"{tensor.path} is not there after a shorter call")
        grown = _bytes_per_token(short.tensors[tensor.path], tensor)
        if "cross_attention_cache" in tensor.path or index in long.crossed:
            bytes_of["encoder_bytes"] += tensor.nbytes // ENCODED
        elif grown == 0:
            states.append((tensor.shape, str(tensor.dtype).removeprefix("torch.")))
        elif index in long.windows:
            bytes_of["window_bytes"] += grown
        else:
            bytes_of["token_bytes"] += grown
        if past is not None and grown and index not in long.crossed:
            _prove(long.windows.get(index), tensor, past.tensors[tensor.path])
    window = long.windows.get(index) if bytes_of["window_bytes"] else None
    return LayerCache(**bytes_of, window=window, states=tuple(states))


def _bytes_per_token(short: _Tensor, long: _Tensor) -> int:
    """Bytes that a token adds; 0 where tokens add nothing."""
    if short.shape == long.shape:
        return 0
    if [a for a, b in zip(short.shape, long.shape, strict=True) if a != b] != [SHORT]:
        raise NotMeasured(f"{long.path} of {SHORT} tokens is {short.shape}, of {LONG} tokens {long.shape}")
    return long.nbytes // LONG


def _prove(window: int | None, tensor: _Tensor, past: _Tensor) -> None:
    """NotMeasured unless as many tokens are kept of a longer call as a window needs, or all of them without one."""
    axis = tensor.shape.index(LONG)
    count = past.shape[axis]
    if (window is None and count <= LONG) or (window is not None and count != window - 1):
        raise NotMeasured(f"{tensor.path} has a window of {window}, but keeps {count} tokens")
