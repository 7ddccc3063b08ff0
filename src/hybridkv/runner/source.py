"""Where a model is: a folder, a GGUF file, or a name on the hub: in its local cache, or fetched there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from hybridkv.errors import ConfigError
from hybridkv.runner.folder import CONFIG

_GGUF: Final = ".gguf"
_NEEDED_BY_GGUF: Final = ("gguf", "accelerate")
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DATA: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_CODE: Final = "*.py"


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
