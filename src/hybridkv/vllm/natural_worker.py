"""vLLM's worker over one arena in slabs: ``--worker-cls hybridkv.vllm.NaturalWorker``.

What vLLM has computed of the layout, which gives all layers pages of one size, says how many bytes there are, and is
left; the layout is the scheduler's, and comes with its first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.worker.cpu_worker import CPUWorker

from hybridkv.errors import ConfigError
from hybridkv.vllm.arena import Arena
from hybridkv.vllm.natural_config import natural_config
from hybridkv.vllm.natural_step import ATTRIBUTE, Cell, NaturalStep

if TYPE_CHECKING:
    from hybridkv.planner import KVCacheConfig as OurConfig


class NaturalLayout:
    """A worker of vLLM's first model runner, in the natural layout: to stand before one of vLLM's workers."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        """Wait for the layout."""
        self._theirs = kv_cache_config
        self._arena: Arena | None = None

    def execute_model(self, scheduler_output: Any) -> Any:  # noqa: ANN401 - vLLM's
        """As vLLM's, between what the step does to blocks."""
        step: NaturalStep | None = getattr(scheduler_output, ATTRIBUTE, None)
        if step is None:
            raise ConfigError("NaturalWorker takes its steps from --scheduler-cls hybridkv.vllm.NaturalScheduler")
        if step.config is not None:
            self._arena = self._lay_out(step.config)
        arena = self._arena
        if arena is None:
            raise ConfigError("the first step was lost: it says how the cache is laid out")
        arena.copy(step.moves)
        arena.zero(step.zero)
        arena.copy(step.copies)
        for cell in step.cells:
            self._rewrite(cell)
        output = super().execute_model(scheduler_output)  # type: ignore[misc] # of the worker behind this one
        arena.copy(step.keep)
        return output

    def _lay_out(self, config: OurConfig) -> Arena:
        """Allocate, and bind every layer to its view. ConfigError for blocks that a kernel would cut."""
        if config.slabs is None:
            raise ConfigError("the scheduler's layout has no slabs")
        made = natural_config(self._theirs, config)
        made.kv_cache_layout = self._theirs.kv_cache_layout
        runner = self.model_runner  # type: ignore[attr-defined] # as above
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined] # as above
            super().initialize_from_config(made)  # type: ignore[misc] # as above
        for group, size in zip(made.kv_cache_groups, runner._kernel_block_sizes, strict=True):
            if size != group.kv_cache_spec.block_size:
                raise ConfigError(
                    f"kernels read {group.layer_names[0]} in blocks of {size} tokens, it has "
                    f"{group.kv_cache_spec.block_size}: give block_size {size} in hybridkv of --additional-config"
                )
        storage = torch.empty(0, dtype=torch.uint8, device=runner.device)
        storage.set_(runner.kv_caches[0].untyped_storage())
        return Arena(storage, config.slabs)

    def _rewrite(self, cell: Cell) -> None:
        """Nothing for a cell that the worker is yet to hear of."""
        runner = self.model_runner  # type: ignore[attr-defined] # as above
        known = runner.requests.get(cell.request_id)
        if known is None or cell.column >= len(known.block_ids[cell.group]):
            return
        known.block_ids[cell.group][cell.column] = cell.block
        row = runner.input_batch.req_id_to_index.get(cell.request_id)
        if row is not None:
            runner.input_batch.block_table[cell.group].block_table.np[row, cell.column] = cell.block


class NaturalWorker(NaturalLayout, CPUWorker):  # type: ignore[misc] # as above
    """vLLM's worker for CPUs."""
