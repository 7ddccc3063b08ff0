"""``read_model`` reads a config from a name, a path or a dict into a Model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from hybridkv.arguments import each, instance, integer, text
from hybridkv.errors import ConfigError, MissingFieldError, UnsupportedModelError
from hybridkv.models.catalog import known_model
from hybridkv.models.compressed import COMPRESSED
from hybridkv.models.decoders import DECODERS, ENCODER_DECODERS
from hybridkv.models.fields import DTYPE_NAMES, Fields, config_dtype, max_model_len
from hybridkv.models.general import HEADS, general, with_mtp
from hybridkv.models.hybrids import HYBRIDS
from hybridkv.models.indexed import INDEXED_DECODERS
from hybridkv.models.json_text import read_json_file
from hybridkv.models.layers import Counting, Family, NotingFamily, ReadOptions, Weights, refuse_layer_types
from hybridkv.models.model import ASSUMED, Model, ReadFact
from hybridkv.models.other_states import OTHER_STATES
from hybridkv.models.quantization import QUANTIZED, SIDECAR, SKIPPED, KVDtype, kv_dtype, quantized, weight_bytes
from hybridkv.models.reading import GIVEN, LAYERS, refuse_unread, table, text_parts
from hybridkv.spec_fields import Quantization
from hybridkv.units import MOST_BYTES, MOST_COUNT, dtype_bytes, dtype_name, shown

ASSUMED_DTYPE: Final = "bfloat16"
BACKENDS: Final = ("vllm", "transformers")

FAMILIES: Final[Mapping[str, Family]] = {**DECODERS, **ENCODER_DECODERS, **HYBRIDS}
NOTING: Final[Mapping[str, NotingFamily]] = {**OTHER_STATES, **INDEXED_DECODERS, **COMPRESSED}
"""Readers that note the source of each value, by model type. The general reader reads all further types."""


NOT_YET: Final[Mapping[str, str]] = table("types")["not_yet"]
"""Model types with layers that keep something that cannot be planned yet, with a description of it."""
LANGUAGE_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
"""Fields that hold the config of the language model."""
MOST_NESTED: Final = 4
"""Most LANGUAGE_PARTS inside one another. Chosen by hand."""


def read_model(
    source: str | Path | Mapping[str, object],
    *,
    block_size: int = 16,
    tp: int = 1,
    dtype: str | None = None,
    backend: str = "vllm",
    num_speculative_tokens: int = 0,
    fields: Mapping[str, object] | None = None,
    state_dtype: str | None = None,
    mtp_layers: int = 0,
    dtype_skip_layers: Sequence[str] = (),
) -> Model:
    """Read a Hugging Face config into the layers and specs of one tensor parallel rank.

    A model type without a reader of its own is read by the fields that configs share. ``Model.read_from`` says how.

    Args:
        source: the config as a dict, a path to config.json, a folder with one, or a known model's name.
        block_size: tokens per block.
        tp: tensor parallel ranks.
        dtype: dtype of keys and values, by name; bf16, fp16, fp32 and fp8 are understood too, and each Quantization.
            ``None`` for the dtype of the config: of its quantized KV cache, else of its weights, else bfloat16, which
            ``Model.read_from`` notes. States keep the dtype of the weights.
        backend: the engine with this layout of recurrent states, ``vllm`` or ``transformers``. Attention is the same.
        num_speculative_tokens: drafts per step that states have room for.
        fields: values that replace fields of the language model's config. A ConfigError names the fields it needs.
        state_dtype: dtype of all recurrent states; ``None`` for the config's. ``vllm`` only.
        mtp_layers: multi-token prediction layers that draft, each with keys and values of its own. At most as many as
            the config has.
        dtype_skip_layers: layers whose keys and values keep the dtype of the weights, as in vLLM's
            kv_cache_dtype_skip_layers: indices of decoder layers, or ``sliding_window`` for all layers with a window.

    Raises:
        ConfigError: the source or a size cannot work.
        UnsupportedModelError: the model has layers that cannot be planned yet, or a KV cache quantized to something
            else than 8-bit floats.
    """
    if not isinstance(source, str | Path | Mapping):
        raise ConfigError(f"a model is a name, the path of a config.json, or its fields, got {shown(source)}")
    block_size, tp = integer("block_size", block_size, 1, MOST_COUNT), integer("tp", tp, 1, MOST_COUNT)
    num_speculative_tokens = integer("num_speculative_tokens", num_speculative_tokens, 0, MOST_COUNT)
    if instance("backend", backend, str) not in BACKENDS:
        raise ConfigError(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}")
    mtp_layers = integer("mtp_layers", mtp_layers, 0, MOST_COUNT)
    name, config = _load(source)
    given = _given(fields)
    part = text_fields(config, name, given)
    model_type = part.text("model_type")
    if model_type is None:
        raise UnsupportedModelError(f"config of {name}: model_type is missing: add it, or say --set model_type=NAME")
    if model_type in NOT_YET:
        raise UnsupportedModelError(
            f"model type {shown(model_type)} of {name} is not supported yet: its layers keep {NOT_YET[model_type]}"
        )
    family = FAMILIES.get(model_type)
    crossed = part.flag("is_encoder_decoder") or part.flag("add_cross_attention")
    if crossed and family is not None and model_type not in ENCODER_DECODERS:
        refuse_layer_types(["cross_attention"] * part.layers("num_hidden_layers"), name)
    of_checkpoint = _quantized(source, config, name) if dtype is None else None
    said = config_dtype(part) if of_checkpoint is None else of_checkpoint.name
    quantization = Quantization.named(dtype)
    given_dtype = None if quantization is not None else dtype
    asked = said if given_dtype is None else dtype_name(DTYPE_NAMES.get(str(dtype), dtype))
    cache_dtype = asked or ASSUMED_DTYPE
    of_states = config_dtype(part) or (cache_dtype if dtype_bytes(cache_dtype) > 1 else ASSUMED_DTYPE)
    every_state = _every_state(state_dtype, backend)
    options = ReadOptions(block_size, tp, cache_dtype, backend, of_states, num_speculative_tokens, every_state)
    noting = NOTING.get(model_type, general)
    refuse_unread(part, model_type, general=family is None and noting is general)
    facts = noting(part, options, tuple(given)) if family is None else family(part, options)
    described = facts.fields or part
    weights, not_counted = _weights(facts.weights, described)
    layers, read_from = facts.layers, (*facts.read_from, *not_counted)
    if mtp_layers:
        layers, drafting = with_mtp(layers, described, mtp_layers)
        read_from = (*(one for one in read_from if one.what != drafting.what), drafting)
    skipped = each(text)("dtype_skip_layers", dtype_skip_layers)
    layers = quantized(layers, quantization, skipped, config_dtype(part) or ASSUMED_DTYPE, name)
    read_from = (*read_from, *(ReadFact("keys and values not quantized", one, SKIPPED, GIVEN) for one in skipped))
    if asked is None:
        why = "the config names no dtype: say dtype= (--dtype) where it is another"
        read_from = (*read_from, ReadFact("dtype of keys and values", ASSUMED_DTYPE, why, ASSUMED))
    depth = (facts.num_layers or _first_count(described, LAYERS)) + mtp_layers
    return Model(
        name=name,
        model_type=model_type,
        layers=layers,
        max_model_len=max_model_len(described, rope_scales=facts.rope_scales, said_by=facts.positions),
        vocab_size=described.integer("vocab_size"),
        dtype=cache_dtype if quantization is None else quantization,
        dtype_from=None if of_checkpoint is None else of_checkpoint.said_by,
        read_from=read_from,
        parameters=weights.every,
        active_parameters=weights.active,
        block_size=block_size,
        tp=tp,
        max_encoder_tokens=facts.max_encoder_tokens,
        num_speculative_tokens=num_speculative_tokens,
        hidden_size=described.optional("hidden_size", minimum=0) or 0,
        query_heads=_first_count(described, HEADS),
        weight_bytes=weight_bytes(
            weights, _quantization(config, name), dtype_bytes(config_dtype(part) or ASSUMED_DTYPE)
        ),
        num_layers=depth if depth != len({layer.index for layer in layers}) else 0,
    )


def _weights(counting: Counting, described: Fields) -> tuple[Weights, tuple[ReadFact, ...]]:
    """Count the weights; the caller's values come first. Returns Weights() and a reason if they are not countable."""
    why = "a replay needs them: --set parameters=N"
    try:
        counted = counting()
    except MissingFieldError as error:
        counted, why = Weights(), f"{error}, or say --set parameters=N"
    every = described.integer("parameters", counted.every, minimum=0, most=1 << 62)
    active = described.integer("active_parameters", every, minimum=0, most=1 << 62)
    if every != counted.every or described.values.get("active_parameters") is not None:
        counted = Weights(every, active)
    if every > MOST_BYTES:
        raise described.fail(f"its sizes make {shown(every)} parameters: correct them")
    return counted, () if every else (ReadFact("parameters", "not counted", why, ASSUMED),)


