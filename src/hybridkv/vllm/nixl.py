"""vLLM's NixlConnector for the natural layout: ``"kv_connector_module_path": "hybridkv.vllm.nixl"``.

NixlConnector reads ``num_blocks`` of the whole cache as the number of blocks of every layer, and for models with
recurrent layers it reads each attention block in the pages of all layers. Neither holds in the natural layout. NIXL
itself moves any range of bytes, so only the registration differs here: each layer is a region with a number of blocks
and a group of its own, and a state is one block.

    arena     [ slab: a a a a | slab: S | slab: b b - | ... ]    a, b: attention blocks; S: a state
    regions   layer of a: base + offset, every block_stride bytes, its own number of blocks
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlHandshakePayload,
    compute_nixl_compatibility_hash,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hybridkv.errors import ConfigError
from hybridkv.vllm.natural_config import NaturalConfig
from hybridkv.vllm.specs import layer_specs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


@dataclass
class Handshakes(KVConnectorWorkerMetadata):  # type: ignore[misc] # vLLM is not typed here
    """The data with which other engines connect to workers, by rank.

    vLLM collects it at start. In the natural layout workers have it after their first step.
    """

    payloads: dict[int, NixlHandshakePayload]

    def aggregate(self, other: Handshakes) -> Handshakes:
        """Return the data of both."""
        return Handshakes(self.payloads | other.payloads)


class NaturalNixlWorker(NixlPullConnectorWorker):  # type: ignore[misc] # as above
    """The worker's side: registers each layer of a NaturalConfig as a region of NIXL.

    Args:
        vllm_config: vLLM's config.
        engine_id: the name of this engine.
        kv_cache_config: a NaturalConfig.

    Raises:
        ConfigError: the cache has another layout, or its bytes would pass through a buffer on the host.
    """

    _TRANSFER_MODE = "hybridkv-natural"  # part of the hash that both engines compare: other layouts do not fit

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        if not isinstance(kv_cache_config, NaturalConfig):
            raise ConfigError(
                "NaturalNixlConnector registers the natural layout alone: start with --scheduler-cls "
                "hybridkv.vllm.NaturalScheduler and its worker, or take NixlConnector"
            )
        config: Any = kv_cache_config
        groups = config.kv_cache_groups
        states = {layer for layer, spec in layer_specs(config) if hasattr(spec, "shapes")}
        tokens = [group for group in groups if not states.intersection(group.layer_names)]
        # without the states: NixlConnector would cut them into parts for engines with other tensor parallel sizes
        super().__init__(vllm_config, engine_id, replace(config, kv_cache_groups=tokens))
        if self.use_host_buffer:
            raise ConfigError("kv_buffer_device 'cpu' copies blocks of one size: leave it out in the natural layout")
        self.kv_cache_config = config
        self._is_hma_required = len(groups) > 1  # then failed blocks have no unique ids, and requests are reported
        self._group_spec_types = (FullAttentionSpec,) * len(groups)  # every group moves as blocks

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register the arena, and each layer as a region with its own blocks. Store the handshake for other engines."""
        config: NaturalConfig = self.kv_cache_config
        first = next(iter(kv_caches.values()))
        storage = first.untyped_storage() if hasattr(first, "untyped_storage") else first[0].untyped_storage()
        in_memory, device = storage.device.type == "cpu", storage.device.index or 0
        group_of = config.transfer_group_index_by_layer
        specs, tensors = dict(layer_specs(config)), {tensor.layers[0]: tensor for tensor in config.kv_cache_tensors}
        names = sorted(specs)
        bases = [storage.data_ptr() + tensors[name].offset for name in names]
        self.device_id, self.device_kv_caches = device, kv_caches
        self.region_names, self.num_regions = names, len(names)
        self.block_len_per_layer = [specs[name].page_size_bytes for name in names]
        self.block_stride_per_layer = [tensors[name].block_stride for name in names]
        self.region_num_blocks = [config.blocks_of_layer[name] for name in names]
        self.region_group_ids = [group_of[name] for name in names]
        self._uses_region_group_mapping = len({*self.region_group_ids}) > 1
        self._region_is_mla = [self.use_mla] * len(names)
        self.region_mem_types = ["DRAM" if in_memory else self.nixl_memory_type] * len(names)
        self.num_descs = sum(self.region_num_blocks)
        self.transfer_topo = TransferTopology(
            tp_rank=self.transfer_tp_rank,
            tp_size=self.transfer_tp_size,
            block_size=self.block_size,
            engine_id=self.engine_id,
            is_mla=self.use_mla,
            is_mamba=False,
            total_num_kv_heads=1 if self.use_mla else self.model_config.get_total_num_kv_heads(),
            attn_backends=self.attn_backends,
        )
        self.compat_hash = compute_nixl_compatibility_hash(
            self.vllm_config, self.backend_name, transfer_mode=self._TRANSFER_MODE
        )
        registered = self.nixl_wrapper.get_reg_descs(
            [(storage.data_ptr(), storage.nbytes(), device, "")], self.region_mem_types[0]
        )
        self.nixl_wrapper.register_memory(registered, backends=self.nixl_backends)
        self._registered_descs.append(registered)
        mine = self.engine_id
        self.kv_caches_base_addr[mine][self.tp_rank] = bases
        self.dst_num_blocks[mine] = self.num_blocks
        self.dst_region_num_blocks[mine] = self.region_num_blocks
        self.dst_region_group_ids[mine] = self.region_group_ids
        self.dst_uses_region_group_mapping[mine] = self._uses_region_group_mapping
        self.dst_region_mem_types[mine] = self.region_mem_types
        handle, self.src_blocks_data = self.register_local_xfer_handler(self.block_size)
        self.src_xfer_handles_by_block_size[self.block_size] = handle
        self.xfer_handshake_metadata = NixlHandshakePayload(self.compat_hash, msgspec.msgpack.encode(self._described()))

    def _described(self) -> NixlAgentMetadata:
        """Return the description of the regions for other engines."""
        return NixlAgentMetadata(
            engine_id=self.engine_id,
            agent_metadata=self.nixl_wrapper.get_agent_metadata(),
            kv_caches_base_addr=self.kv_caches_base_addr[self.engine_id][self.tp_rank],
            device_id=self.device_id,
            num_blocks=self.num_blocks,
            block_lens=self.block_len_per_layer,
            block_strides=self.block_stride_per_layer,
            kv_cache_layout=self.kv_cache_layout,
            block_size=self.block_size,
            ssm_sizes=self._mamba_ssm_size,
            attn_backend_name=self.backend_name,
            physical_blocks_per_logical_kv_block=self._physical_blocks_per_logical_kv_block,
            region_num_blocks=self.region_num_blocks,
            region_group_ids=self.region_group_ids,
            region_names=self.region_names,
            region_mem_types=self.region_mem_types,
        )

    def add_remote_agent(self, nixl_agent_meta: NixlAgentMetadata, *args: Any, **kwargs: Any) -> str:  # noqa: ANN401 - vLLM's
        """Add an engine whose regions are like these. vLLM logs a ConfigError, and the load fails."""
        for field, mine, what in (
            ("region_names", self.region_names, "layers"),
            ("block_lens", self.block_len_per_layer, "bytes of a block by layer"),
            ("region_group_ids", self.region_group_ids, "groups of layers"),
        ):
            theirs = getattr(nixl_agent_meta, field)
            if theirs != mine:
                raise ConfigError(
                    f"the other engine has the {what} {theirs}, this one {mine}: give both the same model, block_size, "
                    "memory and tensor parallel size"
                )
        name: str = super().add_remote_agent(nixl_agent_meta, *args, **kwargs)
        return name


