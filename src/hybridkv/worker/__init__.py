"""What runs beside the model: block tables fed by Steps, slots, and the arena with every layer's view of it.

    Step -> MultiGroupBlockTable.apply -> commit_block_table -> compute_slot_mapping -> commit_slot_mapping -> forward

Never imports the cache or the scheduler: a worker could live in another process.
"""

from hybridkv.worker.block_table import BlockTable
from hybridkv.worker.multi_group import MultiGroupBlockTable
from hybridkv.worker.slot_mapping import SlotMapper
from hybridkv.worker.storage import PagedStorage, PageOrder, PagePart, parts_of

__all__ = ["BlockTable", "MultiGroupBlockTable", "PageOrder", "PagePart", "PagedStorage", "SlotMapper", "parts_of"]
