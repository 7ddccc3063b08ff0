"""Stores to open: what a user chooses before the layout of the blocks is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

from hybridkv.arguments import check_types, each, text
from hybridkv.errors import ConfigError
from hybridkv.stores.disk import DiskStore
from hybridkv.stores.disk_folders import DiskFolders
from hybridkv.stores.disk_view import DiskView
from hybridkv.stores.shared import SharedStore
from hybridkv.stores.store import BlockStore
from hybridkv.stores.url import open_store
from hybridkv.units import parse_bytes, shown


class StoreChoice(Protocol):
    """A store to open.

    Attributes:
        looks_up_at_once: Whether its look-ups are quick enough to run between two steps.
    """

    @property
    def looks_up_at_once(self) -> bool:
        """As above."""
        ...

    def open(self, identity: bytes, block_bytes: Sequence[int]) -> BlockStore:
        """Open the store.

        Args:
            identity: A hash of all that gives a block's bytes their meaning.
            block_bytes: The sizes of blocks.

        Raises:
            ConfigError: The store cannot be opened.
        """
        ...


def _path(name: str, value: object) -> str | Path:
    return value if isinstance(value, Path) else text(name, value)


def _size(name: str, value: object) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"{name} must be a number of bytes or a size like '100GiB', got {shown(value)}")
    parse_bytes(value)
    return value


@dataclass(frozen=True, slots=True)
class DiskFolder:
    """A DiskStore to open.

    Attributes:
        path: A folder, which is made if it is missing. One engine at a time uses it; each of its tensor parallel ranks
            but the first has a folder inside.
        memory: Most bytes of the file of each rank, or a size like ``"100GiB"``. All of them are reserved.
        others: Folders of other engines of this machine, with as much memory each. They are only read.
        looks_up_at_once: Whether its index is in memory, as it is without others.

    Raises:
        ConfigError: ``memory`` is no size.
    """

    path: Annotated[str | Path, _path]
    memory: Annotated[str | int, _size]
    others: Annotated[tuple[str | Path, ...], each(_path)] = ()

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def looks_up_at_once(self) -> bool:
        """Whether its index is in memory, as it is without others."""
        return not self.others

    def of_rank(self, rank: int, ranks: int) -> DiskFolder:
        """Return the folder of a tensor parallel rank, which reads those of the others; rank 0 has ``path``.

        Args:
            rank: Number of the rank, from 0.
            ranks: How many there are.
        """
        names = ["", *(f"rank-{number}" for number in range(1, ranks))]
        folders = [Path(of, name) for of in (self.path, *self.others) for name in names]
        return replace(self, path=folders.pop(rank), others=tuple(folders))

    def open(self, identity: bytes, block_bytes: Sequence[int]) -> BlockStore:
        """Open the store.

        Args:
            identity: A hash of all that gives a block's bytes their meaning.
            block_bytes: The sizes of blocks.

        Raises:
            ConfigError: As DiskStore.
        """
        size = parse_bytes(self.memory)
        own = DiskStore(self.path, size, identity, block_bytes)
        views = [partial(DiskView, one, size, identity, block_bytes) for one in self.others]
        return DiskFolders(own, views) if views else own


def _url(name: str, value: object) -> str:
    url = text(name, value)
    open_store(url).close()  # no connection is made
    return url


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A SharedStore to open. Several engines may use it at once.

    Attributes:
        url: A URL of ``open_store``, such as ``"redis://host"`` or ``"file:///folder"``.

    Raises:
        ConfigError: As ``open_store``.
    """

    url: Annotated[str, _url]

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def looks_up_at_once(self) -> bool:
        """False: a look-up may take as long as the network."""
        return False

    def open(self, identity: bytes, block_bytes: Sequence[int]) -> SharedStore:  # noqa: ARG002 - keys have the identity
        """Open the store.

        Args:
            identity: Not read: it is in each key.
            block_bytes: Not read.

        Raises:
            ConfigError: As ``open_store``.
        """
        return open_store(self.url)
