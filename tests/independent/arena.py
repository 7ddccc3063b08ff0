"""Memory by the byte: every layer's pages where the plan puts them, on every context parallel rank.

Nothing here knows which block holds what: whoever writes over a live block, of whatever group, destroys it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from content import Digests, demand, digest
from numpy.typing import NDArray

from hybridkv.planner import KVCacheConfig
from hybridkv.specs import Keeps, KVCacheSpec

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layer:
    """Where a layer's pages lie. item_bytes: of a token, or of a state. tint: tells its content from other layers'."""

    name: str
    group: int
    spec: KVCacheSpec
    offset: int
    stride: int
    parts: int
    item_bytes: int
    tint: np.uint64


def layers_of(config: KVCacheConfig) -> list[Layer]:
    """All layers that keep anything."""
    tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
    layers = []
    for number, group in enumerate(config.groups):
        parts = 1 if config.slabs is None else config.slabs.kernel_blocks[number]
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
            if spec.keeps is Keeps.NOTHING:
                continue
            items = 1 if spec.keeps is Keeps.STATE else spec.block_size
            tensor = tensors[name]
            place = tensor.offset_bytes, tensor.block_stride_bytes, parts, spec.content_bytes // items
            layers.append(Layer(name, number, spec, *place, np.uint64(digest("layer", name))))
    return layers


class Arena:
    """``ranks`` arenas of one plan, full of rubbish at first. written: places since the last ``take_written``."""

    def __init__(self, config: KVCacheConfig, ranks: int, interleave: int, rng: np.random.Generator) -> None:
        self.config, self.ranks, self.interleave = config, ranks, interleave
        self.layers = layers_of(config)
        self._rng = rng
        self._bytes = rng.integers(0, 256, ranks * config.arena_bytes, np.uint8)
        self._written: list[Places] = []
        self._null = [0 if config.slabs is None else config.slabs.class_of(g).blocks_per_slab - 1 for g in self.groups]

    @property
    def groups(self) -> range:
        """Their numbers."""
        return range(len(self.config.groups))

    def check_ids(self, group: int, blocks: NDArray[np.integer], what: str) -> None:
        """``blocks`` must be blocks of ``group``, and not null."""
        right = (blocks > self._null[group]) & (blocks < self.config.blocks_of(group))
        demand(right.all(), f"{what}: group {group} has no blocks {blocks[~right][:3].tolist()} to use")

    # -- tokens

    def token_places(self, layer: Layer, row: NDArray[np.int32], positions: Places, what: str) -> Places:
        """Bytes of the tokens at ``positions``, int64[n, item_bytes]. row: the block table's. Never a null block."""
        size = layer.spec.block_size
        ranks = 1 if layer.spec.keeps is Keeps.ENCODER else self.ranks
        column, offset = positions // (size * ranks), positions % (size * ranks)
        demand(not len(column) or int(column.max()) < len(row), f"{what}: the table has no column for its tokens")
        blocks = row[column].astype(np.int64)
        self.check_ids(layer.group, blocks, what)
        rank = offset // self.interleave % ranks
        offset = offset // (ranks * self.interleave) * self.interleave + offset % self.interleave
        per = size // layer.parts
        start = rank * self.config.arena_bytes + layer.offset + blocks * layer.stride
        start += offset // per * (layer.stride // layer.parts) + offset % per * layer.item_bytes
        places: Places = start[:, None] + np.arange(layer.item_bytes)
        return places

    def whole_places(self, layer: Layer, places: Places) -> Places:
        """``places`` of rank 0, and of all other ranks too: what is whole on each."""
        all_ranks: Places = places + np.arange(self.ranks).reshape(-1, 1, 1) * self.config.arena_bytes
        return all_ranks.reshape(-1, layer.item_bytes)

    def state_places(self, layer: Layer, block: int) -> Places:
        """Bytes of the state in ``block``, on every rank."""
        start = layer.offset + block * layer.stride
        return self.whole_places(layer, start + np.arange(layer.item_bytes).reshape(1, -1))

    def write(self, layer: Layer, places: Places, content: Digests) -> None:
        """Fill each item with its digest."""
        self._written.append(places)
        self._bytes[places] = _pattern(layer, content)

    def holds(self, layer: Layer, places: Places, content: Digests) -> NDArray[np.bool_]:
        """Whether each item is there, bool[n]."""
        right: NDArray[np.bool_] = (self._bytes[places] == _pattern(layer, content)).all(axis=1)
        return right

    def is_zero(self, places: Places) -> bool:
        """Whether nothing but zeros is there."""
        return not self._bytes[places].any()

    # -- blocks

    def copy(self, group: int, source: int, target: int) -> None:
        """All of one block to another, on every rank."""
        places = self._block_places(group, target)
        self._bytes[places] = self._bytes[self._block_places(group, source)]
        self._written.append(places)

    def clear(self, group: int, block: int) -> None:
        """Zeros."""
        places = self._block_places(group, block)
        self._bytes[places] = 0
        self._written.append(places)

    def snapshot(self, group: int, block: int) -> bytes:
        """What a block holds."""
        return self._bytes[self._block_places(group, block)].tobytes()

    def _block_places(self, group: int, block: int) -> Places:
        if self.config.slabs is not None:
            size = self.config.slabs.class_of(group).block_bytes
            own = np.arange(block * size, (block + 1) * size)
        else:
            mine = [one for one in self.layers if one.group == group]
            pages = [one.offset + block * one.stride + np.arange(one.spec.page_size_bytes) for one in mine]
            own = np.concatenate(pages)
        places: Places = (own + np.arange(self.ranks)[:, None] * self.config.arena_bytes).reshape(-1)
        return places

    # -- failures

    def take_written(self) -> list[Places]:
        """Where anything was written since the last call."""
        written, self._written = self._written, []
        return written

    def spoil(self, written: list[Places]) -> None:
        """Rubbish there: a step that failed may have left anything where it should have written."""
        for places in written:
            self._bytes[places] = self._rng.integers(0, 256, places.shape, np.uint8)


def _pattern(layer: Layer, content: Digests) -> Bytes:
    """uint8[n, item_bytes]: each digest, in the layer's tint, over and over."""
    eight = (content ^ layer.tint).view(np.uint8).reshape(-1, 8)
    times = -(-layer.item_bytes // 8)
    return np.tile(eight, (1, times))[:, : layer.item_bytes]
