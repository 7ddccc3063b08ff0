"""Files at paths that users give: only regular files are read, without waiting; files are written as a whole."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO


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
    raise OSError(errno.EINVAL, "not a regular file: save its content to a file, and give that path", str(path))


def _open_now(path: str, flags: int) -> int:
    """Open a pipe without a wait for its writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))  # Windows has neither


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file next to ``path``, which replaces ``path`` at the end. After an error it is removed."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` to the file at ``path``. OSError without space or permission."""
    with written_whole(path) as file:
        file.write(content)
