"""Fields that say which layers keep what, and that no reader knows: refused by name, so that none is ignored.

A list with one entry a layer, or a number or word called like an interval or a pattern of layers, decides about the
cache in every model type that has one. The exceptions are listed here: fields that a reader reads, and fields that
only weights, positions or training depend on. Tests hold the lists against transformers' config classes (5.19).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from hybridkv.errors import UnsupportedModelError
from hybridkv.models.fields import Fields
from hybridkv.models.general import LAYERS
from hybridkv.models.kinds import ATTENTION_CODES, LAYER_TYPES
from hybridkv.models.lightning import BAILING, GROUP, MINIMAX
from hybridkv.units import shown

_QWEN: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_READ_BY: Final[Mapping[str, tuple[str, ...]]] = {
    ATTENTION_CODES: MINIMAX,
    GROUP: BAILING,
    "attention_layers": ("gpt_neo",),
    "attention_type": ("big_bird", "bigbird_pegasus"),
    "attention_types": ("gpt_neo",),
    "attn_layer_indices": ("bamba", "granitemoehybrid"),
    "attn_layer_offset": ("jamba", "zamba"),
    "attn_layer_period": ("jamba", "zamba"),
    "block_types": ("recurrent_gemma",),
    "cross_layer_interval": ("idefics",),
    "full_attention_interval": _QWEN,
    "full_attn_idxs": ("lfm2",),
    "global_attn_every_n_layers": ("afmoe",),
    "hybrid_layer_ids": ("zamba2",),
    "hybrid_layer_pattern": ("mimo_v2_flash",),
    "hybrid_override_pattern": ("nemotron_h",),
    "layers_block_type": ("bamba", "granitemoehybrid", "jamba", "nemotron_h", "zamba", "zamba2"),
    "no_rope_layers": ("llama4_text", "smollm3"),
    "rescale_every": ("rwkv",),
    "sliding_window_pattern": ("cohere2", "cohere2_moe", "exaone4", "exaone_moe", "gemma3_text"),
}
"""Fields of this kind, and the model types whose reader reads them, or whose cache does not depend on them."""
_READ_BY_ALL: Final = (ATTENTION_CODES, "cross_attention_layers", "indexer_types")
"""Those that the general reader reads in every model type."""
_PLACES: Final = re.compile(
    r"interval|period|layer_group|group_layers|every|pattern|stride|attn_types?|attention_types?|layers?_types?"
    r"|layers?_block_type|block_types?$|layer_freq|layer_step"
)
_HARMLESS: Final = re.compile(
    r"moe|mlp|expert|ffn|ff_|feed_forward|intermediate|sparse_step|sparsity|swiglu|topk|rope|rotary|theta|token|mtp_"
    r"|multiplier|time_step|architectures|quant|dropout|drop_path|label|lang|vision|image|audio|speech|suppress"
    r"|save|eval|log|bad_words|exit_layers|aux_hidden|^encoder_|adaptor|resblock|upsample|axial|exceptions|num_attention_heads_per_layer"
)
_POSITIONS: Final = ("min_period", "max_period")


def refuse_unread(fields: Fields, model_type: str, *, general: bool) -> None:
    """Refuse a config whose layers may differ in a way that the reader of ``model_type`` does not know.

    general: the general reader reads it. Raises UnsupportedModelError that names the field and says how to go on.
    """
    placed = any(fields.values.get(key) is not None for key in LAYER_TYPES)
    said = (fields.values.get(key) for key in LAYERS)
    layers = next((count for count in said if type(count) is int and count > 1), 0)
    for key, value in fields.values.items():
        name = key.lower().strip("_")
        if (
            name in LAYER_TYPES
            or (general and name in _READ_BY_ALL)
            or model_type in _READ_BY.get(name, ())
            or _HARMLESS.search(name)
        ):
            continue
        if isinstance(value, list | tuple) and layers and abs(len(value) - layers) <= 1 and len(value) > 1:
            raise _refusal(fields, key, f"has {len(value)} entries, as many as layers", model_type)
        switched = isinstance(value, str) or (type(value) is int and value > 1)
        if switched and value and not placed and name not in _POSITIONS and _PLACES.search(name):
            raise _refusal(fields, key, f"is {shown(value)}", model_type)


def _refusal(fields: Fields, key: str, what: str, model_type: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"config of {fields.name}: {key} {what}, and what layers of model type {shown(model_type)} keep may depend on "
        "it, which is not supported: say what each layer is (--set layer_types='[...]') and drop the field (--set "
        f"{key}=null), or drop it alone where the cache does not depend on it"
    )
