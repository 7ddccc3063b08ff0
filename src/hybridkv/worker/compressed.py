"""A Step over compressed caches: where it writes compressed states and raw keys, and the ones that it reads.

    tokens of a request   | 0 1 2 3 | 4 5 6 7 | 8 9      tokens_per_state 4, and a step that runs tokens 6 .. 9
    states read           after token 6: 1; after tokens 7, 8 and 9: 2
    ring of 8 tokens      [ 8 9 - - 4 5 6 7 ]

Token 7 ends the state of tokens 4 .. 7. So the layer reads the raw keys of 4 and 5 from the ring first. Then it writes
the state and the raw keys of its tokens: a step of many tokens overwrites the ones that it has read.

A ring is kept at a resume point (``state_writes`` of the Step): the raw keys of the group that is open there go to a
block of their own, those before the step from the ring, the others from the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import WorkerError
from hybridkv.step import Step
from hybridkv.worker.attention import PagedBatch
from hybridkv.worker.block_table import BlockTable
from hybridkv.worker.pages import WriteSlots, write_slots, write_states
from hybridkv.worker.slots import RingSlots, StateSlots

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CompressedBatch:
    """A Step in the layers of one group that share a rate (``tokens_per_state``).

    Attributes:
        slots: where compressed states are written. Token i of the step has the rows ``i * most`` .. ``i * most + most -
            1`` of ``write_states``; ``most`` is 1 unless a token has several states.
        ended: int64[tokens], the states that end at or before each token of the step, on the device of the tables. The
            query of the token may read these.
        num_states: for each request, the states that end in its tokens, this step included.
        block_table: int64[requests, columns], block ids.
        block_states: states of a block.
    """

    slots: WriteSlots
    ended: torch.Tensor
    num_states: tuple[int, ...]
    block_table: torch.Tensor
    block_states: int

    def states_of(self, request: int, pages: torch.Tensor) -> torch.Tensor:
        """Return the states of a request in order, [num_states, ...]. O(states).

        States in blocks that a window no longer reads have any content.

        Args:
            request: its place in the step.
            pages: [blocks, block_states, ...], a view of a layer of this group and rate.
        """
        states = self.num_states[request]
        blocks = self.block_table[request, : -(-states // self.block_states)]
        return pages[blocks].flatten(0, 1)[:states]


@dataclass(frozen=True, slots=True, eq=False)
class RingBatch:
    """A Step in the layers of one group of rings.

    Attributes:
        slots: where the raw keys of its tokens are written, after the step has read the ring.
        blocks: int64[requests], the block of each request.
        capacity: tokens of a ring.
        kept: int64[3, n], raw keys of the step for rings that are kept: token of the step, block, place.
        moved: int64[3, n], raw keys of earlier tokens for them: block of the request, block that is kept, place.
    """

    slots: WriteSlots
    blocks: torch.Tensor
    capacity: int
    kept: torch.Tensor
    moved: torch.Tensor

    def write(self, pages: torch.Tensor, keys: torch.Tensor) -> None:
        """Write the raw keys of a step's tokens, and the rings that are kept at resume points. O(tokens).

        Args:
            pages: [blocks, capacity, ...], a view of a layer of this group.
            keys: [tokens, ...], in the dtype of the pages.

        Raises:
            WorkerError: shapes or dtypes do not match. Nothing has been written then.
        """
        source, target, place = self.moved
        earlier = pages[source, place]
        write_states(self.slots, pages, keys)
        pages[target, place] = earlier
        token, block, place = self.kept
        pages[block, place] = keys[token]

    def keys_of(self, request: int, first: int, end: int, pages: torch.Tensor) -> torch.Tensor:
        """Return the raw keys of tokens ``first`` .. ``end`` - 1 of a request, [tokens, ...]. O(tokens).

        Args:
            request: its place in the step.
            first: position of the first token.
            end: position after the last token.
            pages: [blocks, capacity, ...], a view of a layer of this group.

        Raises:
            WorkerError: a ring does not hold so many tokens.
        """
        if not 0 <= first <= end <= first + self.capacity:
            raise WorkerError(
                f"tokens {first} .. {end - 1} are not in a ring of {self.capacity} tokens: enlarge its block_size by "
                "the drafts of a step"
            )
        return pages[self.blocks[request], torch.arange(first, end, device=pages.device) % self.capacity]


def compressed_batch(step: Step, positions: Int64, of: StateSlots, reads: PagedBatch) -> CompressedBatch:
    """Make the batch of a Step after the slots of its tokens were committed. Waits for the device.

    Args:
        step: the Step.
        positions: int64[tokens], the position of each token of the step.
        of: the slots of the group's states.
        reads: the blocks of the group that the step reads.

    Raises:
        WorkerError: two states have one slot.
    """
    slots = write_slots(of.slots.device[: step.num_tokens * of.most], reads.num_blocks, of.block_states)
    ended = torch.from_numpy(of.ended(positions + 1)).to(reads.block_table.device)
    num_states = of.ended(np.array(reads.seq_lens, np.int64))
    return CompressedBatch(slots, ended, tuple(num_states.tolist()), reads.block_table, of.block_states)


def ring_batch(step: Step, group: int, of: RingSlots, table: BlockTable) -> RingBatch:
    """Make the batch of a Step after the slots of its tokens were committed. Waits for the device.

    Args:
        step: the Step.
        group: number of the group.
        of: the slots of the group.
        table: the table of the group.

    Raises:
        WorkerError: a row has no ring, two rows have one, or a ring of an unknown group is to be kept.
    """
    without = np.flatnonzero(table.num_blocks_per_row[step.rows] == 0)
    if len(without):
        raise WorkerError(
            f"Step {step.id}: row {step.rows[without[0]]} has no block for its ring: apply the Step to the tables first"
        )
    rows = torch.from_numpy(step.rows.astype(np.int64)).to(table.device)
    slots = write_slots(of.slots.device[: step.num_tokens], table.id_limit, of.capacity)
    blocks = table.get_device_tensor()[rows, 0].to(torch.int64)
    kept, moved = _kept(step, group, of, table.get_numpy_array()[step.rows, 0])
    return RingBatch(slots, blocks, of.capacity, kept.to(table.device), moved.to(table.device))


def _kept(step: Step, group: int, of: RingSlots, blocks: NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``kept`` and ``moved`` of a RingBatch. O(raw keys). ``blocks``: int32[requests], their rings."""
    kept, moved = [np.empty((3, 0), np.int64)], [np.empty((3, 0), np.int64)]
    starts = np.cumsum(step.num_scheduled) - step.num_scheduled
    for row, number, position, block in step.state_writes.tolist():
        if number != group:
            continue
        if not of.pools:
            raise WorkerError(
                f"Step {step.id} keeps a ring after {position} tokens, but the groups of group {group} are unknown: "
                "give its spec pools"
            )
        tokens = np.arange(max(position - position % of.pools, position - of.capacity), position)
        earlier, later = tokens[tokens < step.num_computed[row]], tokens[tokens >= step.num_computed[row]]
        at = later - step.num_computed[row] + starts[row]
        kept.append(np.stack((at, np.full_like(later, block), later % of.capacity)))
        sources = np.full_like(earlier, blocks[row])
        moved.append(np.stack((sources, np.full_like(earlier, block), earlier % of.capacity)))
    return torch.from_numpy(np.concatenate(kept, axis=1)), torch.from_numpy(np.concatenate(moved, axis=1))
