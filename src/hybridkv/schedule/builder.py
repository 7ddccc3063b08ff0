"""StepBuilder shares a Step's tokens among requests, ends chunks where they must end, and makes the Step.

Short requests go first, within a share of the step:

    [ short: decoding rows, last chunks of prompts, short waiting prompts | all other requests, in order ]
      at most SchedulerLimits.short_share of the step's tokens              all tokens that are left

So a short prompt need not wait until a long one is done. The bound leaves the oldest long prompt most of every step, so
no request starves. Long prompts get the tokens that short requests do not need, so no step is smaller for it.

Rejected designs (docs/design/0030): equal parts for all prompts, because prompts of one length would all end late;
shortest first without a bound, because long prompts would starve; tokens reserved for prompts that may never come,
because steps would be smaller.

A chunk of a prompt ends where a recurrent state is saved. In the reference layout (split_at_blocks) that is at
multiples of the block of states:

    tokens  [ ... | block B | ... | block B | rest ]          a chunk ends at a multiple of B; no chunk
                                            ^ last boundary   crosses the last one before the last prompt token

With ``CacheOptions.hit_unit`` it is also at resume points inside blocks (split_at_resume_points).

In the natural layout (split_at_checkpoints) it is at checkpoint positions, if the worker cannot write a state inside a
chunk. In both layouts (split_at_items) no chunk ends inside an image whose tokens attend in both directions.

Draft tokens are proposed for one step. Then they are in flight until the model has verified them:

    propose()      drafts by row; the last ones are cut if they do not fit
    schedule()     tokens  [ last known | d0 | d1 | ... ]     the row runs them all, and samples after each
    in flight      the row's number of tokens is unknown, so the row is not scheduled
    update()       accepted drafts are appended
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import BatchSlots, KVCacheManager, RowSpans, SlotPlan, Transfers, cells_of
from hybridkv.errors import ConfigError
from hybridkv.request import Request, token_array
from hybridkv.request_rows import RequestRows
from hybridkv.schedule.limits import SchedulerLimits
from hybridkv.schedule.running import RunningRows
from hybridkv.step import NO_TIER_COPIES, Cells, Csr, EncoderRead, NewRow, Step
from hybridkv.tiers import TierWork
from hybridkv.units import shown

Int64 = NDArray[np.int64]

SAMPLED_BY_WORKER: Final = -1
_NONE: Final = np.empty(0, np.int64)

Split = Callable[[Request, int, int], int]
"""(request, its computed tokens, tokens that it could run now) -> tokens to run now; 0 to wait for another step."""


class StepBuilder:
    """The rows of one step, and the tokens of its budget that no row has taken yet.

    Attributes:
        left: tokens that no row has taken.
        short_tokens: most tokens that short requests take before others; 0 for first come, first served.
    """

    def __init__(
        self,
        tokens: int,
        cache: KVCacheManager,
        split: Split | None,
        *,
        short_tokens: int = 0,
        count_short: Callable[[StepBuilder], int] = lambda _: 0,
    ) -> None:
        """Start an empty step.

        Args:
            tokens: budget of the step.
            cache: the cache of the scheduler.
            split: shortens chunks that must end early; without it, a chunk may end anywhere.
            short_tokens: see the class.
            count_short: returns the tokens that short waiting requests will take, at most ``short_left`` of the builder
                it is given. It is called only if other requests could take these tokens.
        """
        self.left = tokens
        self._cache = cache
        self._split = split
        self.short_tokens = short_tokens
        self._count_short = count_short
        self._reserves = True
        self._wanted = _NONE  # tokens that running rows want
        self._short_budget = short_tokens
        self._short_left: int | None = None
        self._reserved: int | None = None
        self._rows: list[Int64] = []
        self._counts: list[Int64] = []
        self._draft_tokens: list[Csr | None] = []
        self._cells: list[Cells] = []
        self._admitted: list[tuple[Request, bool]] = []

    # -- running requests

    def shares(self, rows: Int64, wanted: Int64) -> Int64:
        """Return the tokens that each of ``rows`` runs, int64[rows].

        Calls Python code per row only while chunks are cut.

        Args:
            rows: running rows in order.
            wanted: int64[rows], tokens that each has left to run.
        """
        left, most = self.left, self.short_tokens
        self._wanted, self._short_budget = wanted, min(left, most)
        self._short_left = self._reserved = None
        total = wanted.sum()
        if total <= left - most and not self._cuts(wanted):
            return wanted
        if not most or total <= left - most or total <= left - self.reserved:
            return self._in_turn(rows, wanted, None, left)
        short = _shortest(wanted, self._short_budget)
        first, others = short.nonzero()[0], (~short).nonzero()[0]
        shares = self._in_turn(rows, wanted, np.concatenate((first, others)), self.left - self.reserved)
        if not shares[others[:1]].all():  # the oldest long request always advances, even if it needs most of a step
            return self._in_turn(rows, wanted, None, self.left)
        return shares

    def _in_turn(self, rows: Int64, wanted: Int64, turns: Int64 | None, tokens: int) -> Int64:
        """Return the share of each row, int64[rows], if rows take from ``tokens`` first come, first served.

        turns: places of the rows that take tokens, in the order in which they do; all rows by default.
        """
        split, cuts = self._split, self._cuts(wanted)
        if turns is None:
            if not cuts:
                return share_budget(wanted, tokens)
            turns = np.arange(len(rows))
        shares = np.zeros_like(wanted)
        if split is None or not cuts:
            shares[turns] = share_budget(wanted[turns], tokens)
            return shares
        requests = self._cache.rows.owners(rows)
        for place in turns.tolist():
            asked = min(wanted.item(place), tokens)
            if asked:
                request = requests[place]
                shares[place] = split(request, request.num_computed_tokens, asked)
                tokens -= shares.item(place)
        return shares

    def _cuts(self, wanted: Int64) -> bool:
        """Return whether a chunk of the ``wanted`` tokens may have to end early."""
        return self._split is not None and bool(np.count_nonzero(wanted > 1))

    @property
    def for_running(self) -> int:
        """Tokens that running requests may still have: all that are left but the reserved ones."""
        return self.left - (self._reserved or 0)

    def add_running(self, rows: Int64, counts: Int64, slots: BatchSlots, draft_tokens: Csr | None) -> None:
        """Add running rows with ``counts`` tokens each, drafts included, and their new blocks."""
        self._rows.append(rows)
        self._counts.append(counts)
        self._draft_tokens.append(draft_tokens)
        if len(slots.block):
            self._cells.append(cells_of(rows, slots))
        self.left -= int(counts.sum())

    # -- waiting requests

    @property
    def short_left(self) -> int:
        """Tokens for short waiting requests: the part of the short budget that short running rows do not want."""
        if self._short_left is None:
            wanted = self._wanted
            ahead = int(wanted[_shortest(wanted, self._short_budget)].sum()) if len(wanted) else 0
            self._short_left = self._short_budget - ahead
        return self._short_left

    @property
    def reserved(self) -> int:
        """Part of ``short_left`` that is reserved, because short waiting requests will take it."""
        if self._reserved is None:
            self._reserved = self._count_short(self) if self._reserves and self.short_left else 0
        return self._reserved

    def reserve_nothing(self) -> None:
        """Reserve no tokens from now on: no waiting request goes before an earlier one."""
        self._reserves, self._reserved = False, 0

    def room_for(self, tokens: int) -> int:
        """Return how many of the ``tokens`` that a waiting request has to compute it may run in this step.

        Reserved tokens are for shorter requests.
        """
        if tokens <= self.left - self._short_budget or tokens <= self.short_left:
            return min(tokens, self.left)
        return max(min(tokens, self.left - self.reserved), 0)

    def first_chunk(self, request: Request, computed: int) -> int:
        """Return the tokens of the first chunk of ``request`` after ``computed`` ones; 0 if too few are left."""
        asked = self.room_for(request.num_tokens - computed)
        return asked if self._split is None or not asked else self._split(request, computed, asked)

    def add_admitted(self, plan: SlotPlan) -> None:
        """Add the row of an admitted request with all its blocks, after ``plan`` was committed."""
        request, count = plan.request, plan.certain_tokens - plan.hit_tokens
        self._rows.append(np.array([request.row]))
        self._counts.append(np.array([count]))
        self._draft_tokens.append(None)
        self._cells.append(self._cache.fields.cells_of_row(request.row))
        self._admitted.append((request, plan.encodes))
        if request.num_tokens - plan.hit_tokens <= self.short_left:
            self._short_left = self.short_left - count
            self._reserved = None if self._reserved is None else max(self._reserved - count, 0)
        self.left -= count

    # -- the Step

    def spans(self) -> RowSpans:
        """Return the tokens that each row computes, certain ones and drafts, in the order of the batch."""
        rows, counts = _joined(self._rows), _joined(self._counts)
        computed = self._cache.rows.num_computed[rows]
        if all(part is None for part in self._draft_tokens):
            return RowSpans(rows, computed, counts)
        parts = [
            Csr.empty(len(some)) if part is None else part
            for some, part in zip(self._rows, self._draft_tokens, strict=True)
        ]
        num_drafts = np.concatenate([np.diff(part.indptr) for part in parts])
        indptr = np.concatenate(([0], np.cumsum(num_drafts)))
        drafts = Csr(indptr, np.concatenate([part.values for part in parts]))
        return RowSpans(rows, computed, counts - num_drafts, drafts)

    def freeze(
        self,
        step_id: int,
        after: int,
        spans: RowSpans,
        *,
        pending: Int64,
        ended_rows: list[int],
        transfers: Transfers,
        tier: TierWork | None,
    ) -> Step:
        """Return the Step of ``spans``.

        Args:
            step_id: id of the Step.
            after: id of the Step that a worker must have applied before this one.
            spans: the rows, as ``spans()`` returned them.
            pending: int64[max_running], tokens that steps in flight sample for each row.
            ended_rows: rows that were freed since the previous Step.
            transfers: block moves, copies and clears that the cache made for this step.
            tier: transfers to and from a host tier; ``None`` without one.
        """
        cache, (rows, computed, certain, drafts) = self._cache, spans
        tokens = _gather_tokens(cache.rows, rows, computed, certain)
        moves = cache.fields.states(spans, transfers)
        cells = cache.fields.cells(rows, self._cells, transfers.moved)
        return Step(
            id=step_id,
            after=after,
            rows=rows.astype(np.int32),
            num_computed=computed.astype(np.int32),
            num_scheduled=_joined(self._counts).astype(np.int32),
            samples=computed + certain == cache.rows.num_tokens[rows] + pending[rows],
            token_ids=tokens if drafts is None else _with_drafts(tokens, drafts),
            drafts=Csr.empty(len(rows)) if drafts is None else drafts,
            cells=cells if tier is None else _known_cells(cells, tier),
            finished_rows=np.array(ended_rows, np.int32),
            new_rows=tuple(_new_row(request, encodes=encodes) for request, encodes in self._admitted),
            zero=moves.zero,
            copies=moves.copies,
            state_read=moves.state_read,
            state_writes=moves.state_writes,
            stores=NO_TIER_COPIES if tier is None else tier.stores,
            tier_copies=() if tier is None else tier.copies,
            loads=NO_TIER_COPIES if tier is None else tier.loads,
            spills=() if tier is None else tier.spills,
            fetches=() if tier is None else tier.fetches,
        )


def _known_cells(cells: Cells, tier: TierWork) -> Cells:
    """Return ``cells`` without those of rows that loads hold: blocks that moved may be shared with them."""
    if not tier.rows or not len(cells):
        return cells
    known = ~np.isin(cells.row, list(tier.rows))
    return Cells(cells.group[known], cells.row[known], cells.column[known], cells.block[known])


def _joined(parts: list[Int64]) -> Int64:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _new_row(request: Request, *, encodes: bool) -> NewRow:
    read = None
    if request.encoder is not None:
        read = EncoderRead(request.encoder.digest, request.encoder.num_tokens, encodes)
    return NewRow(
        row=request.row,
        request_id=request.request_id,
        token_ids=request.token_ids(),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        encoder=read,
        held_ids=request.held_ids,
        lora=None if request.lora is None else request.lora.name,
    )


def _with_drafts(tokens: Csr, drafts: Csr) -> Csr:
    """Append each row of ``drafts`` to the same row of ``tokens``. O(tokens) in array operations."""
    places = np.repeat(tokens.indptr[1:], np.diff(drafts.indptr))
    return Csr(tokens.indptr + drafts.indptr, np.insert(tokens.values, places, drafts.values))


def _gather_tokens(requests: RequestRows, rows: Int64, computed: Int64, counts: Int64) -> Csr:
    """Return ``counts[i]`` tokens of each row, from position ``computed[i]`` on; SAMPLED_BY_WORKER for unknown tokens.

    Decoding rows share a few array operations; every other row costs a Python call.
    """
    indptr = np.zeros(len(rows) + 1, np.int64)
    counts.cumsum(out=indptr[1:])
    ahead = requests.num_tokens[rows] - computed
    if indptr[-1] == len(rows):
        values = requests.last_tokens(rows)
        other = ahead != 1
        if not np.count_nonzero(other):
            return Csr(indptr, values)
    else:
        values = np.empty(int(indptr[-1]), np.int32)
        other = (counts != 1) | (ahead != 1)
        single = (~other).nonzero()[0]
        if single.size:
            values[indptr[single]] = requests.last_tokens(rows[single])
    for i in other.nonzero()[0].tolist():
        start, count = int(computed[i]), int(counts[i])
        if ahead[i] <= 0:
            values[indptr[i] : indptr[i + 1]] = SAMPLED_BY_WORKER
            continue
        request = requests.requests[int(rows[i])]
        if request is not None:
            values[indptr[i] : indptr[i + 1]] = request.token_ids(start, start + count)
    return Csr(indptr, values)


def split_of(cache: KVCacheManager, limits: SchedulerLimits, forking: Collection[str] | None) -> Split | None:
    """Return the function that ends chunks early for saved states and for items. ``None``: chunks may end anywhere.

    Args:
        cache: the cache of the scheduler.
        limits: limits of the scheduler.
        forking: ids of requests with children that wait for them. These stop before their last known token, so that
            each branch computes that token itself. Omitted if no request ever forks.
    """
    split: Split | None = None
    if cache.bounds.keeps_checkpoints or cache.bounds.shares_in_part:  # forks end chunks, too
        if forking is not None or not limits.segments:
            branching = () if forking is None else forking
            split = partial(
                split_at_checkpoints,
                checkpoints=cache.bounds.checkpoint_positions,
                segments=limits.segments,
                forking=branching,
            )
    elif cache.bounds.state_alignment:
        split = partial(
            split_at_blocks,
            size=cache.bounds.state_alignment,
            largest=limits.max_batched_tokens,
            drops=cache.bounds.drops_for_eagle,
        )
        if cache.bounds.hits_inside_blocks:
            split = partial(split_at_resume_points, points=cache.bounds.resume_points, other=split)
    return partial(split_at_items, other=split) if limits.whole_items else split


def split_at_blocks(request: Request, computed: int, asked: int, *, size: int, largest: int, drops: bool) -> int:
    """End chunks at blocks of recurrent states, in the reference layout.

    A chunk that does not reach the end of the prompt ends at a multiple of ``size``, unless a block is larger than a
    whole step. No chunk crosses one of these: the last multiple before the last prompt token, the multiple where the
    prompt branches from cached ones, and the next one if the chunk begins inside a block.

    Args:
        request: the request.
        computed: its computed tokens.
        asked: tokens that it could run now.
        size: tokens of a block of states.
        largest: budget of a step.
        drops: whether EAGLE drops the last block of a hit, which moves the last boundary one block back.

    Returns:
        Tokens to run now; 0 to wait for a step with more tokens left.
    """
    total = request.num_tokens
    prefill_end = max(request.num_prompt_tokens, total - 1)
    if computed >= prefill_end:
        return asked
    end = computed + asked
    if end < prefill_end:
        floor = end // size * size
        if floor > computed:
            end = floor
        elif size <= largest:
            return 0
    last = max(0, total // size * size - size) if drops else (total - 1) // size * size
    boundaries = [last, request.branch_tokens // size * size]
    if computed % size:
        boundaries.append(computed // size * size + size)
    return min([end, *(boundary for boundary in boundaries if computed < boundary < end)]) - computed


def split_at_resume_points(
    request: Request, computed: int, asked: int, *, points: Callable[[Request], Sequence[int]], other: Split
) -> int:
    """End chunks also where hits may end inside blocks, in the reference layout.

    Args:
        request: the request.
        computed: its computed tokens.
        asked: tokens that it could run now.
        points: returns the token counts at which hits may end for the sake of a request, in order.
        other: ends chunks at blocks.

    Returns:
        Tokens to run now; 0 to wait for a step with more tokens left.
    """
    end = computed + other(request, computed, asked)
    return next((one for one in points(request) if computed < one < end), end) - computed


def split_at_checkpoints(
    request: Request,
    computed: int,
    asked: int,
    *,
    checkpoints: Callable[[Request, int, int], tuple[int, ...]],
    segments: bool,
    forking: Collection[str],
) -> int:
    """End chunks at checkpoint positions, in the natural layout, if the worker cannot write a state inside a chunk.

    Args:
        request: the request.
        computed: its computed tokens.
        asked: tokens that it could run now.
        checkpoints: returns the checkpoint positions of a request in start + 1 .. end, in order.
        segments: whether the worker can write states inside a chunk, so that only forks end chunks.
        forking: see split_of.

    Returns:
        Tokens to run now, 1 or more.
    """
    known, end = request.num_tokens, computed + asked
    if request.request_id in forking and computed < known - 1:
        end = min(end, known - 1)
    while not segments:
        first = next(iter(checkpoints(request, computed, min(end, known))), end)
        if first >= end:
            break
        end = first  # ask again: for a shorter chunk, a placement may name an earlier position
    return end - computed


def split_at_items(request: Request, computed: int, asked: int, *, other: Split | None) -> int:
    """End no chunk inside a multimodal item: a chunk ends before the item or contains all of its rest. O(items).

    A hit may end inside an item, because the cached part of it was computed together with the rest. The next chunk then
    has the rest.

    Args:
        request: the request.
        computed: its computed tokens.
        asked: tokens that it could run now.
        other: where else chunks must end.

    Returns:
        Tokens to run now; 0 to wait for a step with more tokens left.
    """
    end = computed + (asked if other is None else other(request, computed, asked))
    for item in request.multimodal:
        if item.offset < end < item.offset + item.length:
            return max(item.offset - computed, 0)
    return end - computed


def share_budget(wanted: Int64, budget: int) -> Int64:
    """Return the tokens that each row gets of ``budget``, first come, first served, int64[rows]."""
    ends = np.cumsum(wanted)
    if not ends.size or ends[-1] <= budget:
        return wanted
    shares: Int64 = np.clip(budget - (ends - wanted), 0, wanted)
    return shares


def _shortest(wanted: Int64, most: int) -> NDArray[np.bool_]:
    """Mark the rows that want the fewest tokens, as long as their sum is at most ``most``, bool[rows].

    Of equal rows, the first come first.
    """
    order = wanted.argsort(kind="stable")
    short = np.zeros(len(wanted), np.bool_)
    short[order[wanted[order].cumsum() <= most]] = True
    return short


class Speculation:
    """Drafts proposed for the next step, and counts of verified drafts. RunningRows counts the drafts in flight.

    Attributes:
        drafted: int64[position], drafts verified so far, by their position after the row's last token.
        accepted: int64[position], drafts accepted so far.
    """

    def __init__(self, cache: KVCacheManager, running: RunningRows, limits: SchedulerLimits) -> None:
        cache.bounds.refuse_drafts(limits.num_speculative_tokens)
        self._cache = cache
        self._running = running
        self._most = limits.num_speculative_tokens
        self._proposed = np.zeros(len(running.pending), np.int64)
        self._tokens = np.zeros((len(running.pending), self._most), np.int32)
        self.drafted = self.accepted = np.zeros(0, np.int64)
        self._any = False

    def propose(self, drafts: Mapping[str, Sequence[int]], find: Callable[[str], Request | None]) -> None:
        """Store ``drafts`` by row; see Scheduler.propose. find: returns the request with an id. O(drafts)."""
        found = [(find(request_id), tokens[: self._most]) for request_id, tokens in drafts.items()]
        taken = [(request, tokens) for request, tokens in found if request is not None and request.row >= 0]
        rows = np.array([request.row for request, _ in taken], np.int64)
        prompts = np.array([request.num_prompt_tokens for request, _ in taken], np.int64)
        counts = np.array([len(tokens) for _, tokens in taken], np.int64)
        counts[(self._cache.rows.num_computed[rows] < prompts) | ~self._decodes(rows)] = 0
        self._proposed[rows] = counts
        for i in np.flatnonzero(counts).tolist():
            request, tokens = taken[i]
            self._tokens[request.row, : len(tokens)] = tokens
        self._any = self._any or bool(counts.any())

    def _decodes(self, rows: Int64) -> NDArray[np.bool_]:
        """Return which of ``rows`` have one token left to run and no step in flight, bool[rows]."""
        columns, running = self._cache.rows, self._running
        decodes: NDArray[np.bool_] = (running.steps[rows] == 0) & (
            columns.num_tokens[rows] - columns.num_computed[rows] == 1
        )
        return decodes

    def room(self, rows: Int64, shares: Int64, builder: StepBuilder) -> Int64 | None:
        """Return how many drafts each of ``rows`` runs after its share, int64[rows]; ``None`` if no row has any.

        First come, first served. builder: its tokens still include ``shares``.
        """
        if not self._any:
            return None
        most = self._running.limit[rows] - 1 - self._cache.rows.num_tokens[rows]
        asked = np.minimum(self._proposed[rows], most)
        asked[(asked < 0) | (shares != 1) | ~self._decodes(rows)] = 0
        return share_budget(asked, builder.for_running - int(shares.sum())) if asked.any() else None

    def tokens_of(self, rows: Int64, counts: Int64) -> Csr:
        """Return the first ``counts[i]`` drafts of each of ``rows``."""
        indptr = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=indptr[1:])
        return Csr(indptr, self._tokens[rows][np.arange(self._most) < counts[:, None]])

    def drop(self, row: int) -> None:
        """Drop the drafts of ``row``, because they do not fit."""
        self._proposed[row] = 0

    def forget(self) -> None:
        """Drop all proposals, because each is for one step."""
        if self._any:
            self._proposed[:] = 0
            self._any = False

    def verify(self, num_drafts: Int64 | None, accepted: NDArray[np.int32] | None) -> None:
        """Count verified and accepted drafts of a step.

        Args:
            num_drafts: int64[R], drafts that each row of the step ran.
            accepted: int32[R], accepted drafts of each row, plus 1 for the token sampled after them.
        """
        if num_drafts is None or accepted is None:
            return
        position = np.arange(max(len(self.drafted), num_drafts.max()))[:, None]
        more = len(position) - len(self.drafted)
        self.drafted = np.pad(self.drafted, (0, more)) + (position < num_drafts).sum(axis=1)
        self.accepted = np.pad(self.accepted, (0, more)) + (position < accepted - 1).sum(axis=1)


def check_drafts(drafts: Mapping[str, Sequence[int]]) -> None:
    """Raise ConfigError unless all drafts are token ids."""
    if not isinstance(drafts, Mapping):
        raise ConfigError(f"drafts must map request ids to token ids, got {shown(drafts)}")
    for request_id, tokens in drafts.items():
        if not isinstance(request_id, str) or not isinstance(tokens, Sequence | np.ndarray):
            raise ConfigError(f"drafts of {shown(request_id)} must be a list of token ids, got {shown(tokens)}")
    try:
        token_array(list(chain.from_iterable(drafts.values())))
    except ConfigError:
        for request_id, tokens in drafts.items():
            try:
                token_array(tokens)
            except ConfigError as error:
                raise ConfigError(f"drafts of {request_id!r}: {error}") from None
        raise
