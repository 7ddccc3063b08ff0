"""src/hybridkv/models/classes/defaults.json: what transformers' config classes are called, have and leave out.

    python tests/runner/config_classes.py src/hybridkv/models/classes/defaults.json

For each class with a measured model (measured_caches.py): the fields that bytes may depend on, with their defaults. For
each model of several parts: the name of its language model. "?" stands for a value that the class makes of others.
"""

import dataclasses
import json
import sys
from pathlib import Path

import transformers
from measured_models import WRAPPERS
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hybridkv.models.reader import FAMILIES, LANGUAGE_PARTS, NOT_YET
from hybridkv.models.reading import MADE_BY_CLASS, table

COMPOSED = {"musicgen": "musicgen_decoder", "musicgen_melody": "musicgen_melody_decoder"}
"""Classes that need their parts said: their language models."""
BASE = {one.name for one in dataclasses.fields(PreTrainedConfig)}


def default_config(model_type: str) -> PreTrainedConfig | None:
    """A class with nothing said; None where it cannot be made so."""
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception:  # noqa: BLE001 - each class has its own reasons
        return None


def text_part(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The config of the language model inside; None where the config is that itself."""
    for name in LANGUAGE_PARTS:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            return text_part(part) or part
    return None


def defaults_of(config: PreTrainedConfig) -> dict[str, object]:
    """Fields that bytes may depend on, and that the class of ``config`` has."""
    own = {one.name: one.default for one in dataclasses.fields(type(config)) if one.name not in BASE}
    made = config.to_dict()
    found: dict[str, object] = {}
    for name in table("types")["fields"]:
        value = own.get(name)
        if name not in own and (name != "layer_types" or made.get(name) is None):
            continue
        if (
            name in {"layer_types", "layers_block_type", "indexer_types", "mlp_layer_types"}
            and value is None
            and made.get(name) is not None
        ):
            value = MADE_BY_CLASS
        if value is None or isinstance(value, bool | int | float | str):
            found[name] = value
        elif isinstance(value, list | tuple):
            found[name] = list(value)
    return found


def classes() -> dict[str, dict[str, object]]:
    """written_with: versions. text_parts: by the model type of the whole. defaults: by model type."""
    elsewhere = {*NOT_YET, *FAMILIES, *table("newer")["defaults"]}
    parts: dict[str, object] = {}
    defaults: dict[str, object] = {}
    for model_type in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}):
        config = default_config(COMPOSED.get(model_type, model_type))
        if config is None:
            continue
        part = text_part(config)
        if part is not None and part.model_type != model_type:
            parts[model_type] = part.model_type
        described = part or config
        measured = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type in WRAPPERS
        if measured and described.model_type and described.model_type not in elsewhere:
            defaults[described.model_type] = defaults_of(described)
    written = {"transformers": transformers.__version__}
    return {"written_with": written, "text_parts": parts, "defaults": dict(sorted(defaults.items()))}


def document() -> str:
    """The file's text: a line for each class."""
    lines = []
    for title, entries in classes().items():
        inner = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
        lines.append(f"  {json.dumps(title)}: {{\n{inner}\n  }}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document(), "utf-8")
