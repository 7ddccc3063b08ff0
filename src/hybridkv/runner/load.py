"""A model and its tokenizer: from a folder with safetensors, a GGUF file, the hub, or a tiny random one."""

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
from hybridkv.models.json_text import DocumentError, read_json
from hybridkv.models.quantization import kv_dtype
from hybridkv.regular_files import open_regular
from hybridkv.runner.model_call import auto_class
from hybridkv.runner.probe import require_runnable
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
    """What generates. name: as it was asked for. tokenizer: a transformers tokenizer, None for ids only.

    eos_token_ids: what ends an output, from the generation config or the config.
    processor: makes token ids and pixels of a text and its pictures, as those of transformers do; None without.
    no_processor: why, where that is known.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    processor: Any = None
    no_processor: str = ""

    def __post_init__(self) -> None:
        check_fields(self, text, "name")
        require_model(self.model)
        missing = [one for one in ("encode", "decode") if not callable(getattr(self.tokenizer, one, None))]
        if self.tokenizer is not None and missing:
            raise ConfigError(f"the tokenizer must have {' and '.join(missing)}, got {shown(self.tokenizer)}")
        check_fields(self, each(integer), "eos_token_ids")
        if self.processor is not None and not callable(self.processor):
            raise ConfigError(f"the processor must take a text and its pictures, got {shown(self.processor)}")

    @property
    def decoder_start(self) -> list[int]:
        """The token that a decoder begins with where its prompt is empty. ConfigError where the model names none."""
        for owner in (getattr(self.model, "generation_config", None), self.model.config):
            if isinstance(found := getattr(owner, "decoder_start_token_id", None), int):
                return [found]
        raise ConfigError(f"{self.name} names no decoder_start_token_id: give the decoder's prompt")

    @property
    def vocab_size(self) -> int:
        """Token ids lie below it."""
        size: int = self.model.get_input_embeddings().num_embeddings
        return size


def load(
    source: str | Path, *, seed: int = 0, device: torch.device | str = "cpu", trust_remote_code: bool = False
) -> LoadedModel:
    """``tiny:NAME`` (weights from ``seed``), a folder with config.json, safetensors and a tokenizer, or a GGUF file.

    A GGUF file, or a folder with nothing else, needs gguf and accelerate; its weights are dequantized, to float32.
    ORG/NAME, where no such folder is, is a name on the hub: its data is fetched to the hub's local cache, or found
    there without a network. Nothing else is downloaded.
    trust_remote_code: run the Python code in the folder that its config or tokenizer names; else none ever runs, and a
    tokenizer that is such code is refused.
    The processor of a multimodal model's folder comes along, where what it needs (pillow, torchvision) is installed.
    Raises ConfigError for what cannot be loaded, UnsupportedModelError for a model that the planner refuses (before its
    weights are read) or whose positions depend on what runs beside it.
    """
    trust_remote_code = flag("trust_remote_code", trust_remote_code)
    source = str(source) if isinstance(source, Path) else instance("the model", source, str)
    where = _device(device)
    if source.startswith(TINY):
        return wrap(tiny_model(source.removeprefix(TINY), seed).to(where), byte_tokenizer(), source)
    files = files_of(source, code=trust_remote_code)
    if files.gguf is None:
        # of any dtype: the model's own is that of its weights, which are not read yet
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
    """A device that holds tensors. ConfigError for any other."""
    try:
        device = torch.device(given)  # type: ignore[call-overload]  # whatever it is, torch judges it
        torch.empty(1, device=device).cpu()
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"device {shown(given)} cannot hold a model: {why}") from error
    return cast("torch.device", device)


class _Reading:
    """transformers reads ``files``: these and no others."""

    def __init__(self, files: ModelFiles, *, trust_remote_code: bool) -> None:
        self._files, self._where = files, files.folder if files.gguf is None else files.folder / files.gguf
        self._options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        if files.gguf is not None:
            self._options["gguf_file"] = files.gguf

    def model(self) -> PreTrainedModel:
        """The model, every weight from its files: transformers itself would make up those that lack."""
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
        except Exception as error:  # whatever files make transformers raise is what is wrong with them
            raise ConfigError(f"cannot load the model in {self._where}: {error}") from error
        lacking = sorted(report["missing_keys"]) or sorted(str(one) for one in report["mismatched_keys"])
        if lacking:
            what = "lacks" if report["missing_keys"] else "has in another shape"
            raise ConfigError(
                f"{self._where} {what} {len(lacking)} of the weights that its config asks for, the first {lacking[0]}: "
                "save the model there again"
            )
        loaded: PreTrainedModel = model
        if self._files.gguf is not None:  # dequantized: plain weights from here on, which can be saved
            vars(loaded.config).pop("quantization_config", None)
            loaded.hf_quantizer = None
        return loaded

    def tokenizer(self) -> Any:  # noqa: ANN401  # transformers' tokenizers share no typed base
        """The tokenizer that is there."""
        try:
            return AutoTokenizer.from_pretrained(self._files.folder, **self._options)
        except Exception as error:
            raise ConfigError(f"cannot load the tokenizer in {self._where}: {error}") from error

    def processor(self, model: PreTrainedModel) -> tuple[Any, str]:
        """Of ``model``, if it takes images and its folder has one; else None, and why (said in the log, too)."""
        if not hasattr(model, "get_image_features"):
            return None, ""
        if not any((self._files.folder / name).is_file() for name in _PROCESSORS):
            return None, f"its folder has no {' or '.join(_PROCESSORS)}"
        try:
            return AutoProcessor.from_pretrained(self._files.folder, **self._options), ""
        except Exception as error:  # noqa: BLE001 - its text runs without, and images that were processed elsewhere
            why_not = _lacking(error)
            logger.warning("%s: no pictures, its processor cannot be made here: %s", self._where, why_not)
            return None, f"it cannot be made here: {why_not}"


def _lacking(error: Exception) -> str:
    """What stopped a processor: the package that is missing, or the error itself in one line."""
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
) -> LoadedModel:
    """A LoadedModel of a model at hand, which trains no longer: causal, or an encoder and a decoder that generate.

    processor: of a multimodal model, for prompts with pictures.

    Raises ConfigError for what is no such model, and UnsupportedModelError when its rotary positions depend on the
    longest request of a batch.
    """
    require_model(model)
    config = model.config.get_text_config()
    scaling: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (scaling, *scaling.values()) if isinstance(one, dict)}
    if wrong := kinds & set(_LENGTH_DEPENDENT_ROPE):
        raise UnsupportedModelError(
            f"{name}: rope_type {wrong.pop()!r} changes the positions of short requests when a long one runs beside "
            "them: not supported yet"
        )
    _tell_of_quantized_cache(model, name)
    return LoadedModel(name, model.eval(), tokenizer, _eos(model), processor)


def require_model(model: object) -> None:
    """Raise ConfigError for what is no model of transformers."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"the model must be a transformers PreTrainedModel, got {type(model).__name__}: give the model that a "
            "wrapper or torch.compile has inside, or load a folder with hybridkv.runner.load"
        )


