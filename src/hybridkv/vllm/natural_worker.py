"""vLLM's workers in the natural layout: ``--worker-cls hybridkv.vllm.NaturalWorker``, on any platform.

A worker has one arena of slabs. Its layers are views of the arena, and each step lists its block operations.

vLLM computes a layout with pages of one size for all layers. The worker takes only the number of bytes from it. The
scheduler sends the real layout with its first step. The worker then allocates the arena, warms up kernels and captures
graphs over the final views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import select_common_block_size
from vllm.v1.worker.worker_base import CompilationTimes

from hybridkv.errors import ConfigError
from hybridkv.vllm.natural import ATTRIBUTE, Cell, NaturalStep, Options, default_block_size, natural_spec
from hybridkv.vllm.natural_config import natural_config, stage_names
from hybridkv.vllm.specs import choose_runner, layer_specs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hybridkv.planner import KVCacheConfig as OurConfig
    from hybridkv.vllm.natural import Int32


class Arena:
    """The bytes of a cache, by class and block.

    ``arena`` is uint8[config.arena_bytes] with the views of all layers. ConfigError for a ``config`` without slabs.
    """

    def __init__(self, arena: torch.Tensor, config: OurConfig) -> None:
        slabs = config.slabs
        if slabs is None:
            raise ConfigError("the scheduler's layout has no slabs")
        self.arena, self.config = arena, config
        self._blocks = [
            arena[: slabs.num_slabs * slabs.slab_bytes].view(slabs.num_slabs * one.blocks_per_slab, one.block_bytes)
            for one in slabs.classes
        ]

    def copy(self, copies: Int32) -> None:
        """Copy blocks, int32[n, 3] of (class, source, target), in order: a target may be the source of the next."""
        for of, source, target in copies.tolist():
            self._blocks[of][target] = self._blocks[of][source]

    def zero(self, blocks: Int32) -> None:
        """Clear blocks, int32[n, 2] of (class, block)."""
        for of in set(blocks[:, 0].tolist()):
            rows = self._blocks[of]
            rows.index_fill_(0, torch.from_numpy(blocks[blocks[:, 0] == of, 1].astype("int64")).to(rows.device), 0)


class NaturalLayout:
    """A mixin before one of vLLM's workers that adds the natural layout. It chooses vLLM's first model runner."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        choose_runner(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg] # the worker that this class precedes

    @staticmethod
    def packs(layout: KVCacheLayout) -> bool:
        """Return whether kernels of ``layout`` can read a layer's blocks with other layers' pages between them."""
        return bool(layout.is_block_compact and layout.is_block_outermost)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Return the names of vLLM's layouts that pack. ConfigError where some kernel supports no such layout."""
        names: Sequence[str] = super().get_supported_kv_cache_layouts()  # type: ignore[misc] # the worker that this class precedes
        packed = [name for name in names if self.packs(KVCacheLayout[name])]
        if not packed:
            raise ConfigError(
                f"kernels of this model read a layer's blocks side by side ({', '.join(names)}), and in the natural "
                "layout pages of other layers lie between them: give another --attention-backend"
            )
        return packed

    def initialize_from_config(self, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        """Store vLLM's config and wait for the layout; vLLM allocates here.

        Raises ConfigError for attention blocks that some kernel would split or not support, and for pipeline stages
        with other layers than the first stage.
        """
        self._theirs = kv_cache_config
        self._arena: Arena | None = None
        config = self.vllm_config  # type: ignore[attr-defined] # as above
        size = Options.of(config.additional_config, default_block_size(kv_cache_config)).block_size
        layers = config.compilation_config.static_forward_context
        self._specs = {name: natural_spec(spec, size) for name, spec in layer_specs(kv_cache_config)}
        for name, spec in self._specs.items():
            if not hasattr(spec, "shapes") and not _takes(layers[name].get_attn_backend(), spec):
                raise ConfigError(
                    f"the kernel of {name} does not read blocks of {size} tokens as they are: give another block_size "
                    "in hybridkv of --additional-config"
                )
        # the step that has the layout names the layers of the first stage
        self._names = stage_names(get_pp_group().broadcast_object(self._specs), self._specs)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Return the times of profiling only: nothing is allocated yet, so the warm-up runs in the first step."""
        times = self.vllm_config.compilation_config  # type: ignore[attr-defined] # as above
        return CompilationTimes(times.compilation_time, times.encoder_compilation_time)

    def execute_model(self, scheduler_output: Any) -> Any:  # noqa: ANN401 - vLLM's
        """Run vLLM's step, with the step's block operations before and after it."""
        step: NaturalStep | None = getattr(scheduler_output, ATTRIBUTE, None)
        if step is None:
            raise ConfigError("NaturalWorker takes its steps from --scheduler-cls hybridkv.vllm.NaturalScheduler")
        if step.config is not None:
            self._arena = self._lay_out(step.config)
        arena = self._arena
        if arena is None:
            raise ConfigError("the first step, which has the cache's layout, did not arrive: restart the engine")
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        tiers = tuple(_tiers_in(connector, scheduler_output.kv_connector_metadata)) if connector is not None else ()
        for tier, work in tiers:
            tier.begin(work, arena)
        arena.copy(step.moves)
        arena.zero(step.zero)
        arena.copy(step.copies)
        for tier, _ in tiers:
            tier.load()
        self._rewrite(step.cells)
        output = super().execute_model(scheduler_output)  # type: ignore[misc] # as above
        arena.copy(step.keep)
        return output

    def _lay_out(self, config: OurConfig) -> Arena:
        """Allocate the arena, bind every layer to its view, and run the postponed ``compile_or_warm_up_model``."""
        made = natural_config(self._specs, config, self._names)
        made.kv_cache_layout = self._theirs.kv_cache_layout
        runner = self.model_runner  # type: ignore[attr-defined] # as above
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined] # as above
            super().initialize_from_config(made)  # type: ignore[misc] # as above
            super().compile_or_warm_up_model()  # type: ignore[misc] # as above
        storage = torch.empty(0, dtype=torch.uint8, device=runner.device)
        storage.set_(runner.kv_caches[0].untyped_storage())
        return Arena(storage, config)

    def _rewrite(self, cells: Sequence[Cell]) -> None:
        """Write moved blocks into the block tables, except in cells that the worker does not have yet."""
        runner = self.model_runner  # type: ignore[attr-defined] # as above
        if cells and runner.prepare_inputs_event is not None:
            runner.prepare_inputs_event.synchronize()  # the last step's tables may still be copied to the device
        for cell in cells:
            known = runner.requests.get(cell.request_id)
            if known is None or cell.column >= len(known.block_ids[cell.group]):
                continue
            known.block_ids[cell.group][cell.column] = cell.block
            row = runner.input_batch.req_id_to_index.get(cell.request_id)
            if row is not None:
                runner.input_batch.block_table[cell.group].block_table.np[row, cell.column] = cell.block


def _tiers_in(connector: Any, work: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - vLLM's
    """Yield each worker of a tier in ``connector`` and its part of ``work``. A MultiConnector nests both alike."""
    inside = getattr(connector, "sub_connectors", None)
    if inside is not None:
        for one, part in zip(inside, work.metadata, strict=True):
            yield from _tiers_in(one, part)
    elif getattr(connector, "natural", None) is not None:
        yield connector.natural, work


def _takes(backend: Any, spec: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Return whether the backend's kernels read whole blocks of ``spec``."""
    try:
        return bool(select_common_block_size(spec.block_size, [backend], [spec]) == spec.block_size)
    except ValueError:
        return False


class NaturalGPUWorker(NaturalLayout, Worker):  # type: ignore[misc] # vLLM is not typed here
    """vLLM's worker for GPUs (CUDA, ROCm)."""


def _worker() -> type[NaturalLayout]:
    """Return the worker of this platform."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: PLC0415 - importing it changes torch

        class NaturalCPUWorker(NaturalLayout, CPUWorker):  # type: ignore[misc] # as above
            """vLLM's worker for CPUs."""

            @staticmethod
            def packs(layout: KVCacheLayout) -> bool:
                """Kernels for CPUs name the order inside a page alone, and go from block to block by strides."""
                return bool(layout.is_block_compact)

        return NaturalCPUWorker
    if not current_platform.is_cuda_alike():
        raise ConfigError("NaturalWorker runs on CPUs and on GPUs of CUDA and ROCm: leave --worker-cls out")
    return NaturalGPUWorker


NaturalWorker = _worker()
