"""The natural layout for a model of vLLM: its plan, and the block operations of a step.

vLLM's KVCacheConfig   groups in pages of one size, as many as its memory budget holds
layers                 the same layers, each in pages of its own size, attention in blocks that the kernel takes
plan                   slabs in one arena of the same bytes

A ``NaturalStep`` is attached to vLLM's SchedulerOutput.

scheduler   vLLM's schedule()   its output, with ids from before the step's moves
StepWriter.write    allocates blocks for states to keep, and corrects ids for the moves
worker      moves, zero, copies | vLLM's forward | keep
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import CacheOptions, KVCacheManager, Transfers, placement_named
from hybridkv.errors import CacheError, ConfigError
from hybridkv.eviction import HAZARD, LRU, Eviction, eviction_named
from hybridkv.models.model import Layer, Model
from hybridkv.planner import KVCacheConfig, Plan, plan
from hybridkv.planner.plan import NATURAL
from hybridkv.request import Request
from hybridkv.spec_fields import Feature, require_supported
from hybridkv.specs import AttentionSpec, Keeps, KVCacheSpec
from hybridkv.vllm.manager import CacheManager
from hybridkv.vllm.specs import Config, Settings, layer_specs, spec_of

Int32 = NDArray[np.int32]

OPTIONS: Final = "hybridkv"
"""The key of this library in vLLM's ``--additional-config``."""
MAX_OVERTAKEN: Final = 16
"""Default of ``max_overtaken``, measured in docs/design/0054."""
LARGEST_BLOCK: Final = 32
"""Tokens of a block that every attention kernel supports. vLLM's blocks are larger where they fill a state's page."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options in ``--additional-config '{"hybridkv": {...}}'``.

    Attributes:
        block_size: tokens of an attention block, which kernels read as one.
        placement: name of the placement; ``None`` for the default of the natural layout.
        eviction: name of the eviction policy; ``None`` for the default.
        kv_events: form of the KV events (docs/events.md); ``None``: exact, or raw where exact is not supported.
        requests: endpoint on which requests are published as they end (docs/traces.md); ``None`` for none.
        max_overtaken: as in ReferenceOptions.
    """

    block_size: Annotated[int, msgspec.Meta(ge=1)]
    placement: str | None = None
    eviction: str | None = None
    kv_events: Literal["exact", "raw"] | None = None
    requests: str | None = None
    max_overtaken: Annotated[int, msgspec.Meta(ge=0)] = MAX_OVERTAKEN

    @classmethod
    def of(cls, given: Mapping[str, Any], block_size: int) -> Self:
        """Return the options in vLLM's additional config. Raises ConfigError for invalid ones.

        ``block_size`` is the default.
        """
        made = _read(cls, given, {"block_size": block_size})
        if made.placement is not None:
            placement_named(made.placement, made.block_size)
        if made.eviction is not None:
            eviction_named(made.eviction)
        return made


class ReferenceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the reference layout in ``--additional-config '{"hybridkv": {...}}'``.

    Attributes:
        eviction: name of the eviction policy; ``None`` for the default.
        kv_events: form of the KV events (docs/events.md); ``None``: exact, or raw where exact is not supported.
        requests: endpoint on which requests are published as they end (docs/traces.md); ``None`` for none.
        max_overtaken: how many later requests with longer cached prefixes may overtake a waiting request while memory
            is full; 0 keeps the order of arrival, as ``lru`` does.
    """

    eviction: str | None = None
    kv_events: Literal["exact", "raw"] | None = None
    requests: str | None = None
    max_overtaken: Annotated[int, msgspec.Meta(ge=0)] = MAX_OVERTAKEN

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the options in vLLM's additional config. Raises ConfigError for invalid ones."""
        return _read(cls, given, {})

    def chosen(self, config: Config, *, use_eagle: bool) -> Eviction:
        """Return the eviction of the groups of ``config``.

        The default is ``hazard``. It is ``lru`` for recurrent layers with a draft head that reads the cache: a hit then
        needs the block after each state, which ranked eviction does not count.
        """
        if self.eviction is not None:
            return eviction_named(self.eviction)
        states = any(hasattr(spec, "shapes") for _, spec in layer_specs(config))
        drops = use_eagle or any(group.is_eagle_group for group in config.kv_cache_groups)
        return LRU if states and drops else HAZARD


_Given = TypeVar("_Given", bound=msgspec.Struct)


def _read(cls: type[_Given], given: Mapping[str, Any], defaults: Mapping[str, Any]) -> _Given:
    """Return the options in vLLM's additional config as a ``cls``. Raises ConfigError for invalid ones."""
    asked = given.get(OPTIONS, {})
    try:
        return msgspec.convert({**defaults, **asked} if isinstance(asked, dict) else asked, cls)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{OPTIONS} of --additional-config: {error}") from None


