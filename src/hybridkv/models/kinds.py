"""What each layer of a decoder is, by what its config says or the rule that its config class has.

Rules are those of transformers' config classes (5.19).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hybridkv.models.layers import CHUNKED, FULL, LINEAR, SLIDING, ranges, refuse_layer_types
from hybridkv.models.reading import CONFIG, Reading

INDEXED: Final = ("indexed_attention", "minimax_m3_sparse")
NOTHING: Final = ("mlp", "moe")
KINDS: Final = (FULL, SLIDING, CHUNKED, *INDEXED, *NOTHING)

LAYER_TYPES: Final = ("layer_types", "layers_block_type")
ATTENTION_CODES: Final = "attn_type_list"
"""Of MiniMax's files: 0 for a layer of lightning attention, 1 for one of softmax attention."""
PATTERN: Final = "hybrid_layer_pattern"
"""Of MiMo-V2-Flash's file: 1 for a layer with a window."""
WINDOW: Final = ("sliding_window", "sliding_window_size", "attention_window_size")


def layer_types(reading: Reading, count: int, *, known: bool) -> tuple[str, ...]:
    """What every layer is, one of KINDS. Raises UnsupportedModelError for others, ConfigError where nothing says it."""
    key = reading.key(LAYER_TYPES)
    if key is not None:
        found = reading.fields.layer_types(key, count, ())
        refuse_layer_types(found, reading.name, KINDS)
        for kind in dict.fromkeys(found):
            reading.say(
                f"{kind} layers", ranges([i for i, one in enumerate(found) if one == kind]), key, reading.source(key)
            )
        return _last_is_full(reading, found)
    if reading.key((ATTENTION_CODES,)) is not None:
        coded = coded_types(reading, count)
        refuse_layer_types(coded, reading.name, KINDS)
        return coded
    pattern = reading.fields.integers(PATTERN)
    if pattern is not None and reading.fields.text("model_type") == "mimo_v2_flash":
        if len(pattern) != count or not set(pattern) <= {0, 1}:
            raise reading.refuse_value(PATTERN, list(pattern))
        reading.say("windowed layers", ranges([i for i, one in enumerate(pattern) if one]), PATTERN, CONFIG)
        return tuple(SLIDING if one else FULL for one in pattern)
    if any(reading.is_made_by_class(one) for one in LAYER_TYPES):
        return _last_is_full(reading, _made_by_class(reading, count))
    window = window_of(reading)
    if window is not None and not known:
        raise reading.missing("which layers have the window", "layer_types", '["sliding_attention", ...]')
    kind = FULL if window is None else SLIDING
    if window is None and reading.key(("attention_chunk_size",)) is not None:
        kind = CHUNKED
    if reading.key(("index_head_dim",)) is not None and reading.key(("kv_lora_rank",)) is not None:
        kind = INDEXED[0]
    reading.derive("layers", f"{count} of {kind}", "there are no layer_types")
    return (kind,) * count


def coded_types(reading: Reading, count: int) -> tuple[str, ...]:
    """Read ``attn_type_list``: FULL or LINEAR for each of ``count`` layers. Raises ConfigError for any other list."""
    codes = reading.fields.integers(ATTENTION_CODES) or ()
    if len(codes) != count or not set(codes) <= {0, 1}:
        raise reading.refuse_value(ATTENTION_CODES, list(codes))
    types = tuple(FULL if code else LINEAR for code in codes)
    for kind in dict.fromkeys(types):
        where = ranges([i for i, one in enumerate(types) if one == kind])
        reading.say(f"{kind} layers", where, ATTENTION_CODES, reading.source(ATTENTION_CODES))
    return types


def _last_is_full(reading: Reading, types: tuple[str, ...]) -> tuple[str, ...]:
    """Gemma 4 makes the last layer one of full attention whatever its config says."""
    if str(reading.fields.text("model_type")).startswith("gemma4") and types[-1] != FULL:
        reading.derive("last layer", FULL, "as its config class makes it")
        return (*types[:-1], FULL)
    return types


_PERIODS: Final[Mapping[str, tuple[str, int]]] = {
    "afmoe": ("global_attn_every_n_layers", 4),
    "cohere2": ("sliding_window_pattern", 4),
    "exaone4": ("sliding_window_pattern", 4),
    "exaone_moe": ("sliding_window_pattern", 4),
    "gemma3n_text": ("", 5),
    "gemma4_text": ("", 6),
    "gemma4_unified_text": ("", 6),
    "olmo3": ("", 4),
    "vaultgemma": ("", 2),
}
"""Config classes that make every n-th layer one of full attention, by a field or always, without layer_types."""
_SWITCHED: Final = ("qwen2_moe", "smollm3")
"""Config classes with windows in no layer unless use_sliding_window."""
_FROM_A_LAYER: Final = ("dots1", "qwen2_vl_text", "qwen2_5_vl_text")
"""Config classes with windows, where there are any, from layer max_window_layers on."""
_ALL_OF: Final[Mapping[str, str]] = {
    **dict.fromkeys(("laguna", "minimax_m3_vl_text", *_FROM_A_LAYER, *_SWITCHED), FULL),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), INDEXED[0]),
}
"""Config classes that make all layers alike."""


def _made_by_class(reading: Reading, count: int) -> tuple[str, ...]:
    """Layer types where the config leaves out what its class makes: a rule known here, else ConfigError."""
    model_type = reading.fields.text("model_type") or ""
    if model_type in _PERIODS:
        field, period = _PERIODS[model_type]
        if field and field in reading.fields:
            period = reading.required("every n-th layer is full", (field,))
        reading.derive("layers", f"every {period}th of {FULL}, others of {SLIDING}", "as its config class makes them")
        return tuple(SLIDING if (i + 1) % period else FULL for i in range(count))
    if model_type == "mimo_v2_flash":
        reading.derive(
            "layers", f"the first and every 6th of {FULL}, others of {SLIDING}", "as its config class has it"
        )
        return tuple(SLIDING if i and (i + 1) % 6 else FULL for i in range(count))
    if model_type in _FROM_A_LAYER and (window := window_of(reading)) is not None:
        first = reading.required("first layer with a window", ("max_window_layers",), minimum=0)
        reading.derive("layers", f"windows of {window} from layer {first} on", "as its config class makes them")
        return tuple(SLIDING if i >= first else FULL for i in range(count))
    kind = _ALL_OF.get(model_type)
    if kind is not None and not (model_type in _SWITCHED and reading.fields.flag("use_sliding_window")):
        reading.derive("layers", f"{count} of {kind}", "as its config class makes them")
        return (kind,) * count
    raise reading.missing("what each layer is", "layer_types", '["full_attention", ...]')


def window_of(reading: Reading) -> int | None:
    """The window; None where there is none, or a switch turns it off."""
    key = reading.key(WINDOW)
    if key is None or (reading.declares(("use_sliding_window",)) and not reading.fields.flag("use_sliding_window")):
        return None
    return reading.integer("window", (key,))
