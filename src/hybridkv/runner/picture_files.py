"""Pictures that somebody names: files, and data: URLs. Nothing is fetched from a network.

    sunset.png        file:///home/me/sunset.png        data:image/png;base64,iVBORw0KGgo...

What is named may come from anybody: only regular files are read, up to a size, in formats that pillow decodes by
itself (an EPS file, say, would be run), and a picture that would fill the memory is refused before it is decoded.
"""

from __future__ import annotations

import binascii
import io
import os
import re
import warnings
from base64 import b64decode
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import torch

from hybridkv.errors import ConfigError
from hybridkv.regular_files import open_regular
from hybridkv.units import format_bytes, shown

FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
MOST_BYTES: Final = 64 << 20
"""Of a picture as it is stored."""
MOST_PIXELS: Final = 1 << 26
"""Of a picture, which takes 3 bytes each once it is decoded: 192 MiB."""

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters at least: one is a drive
_DATA: Final = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


def open_picture(named: str, folder: Path | None) -> Any:  # noqa: ANN401  # pillow is optional, its types with it
    """The picture that ``named`` says, decoded: a pillow image, upright, in RGB.

    folder: where a relative path begins; None: no files are read, as is right for what strangers ask.
    Raises ConfigError for anything but a file or a data: URL, for files that cannot be read or are no pictures of
    FORMATS, for too large ones, and without pillow. O(pixels).
    """
    what, scheme = shown(named), _SCHEME.match(named)
    kind = "file" if scheme is None else scheme[1].lower()
    if kind == "data":
        return _decoded(_of_data(named, what), what)
    if kind != "file":
        raise ConfigError(f"picture {what} is not fetched: save it, and name the file, or give it as a data: URL")
    if folder is None:
        raise ConfigError(f"picture {what} is a file, and none is read here: give it as a data: URL")
    return _decoded(_of_file(folder / (named if scheme is None else _path_of(named, what)), what), what)


def is_picture(given: object) -> bool:
    """Whether it is a picture in hand: what names one, in whatever it is wrapped, is opened by open_picture alone."""
    if isinstance(given, np.ndarray | torch.Tensor):
        return True
    return any((one.__module__, one.__name__) == ("PIL.Image", "Image") for one in type(given).__mro__)


def require_pillow() -> None:
    """Raise ConfigError where it is not installed."""
    try:
        import PIL  # noqa: F401, PLC0415  # optional
    except ImportError as error:
        raise ConfigError("pictures need pillow: pip install 'hybridkv[images]'") from error


def _path_of(url: str, what: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"}:
        raise ConfigError(f"picture {what} is on another machine: a file: URL begins with file:///")
    return url2pathname(parts.path)


def _of_file(path: Path, what: str) -> bytes:
    try:
        with open_regular(path) as file:
            size, octets = os.fstat(file.fileno()).st_size, file.read(MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read picture {what}: {error.strerror or error}") from error
    if size > MOST_BYTES:
        raise ConfigError(f"picture {what} has {format_bytes(size)}, more than {format_bytes(MOST_BYTES)}")
    return octets


def _of_data(url: str, what: str) -> bytes:
    begin = _DATA.match(url)
    if begin is None:
        raise ConfigError(f"picture {what} must begin like data:image/png;base64,")
    if len(url) > MOST_BYTES * 4 // 3:
        raise ConfigError(f"picture {what} has {format_bytes(len(url))}, more than {format_bytes(MOST_BYTES * 4 // 3)}")
    try:
        return b64decode(url[begin.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"picture {what} is no base64: {error}") from error


def _require_pixels(size: tuple[int, int], what: str) -> None:
    """ConfigError for a picture that is large when decoded, whatever bound the application has set in pillow."""
    width, height = size
    if width * height > MOST_PIXELS:
        raise ConfigError(
            f"picture {what} has {width} x {height} pixels, more than {MOST_PIXELS:,}: give it in a smaller size"
        )


def _decoded(octets: bytes, what: str) -> Any:  # noqa: ANN401  # see open_picture
    require_pillow()
    from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415  # optional

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(octets), formats=FORMATS) as picture:  # reads the header alone
                _require_pixels(picture.size, what)
                return ImageOps.exif_transpose(picture).convert("RGB")
    except ConfigError:
        raise
    except UnidentifiedImageError as error:
        raise ConfigError(f"picture {what} is none of {', '.join(FORMATS)}") from error
    except Exception as error:  # broken files make decoders raise anything
        raise ConfigError(f"cannot decode picture {what}: {error}") from error
