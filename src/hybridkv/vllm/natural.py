"""The natural layout for a model of vLLM's: its plan, and what a step does beside vLLM's own.

vLLM's KVCacheConfig   groups in pages of one size, as many as its memory budget holds
layers                 the same layers, each in pages of its own size, attention in blocks that the kernel takes
plan                   slabs in one arena of the same bytes

A ``NaturalStep`` rides on vLLM's SchedulerOutput.

scheduler   vLLM's schedule()   its output, with ids from before the step's moves
StepWriter.write    states to keep get their blocks, ids are those behind all moves
worker      moves, zero, copies | vLLM's forward | keep
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import CacheOptions, KVCacheManager, Transfers, placement_named
from hybridkv.errors import CacheError, ConfigError
from hybridkv.eviction import eviction_named
from hybridkv.models.model import Layer, Model
from hybridkv.planner import KVCacheConfig, Plan, plan
from hybridkv.planner.plan import NATURAL
from hybridkv.request import Request
from hybridkv.specs import AttentionSpec, Keeps, KVCacheSpec
from hybridkv.vllm.manager import CacheManager
from hybridkv.vllm.specs import Config, Settings, layer_specs, spec_of

Int32 = NDArray[np.int32]

OPTIONS: Final = "hybridkv"
"""The key of ours in vLLM's ``--additional-config``."""
LARGEST_BLOCK: Final = 32
"""Tokens that every kernel of attention takes as they are. vLLM's blocks are larger where they fill a state's page."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``--additional-config '{"hybridkv": {...}}'`` says.

    block_size: tokens of a block of attention, which kernels read as one. placement, eviction: by name, None for the
    default of the natural layout.
    """

    block_size: Annotated[int, msgspec.Meta(ge=1)]
    placement: str | None = None
    eviction: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], block_size: int) -> Self:
        """Those of vLLM's additional config. block_size: where it says none. ConfigError for what is none of them."""
        asked = given.get(OPTIONS, {})
        try:
            made = msgspec.convert({"block_size": block_size, **asked} if isinstance(asked, dict) else asked, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{OPTIONS} of --additional-config: {error}") from None
        if made.placement is not None:
            placement_named(made.placement, made.block_size)
        if made.eviction is not None:
            eviction_named(made.eviction)
        return made


def default_block_size(config: Config) -> int:
    """Tokens of a block of attention: as few as vLLM's own blocks have, at most LARGEST_BLOCK."""
    sizes: list[int] = [spec.block_size for _, spec in layer_specs(config) if not hasattr(spec, "shapes")]
    return min([LARGEST_BLOCK, *sizes])


def natural_plan(config: Config, options: Options, *, name: str, max_model_len: int, max_in_flight_tokens: int) -> Plan:
    """The plan of vLLM's layers in vLLM's memory. name: the model's.

    ConfigError for a kind of layer, or a form of its pages, that is not supported, CapacityError where one request does
    not fit.
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


def natural_cache(made: Plan, options: Options, settings: Settings) -> KVCacheManager:
    """A cache of ``made``, which hashes what it caches itself."""
    return KVCacheManager(
        made,
        enable_caching=settings.enable_caching,
        enable_kv_cache_events=settings.enable_events,
        options=CacheOptions(eviction=None if options.eviction is None else eviction_named(options.eviction)),
    )


def memory_bytes(config: Any) -> int:  # noqa: ANN401 - vLLM's KVCacheConfig
    """Of the one allocation that all of vLLM's tensors lie in. ConfigError where there are several."""
    sizes: list[int] = sorted({tensor.size for tensor in config.kv_cache_tensors})
    if len(sizes) != 1:
        raise ConfigError(f"vLLM lays this model out in allocations of {sizes} bytes: one is supported")
    return sizes[0]


def natural_spec(spec: Any, block_size: int) -> Any:  # noqa: ANN401 - vLLM is not typed here
    """One of vLLM's specs as the natural layout has it: its page of its own size, attention in its own blocks."""
    if hasattr(spec, "shapes"):
        return replace(spec, page_size_padded=None, num_prefill_checkpoint_blocks=0)
    return replace(spec, page_size_padded=None, block_size=block_size)


def _layers(config: Config, block_size: int) -> Iterator[tuple[str, KVCacheSpec]]:
    """Ours. ConfigError for pages that are not ours to the byte, such as those of quantized keys with their scales."""
    for layer, theirs in layer_specs(config):
        spec = spec_of(natural_spec(theirs, block_size))
        if theirs.real_page_size_bytes * spec.block_size != spec.content_bytes * theirs.block_size:
            raise ConfigError(
                f"a page of {layer} has {theirs.real_page_size_bytes} bytes for {theirs.block_size} tokens, which is "
                "not what its heads and dtype say: the natural layout of hybridkv.vllm does not support it"
            )
        yield layer, spec


ATTRIBUTE: Final = "hybridkv_step"
"""Of a SchedulerOutput."""


class Cell(NamedTuple):
    """A cell of a block table that is another block now: column ``column`` of ``group`` of a request."""

    request_id: str
    group: int
    column: int
    block: int


class NaturalStep(NamedTuple):
    """Ids are those within each class of blocks, behind the step's moves.

    moves, copies, keep: int32[n, 3], (class, source, target), in order: before the forward, then behind ``zero``, then
    behind the forward. zero: int32[n, 2], (class, block). cells: of requests that the worker knows already.
    config: of the cache, with the first step; it is laid out then.
    """

    moves: Int32
    zero: Int32
    copies: Int32
    keep: Int32
    cells: tuple[Cell, ...] = ()
    config: KVCacheConfig | None = None


class StepWriter:
    """Of one manager. Every step is written, in order."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager, self._cache = manager, manager.cache
        slabs = self._cache.config.slabs
        if slabs is None:
            raise CacheError("steps of the natural layout need a cache in slabs")
        self._class_of = [slabs.classes.index(slabs.class_of(group)) for group in range(len(self._cache.groups))]
        specs = [group.spec for group in self._cache.config.groups]
        # what lies in a block behind its tokens is read and masked: harmless, unless it was written as something else
        written_as = {spec.dtype if isinstance(spec, AttentionSpec) else None for spec in specs}
        mixed = written_as == {None} or len(written_as) > 1
        self._cleared = [
            (number, group.policy.block_size)
            for number, (group, spec) in enumerate(zip(self._cache.groups, specs, strict=True))
            if mixed and spec.keeps is not Keeps.STATE
        ]
        self._config: KVCacheConfig | None = self._cache.config

    def write(self, output: Any) -> NaturalStep:  # noqa: ANN401 - vLLM's
        """What goes with ``output``, whose ids are put right; inside the manager's step. O(scheduled requests)."""
        ends = self._store(output)
        transfers = self._cache.fields.take_transfers()
        zero = list(self._put_right(output))
        config, self._config = self._config, None
        moved = [one for one in transfers.copies if one.kind == "move"]
        copied = [one for one in transfers.copies if one.kind != "move"]
        return NaturalStep(
            _triples((self._class_of[one.group], one.source, one.destination) for one in moved),
            np.array(zero, np.int32).reshape(-1, 2),
            _triples((self._class_of[one.group], one.source, one.destination) for one in copied),
            _triples(self._kept(transfers, ends)),
            tuple(self._moved_cells(transfers)),
            config,
        )

    def _store(self, output: Any) -> Mapping[int, tuple[Request, int]]:  # noqa: ANN401 - vLLM's
        """Give blocks to the states that the step passes; return, by row, requests that may pass one and their ends.

        Drafts are left out of the ends.
        """
        if self._cache.checkpoints.idle:
            return {}
        cached, counts = output.scheduled_cached_reqs, output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        ends = dict[int, tuple[Request, int]]()
        for name, mine in self._manager.ahead.served.items():
            if name in counts:
                end = computed[name] + counts[name] - len(drafts.get(name, ()))
                ends[mine.row] = mine, end
                self._cache.engine.store_checkpoints_of(mine, computed[name], end)
        return ends

    def _kept(self, transfers: Transfers, ends: Mapping[int, tuple[Request, int]]) -> Iterator[tuple[int, int, int]]:
        """From each row's running state, as the forward leaves it. CacheError for one inside the chunk: it is gone."""
        for one in transfers.checkpoints:
            request, end = ends[one.row]
            if end != one.tokens:
                raise CacheError(f"row {one.row} runs to {end} tokens: the state at {one.tokens} is not seen")
            source = self._cache.get_block_ids(request.request_id)[one.group][0]
            yield self._class_of[one.group], source, one.block

    def _moved_cells(self, transfers: Transfers) -> Iterator[Cell]:
        """Every cell that holds a block which moved."""
        if not transfers.moved.size:
            return
        cells = self._cache.fields.cells(np.empty(0, np.int64), (), transfers.moved)
        names = {one.row: one.request_id for one in self._cache.engine.resident_requests()}
        lists = (cells.group, cells.row, cells.column, cells.block)
        for group, row, column, block in zip(*(one.tolist() for one in lists), strict=True):
            if row in names:
                yield Cell(names[row], group, column, block)

    def _put_right(self, output: Any) -> Iterator[tuple[int, int]]:  # noqa: ANN401 - vLLM's
        """Ids of ``output`` as they are by now; (class, block) of those of attention that begin with this step."""
        for one in output.scheduled_new_reqs:
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
        """Those of a row that begins: all behind the full blocks of its hit, or all that a connector wrote nothing to.

        What is copied into the block that a hit ends in comes behind the clearing, what was loaded came before.
        """
        loaded = self._manager.goes_on_behind_load(name)
        for group, size in self._cleared:
            first = -(-computed // size) if loaded else computed // size
            yield from ((self._class_of[group], block) for block in table[group][first:] if block)


def _triples(given: Iterable[tuple[int, int, int]]) -> Int32:
    return np.array(list(given), np.int32).reshape(-1, 3)
