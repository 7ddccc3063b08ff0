"""A model folder before transformers reads it: what it names are weights and tokenizers, no code to be run.

transformers runs the Python files that ``auto_map`` names, or asks on standard input whether it may; a tokenizer class
may be any of its names, of which some load more, by rules of their own; and a config or an index of shards may name
pickles, ``use_safetensors`` or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Final

from transformers import PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from hybridkv.errors import ConfigError
from hybridkv.models.json_text import DocumentError, read_json
from hybridkv.regular_files import open_regular

CONFIG: Final = "config.json"
_TOKENIZER: Final = "tokenizer_config.json"
_INDEX: Final = "*.safetensors.index.json"
_WEIGHTS: Final = ".safetensors"


def require_plain_weights(folder: Path) -> None:
    """Raise ConfigError unless there are safetensors, and all weights that ``folder`` names are such files in it."""
    if not any(folder.glob(f"*{_WEIGHTS}")):
        raise ConfigError(f"{folder} has no *.safetensors: save the model with save_pretrained there")
    _require_weights(folder / CONFIG, _object(folder / CONFIG).get("transformers_weights"))
    for index in filter(Path.is_file, folder.glob(_INDEX)):
        shards = _object(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ConfigError(f"{index} has no weight_map, an object: save the model as safetensors again")
        for shard in shards.values():
            _require_weights(index, shard)


def _require_weights(where: Path, name: object) -> None:
    """``name``: of a file of weights, or of an index of them; None for none."""
    if name is None:
        return
    plain = isinstance(name, str) and not PurePath(name).is_absolute() and ".." not in PurePath(name).parts
    if not plain or not str(name).endswith((_WEIGHTS, _INDEX.removeprefix("*"))):
        raise ConfigError(
            f"{where} names {name!r} as weights, which is no safetensors file of its folder: save the model as "
            "safetensors there"
        )


def require_no_code(folder: Path) -> None:
    """Raise ConfigError for a tokenizer that only code of the folder makes, and for a class that is no tokenizer.

    Code that the folder has for a config or a model of a known type is not needed: transformers has its own.
    """
    settings = _object(folder / _TOKENIZER) if (folder / _TOKENIZER).is_file() else {}
    known = False
    for where, values in ((_TOKENIZER, settings), (CONFIG, _object(folder / CONFIG))):
        name = values.get("tokenizer_class")
        if name is None:
            continue
        found = _tokenizer_class(name)
        if found is not None and not (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
            raise ConfigError(f"{folder / where} names {name!r} as tokenizer_class, which is no tokenizer: correct it")
        known = known or (where == _TOKENIZER and found is not None)
    code = settings.get("auto_map")
    if isinstance(code, Mapping):
        code = code.get("AutoTokenizer")
    if code is not None and not known:
        raise ConfigError(
            f"the tokenizer in {folder} is Python code of that folder, which is not run: read it, and if you trust it "
            "say --trust-remote-code (trust_remote_code=True)"
        )


def _tokenizer_class(name: object) -> object:
    """What transformers would take ``name`` for; None where it knows no such class, False where it is no name."""
    if not isinstance(name, str):
        return False
    names = (name, name.removesuffix("Fast"), f"{name}Fast")
    return next((found for one in names if (found := tokenizer_class_from_name(one)) is not None), None)


def _object(path: Path) -> Mapping[str, object]:
    """The JSON object in a file. ConfigError where there is none."""
    try:
        with open_regular(path) as file:
            held = read_json(file)
    except (OSError, DocumentError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(held, dict):
        raise ConfigError(f"{path} holds no JSON object: save the model there again")
    return held