def _tell_of_quantized_cache(model: PreTrainedModel, name: str) -> None:
    """A warning in the log where the checkpoint has a quantized KV cache: pages hold what the model computes."""
    try:
        found = kv_dtype(model.config.to_dict(), name)
        asked = None if found is None else f"its {found.said_by} means {found.name} keys and values"
    except ConfigError as error:
        asked = str(error)
    if asked is not None:
        held = str(model.dtype).removeprefix("torch.")
        logger.warning("%s: %s; here they are kept as the model computes them, in %s", name, asked, held)


@contextmanager
def own_mode(model: object) -> Iterator[None]:
    """On leaving, those modules train of a model in hand that did before: ``wrap`` ends that."""
    training = [one for one in model.modules() if one.training] if isinstance(model, torch.nn.Module) else []
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _eos(model: PreTrainedModel) -> tuple[int, ...]:
    """End tokens: one id or several; those of the generation config come first."""
    generation = getattr(model, "generation_config", None)
    for owner in (generation, model.config.get_text_config()):
        found = getattr(owner, "eos_token_id", None)
        if isinstance(found, int):
            return (found,)
        if found:
            return tuple(found)
    return ()


# -- which files a model is read from


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A folder, and the GGUF file in it that the model is; None where it is the folder itself."""

    folder: Path
    gguf: str | None = None


def files_of(source: str, *, code: bool = False) -> ModelFiles:
    """The files of ``source``. code: fetch Python files of a hub's folder, too.

    Raises ConfigError for what is nowhere, for a folder that holds no model or several GGUF files, and for a GGUF file
    where what reads it is not installed.
    """
    path = Path(source)
    if path.is_dir():
        return _in_folder(path)
    if path.is_file() and path.suffix == _GGUF:
        return _gguf(path)
    if _HUB_NAME.fullmatch(source):
        return _in_folder(_fetched(source, code=code))
    raise ConfigError(
        f"--model {source!r} is neither a folder nor tiny:NAME, nor a {_GGUF} file or a name on the hub: give a folder "
        f"with {CONFIG}"
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
            f"{path} is read by {' and '.join(_NEEDED_BY_GGUF)} (missing: {', '.join(missing)}): "
            "pip install 'hybridkv[runner,gguf]'"
        )
    return ModelFiles(path.parent, path.name)


def _fetched(name: str, *, code: bool) -> Path:
    """The folder of ``name`` in the hub's cache, its files fetched where there is a network."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415  # only a name on the hub needs it

    try:
        return Path(snapshot_download(name, allow_patterns=[*_DATA, *([_CODE] if code else [])]))
    except Exception as error:  # whatever the hub's client raises is why the model is not there
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"--model {name!r} is neither a folder nor tiny:NAME, and as a name on the hub it is neither in the local "
            f"cache nor can it be fetched: {why}"
        ) from error


# -- a folder before transformers reads it


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