def default_block_size(config: Config) -> int:
    """Return the tokens of an attention block: the smallest of vLLM's blocks, at most LARGEST_BLOCK."""
    sizes: list[int] = [spec.block_size for _, spec in layer_specs(config) if not hasattr(spec, "shapes")]
    return min([LARGEST_BLOCK, *sizes])


def natural_plan(config: Config, options: Options, *, name: str, max_model_len: int, max_in_flight_tokens: int) -> Plan:
    """Return the plan of vLLM's layers in vLLM's memory, under the model's ``name``.

    Raises ConfigError for a kind of layer or page that is not supported, and CapacityError if one request does not fit.
    """
    layers = tuple(Layer(layer, spec, i) for i, (layer, spec) in enumerate(_layers(config, options.block_size)))
    model = Model(
        name=name,
        model_type="vllm",
        layers=layers,
        max_model_len=max_model_len,
        vocab_size=1,
        dtype="auto",
        parameters=0,
        active_parameters=0,
        block_size=options.block_size,
    )
    return plan(
        model,
        memory_bytes(config),
        max_model_len=max_model_len,
        max_batched_tokens=max_in_flight_tokens,
        placement=options.placement,
        layout=NATURAL,
        kernel_block_size=options.block_size,
    )


def natural_cache(made: Plan, options: Options, settings: Settings, *, tiered: bool = False) -> KVCacheManager:
    """Return a cache of the plan ``made``. It hashes blocks itself. ``tiered``: a tier will lie behind it."""
    return KVCacheManager(
        made,
        enable_caching=settings.enable_caching,
        enable_kv_cache_events=settings.enable_events,
        options=CacheOptions(
            eviction=None if options.eviction is None else eviction_named(options.eviction), log_resume_points=tiered
        ),
    )


def memory_bytes(config: Any) -> int:  # noqa: ANN401 - vLLM's KVCacheConfig
    """Return the bytes of the allocation that holds all of vLLM's tensors. ConfigError for several allocations."""
    sizes: list[int] = sorted({tensor.size for tensor in config.kv_cache_tensors})
    if len(sizes) != 1:
        raise ConfigError(f"vLLM lays this model out in allocations of {sizes} bytes: one is supported")
    return sizes[0]


def natural_spec(spec: Any, block_size: int) -> Any:  # noqa: ANN401 - vLLM is not typed here
    """Return vLLM's spec with its page in its own size, and attention in blocks of ``block_size`` tokens."""
    if hasattr(spec, "shapes"):
        return replace(spec, page_size_padded=None, num_prefill_checkpoint_blocks=0)
    return replace(spec, page_size_padded=None, block_size=block_size)


def _layers(config: Config, block_size: int) -> Iterator[tuple[str, KVCacheSpec]]:
    """Yield our specs.

    Raises ConfigError for compressed caches, and if page bytes differ, as for quantized keys with scales in the page.
    """
    for layer, theirs in layer_specs(config):
        spec = spec_of(natural_spec(theirs, block_size))
        require_supported([spec], "the natural layout in vLLM", {Feature.REPLICATED})
        if theirs.real_page_size_bytes * spec.block_size != spec.content_bytes * theirs.block_size:
            raise ConfigError(
                f"a page of {layer} has {theirs.real_page_size_bytes} bytes for {theirs.block_size} tokens, which is "
                "not what its heads and dtype say: the natural layout of hybridkv.vllm does not support it"
            )
        yield layer, spec


ATTRIBUTE: Final = "hybridkv_step"
"""The attribute of a SchedulerOutput that holds the NaturalStep."""


class Cell(NamedTuple):
    """A changed cell of a block table: column ``column`` in ``group`` of a request holds another block."""

    request_id: str
    group: int
    column: int
    block: int


class NaturalStep(NamedTuple):
    """The block operations of a step. Block ids are within their class, after the step's moves.

    Attributes:
        moves: int32[n, 3] of (class, source, target), in order, before everything else.
        zero: int32[n, 2] of (class, block) to clear, after ``moves``.
        copies: int32[n, 3] of (class, source, target), after ``zero`` and before the forward pass.
        keep: int32[n, 3] of (class, source, target), after the forward pass.
        cells: changed cells of requests that the worker knows.
        config: config of the cache in the first step, when the worker allocates it; else ``None``.
    """

    moves: Int32
    zero: Int32
    copies: Int32
    keep: Int32
    cells: tuple[Cell, ...] = ()
    config: KVCacheConfig | None = None


