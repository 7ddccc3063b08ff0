"""The worker's side of the cache: block tables fed by Steps, slots, block copies, paged storage, attention over pages.

    Step -> MultiGroupBlockTable.apply -> BlockCopier.execute_before -> step_batch -> forward
    forward, in each layer: write_kv(slots) -> paged_attention(reads) -> combine_over_ranks, if there are several ranks
    compressed layers: raw keys of rings are read -> write_states(slots of states) -> RingBatch.write
    host tier: HostTierCopier.begin before a Step changes blocks, load before its forward, finish after it
    recurrent states: read and written where the Step says, or through InPlaceStates for kernels that update in place

docs/build-an-engine.md walks through it, with an engine in one file: examples/bare_engine.py.

On a GPU, ``triton_paged_attention`` and ``triton_write_kv`` do the same with this library's kernels
(``hybridkv[gpu]``).

This package never imports the cache or the scheduler: a worker may run in another process.
"""

from hybridkv.worker.attention import (
    CAUSAL,
    WHOLE,
    AttentionMask,
    ContextShare,
    PagedBatch,
    combine_over_ranks,
    combine_partial,
    paged_attention,
    paged_batch,
    with_sink,
)
from hybridkv.worker.block_table import BlockTable
from hybridkv.worker.compressed import CompressedBatch, RingBatch
from hybridkv.worker.copies import TORCH, BlockCopier, CopyKernels, copy_kernels, triton_kernels
from hybridkv.worker.pages import (
    KVPages,
    PagedStorage,
    PageOrder,
    PagePart,
    WriteSlots,
    parts_of,
    quantized_parts,
    triton_write_kv,
    triton_write_latent,
    triton_write_states,
    write_kv,
    write_latent,
    write_slots,
    write_states,
)
from hybridkv.worker.quantized import LayerPages, QuantizedPages, layer_pages, write_quantized
from hybridkv.worker.states import (
    InPlaceStates,
    RowColumns,
    StateCopier,
    StateCopies,
    StatePart,
    StatePlan,
    state_copies,
    state_parts,
)
from hybridkv.worker.tables import GroupBatch, MultiGroupBlockTable, StepBatch, step_batch
from hybridkv.worker.tier import HostTierCopier
from hybridkv.worker.triton_attention import TritonBatch, triton_batch, triton_paged_attention

__all__ = [
    "CAUSAL",
    "TORCH",
    "WHOLE",
    "AttentionMask",
    "BlockCopier",
    "BlockTable",
    "CompressedBatch",
    "ContextShare",
    "CopyKernels",
    "GroupBatch",
    "HostTierCopier",
    "InPlaceStates",
    "KVPages",
    "LayerPages",
    "MultiGroupBlockTable",
    "PageOrder",
    "PagePart",
    "PagedBatch",
    "PagedStorage",
    "QuantizedPages",
    "RingBatch",
    "RowColumns",
    "StateCopier",
    "StateCopies",
    "StatePart",
    "StatePlan",
    "StepBatch",
    "TritonBatch",
    "WriteSlots",
    "combine_over_ranks",
    "combine_partial",
    "copy_kernels",
    "layer_pages",
    "paged_attention",
    "paged_batch",
    "parts_of",
    "quantized_parts",
    "state_copies",
    "state_parts",
    "step_batch",
    "triton_batch",
    "triton_kernels",
    "triton_paged_attention",
    "triton_write_kv",
    "triton_write_latent",
    "triton_write_states",
    "with_sink",
    "write_kv",
    "write_latent",
    "write_quantized",
    "write_slots",
    "write_states",
]