def _quantization(config: Mapping[str, object], name: str) -> Fields:
    """Return the checkpoint's quantization_config, without fields where nothing is quantized."""
    inner = config.get("text_config")
    wholes = (config, inner if isinstance(inner, Mapping) else {})
    found = [part for one in wholes for key in QUANTIZED if (part := one.get(key)) not in (None, {})]
    said = found[0] if found else {}
    experts = {"expert_dtype": config["expert_dtype"]} if found and "expert_dtype" in config else {}
    return Fields({**experts, **said} if isinstance(said, Mapping) else {QUANTIZED[0]: said}, name)


def _first_count(described: Fields, keys: Sequence[str]) -> int:
    """Return the value of the first field of ``keys`` that is above 0; 0 if no field is."""
    return next((count for key in keys if (count := described.optional(key, minimum=0))), 0)


def _given(fields: Mapping[str, object] | None) -> dict[str, object]:
    """Return the fields that the caller set."""
    if fields is None:
        return {}
    if not isinstance(fields, Mapping) or not all(isinstance(key, str) for key in fields):
        raise ConfigError(f"fields must be values by the names of a config's fields, got {shown(fields)}")
    return dict(fields)


def _every_state(dtype: str | None, backend: str) -> str | None:
    """Return the dtype that the caller set for all states."""
    if dtype is None:
        return None
    if backend != "vllm":
        raise ConfigError(f"state_dtype is for the vllm backend: the states of {backend} have dtypes of their own")
    return dtype_name(DTYPE_NAMES.get(str(dtype), dtype))


