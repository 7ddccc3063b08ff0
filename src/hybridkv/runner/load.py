"""Load a model and its tokenizer: from a folder with safetensors, a GGUF file, the hub, or a tiny random one.

A model folder is checked before transformers reads it, so that it can only name weights and tokenizers, never code:

- transformers runs the Python files that ``auto_map`` names, or asks on standard input whether it may.
- a tokenizer class may be any name in transformers, and some of these load further classes by rules of their own.
- a config, or an index of shards, may name pickles, even with ``use_safetensors``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any, Final, cast

import torch
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from hybridkv.arguments import check_fields, each, flag, instance, integer, text
from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models import read_model
from hybridkv.models.json_text import read_json_file
from hybridkv.models.quantization import kv_dtype
from hybridkv.runner.model_call import auto_class, vocabulary_of
from hybridkv.runner.probe import require_runnable
from hybridkv.runner.shares import ModelShare
from hybridkv.runner.tiny import byte_tokenizer, tiny_model
from hybridkv.units import shown

logger = logging.getLogger(__name__)

TINY: Final = "tiny:"
_PROCESSORS: Final = ("processor_config.json", "preprocessor_config.json")
_PICTURE_PACKAGES: Final = (("PIL", "pillow"), ("torchvision", "torchvision"))
_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")
_GGUF: Final = ".gguf"
_NEEDED_BY_GGUF: Final = ("gguf", "accelerate")
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DATA: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_CODE: Final = "*.py"
CONFIG: Final = "config.json"
_TOKENIZER: Final = "tokenizer_config.json"
_INDEX: Final = "*.safetensors.index.json"
_WEIGHTS: Final = ".safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model with its tokenizer, ready to generate.

    Args:
        name: the name or path that it was loaded from, for messages.
        model: the transformers model.
        tokenizer: a transformers tokenizer; None if prompts and outputs are token ids.
        eos_token_ids: tokens that end an output, from the generation config or the config.
        processor: for a multimodal model, makes token ids and pixels from a text and its pictures, like the processors
            of transformers.
        no_processor: why there is no processor, if that is known.
        share: of which whole model this is a tensor parallel rank; None for a whole model.

    Raises:
        ConfigError: the model, the tokenizer or the processor lacks a method that the engine calls.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    processor: Any = None
    no_processor: str = ""
    share: ModelShare | None = None

    def __post_init__(self) -> None:
        check_fields(self, text, "name")
        require_model(self.model)
        missing = [one for one in ("encode", "decode") if not callable(getattr(self.tokenizer, one, None))]
        if self.tokenizer is not None and missing:
            raise ConfigError(f"the tokenizer must have {' and '.join(missing)}, got {shown(self.tokenizer)}")
        check_fields(self, each(integer), "eos_token_ids")
        if self.processor is not None and not callable(self.processor):
            raise ConfigError(f"the processor must be callable, got {shown(self.processor)}")

    @property
    def decoder_start(self) -> list[int]:
        """The first token of a decoder with an empty prompt. Raises ConfigError if the model does not name it."""
        for owner in (getattr(self.model, "generation_config", None), self.model.config):
            if isinstance(found := getattr(owner, "decoder_start_token_id", None), int):
                return [found]
        raise ConfigError(f"the config of {self.name} has no decoder_start_token_id: give the decoder's prompt")

    @property
    def vocab_size(self) -> int:
        """Number of token ids: ids are 0 to this number less one."""
        return vocabulary_of(self.model)

    @property
    def without_weights(self) -> TextModel:
        """The model for processes that only convert text."""
        return TextModel(self.name, self.tokenizer, self.eos_token_ids, self.vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class TextModel:
    """The part of a LoadedModel that converts text to tokens and back. It can be pickled if its tokenizer can.

    Attributes:
        name: as of the LoadedModel, like all fields.
        tokenizer: as there.
        eos_token_ids: as there.
        vocab_size: as there.
    """

    name: str
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    vocab_size: int


def load(
    source: str | Path, *, seed: int = 0, device: torch.device | str = "cpu", trust_remote_code: bool = False
) -> LoadedModel:
    """Load a model for an Engine.

    The processor of a multimodal model is loaded, too, if its packages (pillow, torchvision) are installed. Only a name
    on the hub downloads anything.

    Args:
        source: one of
            ``tiny:NAME``, a small model with random weights from ``seed``;
            a folder with config.json, safetensors and a tokenizer;
            a GGUF file, or a folder with nothing else: it needs gguf and accelerate, and is dequantized to float32;
            ``ORG/NAME``, if no such folder exists: the data of a model on the hub, from its local cache or the network.
        seed: seed of the weights of a tiny model.
        device: the torch device that holds the model.
        trust_remote_code: run the Python code in the folder that its config or tokenizer names. Otherwise no code of
            the folder runs, and a tokenizer that needs it is rejected.

    Raises:
        ConfigError: the model cannot be loaded.
        UnsupportedModelError: the planner rejects the model (before its weights are read), or a token's position
            depends on other requests in its batch.
    """
    trust_remote_code = flag("trust_remote_code", trust_remote_code)
    source = str(source) if isinstance(source, Path) else instance("the model", source, str)
    where = _device(device)
    if source.startswith(TINY):
        return wrap(tiny_model(source.removeprefix(TINY), seed).to(where), byte_tokenizer(), source)
    files = files_of(source, code=trust_remote_code)
    if files.gguf is None:
        # the check does not depend on the dtype, and the weights, which decide it, are not read yet
        require_runnable(read_model(files.folder, backend="transformers", dtype="float32"))
        require_plain_weights(files.folder)
        if not trust_remote_code:
            require_no_code(files.folder)
    # a GGUF file holds data alone
    options = _Reading(files, trust_remote_code=trust_remote_code and files.gguf is None)
    model = options.model()
    processor, why_not = options.processor(model)
    loaded = wrap(model.to(where).eval(), options.tokenizer(), source, processor=processor)
    return replace(loaded, no_processor=why_not)


def _device(given: object) -> torch.device:
    """Return ``given`` as a device that can hold tensors. Raises ConfigError for any other."""
    try:
        device = torch.device(given)  # type: ignore[call-overload]  # torch checks the value
        torch.empty(1, device=device).cpu()
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"device {shown(given)} cannot hold tensors: {why}: give another device") from error
    return cast("torch.device", device)


class _Reading:
    """Reads ``files`` with transformers, which may read no other file."""

    def __init__(self, files: ModelFiles, *, trust_remote_code: bool) -> None:
        self._files, self._where = files, files.folder if files.gguf is None else files.folder / files.gguf
        self._options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        if files.gguf is not None:
            self._options["gguf_file"] = files.gguf

    def model(self) -> PreTrainedModel:
        """Return the model. Every weight must be in its files: transformers would fill in random ones."""
        weights: dict[str, Any] = {"use_safetensors": True, "dtype": "auto"}
        try:
            config = AutoConfig.from_pretrained(self._files.folder, **self._options)
            if self._files.gguf is not None:
                weights = {"dtype": torch.float32}
                fields = {**config.to_dict(), "_name_or_path": str(self._where)}
                require_runnable(read_model(fields, backend="transformers", dtype="float32"))
            model, report = auto_class(config).from_pretrained(
                self._files.folder,
                config=config,
                attn_implementation="eager",
                weights_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **weights,
                **self._options,
            )
        except UnsupportedModelError:
            raise
        except Exception as error:  # broken files make transformers raise any error
            raise ConfigError(f"cannot load the model in {self._where}: {error}") from error
        lacking = sorted(report["missing_keys"]) or sorted(str(one) for one in report["mismatched_keys"])
        if lacking:
            verb = "lacks" if report["missing_keys"] else "has in another shape"
            raise ConfigError(
                f"{self._where} {verb} {len(lacking)} of the weights that its config asks for, the first {lacking[0]}: "
                "save the model there again with save_pretrained"
            )
        loaded: PreTrainedModel = model
        if self._files.gguf is not None:  # the weights are dequantized; else the model could not be saved
            vars(loaded.config).pop("quantization_config", None)
            loaded.hf_quantizer = None
        return loaded

    def tokenizer(self) -> Any:  # noqa: ANN401  # transformers' tokenizers share no typed base
        """Return the tokenizer of the folder."""
        try:
            return AutoTokenizer.from_pretrained(self._files.folder, **self._options)
        except Exception as error:
            raise ConfigError(f"cannot load the tokenizer in {self._where}: {error}") from error

    def processor(self, model: PreTrainedModel) -> tuple[Any, str]:
        """Return the processor of ``model`` and "", or None and the reason. A failure is logged, too."""
        if not hasattr(model, "get_image_features"):
            return None, ""
        if not any((self._files.folder / name).is_file() for name in _PROCESSORS):
            return None, f"its folder has no {' or '.join(_PROCESSORS)}"
        try:
            return AutoProcessor.from_pretrained(self._files.folder, **self._options), ""
        except Exception as error:  # noqa: BLE001 - text, and images that were processed elsewhere, run without it
            why_not = _lacking(error)
            logger.warning("%s takes no pictures here, because its processor cannot be made: %s", self._where, why_not)
            return None, f"it cannot be made here: {why_not}"


def _lacking(error: Exception) -> str:
    """Return why a processor could not be made: the package to install, or the error in one line."""
    said = " ".join(str(error).split())
    missing = [(module, pip) for module, pip in _PICTURE_PACKAGES if find_spec(module) is None]
    lacks = [pip for module, pip in missing if f"the {module.lower()} library" in said.lower()]
    return f"pip install {' '.join(lacks)}" if lacks else said


def wrap(
    model: PreTrainedModel,
    tokenizer: Any = None,  # noqa: ANN401  # transformers' tokenizers share no typed base
    name: str = "model",
    *,
    processor: Any = None,  # noqa: ANN401  # nor do its processors
    share: ModelShare | None = None,
) -> LoadedModel:
    """Make a LoadedModel of a transformers model in memory, and switch the model to evaluation mode.

    Args:
        model: a causal language model, or an encoder-decoder that generates.
        tokenizer: a transformers tokenizer; None if prompts and outputs are token ids.
        name: the model's name in messages.
        processor: for a multimodal model, the processor for prompts with pictures.
        share: of which whole model this is a tensor parallel rank; None for a whole model.

    Raises:
        ConfigError: ``model`` is not a transformers model.
        UnsupportedModelError: its rotary positions depend on the longest request of a batch.
    """
    require_model(model)
    config = model.config.get_text_config()
    scaling: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (scaling, *scaling.values()) if isinstance(one, dict)}
    if wrong := kinds & set(_LENGTH_DEPENDENT_ROPE):
        raise UnsupportedModelError(
            f"{name}: rope_type {wrong.pop()!r} changes the positions of short requests in a batch with a long one, "
            "which paged batches do not support: use a model with another rope_type"
        )
    _warn_of_quantized_cache(model, name)
    return LoadedModel(name, model.eval(), tokenizer, _eos(model), processor, share=share)


def require_model(model: object) -> None:
    """Raise ConfigError unless ``model`` is a PreTrainedModel."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"the model must be a transformers PreTrainedModel, got {type(model).__name__}: give the model inside its "
            "wrapper (torch.compile makes one), or load a folder with hybridkv.runner.load"
        )


