"""Values of a shared store as files of any file system that fsspec reaches: a folder, NFS, S3 and others.

    <folder>/hkv1/<first 2 hex digits>/<hex digits of the key>

A file appears whole: it is written under another name, then renamed. An object store does so by itself. If a file
system does neither, the checksum rejects what is not whole.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError
from hybridkv.stores.shared import Value
from hybridkv.units import MOST_BYTES, shown

if TYPE_CHECKING:
    import fsspec

_NAME: Final = "hkv1"

_WHOLE_PUTS: Final = frozenset(
    ("memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "obs", "tos", "r2")
)
"""Protocols whose objects appear whole, and cannot be renamed without a copy."""

_MISSING: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_REJECTED: Final = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENOENT, errno.EEXIST)
)
"""Errors of a write that say nothing about reads."""

_SWEEP_SHARE: Final = 16
"""The folder is swept after each 1/16 of ``max_bytes`` that this process wrote, down to 15/16."""


class FolderClient:
    """A StoreClient for a folder of a file system, through fsspec.

    Without ``max_bytes``, nothing is evicted: let the object store expire objects. With it, each process sweeps the
    folder now and then, so it may be larger by 1/16 for each process. On a local file system, the files that were not
    used for the longest time go first, elsewhere the oldest.

    Args:
        url: The folder, such as ``file:///mnt/cache`` or ``s3://bucket/cache``. fsspec's configuration has passwords.
        max_bytes: Most bytes of the folder; ``None`` for no limit.

    Raises:
        ConfigError: The URL is wrong, or the package fsspec or the one of its file system is missing.
    """

    def __init__(self, url: str, max_bytes: int | None = None) -> None:
        self._max_bytes = None if max_bytes is None else integer("max_bytes", max_bytes, 1, MOST_BYTES)
        self._files, folder = _file_system(url)
        self._folder = f"{folder.rstrip('/')}/{_NAME}"
        self.name = self._files.unstrip_protocol(folder)
        protocols = {self._files.protocol} if isinstance(self._files.protocol, str) else {*self._files.protocol}
        self._is_local = not protocols.isdisjoint({"file", "local"})
        self._has_whole_puts = not protocols.isdisjoint(_WHOLE_PUTS)
        self._made = set[str]()
        self._lock = threading.Lock()
        self._written = 0
        self._is_swept = True

    def _path(self, key: bytes) -> str:
        digits = key.hex()
        return f"{self._folder}/{digits[:2]}/{digits}"

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether there is a file. On object stores, all are asked at once.

        Args:
            keys: At most 1,024 keys.
        """
        paths = [self._path(key) for key in keys]
        if self._files.async_impl:
            from fsspec.asyn import sync  # noqa: PLC0415 - optional dependency

            return [bool(one) for one in sync(self._files.loop, _gathered, [self._files._exists(at) for at in paths])]
        return [bool(self._files.exists(path)) for path in paths]

    def read(self, keys: Sequence[bytes], lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:  # noqa: ARG002  # as the files have them
        """Yield the values that are there, each with its place in ``keys``. On object stores, all are read at once.

        Args:
            keys: At most 1,024 keys.
            lengths: Not used.
        """
        paths, failed = [self._path(key) for key in keys], list[BaseException]()
        found = self._files.cat([*dict.fromkeys(paths)], on_error="return") if self._files.async_impl else {}
        for number, path in enumerate(paths):
            value = found[path] if found else self._content(path)
            if isinstance(value, bytes):
                if self._is_local and self._max_bytes is not None:
                    with suppress(OSError):
                        os.utime(path)
                yield number, value
            elif not isinstance(value, _MISSING):
                failed.append(value)
        if failed:
            raise failed[0]

    def _content(self, path: str) -> bytes | BaseException:
        try:
            return bytes(self._files.cat_file(path))
        except Exception as error:  # noqa: BLE001 - as fsspec does
            return error

    def write(self, values: Sequence[Value]) -> list[bool]:
        """Write values, and return for each whether it is kept. False: no space, or no permission.

        Args:
            values: At most 1,024 values.
        """
        contents = {self._path(key): b"".join((checksum, block)) for key, checksum, block in values}
        if self._has_whole_puts:
            self._files.pipe(contents)
            kept = dict.fromkeys(contents, True)
        else:
            kept = {path: self._write(path, content) for path, content in contents.items()}
        self._sweep_if_due(sum(len(content) for path, content in contents.items() if kept[path]))
        return [kept[self._path(key)] for key, _, _ in values]

    def _write(self, path: str, content: bytes) -> bool:
        """Write a file under another name, and rename it."""
        new = f"{self._folder}/new/{secrets.token_hex(16)}"
        try:
            for folder in {one.rpartition("/")[0] for one in (new, path)} - self._made:
                self._files.makedirs(folder, exist_ok=True)
                self._made.add(folder)
            self._files.pipe_file(new, content)
            if self._is_local:
                os.replace(new, path)  # noqa: PTH105 - paths of fsspec are text
            else:
                self._files.mv(new, path)
        except OSError as error:
            self._made.clear()  # somebody may have removed a folder
            with suppress(Exception):
                self._files.rm_file(new)
            if error.errno in _REJECTED:
                return False
            raise
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove files.

        Args:
            keys: Keys; some may have no file.
        """
        for key in keys:
            with suppress(*_MISSING):
                self._files.rm_file(self._path(key))

    def close(self) -> None:
        """Do nothing: file systems have no connections of their own."""

    # -- the bound

    def _sweep_if_due(self, written: int) -> None:
        """Sweep the folder on a thread of its own, if enough was written since the last time."""
        if self._max_bytes is None:
            return
        with self._lock:
            self._written += written
            if self._written * _SWEEP_SHARE < self._max_bytes or not self._is_swept:
                return
            self._written, self._is_swept = 0, False
        threading.Thread(target=self._sweep, name="hybridkv sweep", daemon=True).start()

    def _sweep(self) -> None:
        """Remove the files that were not used for the longest time, until the others are within the bound. O(files)."""
        try:
            with suppress(Exception):  # the next sweep tries again
                files = self._files.find(self._folder, detail=True)
                order = sorted(files.items(), key=lambda file: _time_of(file[1]))
                left = sum(info["size"] for info in files.values())
                for path, info in order:
                    if left * _SWEEP_SHARE <= (self._max_bytes or 0) * (_SWEEP_SHARE - 1):
                        break
                    with suppress(*_MISSING):
                        self._files.rm_file(path)
                    left -= info["size"]
        finally:
            with self._lock:
                self._is_swept = True


def _time_of(info: dict[str, Any]) -> Any:  # noqa: ANN401 - a number, a text or a date, but the same in one file system
    """Return when a file was changed."""
    return next(info[name] for name in ("mtime", "LastModified", "last_modified", "updated", "created") if name in info)


async def _gathered(answers: Sequence[Coroutine[Any, Any, bool]]) -> list[bool]:
    """Wait for all answers."""
    import asyncio  # noqa: PLC0415 - fsspec has imported it, and others need not wait for it

    return await asyncio.gather(*answers)


def _file_system(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a URL, and the path there. Listings are not remembered: other processes write, too."""
    shown_url = shown(re.sub("//[^/]*@", "//", url))  # without a password
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        raise ConfigError(f"{shown_url} needs the package fsspec: pip install 'hybridkv[fsspec]'") from error
    try:
        files, folder = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:  # fsspec names the package
        raise ConfigError(f"{shown_url} needs another package: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"no store can be opened in {shown_url} ({error}): write file:///folder, or s3://bucket/folder"
        ) from error
    return files, folder