class NaturalNixlConnector(NixlPullConnector):  # type: ignore[misc] # as above
    """Both ends. vLLM makes one for the scheduler and one for each worker.

    Args:
        vllm_config: vLLM's config.
        role: the end.
        kv_cache_config: a NaturalConfig; for the scheduler also vLLM's, before the layout is known.

    Raises:
        ConfigError: as NaturalNixlWorker.
    """

    supports_natural_layout = True  # hybridkv.vllm.specs.TAKES

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        if role == KVConnectorRole.SCHEDULER:
            super().__init__(vllm_config, role, kv_cache_config)
        else:
            super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
            self.connector_worker = NaturalNixlWorker(vllm_config, self.engine_id, kv_cache_config)
        self._handed_out = False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> None:  # noqa: ANN401 - vLLM's
        """Return ``None``: NaturalWorker takes a layout in which pages of other layers may lie between blocks."""
        del vllm_config

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], NixlHandshakePayload]) -> None:
        """Serve handshakes by rank; vLLM passes none at start, and the listener of NixlConnector would keep to that."""
        if metadata:
            super().set_xfer_handshake_metadata_pp_aware(metadata)

    def build_connector_worker_meta(self) -> Handshakes | None:
        """Return the handshake with the first output of a worker."""
        worker = self.connector_worker
        if self._handed_out or worker is None or worker.xfer_handshake_metadata is None:
            return None
        self._handed_out = True
        return Handshakes({worker.tp_rank: worker.xfer_handshake_metadata})

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401 - vLLM's
        """Serve the handshakes of all workers, before vLLM answers the first request."""
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, Handshakes):
            self.set_xfer_handshake_metadata_pp_aware({(0, rank): one for rank, one in told.payloads.items()})
        super().update_connector_output(connector_output)
