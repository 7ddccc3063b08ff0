"""The file of a session: tensors by name, and a manifest that is checked before anything of it is used.

The manifest has the SHA-256 of each tensor. The SHA-256 of the manifest, or the HMAC of a key, lies beside it. So a
changed bit anywhere is found (docs/design/0040).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hybridkv.arguments import instance
from hybridkv.errors import ConfigError, SchemaError, SessionError
from hybridkv.regular_files import open_regular, write_whole
from hybridkv.runner.identity import bits_of
from hybridkv.units import shown
from hybridkv.worker.ranks import Run, Split

FORMAT: Final = 1
"""Version of the file. It changes when a tensor gets another meaning."""
TOKENS: Final = "tokens"
_MANIFEST, _SUM, _HMAC = "hybridkv.session", "sha256", "hmac_sha256"

Manifest = dict[str, Any]


def write_session(
    path: Path,
    manifest: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    described: Mapping[str, Mapping[str, Any]],
    key: bytes | None,
) -> int:
    """Write a session, as a whole or not at all. O(bytes).

    Args:
        path: the file.
        manifest: its fields, without those of tensors, and without the format.
        tensors: the tensors by name.
        described: fields of the manifest for each tensor.
        key: signs the file; None for no signature.

    Returns:
        Bytes of the file.
    """
    entries = {name: {**described[name], "sha256": _sum_of(tensor)} for name, tensor in tensors.items()}
    made = {"format": FORMAT, "library": version("hybridkv"), **manifest, "tensors": entries}
    text = json.dumps(made, sort_keys=True)
    metadata = {_MANIFEST: text, _SUM: hashlib.sha256(text.encode()).hexdigest()}
    if key is not None:
        metadata[_HMAC] = _signature(key, text)
    content = save(dict(tensors), metadata)
    write_whole(path, content)
    return len(content)


def read_session(
    path: Path, key: bytes | None, check: Callable[[Manifest], None]
) -> tuple[Manifest, dict[str, torch.Tensor], int]:
    """Read a session and check its sums. O(bytes).

    Args:
        path: the file.
        key: the key with which it was signed; None if it is not signed.
        check: called with the manifest before any tensor is read.

    Returns:
        The manifest, the tensors by name, and the bytes of the file.

    Raises:
        SessionError: the file is damaged, or is signed otherwise.
        SchemaError: it has another format.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        num_bytes = file.seek(0, 2)
    try:
        with safe_open(path, framework="pt") as opened:
            manifest = _manifest(opened.metadata(), key)
            check(manifest)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as error:
        raise SessionError(f"{path} is no whole safetensors file: export the session again ({error})") from error
    described = manifest["tensors"]
    require_names(described.keys(), tensors.keys())
    for name, tensor in tensors.items():
        if _sum_of(tensor) != described[name].get("sha256"):
            raise SessionError(f"tensor {name!r} of the session is damaged: copy the file again, or export it again")
    return manifest, tensors, num_bytes


def require_names(expected: Any, names: Any) -> None:  # noqa: ANN401  # sets of names
    """Raise SessionError unless a session has exactly the expected tensors."""
    if missing := sorted(set(expected) ^ set(names)):
        raise SessionError(f"the session has no tensor {missing[0]!r}, or should not: export it again")


def split_in(described: Mapping[str, Any], name: str) -> Split:
    """Return how ranks share a tensor, as the manifest says it.

    Args:
        described: its entry in the manifest.
        name: its name.

    Raises:
        SessionError: the manifest does not say it.
    """
    match described.get("split"):
        case [int(axis), [*runs]] if axis < 0 and all(
            isinstance(run, list) and len(run) == 2 and all(type(one) is int and one > 0 for one in run) for run in runs
        ):
            return Split(axis, tuple(Run(*run) for run in runs))
    raise SessionError(
        f"the session does not say how ranks share tensor {name!r}: import it into an engine with as many ranks "
        "as that of its export"
    )


def checked_path(name: str, path: object) -> Path:
    """Return ``path``, the argument ``name``. Raises ConfigError unless it is a str or a path."""
    if not isinstance(path, str | PathLike) or "\0" in str(path):
        raise ConfigError(f"{name} must be the path of a file, got {shown(path)}: give a str or a Path")
    return Path(path)


def checked_key(key: bytes | None) -> bytes | None:
    """Return ``key``. Raises ConfigError unless it is None, or bytes and not empty."""
    if key is not None and not instance("key", key, bytes):
        raise ConfigError("key must not be empty: give secret bytes, or None for a file that is not signed")
    return key


def _manifest(metadata: Mapping[str, str] | None, key: bytes | None) -> dict[str, Any]:
    """Return the manifest of a file after checking its sum and signature."""
    found = dict(metadata or {})
    text, said, signed = found.pop(_MANIFEST, None), found.pop(_SUM, None), found.pop(_HMAC, None)
    if text is None or said is None or found:
        raise SessionError("the file has no manifest of a session, or another one: export the session again")
    if not hmac.compare_digest(hashlib.sha256(text.encode()).hexdigest().encode(), said.encode()):
        raise SessionError("the manifest of the session is damaged: copy the file again, or export it again")
    if (key is None) != (signed is None):
        raise SessionError(
            "the session is signed: give its key" if key is None else "the session is not signed: leave the key out"
        )
    if key is not None and not hmac.compare_digest(_signature(key, text).encode(), str(signed).encode()):
        raise SessionError("the session is signed with another key, or was changed: give the key of its export")
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise SessionError(f"the manifest of the session is no JSON: export the session again ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        made = manifest.get("library") if isinstance(manifest, dict) else None
        raise SchemaError(
            f"the session has another format than {FORMAT}: import it with hybridkv {shown(made)}, which made it"
        )
    tensors, salt = manifest.get("tensors"), manifest.get("cache_salt")
    if (
        not isinstance(tensors, dict)
        or not all(isinstance(one, dict) for one in tensors.values())
        or type(manifest.get("resume_tokens")) is not int
        or type(manifest.get("note")) is not str
        or not (salt is None or (isinstance(salt, str) and salt))
    ):
        raise SessionError("the manifest of the session lacks a field: export the session again")
    return manifest


def _signature(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _sum_of(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor: dtype, shape and bytes."""
    made = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    made.update(bits_of(tensor.contiguous().reshape(-1)).numpy().data)
    return made.hexdigest()
