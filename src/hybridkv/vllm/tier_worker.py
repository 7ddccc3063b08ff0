"""The worker's side of TierConnector: blocks between the device's pages and memory that stores read and write.

    step       look-ups begin | forward | loads: memory -> pages, on a thread | stores: pages -> memory, now
    afterwards stores: memory -> host memory, disk, on a thread

A block of a group is the pages of its layers, one after the other. Pages are copied as bytes, so kernels, dtypes and
states make no difference. On a GPU, copies to and from pinned memory run on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from hybridkv.errors import ConfigError
from hybridkv.stores.prefetch import Found, Prefetcher, PrefetchLimits, PrefixRules, Rows, pieces_of
from hybridkv.stores.stack import StoreStack
from hybridkv.vllm.specs import Config, layer_specs
from hybridkv.vllm.tier_events import TierChange, WholeBlocks
from hybridkv.vllm.tier_requests import Find, Load, TierWork, key

_WAIT_S: Final = 0.002
"""Wait of a step without a forward for a look-up or load: the engine would only ask again."""


class Loaded(NamedTuple):
    """Requests whose loads have ended: ``done`` are all, ``failed`` those without their bytes."""

    done: set[str]
    failed: set[str]


class DevicePages:
    """The pages of a worker's cache by group, as bytes.

    Args:
        config: vLLM's KVCacheConfig.
        caches: vLLM's tensors by layer; states are lists of tensors.

    Attributes:
        block_bytes: Bytes of a block of each group.
        device: Where the pages are.

    Raises:
        ConfigError: The heads of a page are not next to each other in this layout of the cache.
    """

    def __init__(self, config: Config, caches: Mapping[str, Any]) -> None:
        given: Any = config
        if given.kv_cache_layout in {"LHBNC", "BHLNC"}:
            raise ConfigError(
                f"TierConnector copies whole pages, and the layout {given.kv_cache_layout} spreads a page over heads: "
                "choose another attention backend"
            )
        place = {layer: (one, number) for one in given.kv_cache_tensors for number, layer in enumerate(one.layers)}
        specs = dict(layer_specs(config))
        self._pages = [
            [
                _pages(caches[layer], *place[layer], specs[layer].page_size_bytes, given.num_blocks)
                for layer in group.layer_names
                if layer in place
            ]
            for group in config.kv_cache_groups
        ]
        self.block_bytes = tuple(sum(pages.shape[1] for pages in group) for group in self._pages)
        self.device = self._pages[0][0].device

    def read(self, group: int, blocks: torch.Tensor, into: torch.Tensor) -> None:
        """Copy blocks. O(bytes).

        Args:
            group: Their group.
            blocks: int64[n] on the device.
            into: uint8[n, bytes of a block] on the device.
        """
        first = 0
        for pages in self._pages[group]:
            torch.index_select(pages, 0, blocks, out=into[:, first : first + pages.shape[1]])
            first += pages.shape[1]

    def write(self, group: int, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy rows to blocks. O(bytes).

        Args:
            group: Their group.
            blocks: int64[n] on the device.
            rows: uint8[n, bytes of a block] on the device.
        """
        first = 0
        for pages in self._pages[group]:
            pages.index_copy_(0, blocks, rows[:, first : first + pages.shape[1]])
            first += pages.shape[1]


def _pages(cache: Any, tensor: Any, number: int, page_bytes: int, num_blocks: int) -> torch.Tensor:  # noqa: ANN401 - vLLM's
    """Return uint8[blocks, bytes of a page], a view of a layer's memory. ``number``: of the layer in its tensor."""
    first = cache[0] if isinstance(cache, list | tuple) else cache
    memory = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    offset = tensor.offset + number * tensor.layer_stride
    return memory.as_strided((num_blocks, page_bytes), (tensor.block_stride, 1), offset)


