"""Opens files whose paths users give: regular files alone, and never with a wait."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: str | Path) -> BufferedReader:
    """Open the regular file at ``path`` for reading.

    A named pipe would wait for a writer and a device may never end, so both are refused without reading them.
    Raises OSError if ``path`` is a pipe, a device, a socket or a folder, or if it cannot be opened.
    """
    try:
        file = open(path, "rb", opener=_open_now)  # noqa: SIM115  # Path.open takes no opener
    except ValueError as error:  # a null character, or one that file names cannot have
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "not a regular file: save what it gives to a file, and name that", str(path))


def _open_now(path: str, flags: int) -> int:
    """Open a pipe without a wait for its writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))  # Windows has neither