class StepWriter:
    """Writes the steps of one manager, in order."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager, self._cache = manager, manager.cache
        slabs = self._cache.config.slabs
        if slabs is None:
            raise CacheError("the cache has no slabs: steps of the natural layout need a cache in that layout")
        self._class_of = [slabs.classes.index(slabs.class_of(group)) for group in range(len(self._cache.groups))]
        specs = [group.spec for group in self._cache.config.groups]
        # kernels read and mask the bytes after a block's tokens: bytes of another dtype may be NaN, so clear them
        written_as = {spec.dtype if isinstance(spec, AttentionSpec) else None for spec in specs}
        mixed = written_as == {None} or len(written_as) > 1
        self._cleared = [
            (number, group.policy.block_size)
            for number, (group, spec) in enumerate(zip(self._cache.groups, specs, strict=True))
            if mixed and spec.keeps is not Keeps.STATE
        ]
        self._config: KVCacheConfig | None = self._cache.config

    def write(self, output: Any) -> NaturalStep:  # noqa: ANN401 - vLLM's
        """Return the operations of ``output`` and correct its ids, inside the manager's step. O(scheduled requests)."""
        ends = self._manager.store_checkpoints(output)
        transfers = self._cache.fields.take_transfers()
        config, self._config = self._config, None
        moves, copies = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for one in transfers.copies:
            to = moves if one.kind == "move" else copies
            to.append((self._class_of[one.group], one.source, one.destination))
        has_moves = bool(len(transfers.moved))
        return NaturalStep(
            _table(moves, 3),
            _table(list(self._correct_ids(output, moves=has_moves)), 2),
            _table(copies, 3),
            _table(list(self._kept(transfers, ends)) if transfers.checkpoints else [], 3),
            tuple(self._moved_cells(transfers)) if has_moves else (),
            config,
        )

    def _kept(self, transfers: Transfers, ends: Mapping[int, tuple[Request, int]]) -> Iterator[tuple[int, int, int]]:
        """Yield copies of each row's running state after the forward pass. CacheError for a position inside a chunk."""
        for one in transfers.checkpoints:
            request, end = ends[one.row]
            if end != one.tokens:
                raise CacheError(f"row {one.row} runs to {end} tokens: the state at {one.tokens} is not seen")
            source = self._cache.get_block_ids(request.request_id)[one.group][0]
            yield self._class_of[one.group], source, one.block

    def _moved_cells(self, transfers: Transfers) -> Iterator[Cell]:
        """Yield every cell that holds a moved block."""
        cells = self._cache.fields.cells(np.empty(0, np.int64), (), transfers.moved)
        names = {one.row: one.request_id for one in self._cache.engine.resident_requests()}
        lists = (cells.group, cells.row, cells.column, cells.block)
        for group, row, column, block in zip(*(one.tolist() for one in lists), strict=True):
            if row in names:
                yield Cell(names[row], group, column, block)

    def _correct_ids(self, output: Any, *, moves: bool) -> Iterator[tuple[int, int]]:  # noqa: ANN401 - vLLM's
        """Correct the ids in ``output`` after ``moves``; yield (class, block) of attention blocks that start in it."""
        for one in output.scheduled_new_reqs:
            if moves:
                one.block_ids = self._cache.get_block_ids(one.req_id)
            yield from self._begun(one.req_id, one.block_ids, one.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            given = cached.new_block_ids[place]
            if given is None:
                continue
            table = self._cache.get_block_ids(name)
            if name in cached.resumed_req_ids:
                cached.new_block_ids[place] = table
                yield from self._begun(name, table, cached.num_computed_tokens[place])
                continue
            new = tuple(ids[len(ids) - len(some) :] for ids, some in zip(table, given, strict=True))
            cached.new_block_ids[place] = new
            for group, _ in self._cleared:
                yield from ((self._class_of[group], block) for block in new[group] if block)

    def _begun(self, name: str, table: tuple[list[int], ...], computed: int) -> Iterator[tuple[int, int]]:
        """Yield blocks to clear for a request that starts: those after the full blocks of its hit.

        After a load, the block that the load wrote in part is kept too. Copies into the last block of a hit run after
        the clearing, and a load has run before it.
        """
        loaded = name in self._manager.resumed
        for group, size in self._cleared:
            first = -(-computed // size) if loaded else computed // size
            yield from ((self._class_of[group], block) for block in table[group][first:] if block)


_NO_ROWS: Final = {columns: np.empty((0, columns), np.int32) for columns in (2, 3)}


def _table(rows: Sequence[tuple[int, ...]], columns: int) -> Int32:
    return np.array(rows, np.int32) if rows else _NO_ROWS[columns]  # most steps have none
