"""Text as token ids, for traces that hold text: by a tokenizer's file, or four bytes a token where none is at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.units import shown

Encoder = Callable[[str], NDArray[np.int32]]
"""text -> token ids, int32[n], without special tokens."""

BY_BYTES: Final = "bytes:"
_MOST_BYTES: Final = 4
_FILE: Final = "tokenizer.json"


def encoder_named(name: str) -> Encoder:
    """``bytes:N`` makes a token of every N bytes of UTF-8, 1 to 4; anything else names a tokenizer.json or its folder.

    ConfigError for what is none of these, and where the tokenizers library is missing.
    """
    if name.startswith(BY_BYTES):
        digits = name.removeprefix(BY_BYTES)
        if digits not in {str(one) for one in range(1, _MOST_BYTES + 1)}:
            raise ConfigError(f"tokenizer {shown(name)}: say bytes:1 to bytes:{_MOST_BYTES}")
        return _bytes_encoder(int(digits))
    path = Path(name)
    path = path / _FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"no tokenizer at {path}: name a {_FILE}, a folder with one, or bytes:4 (four bytes a token)")
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  # an extra
    except ImportError:
        raise ConfigError("reading text needs tokenizers: pip install 'hybridkv[traces]', or say bytes:4") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  # the library raises nothing narrower
        raise ConfigError(f"{path} is no tokenizer that can be read: {error}") from None
    return lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def _bytes_encoder(size: int) -> Encoder:
    def encode(text: str) -> NDArray[np.int32]:
        raw = text.encode(errors="surrogatepass")
        columns = np.zeros((-(-len(raw) // size), _MOST_BYTES), np.uint8)
        padded = np.frombuffer(raw + bytes(-len(raw) % size), np.uint8)
        columns[:, :size] = padded.reshape(-1, size)
        return columns.view("<i4").astype(np.int32).ravel()

    return encode
