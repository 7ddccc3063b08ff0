"""Every call of every store of blocks with values of wrong kinds: named errors, and the store goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wrong_values import unnamed_errors

from hybridkv.stores import BlockStore, DiskStore, MemoryStore, SharedStore, open_store
from hybridkv.stores.folder_client import FolderClient

DISK: dict[str, Any] = {"max_bytes": 1 << 20, "identity": b"model", "block_bytes": [4096]}


def more_values() -> dict[str, Any]:
    """Keys and buffers at their edges."""
    return {
        "64 bytes": [b"k" * 64],
        "65 bytes": [b"k" * 65],
        "no bytes": [b""],
        "2 keys": [b"k", b"l"],
        "a view": memoryview(bytearray(4)),
        "2 views": [memoryview(bytearray(4)), memoryview(bytearray(4))],
        "a constant": [memoryview(bytes(4))],
        "every other byte": [memoryview(bytearray(8))[::2]],
        "bytearray": [bytearray(4)],
        "0-d view": [np.array(3).data],
        "2-d view": [np.zeros((2, 2)).data],
        "objects": [np.array([None], object)],
        "a large buffer": [memoryview(bytearray(5000))],
    }


def opened(kind: str, folder: Path) -> BlockStore:
    if kind == "shared":
        return open_store(f"file://{folder}?timeout_s=20")
    return MemoryStore(1000) if kind == "memory" else DiskStore(folder, **DISK)


@pytest.mark.parametrize("kind", ["memory", "disk", "shared"])
def test_wrong_type_for_a_store_call_is_accepted_or_rejected_by_name(tmp_path: Path, kind: str) -> None:
    store, view = opened(kind, tmp_path), memoryview(bytearray(4))
    calls: list[tuple[Callable[..., object], dict[str, Any]]] = [
        (store.exists, {"keys": [b"k"]}),
        (store.get, {"keys": [b"k"], "into": [view]}),
        (store.put, {"keys": [b"k"], "blocks": [view]}),
    ]
    if isinstance(store, MemoryStore | DiskStore):
        calls.append((store.remove, {"keys": [b"k"]}))
    for call, arguments in calls:
        assert unnamed_errors(call, arguments, more_values) == [], call
    assert store.put([b"good"], [memoryview(b"good")]) == [True]
    assert store.get([b"good"], [view]) == [True]
    assert bytes(view) == b"good"
    store.close()


def test_wrong_type_for_a_store_is_rejected(tmp_path: Path) -> None:
    assert unnamed_errors(MemoryStore, {"max_bytes": 1000}) == []
    client = FolderClient(f"file://{tmp_path}")
    assert unnamed_errors(SharedStore, {"client": client, "timeout_s": 1.0, "max_block_bytes": 9}) == []
    assert unnamed_errors(open_store, {"url": f"file://{tmp_path}"}) == []
    number = 0

    def disk(**arguments: Any) -> None:  # noqa: ANN401 - of wrong types
        nonlocal number
        number += 1
        DiskStore(**{"path": tmp_path / str(number), **arguments}).close()

    assert unnamed_errors(disk, DISK) == []
