"""What a Rig is built of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hybridkv.planner.config import KVCacheConfig
from hybridkv.schedule import SchedulerLimits
from hybridkv.specs import KVCacheSpec, MambaSpec
from hybridkv.testing.configs import full_spec, model_config, natural_model_config


@dataclass(frozen=True, slots=True)
class RigOptions:
    """What a Rig is built of. num_blocks: the null block included. specs: one a group.

    block_sizes: of as many groups of full attention, where no specs are given. dcp, pcp: context parallel sizes; what
    is read is checked on a single rank only. blocks_per_slab: of every group, for the natural layout, whose slabs
    ``num_blocks`` then counts; kernel_blocks: of every group, where a block is more than one. placement: its name,
    as in a plan. remembered_losses: as of the manager.
    """

    num_blocks: int = 16
    block_sizes: tuple[int, ...] = (4,)
    max_model_len: int = 40
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    caching: bool = True
    events: bool = False
    layers_per_group: int = 1
    vocabulary: int = 4
    specs: tuple[KVCacheSpec, ...] = ()
    eagle: bool = False
    dcp: int = 1
    pcp: int = 1
    blocks_per_slab: tuple[int, ...] = ()
    kernel_blocks: tuple[int, ...] = ()
    placement: str = "ends"
    remembered_losses: int = 0

    @property
    def ranks(self) -> int:
        """Context parallel ranks."""
        return self.dcp * self.pcp

    def with_drafts(self, drafts: int) -> RigOptions:
        """The same with up to ``drafts`` drafts of a row in a step, and blocks for their states.

        Fewer in the reference layout, where states are kept every few tokens.
        """
        if not self.blocks_per_slab:
            kept = [spec for spec in self.specs if isinstance(spec, MambaSpec) and spec.cache_mode == "align"]
            drafts = min([drafts, *(spec.block_size - 1 for spec in kept)])
        specs = tuple(
            replace(spec, num_speculative_blocks=max(drafts, spec.num_speculative_blocks))
            if isinstance(spec, MambaSpec)
            else spec
            for spec in self.specs
        )
        return replace(self, specs=specs, limits=replace(self.limits, num_speculative_tokens=drafts))

    @property
    def config(self) -> KVCacheConfig:
        """A config with these groups; strides are larger than pages."""
        specs = self.specs or tuple(full_spec(size) for size in self.block_sizes)
        if self.blocks_per_slab:
            return natural_model_config(
                self.num_blocks,
                specs,
                self.blocks_per_slab,
                layers_per_group=self.layers_per_group,
                kernel_blocks=self.kernel_blocks,
            )
        return model_config(self.num_blocks, specs, layers_per_group=self.layers_per_group, gap_bytes=8)
