"""Options of TierConnector, what each of vLLM's groups needs, and what is rejected. It imports nothing of vLLM."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from hybridkv.errors import ConfigError
from hybridkv.specs import ChunkedLocalAttentionSpec, Keeps, SlidingWindowSpec
from hybridkv.stores import StoreUrl
from hybridkv.stores.changes import UNHEARD, Changes
from hybridkv.stores.disk import DiskStore
from hybridkv.stores.memory import MemoryStore
from hybridkv.stores.prefetch import GroupNeeds, PrefetchLimits, pieces_of
from hybridkv.stores.stack import StoreStack
from hybridkv.stores.store import BlockStore
from hybridkv.units import MiB, parse_bytes
from hybridkv.vllm.specs import WORKER, Config, spec_of

_SMALL: Final = 256 * MiB
_SEED: Final = "PYTHONHASHSEED"


class _Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config``."""

    host_memory: str | int
    disk: str | None = None
    disk_memory: str | int | None = None
    store: str | None = None


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The options of each rank.

    Attributes:
        host_bytes: Most bytes of blocks in host memory.
        disk: Folder of the disk store; ``None`` without one.
        disk_bytes: Bytes of its file.
        store: A store that engines share; ``None`` without one.
    """

    host_bytes: int
    disk: Path | None = None
    disk_bytes: int = 0
    store: StoreUrl | None = None

    @property
    def outlives(self) -> bool:
        """Whether some blocks are kept beyond this process, so that those of other processes may be there."""
        return self.disk is not None or self.store is not None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the options in vLLM's ``kv_connector_extra_config``.

        Raises:
            ConfigError: A name or value is wrong.
        """
        try:
            read = msgspec.convert(dict(given), _Given)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_connector_extra_config of TierConnector: {error}") from None
        if (read.disk is None) != (read.disk_memory is None):
            raise ConfigError("kv_connector_extra_config needs disk, a folder, and disk_memory together, or neither")
        host_bytes, store = parse_bytes(read.host_memory), None if read.store is None else StoreUrl(read.store)
        if read.disk is None or read.disk_memory is None:
            return cls(host_bytes, store=store)
        return cls(host_bytes, Path(read.disk), parse_bytes(read.disk_memory), store)

    @property
    def limits(self) -> PrefetchLimits:
        """Memory for copies beside host memory: a quarter for loads and an eighth for stores, each at least 256 MiB."""
        return PrefetchLimits(
            held_bytes=max(self.host_bytes // 4, _SMALL), staged_bytes=max(self.host_bytes // 8, _SMALL)
        )

    def open_stores(self, folder: str, identity: bytes, block_bytes: Sequence[int], *, tell: bool) -> StoreStack:
        """Open the stores of a rank.

        Args:
            folder: Name of the rank's folder on the disk.
            identity: Hash of the configuration.
            block_bytes: Bytes of a block of each group.
            tell: Whether host memory and disk tell which blocks they get and lose.

        Raises:
            ConfigError: As DiskStore and open_store do.
        """
        changes = Changes() if tell else None
        in_host, on_disk = (UNHEARD if changes is None else changes.of(name) for name in ("host", "disk"))
        stores: dict[str, BlockStore] = {"host": MemoryStore(self.host_bytes, in_host)}
        if self.disk is not None:
            sizes = {pieces_of(size)[0].stop for size in block_bytes}
            stores["disk"] = DiskStore(self.disk / folder, self.disk_bytes, identity, sorted(sizes), on_disk)
        if self.store is not None:
            stores["store"] = self.store.open(identity, ())
        return StoreStack(stores, changes)


def folder_of(parallel: Any, rank: int) -> str:  # noqa: ANN401 - vLLM's ParallelConfig
    """Return the name of a rank's folder on the disk.

    Args:
        parallel: vLLM's config of the replica.
        rank: Number of the rank.
    """
    return f"replica-{parallel.data_parallel_index}-rank-{rank}"  # the rank is 0 in all replicas of a dense model


def needs_of(config: Config) -> tuple[GroupNeeds, ...]:
    """Return what each group needs of a prefix.

    Raises:
        ConfigError: A group is of an unknown kind, or its blocks cannot be found by a hash.
    """
    return tuple(_needs(group.layer_names[0], group.kv_cache_spec) for group in config.kv_cache_groups)


def _needs(layer: str, spec: Any) -> GroupNeeds:  # noqa: ANN401 - vLLM's
    made = spec_of(spec)
    if made.keeps is Keeps.STATE and spec.mamba_cache_mode == "align":
        return GroupNeeds(made.block_size, is_state=True)
    if made.keeps not in {Keeps.TOKENS, Keeps.WINDOW} or not spec.prefix_cacheable:
        raise ConfigError(
            f"TierConnector cannot store the blocks of {layer} ({type(spec).__name__}), which vLLM finds by no hash: "
            "leave the connector out, or for states set --mamba-cache-mode align"
        )
    if isinstance(made, SlidingWindowSpec):
        return GroupNeeds(made.block_size, window=made.sliding_window - 1 + made.extra_retained_tokens)
    if isinstance(made, ChunkedLocalAttentionSpec):
        return GroupNeeds(made.block_size, chunk=made.attention_chunk_size)
    return GroupNeeds(made.block_size)


def identity_of(started: Any, config: Config, rules: object, versions: Sequence[str]) -> bytes:  # noqa: ANN401 - vLLM's VllmConfig
    """Return 16 bytes that differ wherever a block's bytes or its hash would mean something else.

    Args:
        started: vLLM's config of this rank.
        config: vLLM's KVCacheConfig.
        rules: Which prefixes can be resumed; its ``str`` is read.
        versions: Of vLLM and this library.
    """
    model, cache, parallel = started.model_config, started.cache_config, started.parallel_config
    weights = list(_weights(Path(model.model)))
    parts = [
        *versions, platform.python_version(), os.environ.get(_SEED), cache.prefix_caching_hash_algo,
        *(weights or [model.model]), model.revision, model.quantization, model.dtype, cache.cache_dtype,
        getattr(config, "kv_cache_layout", None), [repr(group.kv_cache_spec) for group in config.kv_cache_groups],
        [tuple(group.layer_names) for group in config.kv_cache_groups], rules,
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.rank,
    ]  # fmt: skip
    return blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()


def _weights(folder: Path) -> Iterator[str]:
    """Yield name, size and some bytes of each file of a model's folder, which is the same model at any path.

    The bytes are 64 pieces of 4 KiB, evenly spaced: all weights of another training differ.
    """
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix in {".safetensors", ".bin", ".pt", ".gguf", ".json"}:
            size, read = file.stat().st_size, blake2b(digest_size=16)
            with file.open("rb") as content:
                for first in range(0, size, max(size // 64, 4096)):
                    content.seek(first)
                    read.update(content.read(4096))
            yield f"{file.name} {size} {read.hexdigest()}"


def refuse_tiers(started: Any, config: Config, options: TierOptions) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """Raise ConfigError for the first option of vLLM with which TierConnector does not work."""
    if started.kv_transfer_config.kv_role != "kv_both":
        raise ConfigError('TierConnector stores and loads: set "kv_role": "kv_both"')
    natural = started.parallel_config.worker_cls == WORKER
    if natural and options.disk is not None and options.store is not None:
        raise ConfigError("TierConnector takes a disk or a store in the natural layout, not both: leave one out")
    for why in () if natural else _unsupported(started, config, options):
        raise ConfigError(f"TierConnector {why}")


def _unsupported(started: Any, config: Config, options: TierOptions) -> Iterator[str]:  # noqa: ANN401 - as above
    """Yield each unsupported option with its fix."""
    cache, parallel, drafts = started.cache_config, started.parallel_config, started.speculative_config
    if not cache.enable_prefix_caching:
        yield "finds blocks by vLLM's hashes: leave --no-enable-prefix-caching out"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"does not support {name}, which spreads a block over ranks: leave it out"
    if drafts is not None and drafts.method != "ngram":
        yield f"does not support drafts by {drafts.method}, which read the cache: use ngram, or leave them out"
    if cache.prefix_match_unit is not None:
        yield "loads whole blocks: leave --prefix-match-unit out"
    if any(getattr(group, "host_resident", False) for group in config.kv_cache_groups):
        yield "does not support groups in host memory: leave HiSparse out"
    if options.outlives and cache.prefix_caching_hash_algo.startswith("xxhash") and _SEED not in os.environ:
        yield f"would find no block of another process, because vLLM's hashes begin at random: set {_SEED}, or sha256"