class TierWorker:
    """Carries out TierWork: looks for prefixes, loads and stores.

    Args:
        config: vLLM's KVCacheConfig.
        caches: vLLM's tensors by layer.
        rules: Which prefixes can be resumed.
        identity: Hash of the configuration, 16 bytes.
        limits: Bounds of memory for copies.
        open_stores: Returns the stores, given the bytes of a block of each group.
    """

    def __init__(
        self,
        config: Config,
        caches: Mapping[str, Any],
        rules: PrefixRules,
        *,
        identity: bytes,
        limits: PrefetchLimits,
        open_stores: Callable[[Sequence[int]], StoreStack],
    ) -> None:
        self._pages = DevicePages(config, caches)
        self._rules, self._identity = rules, identity
        self._on_gpu = self._pages.device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(self._pages.device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._stores = open_stores(self._pages.block_bytes)
        self._prefetcher = Prefetcher(self._stores, rules, self._pages.block_bytes, limits, self._allocate)
        self._loader = ThreadPoolExecutor(1, "hybridkv-load")
        self._loading = dict[str, Future[bool]]()
        self._runs = True
        self._whole = WholeBlocks([len(pieces_of(size)) for size in self._pages.block_bytes])

    def begin(self, work: TierWork) -> None:
        """Begin the look-ups of a step, before its forward. O(look-ups).

        Args:
            work: The step.
        """
        self._runs = work.runs
        for number in work.drops:
            self._prefetcher.drop(number)
        for find in work.finds:
            self._prefetcher.find(find.number, find.start, find.most, partial(self._key_of, find, work.epoch))

    def _key_of(self, find: Find, epoch: bytes, group: int, column: int) -> bytes:
        return key(self._identity, epoch, group, self._rules.hash_of(find.hashes, find.start, group, column))

    def load(self, work: TierWork) -> None:
        """Begin the loads of a step, after its forward was submitted. O(loads).

        Args:
            work: The step.
        """
        submitted = torch.cuda.current_stream().record_event() if work.loads and self._on_gpu else None
        for load in work.loads:
            found = self._prefetcher.take(load.number)
            self._loading[load.request_id] = self._loader.submit(self._load, load, found, submitted)

    def _load(self, load: Load, found: Found | None, submitted: Any) -> bool:  # noqa: ANN401 - an event of torch
        """Copy what is held to the device; return whether all blocks were held. ``submitted``: wait for it first."""
        if found is None or found.end != load.end:
            return False
        with torch.cuda.stream(self._stream):  # no effect without a GPU
            if self._stream is not None:
                self._stream.wait_event(submitted)
            for group, (blocks, columns, rows) in enumerate(zip(load.blocks, found.columns, found.rows, strict=True)):
                if not blocks.keys() <= set(columns) or not all(blocks.values()):
                    return False  # block 0 is vLLM's null block
                held = torch.from_numpy(rows)
                if len(blocks) < len(columns):  # the device has got some of them meanwhile
                    held = held[[column - columns.start for column in blocks]]
                ids = torch.tensor([*blocks.values()], dtype=torch.int64)
                self._pages.write(group, ids.to(self._pages.device), held.to(self._pages.device))
            if self._stream is not None:
                self._stream.synchronize()
        return True

    def store(self, work: TierWork) -> None:
        """Copy blocks to staging memory and begin to store them. Their pages may change afterwards. O(bytes).

        Args:
            work: The step.
        """
        for group, store in work.stores.items():
            keys = [key(self._identity, work.epoch, group, one) for one in store.hashes]
            self._prefetcher.store(group, keys, partial(self._stage, group, store.blocks))

    def _stage(self, group: int, ids: Sequence[int]) -> tuple[Rows, Callable[[], None]]:
        """Copy blocks to memory of the host; return it, and a function that waits until the copy has arrived."""
        blocks = torch.tensor(ids, dtype=torch.int64).to(self._pages.device)
        shape = (len(ids), self._pages.block_bytes[group])
        staged = torch.empty(shape, dtype=torch.uint8, device=self._pages.device)
        self._pages.read(group, blocks, staged)
        if self._stream is None:
            return staged.numpy(), _nothing
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            rows = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
            rows.copy_(staged, non_blocking=True)
            staged.record_stream(self._stream)
            arrived = self._stream.record_event()
        return rows.numpy(), arrived.synchronize

    def loaded(self) -> Loaded:
        """Return the requests whose loads have ended since the last call. O(loads in flight)."""
        if not self._runs and self._loading:
            wait(self._loading.values(), _WAIT_S, FIRST_COMPLETED)
        ended = {name: one for name, one in self._loading.items() if one.done()}
        for name in ended:
            del self._loading[name]
        failed = {name for name, one in ended.items() if one.exception() is not None or not one.result()}
        return Loaded(set(ended), failed)

    def answers(self) -> dict[int, int]:
        """Return the tokens of each look-up that has ended since the last call."""
        return self._prefetcher.answers(0.0 if self._runs else _WAIT_S)

    def changes(self) -> list[TierChange]:
        """Return the blocks that host memory and disk got and lost since the last call."""
        return self._whole.of(self._stores.take_changes())

    def take_counts(self) -> dict[str, float]:
        """Return the counts since the last call."""
        return self._prefetcher.take_counts()

    def close(self) -> None:
        """Wait for loads and stores that have begun, and close the stores."""
        self._loader.shutdown()
        self._prefetcher.close()

    def _allocate(self, num_rows: int, num_bytes: int) -> Rows:
        made: Rows = torch.empty((num_rows, num_bytes), dtype=torch.uint8, pin_memory=self._on_gpu).numpy()
        return made


def _nothing() -> None:
    """Wait for nothing."""
