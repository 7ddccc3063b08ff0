"""Pictures named by a user: files, and data: URLs. Nothing is fetched from a network.

    sunset.png        file:///home/me/sunset.png        data:image/png;base64,iVBORw0KGgo...

A name may come from any client. So only regular files are read, up to a maximum size, in formats that pillow decodes
itself (it would run an EPS file, for example). A picture that would fill the memory is rejected before it is decoded.
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
"""The largest encoded picture."""
MOST_PIXELS: Final = 1 << 26
"""The largest decoded picture: 192 MiB at 3 bytes a pixel."""

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # at least two letters: one is a drive of Windows
_DATA: Final = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


def open_picture(named: str, folder: Path | None) -> Any:  # noqa: ANN401  # pillow is optional, its types with it
    """Return the picture ``named``, decoded: a pillow image, upright, in RGB. O(pixels).

    ``folder`` is where a relative path begins. None means that no file is read, which is right for requests of clients.
    Raises ConfigError for any other URL, for a file that cannot be read, is too large or is not a picture of FORMATS,
    and if pillow is not installed.
    """
    what, scheme = shown(named), _SCHEME.match(named)
    kind = "file" if scheme is None else scheme[1].lower()
    if kind == "data":
        return _decoded(_of_data(named, what), what)
    if kind != "file":
        raise ConfigError(f"picture {what} is not fetched: save it and name the file, or give it as a data: URL")
    if folder is None:
        raise ConfigError(f"picture {what} is a file, which is not read here: give it as a data: URL")
    return _decoded(_of_file(folder / (named if scheme is None else _path_of(named, what)), what), what)


def is_picture(given: object) -> bool:
    """Return whether ``given`` is a decoded picture. Anything that names a picture must go through ``open_picture``."""
    if isinstance(given, np.ndarray | torch.Tensor):
        return True
    return any((one.__module__, one.__name__) == ("PIL.Image", "Image") for one in type(given).__mro__)


def require_pillow() -> None:
    """Raise ConfigError if pillow is not installed."""
    try:
        import PIL  # noqa: F401, PLC0415  # optional
    except ImportError as error:
        raise ConfigError("pictures need pillow: pip install 'hybridkv[images]'") from error


def _path_of(url: str, what: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"}:
        raise ConfigError(f"picture {what} is on another machine: use a file: URL that begins with file:///")
    return url2pathname(parts.path)


def _of_file(path: Path, what: str) -> bytes:
    try:
        with open_regular(path) as file:
            size, octets = os.fstat(file.fileno()).st_size, file.read(MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read picture {what}: {error.strerror or error}") from error
    if size > MOST_BYTES:
        raise ConfigError(
            f"picture {what} has {format_bytes(size)}, more than {format_bytes(MOST_BYTES)}: give a smaller one"
        )
    return octets


def _of_data(url: str, what: str) -> bytes:
    begin = _DATA.match(url)
    if begin is None:
        raise ConfigError(f"picture {what} must begin like data:image/png;base64,")
    if len(url) > MOST_BYTES * 4 // 3:
        most = format_bytes(MOST_BYTES * 4 // 3)
        raise ConfigError(f"picture {what} has {format_bytes(len(url))}, more than {most}: give a smaller one")
    try:
        return b64decode(url[begin.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"picture {what} is not valid base64: {error}") from error


def _require_pixels(size: tuple[int, int], what: str) -> None:
    """Raise ConfigError for a picture with too many pixels. The limit of the application in pillow does not count."""
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
        raise ConfigError(f"picture {what} is in an unknown format: save it as one of {', '.join(FORMATS)}") from error
    except Exception as error:  # broken files make decoders raise any error
        raise ConfigError(f"cannot decode picture {what}: {error}") from error