def text_fields(config: Mapping[str, object], name: str, given: Mapping[str, object] | None = None) -> Fields:
    """Return the part of a config that describes the language model, with ``given`` in place of its own values.

    The part is in LANGUAGE_PARTS, or is the whole config. The dtype of the whole applies where the part names none.
    """
    part = dict(config)
    for _ in range(MOST_NESTED):
        key = next((one for one in LANGUAGE_PARTS if Fields(part, name).mapping(one)), None)
        if key is None:
            break
        inner = Fields(part, name).mapping(key)
        outer_dtype = {one: part[one] for one in ("dtype", "torch_dtype") if part.get(one) is not None}
        own_dtype = any(inner.get(one) is not None for one in ("dtype", "torch_dtype"))
        merged = dict(inner) if own_dtype else {**inner, **outer_dtype}
        outer_type = part.get("model_type")
        if (tied := part.get("tie_word_embeddings")) is not None:
            merged["tie_word_embeddings"] = tied  # the head is the whole's
        if (images := part.get("vision_config")) is not None:
            merged.setdefault("vision_config", images)  # says how many tokens cross attention reads of an image
        if merged.get("model_type") is None and outer_type is not None:
            merged["model_type"] = outer_type
        part = merged
    named = part.get("model_type")
    if isinstance(named, str):
        # some parts leave their own name out, or give the whole's
        part["model_type"] = text_parts().get(named, named)
    return Fields({**part, **(given or {})}, name)


def _quantized(source: str | Path | Mapping[str, object], config: Mapping[str, object], name: str) -> KVDtype | None:
    """Return the dtype of a quantized KV cache that the config, or modelopt's file next to it, gives."""
    sidecar = None
    if not isinstance(source, Mapping):
        folder = Path(source) if Path(source).is_dir() else Path(source).parent
        if (folder / "config.json").is_file() and (folder / SIDECAR).is_file():
            sidecar = read_json_file(folder / SIDECAR, "object")
    return kv_dtype(config, name, sidecar)


def _load(source: str | Path | Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """Return the model's name and its config."""
    if isinstance(source, Mapping):
        return _own_name(source, "model"), source
    path = Path(source)
    if path.is_dir():
        path /= "config.json"
        if not path.is_file():
            raise ConfigError(f"{path.parent} has no config.json: give a folder with one, or the path of the file")
    elif not path.exists():
        known = known_model(str(source))
        return known.name, known.config
    config = read_json_file(path, "object")
    return _own_name(config, path.resolve().parent.name or "model"), config


def _own_name(config: Mapping[str, object], default: str) -> str:
    """Return the model's name in its config."""
    given = config.get("_name_or_path")
    return given if isinstance(given, str) and given else default
