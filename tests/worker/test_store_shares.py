"""Blocks of ranks in a store: written by some ranks and read by others, beside shares of a whole model cut by hand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec
from hybridkv.planner.natural import natural_config, slab_layout
from hybridkv.specs import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from hybridkv.step import Step, StoreTransfer
from hybridkv.stores import MemoryStore
from hybridkv.stores.marks import mark_bytes, tails_of
from hybridkv.worker import HostTierCopier, PagedStorage
from hybridkv.worker.ranks import Split, shares_of, splits_of
from hybridkv.worker.store import StoreForm
from small_steps import small_step

BLOCK, BLOCKS, SLAB = 4, 5, 1 << 15
KV_HEADS, WIDTH, LATENT = 4, 3, 10
HEADS, DIM, STATE, GROUPS, KERNEL = 8, 3, 5, 2, 4
"""Of Mamba-2; delta rules have GROUPS key heads of STATE elements, and HEADS value heads of DIM."""
LAYERS = ("full 0", "window 0", "mamba", "full 1", "latent", "delta", "window 1", "conv", "narrow 0", "full 2")


def specs_of(ranks: int) -> dict[str, KVCacheSpec]:
    """The specs of one rank, by hand: heads are divided, or one is copied."""
    of: dict[str, Any] = {"block_size": BLOCK, "dtype": "float16"}
    kv, heads, groups = max(KV_HEADS // ranks, 1), HEADS // ranks, max(GROUPS // ranks, 1)

    def states(kind: str, *shapes: tuple[int, ...]) -> KVCacheSpec:
        dtypes = ("float16", "float32")[: len(shapes)]
        return MambaSpec(block_size=BLOCK, shapes=shapes, dtypes=dtypes, mamba_type=kind)

    made: dict[str, KVCacheSpec] = {
        "full": FullAttentionSpec(num_kv_heads=kv, head_size=WIDTH, **of),
        "window": SlidingWindowSpec(num_kv_heads=kv, head_size=WIDTH, sliding_window=6, **of),
        "narrow": SlidingWindowSpec(num_kv_heads=kv, head_size=WIDTH, sliding_window=3, **of),
        "latent": MLAAttentionSpec(head_size=LATENT, **of),
        "mamba": states("mamba2", (heads * DIM + 2 * groups * STATE, KERNEL), (heads, DIM, STATE)),
        "delta": states("gdn_attention", (2 * groups * STATE + heads * DIM, KERNEL), (heads, STATE, DIM)),
        "conv": states("short_conv", (2 * heads, KERNEL)),
    }
    return {name: made[name.split()[0]] for name in LAYERS}


def config_of(specs: dict[str, KVCacheSpec], rng: np.random.Generator) -> KVCacheConfig:
    """A plan with random groups: the layers of a kind are dealt to one, two or three of them, in a random order."""
    kinds: dict[object, list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault((type(spec), spec.mask, getattr(spec, "mamba_type", None)), []).append(name)
    groups = [
        KVCacheGroupSpec(tuple(part.tolist()), specs[part[0]])
        for names in kinds.values()
        for part in np.array_split(np.array(names, object), int(rng.integers(1, len(names) + 1)))
    ]
    order = rng.permutation(len(groups)).tolist()
    cut = tuple(int(rng.integers(1, 3)) if not isinstance(groups[at].spec, MambaSpec) else 1 for at in order)
    ks = tuple(int(rng.choice([1, 2, 4])) for _ in order)
    return natural_config(tuple(groups[at] for at in order), slab_layout(SLAB, BLOCKS * len(groups) + 1, ks, cut))


class Rank(NamedTuple):
    """The tier of one rank. ``blocks``: of each group, the blocks 1 .. as the transfers name them."""

    copier: HostTierCopier
    storage: PagedStorage
    config: KVCacheConfig
    blocks: dict[int, list[int]]
    whole: tuple[str, ...] = ()


STATES = ("mamba", "delta", "conv")


def ranks_of(ranks: int, store: MemoryStore, rng: np.random.Generator, kept: tuple[str, ...] = ()) -> list[Rank]:
    """``kept``: layers that each rank has whole."""
    whole = specs_of(1)
    specs = specs_of(ranks) | {name: whole[name] for name in kept}
    splits = {name: _splits(spec) for name, spec in whole.items()}
    config, made = config_of(specs, rng), []
    slabs = iter((1 + rng.permutation(BLOCKS * len(config.groups))).tolist())  # groups share slabs, but not at a time
    ks = [config.slabs.class_of(group).blocks_per_slab for group in range(len(config.groups))] if config.slabs else []
    blocks = {group: [next(slabs) * k + int(rng.integers(k)) for _ in range(BLOCKS)] for group, k in enumerate(ks)}
    for rank in range(ranks):
        form = StoreForm.of(config, splits, rank, ranks, kept)
        copier = HostTierCopier(PagedStorage(config), config, store=store, form=form)
        made.append(Rank(copier, copier.settled(PagedStorage(config)), config, blocks, kept))
    return made


def _splits(spec: KVCacheSpec) -> tuple[Split, ...]:
    if isinstance(spec, MambaSpec):
        return splits_of(spec, spec.shapes)
    return splits_of(spec, [(LATENT,)] if isinstance(spec, MLAAttentionSpec) else [(KV_HEADS, WIDTH)] * 2)


def whole_pages(rng: np.random.Generator) -> dict[str, list[torch.Tensor]]:
    """Random pages of BLOCKS blocks of the whole model."""
    made = {}
    for name, spec in specs_of(1).items():
        shapes = [[BLOCKS, BLOCK, KV_HEADS, WIDTH]] * 2
        if isinstance(spec, MambaSpec):
            shapes = [[BLOCKS, *shape] for shape in spec.shapes]
        elif isinstance(spec, MLAAttentionSpec):
            shapes = [[BLOCKS, BLOCK, LATENT]]
        made[name] = [torch.from_numpy(rng.standard_normal(shape)) for shape in shapes]
    return made


def by_hand(name: str, pages: list[torch.Tensor], rank: int, ranks: int) -> list[torch.Tensor]:
    """What a rank holds of a layer's pages: slices of heads and of named sections of channels."""

    def mine(tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor.chunk(ranks, axis)[rank]

    def sections(tensor: torch.Tensor, *sizes: tuple[int, int]) -> torch.Tensor:
        """Sections of the channels, each (heads, channels of a head)."""
        parts = []
        for part, (heads, width) in zip(torch.split(tensor, [a * b for a, b in sizes], 1), sizes, strict=True):
            held = [
                head for head in range(heads) if head * ranks < (rank + 1) * heads and rank * heads < (head + 1) * ranks
            ]
            parts += [part[:, head * width : (head + 1) * width] for head in held]
        return torch.cat(parts, 1)

    kind = name.split(maxsplit=1)[0]
    if kind == "latent":
        return pages
    if kind in {"full", "window", "narrow"}:
        return [mine(one, 2) if ranks <= KV_HEADS else one[:, :, [rank * KV_HEADS // ranks]] for one in pages]
    if kind == "conv":
        return [mine(pages[0], 1)]
    channels = ((HEADS, DIM), (GROUPS, STATE), (GROUPS, STATE))
    if kind == "delta":
        channels = channels[::-1]
    return [sections(pages[0], *channels), mine(pages[1], 1)]


def views_of(rank: Rank, name: str, blocks: Sequence[int]) -> list[torch.Tensor]:
    """The pages of a layer in some blocks, [blocks, ...], copied."""
    group = next(at for at, of in enumerate(rank.config.groups) if name in of.layer_names)
    cut = rank.config.kernel_blocks_of(group)
    spec = rank.config.groups[group].spec.layer_spec(name)
    made = []
    for view in rank.storage.views[name]:
        rows = torch.cat([view[block * cut : (block + 1) * cut] for block in blocks])
        made.append(rows if isinstance(spec, MambaSpec) else rows.reshape(len(blocks), BLOCK, *view.shape[2:]))
    return made


def fill(rank: Rank, number: int, ranks: int, pages: dict[str, list[torch.Tensor]]) -> None:
    for group, of in enumerate(rank.config.groups):
        cut = rank.config.kernel_blocks_of(group)
        for name in of.layer_names:
            held = pages[name] if name in rank.whole else by_hand(name, pages[name], number, ranks)
            for view, part in zip(rank.storage.views[name], held, strict=True):
                for at, block in enumerate(rank.blocks[group]):
                    view[block * cut : (block + 1) * cut] = part[at].reshape(view[:cut].shape).to(view.dtype)


def transfer(rank: Rank, kinds: dict[str, int]) -> StoreTransfer:
    groups, blocks, keys = [], [], []
    for group, ids in rank.blocks.items():
        for at, block in enumerate(ids):
            groups.append(group)
            blocks.append(block)
            keys.append(bytes([kinds[rank.config.groups[group].layer_names[0]], at]))
    return StoreTransfer(0, np.array(groups, np.int32), np.array(blocks, np.int32), tuple(keys))


KINDS = {"full": 0, "latent": 0, "window": 1, "mamba": 2, "delta": 2, "conv": 2, "narrow": 3}


def run(rank: Rank, way: str, kinds: dict[str, int] | None = None) -> bool:
    """Run one Step with all blocks; return whether its transfer arrived."""
    one = transfer(rank, kinds or {name: KINDS[name.split()[0]] for name in LAYERS})
    step: Step = small_step(spills=(one,)) if way == "spills" else small_step(fetches=(one,))
    rank.copier.check(step)
    rank.copier.begin(step)
    rank.copier.load(step)
    while True:
        arrived, lost, _ = rank.copier.finish(step)
        if len(arrived) + len(lost):
            rank.copier.close()
            return len(arrived) == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("writers", [1, 2, 4, 8])
@pytest.mark.parametrize("readers", [1, 2, 4, 8])
def test_pages_of_some_ranks_are_read_by_others(writers: int, readers: int, seed: int) -> None:
    """Groups, orders, blocks and halves of blocks differ between the writers and the readers."""
    rng = np.random.default_rng([writers, readers, seed])
    store, pages = MemoryStore(1 << 24), whole_pages(rng)
    for number, rank in enumerate(ranks_of(writers, store, rng)):
        fill(rank, number, writers, pages)
        assert run(rank, "spills")
    for number, rank in enumerate(ranks_of(readers, store, rng)):
        assert run(rank, "fetches")
        for group, of in enumerate(rank.config.groups):
            for name in of.layer_names:
                held = views_of(rank, name, rank.blocks[group])
                for part, wanted in zip(held, by_hand(name, pages[name], number, readers), strict=True):
                    assert torch.equal(part, wanted.to(part.dtype)), (name, number)


WAYS = [(1, ()), (2, ()), (2, STATES), (4, STATES), (8, ()), (8, STATES)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("writers", WAYS)
@pytest.mark.parametrize("readers", WAYS)
def test_whole_states_of_some_ranks_are_read_by_others(
    writers: tuple[int, tuple[str, ...]], readers: tuple[int, tuple[str, ...]], seed: int
) -> None:
    """The ranks after the first have other bytes: those of rank 0 are written, each once, and read by all."""
    rng = np.random.default_rng(seed)
    store, pages, others = BlindStore(1 << 24), whole_pages(rng), whole_pages(rng)
    for number, rank in enumerate(ranks_of(writers[0], store, rng, writers[1])):
        fill(rank, number, writers[0], pages | ({name: others[name] for name in rank.whole} if number else {}))
        assert run(rank, "spills")
    for number, rank in enumerate(ranks_of(readers[0], store, rng, readers[1])):
        assert run(rank, "fetches")
        for group, of in enumerate(rank.config.groups):
            for name in of.layer_names:
                held = views_of(rank, name, rank.blocks[group])
                expected = pages[name] if name in rank.whole else by_hand(name, pages[name], number, readers[0])
                for part, wanted in zip(held, expected, strict=True):
                    assert torch.equal(part, wanted.to(part.dtype)), (name, number)
    (one,) = ranks_of(1, alone := MemoryStore(1 << 24), rng)
    fill(one, 0, 1, pages)
    assert run(one, "spills")
    assert store.statistics().stored_bytes == alone.statistics().stored_bytes


def test_share_of_whole_and_cut_layers_is_named() -> None:
    splits = {name: _splits(spec) for name, spec in specs_of(1).items() if name in STATES}
    shares_of(splits, 1, 2, STATES)
    with pytest.raises(ConfigError, match="cannot keep layer 'delta' with others of 2 heads or channels"):
        shares_of(splits, 1, 2, ("mamba", "conv"))


class BlindStore(MemoryStore):
    """Two ranks that write at once do not see what the other one has written."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_byte_is_stored_once_and_all_shares_are_needed(ranks: int) -> None:
    """A reader of one rank finds nothing until the last of the writers has written."""
    rng = np.random.default_rng(ranks)
    store, pages = BlindStore(1 << 24), whole_pages(rng)
    for number, rank in enumerate(ranks_of(ranks, store, rng)):
        (reader,) = ranks_of(1, store, rng)
        assert not run(reader, "fetches")
        fill(rank, number, ranks, pages)
        assert run(rank, "spills")
    (reader,) = ranks_of(1, store, rng)
    assert run(reader, "fetches")
    whole = sum(
        part.numel() * view.element_size()
        for name in LAYERS
        for part, view in zip(pages[name], reader.storage.views[name], strict=True)
    )
    assert store.statistics().stored_bytes == whole


class SlowMarks(MemoryStore):
    """A mark arrives after 0.3 s, or once two callers have asked for it."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._both = threading.Barrier(2)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        found = super().get(keys, into)
        if [*keys] == [b"mark"]:
            with suppress(threading.BrokenBarrierError):
                self._both.wait(0.3)
        return found


def test_spills_that_end_in_one_hash_block_are_both_marked() -> None:
    """Their blocks are written at once; the mark is read and written again by one after the other."""
    store = SlowMarks(1 << 24)
    (rank,) = ranks_of(1, store, np.random.default_rng(0))
    copier = HostTierCopier(PagedStorage(rank.config), rank.config, store=store, hash_block=BLOCK)
    tails = [np.arange(1, 1 + tokens, dtype=np.int32).tobytes() for tokens in (2, 3)]
    one = transfer(rank, {name: number for number, name in enumerate(LAYERS)})
    step = small_step(spills=tuple(replace(one, number=at, mark=b"mark", tail=tail) for at, tail in enumerate(tails)))
    copier.check(step)
    copier.begin(step)
    copier.load(step)
    copier.close()
    mark = bytearray(mark_bytes(BLOCK))
    assert store.get([b"mark"], [memoryview(mark)]) == [True]
    assert sorted(tails_of(mark, BLOCK)) == sorted(tails)


def test_ranks_that_would_divide_a_share_are_named() -> None:
    splits = {
        "mamba": _splits(MambaSpec(block_size=4, shapes=((48, 3),), dtypes=("float32",), mamba_type="short_conv"))
    }
    assert shares_of(splits, 0, 8)[1] == 8
    for ranks in (3, 16):
        with pytest.raises(
            ConfigError, match=f"{ranks} ranks cannot share 48 heads or channels, which stores keep in 8"
        ):
            shares_of(splits, 0, ranks)


def test_blocks_without_a_form_lie_in_the_store_as_in_the_tier() -> None:
    """As vLLM's workers keep them: whole blocks, each under its own key, with what lies between pages."""
    store, made = MemoryStore(1 << 24), list[Rank]()
    for _ in range(2):
        rng = np.random.default_rng(1)
        (rank,) = ranks_of(1, store, rng)
        copier = HostTierCopier(PagedStorage(rank.config), rank.config, store=store)
        made.append(rank._replace(copier=copier, storage=copier.settled(PagedStorage(rank.config))))
    writer, reader = made
    writer.storage.arena.random_(0, 256)
    kinds = {name: number for number, name in enumerate(LAYERS)}  # no two groups have a key in common
    assert [run(writer, "spills", kinds), run(reader, "fetches", kinds)] == [True, True]
    assert writer.config.slabs is not None
    for group, blocks in writer.blocks.items():
        size = writer.config.slabs.class_of(group).block_bytes
        for block in blocks:
            there, here = (one.storage.arena[block * size : (block + 1) * size] for one in (writer, reader))
            assert torch.equal(there, here)