def _warn_of_quantized_cache(model: PreTrainedModel, name: str) -> None:
    """Log a warning if the checkpoint asks for a quantized KV cache: pages have the model's dtype."""
    try:
        found = kv_dtype(model.config.to_dict(), name)
        asked = None if found is None else f"its {found.said_by} means {found.name} keys and values"
    except ConfigError as error:
        asked = str(error)
    if asked is not None:
        held = str(model.dtype).removeprefix("torch.")
        logger.warning("%s: %s; the pages hold them in the model's dtype, %s", name, asked, held)


@contextmanager
def own_mode(model: object) -> Iterator[None]:
    """Restore the training mode of the modules of ``model`` at the end: ``wrap`` switches it off."""
    training = [one for one in model.modules() if one.training] if isinstance(model, torch.nn.Module) else []
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _eos(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that end an output; the generation config comes before the config."""
    generation = getattr(model, "generation_config", None)
    for owner in (generation, model.config.get_text_config()):
        found = getattr(owner, "eos_token_id", None)
        if isinstance(found, int):
            return (found,)
        if found:
            return tuple(found)
    return ()


# -- the files of a model


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's folder, and the GGUF file in it; ``gguf`` is ``None`` for a folder with safetensors."""

    folder: Path
    gguf: str | None = None


def files_of(source: str, *, code: bool = False) -> ModelFiles:
    """Return the files of ``source``. ``code``: fetch the Python files of a model on the hub, too.

    Raises ConfigError if nothing is there, if a folder has no model or several GGUF files, or if the packages that read
    a GGUF file are not installed.
    """
    path = Path(source)
    if path.is_dir():
        return _in_folder(path)
    if path.is_file() and path.suffix == _GGUF:
        return _gguf(path)
    if _HUB_NAME.fullmatch(source):
        return _in_folder(_fetched(source, code=code))
    raise ConfigError(
        f"--model {source!r} is neither a folder nor tiny:NAME, nor a {_GGUF} file or a name on the hub: give a "
        f"folder with {CONFIG}"
    )


def _in_folder(folder: Path) -> ModelFiles:
    if (folder / CONFIG).is_file():
        return ModelFiles(folder)
    found = sorted(folder.glob(f"*{_GGUF}"))
    if len(found) > 1:
        raise ConfigError(f"{folder} has {len(found)} {_GGUF} files: name one, such as {found[0]}")
    if not found:
        raise ConfigError(f"{folder} has no {CONFIG} and no {_GGUF} file: give the folder of a Hugging Face model")
    return _gguf(found[0])


def _gguf(path: Path) -> ModelFiles:
    missing = [name for name in _NEEDED_BY_GGUF if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{path} needs the packages {' and '.join(_NEEDED_BY_GGUF)} (missing: {', '.join(missing)}): "
            "pip install 'hybridkv[runner,gguf]'"
        )
    return ModelFiles(path.parent, path.name)


def _fetched(name: str, *, code: bool) -> Path:
    """Return the folder of ``name`` in the hub's cache. Missing files are downloaded if there is a network."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415  # only a name on the hub needs it

    try:
        return Path(snapshot_download(name, allow_patterns=[*_DATA, *([_CODE] if code else [])]))
    except Exception as error:  # the hub's client raises many errors, each of which is the reason
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"--model {name!r} is neither a folder nor tiny:NAME, and as a name on the hub it is not in the local "
            f"cache and cannot be fetched: {why}"
        ) from error


# -- a folder before transformers reads it


def require_plain_weights(folder: Path) -> None:
    """Raise ConfigError unless ``folder`` has safetensors, and all weights that it names are such files in it."""
    if not any(folder.glob(f"*{_WEIGHTS}")):
        raise ConfigError(f"{folder} has no *.safetensors: save the model there with save_pretrained")
    _require_weights(folder / CONFIG, read_json_file(folder / CONFIG, "object").get("transformers_weights"))
    for index in filter(Path.is_file, folder.glob(_INDEX)):
        shards = read_json_file(index, "object").get("weight_map")
        if not isinstance(shards, dict):
            raise ConfigError(f"weight_map in {index} must be an object: save the model as safetensors again")
        for shard in shards.values():
            _require_weights(index, shard)


def _require_weights(where: Path, name: object) -> None:
    """Raise ConfigError unless ``name`` is a file of weights in its folder, an index of them, or None."""
    if name is None:
        return
    plain = isinstance(name, str) and not PurePath(name).is_absolute() and ".." not in PurePath(name).parts
    if not plain or not str(name).endswith((_WEIGHTS, _INDEX.removeprefix("*"))):
        raise ConfigError(
            f"{where} names {name!r} as weights, which is not a safetensors file in its folder: save the model there "
            "as safetensors"
        )


def require_no_code(folder: Path) -> None:
    """Raise ConfigError if only code of the folder makes its tokenizer, or if its tokenizer class is no tokenizer.

    Code that the folder has for a config or a model of a known type does not matter: transformers uses its own.
    """
    settings = read_json_file(folder / _TOKENIZER, "object") if (folder / _TOKENIZER).is_file() else {}
    known = False
    for where, values in ((_TOKENIZER, settings), (CONFIG, read_json_file(folder / CONFIG, "object"))):
        name = values.get("tokenizer_class")
        if name is None:
            continue
        found = _tokenizer_class(name)
        if found is not None and not (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
            raise ConfigError(f"tokenizer_class {name!r} in {folder / where} is not a tokenizer class: correct it")
        known = known or (where == _TOKENIZER and found is not None)
    code = settings.get("auto_map")
    if isinstance(code, Mapping):
        code = code.get("AutoTokenizer")
    if code is not None and not known:
        raise ConfigError(
            f"the tokenizer in {folder} needs Python code of that folder, which does not run by default: read the "
            "code, and if you trust it, give --trust-remote-code (trust_remote_code=True)"
        )


def _tokenizer_class(name: object) -> object:
    """Return the object that transformers has for ``name``; None for an unknown name, False if it is not a text."""
    if not isinstance(name, str):
        return False
    names = (name, name.removesuffix("Fast"), f"{name}Fast")
    return next((found for one in names if (found := tokenizer_class_from_name(one)) is not None), None)
