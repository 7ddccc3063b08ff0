"""The step being scheduled: how its tokens are shared, where chunks must end, and the Step that is made of its rows.

    [ few tokens left: decoding rows, the ends of prompts, short prompts that wait | all others, in order ]
      at most SchedulerLimits.short_share of the step                                the rest

A short prompt does not wait until a long one is done. The bound leaves the oldest long prompt most of every step, so
no request starves. Tokens that short work does not need go to the others, so no step is smaller.

Rejected: equal parts for all prompts, since prompts of one length would all end late; shortest first without a bound,
since long prompts would starve; tokens set aside for prompts that may not come, since steps would be smaller.

Chunks end where recurrent states are kept. Reference layout (split_at_blocks): at multiples of the block of states.

    tokens  [ ... | block B | ... | block B | rest ]          a chunk ends at a multiple of B;
                                            ^ last boundary   none jumps the last one before the last prompt token

Natural layout (split_at_stops): at stops, if the worker cannot write a state inside a chunk. In both layouts
(split_at_items): never inside an image with tokens that attend to each other in both directions.

Draft tokens of running rows are proposed for one step, then in flight until it is known which of them are accepted:

    propose()      row -> tokens; those that do not fit are cut from the tail when the step is made
    schedule()     tokens  [ last known | d0 | d1 | ... ]     the row runs them all, and samples behind each
    in flight      how many tokens the row has, nobody knows: it is not scheduled
    update()       the accepted ones stay
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
from hybridkv.step import Cells, Csr, EncoderRead, NewRow, Step
from hybridkv.units import shown

Int64 = NDArray[np.int64]

SAMPLED_BY_WORKER: Final = -1
_NONE: Final = np.empty(0, np.int64)

Split = Callable[[Request, int, int], int]
"""Of a request, tokens that it has computed and tokens asked for: how many of those run now, 0: none this time."""


class StepBuilder:
    """The rows of one step so far, and the tokens that no row has yet.

    left: how many; for reading. split: where chunks must end, None where they may anywhere. short_tokens: most that
    requests with few tokens left take before others; 0: none may. count_short: given this step, the tokens of waiting
    requests that may go ahead, ``ahead`` at most; called only where others could take those tokens.
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
        self.left = tokens
        self._cache = cache
        self._split = split
        self.short_tokens = short_tokens
        self._count_short = count_short
        self._goes_ahead = True
        self._wanted = _NONE  # tokens that running rows want
        self._most_ahead = short_tokens
        self._ahead: int | None = None
        self._kept: int | None = None
        self._rows: list[Int64] = []
        self._counts: list[Int64] = []
        self._draft_tokens: list[Csr | None] = []
        self._cells: list[Cells] = []
        self._admitted: list[tuple[Request, bool]] = []

    # -- running requests

    def shares(self, rows: Int64, wanted: Int64) -> Int64:
        """Tokens of each of ``rows``, which want ``wanted``, int64[rows]. A Python call a row while chunks are cut."""
        left, most = self.left, self.short_tokens
        self._wanted, self._most_ahead = wanted, min(left, most)
        self._ahead = self._kept = None
        total = wanted.sum()
        if total <= left - most and not self._cuts(wanted):
            return wanted
        if not most or total <= left - most or total <= left - self.kept:
            return self._in_turn(rows, wanted, None, left)
        short = _shortest(wanted, self._most_ahead)
        first, others = short.nonzero()[0], (~short).nonzero()[0]
        shares = self._in_turn(rows, wanted, np.concatenate((first, others)), self.left - self.kept)
        if not shares[others[:1]].all():  # the oldest always advances, also where it needs most of a step at once
            return self._in_turn(rows, wanted, None, self.left)
        return shares

    def _in_turn(self, rows: Int64, wanted: Int64, turns: Int64 | None, tokens: int) -> Int64:
        """Shares of ``tokens`` tokens, first come first served in the order of ``turns``, of the rows without."""
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
        """Whether chunks of so many tokens may have to end early."""
        return self._split is not None and bool(np.count_nonzero(wanted > 1))

    @property
    def for_running(self) -> int:
        """Tokens that running requests may have, without those that their shares left to waiting ones."""
        return self.left - (self._kept or 0)

    def add_running(self, rows: Int64, counts: Int64, slots: BatchSlots, draft_tokens: Csr | None) -> None:
        """Rows that ran before get ``counts`` tokens, ``draft_tokens`` among them, and their new blocks."""
        self._rows.append(rows)
        self._counts.append(counts)
        self._draft_tokens.append(draft_tokens)
        if len(slots.block):
            self._cells.append(cells_of(rows, slots))
        self.left -= int(counts.sum())

    # -- waiting requests

    @property
    def ahead(self) -> int:
        """Tokens with which a waiting request goes ahead, if it needs no more."""
        if self._ahead is None:
            wanted = self._wanted
            ahead = int(wanted[_shortest(wanted, self._most_ahead)].sum()) if len(wanted) else 0
            self._ahead = self._most_ahead - ahead
        return self._ahead

    @property
    def kept(self) -> int:
        """Tokens of ``ahead`` that are kept for waiting requests."""
        if self._kept is None:
            self._kept = self._count_short(self) if self._goes_ahead and self.ahead else 0
        return self._kept

    def keep_nothing(self) -> None:
        """Keep no tokens for waiting requests from now on: none may go ahead."""
        self._goes_ahead, self._kept = False, 0

    def room_for(self, tokens: int) -> int:
        """How many of the ``tokens`` tokens that a waiting request lacks it may run; kept ones are for shorter ones."""
        if tokens <= self.left - self._most_ahead or tokens <= self.ahead:
            return min(tokens, self.left)
        return max(min(tokens, self.left - self.kept), 0)

    def first_chunk(self, request: Request, computed: int) -> int:
        """Tokens of the first chunk of ``request`` behind ``computed`` ones; 0: wait for a larger budget."""
        asked = self.room_for(request.num_tokens - computed)
        return asked if self._split is None or not asked else self._split(request, computed, asked)

    def add_admitted(self, plan: SlotPlan) -> None:
        """A row begins as ``plan``, which is carried out, says: all its blocks, the tokens behind its hit."""
        request, count = plan.request, plan.certain_tokens - plan.hit_tokens
        self._rows.append(np.array([request.row]))
        self._counts.append(np.array([count]))
        self._draft_tokens.append(None)
        self._cells.append(self._cache.fields.cells_of_row(request.row))
        self._admitted.append((request, plan.encodes))
        if request.num_tokens - plan.hit_tokens <= self.ahead:
            self._ahead = self.ahead - count
            self._kept = None if self._kept is None else max(self._kept - count, 0)
        self.left -= count

    # -- the Step

    def spans(self) -> RowSpans:
        """What each row computes for certain and its drafts, in the order of the batch."""
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
        self, step_id: int, after: int, spans: RowSpans, *, pending: Int64, ended_rows: list[int], transfers: Transfers
    ) -> Step:
        """The Step of ``spans``. pending: per row, tokens that steps in flight sample. transfers: the cache's."""
        cache, (rows, computed, certain, drafts) = self._cache, spans
        tokens = _gather_tokens(cache.rows, rows, computed, certain)
        moves = cache.fields.states(spans, transfers)
        return Step(
            id=step_id,
            after=after,
            rows=rows.astype(np.int32),
            num_computed=computed.astype(np.int32),
            num_scheduled=_joined(self._counts).astype(np.int32),
            samples=computed + certain == cache.rows.num_tokens[rows] + pending[rows],
            token_ids=tokens if drafts is None else _with_drafts(tokens, drafts),
            drafts=Csr.empty(len(rows)) if drafts is None else drafts,
            cells=cache.fields.cells(rows, self._cells, transfers.moved),
            finished_rows=np.array(ended_rows, np.int32),
            new_rows=tuple(_new_row(request, encodes=encodes) for request, encodes in self._admitted),
            zero=moves.zero,
            copies=moves.copies,
            state_read=moves.state_read,
            state_writes=moves.state_writes,
        )


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
    )


def _with_drafts(tokens: Csr, drafts: Csr) -> Csr:
    """Each row of ``drafts`` behind the same row of ``tokens``. O(tokens) in array operations."""
    behind = np.repeat(tokens.indptr[1:], np.diff(drafts.indptr))
    return Csr(tokens.indptr + drafts.indptr, np.insert(tokens.values, behind, drafts.values))


def _gather_tokens(requests: RequestRows, rows: Int64, computed: Int64, counts: Int64) -> Csr:
    """Tokens computed[i] .. computed[i] + counts[i] - 1 of each row; -1 for one that is not known yet.

    A decoding row costs a share of a few array operations, any other one a Python call.
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
    """How chunks are cut for states that are kept, and items; None where they end anywhere.

    forking: ids of requests that branch before the last of their known tokens, so that each branch runs that one
    itself; None where none ever does.
    """
    split: Split | None = None
    if cache.bounds.keeps_checkpoints or cache.bounds.shares_in_part:  # branches cut chunks, too
        if forking is not None or not limits.segments:
            branching = () if forking is None else forking
            split = partial(
                split_at_stops, stops=cache.bounds.checkpoint_positions, segments=limits.segments, forking=branching
            )
    elif cache.bounds.state_alignment:
        split = partial(
            split_at_blocks,
            size=cache.bounds.state_alignment,
            largest=limits.max_batched_tokens,
            drops=cache.bounds.drops_for_eagle,
        )
    return partial(split_at_items, other=split) if limits.whole_items else split


def split_at_blocks(request: Request, computed: int, asked: int, *, size: int, largest: int, drops: bool) -> int:
    """See Split. size: of a block of states, tokens. largest: the budget of a step. drops: whether EAGLE does."""
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
    stops = [last, request.branch_tokens // size * size]
    if computed % size:
        stops.append(computed // size * size + size)
    return min([end, *(stop for stop in stops if computed < stop < end)]) - computed


def split_at_stops(
    request: Request,
    computed: int,
    asked: int,
    *,
    stops: Callable[[Request, int, int], tuple[int, ...]],
    segments: bool,
    forking: Collection[str],
) -> int:
    """See Split. Natural layout: chunks end at stops, where the worker cannot write a state inside a chunk.

    stops: of a request, in start + 1 .. end. segments: the worker can. forking: see split_of.
    """
    known, end = request.num_tokens, computed + asked
    if request.request_id in forking and computed < known - 1:
        end = min(end, known - 1)
    while not segments:
        first = next(iter(stops(request, computed, min(end, known))), end)
        if first >= end:
            break
        end = first  # and what a shorter chunk reaches: placements may keep the last edge of one
    return end - computed


def split_at_items(request: Request, computed: int, asked: int, *, other: Split | None) -> int:
    """See Split. No chunk ends inside a multimodal item: before it, or behind all of it. O(items).

    other: where else chunks end. What was cached of an item was computed with all of it, so that a hit may end inside:
    the next chunk has the rest.
    """
    end = computed + (asked if other is None else other(request, computed, asked))
    for item in request.multimodal:
        if item.offset < end < item.offset + item.length:
            return max(item.offset - computed, 0)
    return end - computed


def share_budget(wanted: Int64, budget: int) -> Int64:
    """What each row gets of ``budget`` tokens, first come first served, int64[rows]."""
    ends = np.cumsum(wanted)
    if not ends.size or ends[-1] <= budget:
        return wanted
    shares: Int64 = np.clip(budget - (ends - wanted), 0, wanted)
    return shares


def _shortest(wanted: Int64, most: int) -> NDArray[np.bool_]:
    """Rows that want least, as many as ``most`` tokens are enough for, of equal ones the first; bool[rows]."""
    order = wanted.argsort(kind="stable")
    short = np.zeros(len(wanted), np.bool_)
    short[order[wanted[order].cumsum() <= most]] = True
    return short


class Speculation:
    """Drafts proposed for the next step. How many are in flight is in ``running``.

    drafted, accepted: drafts that the model verified so far, and those it accepted, int64[position in the row].
    ConfigError where states of so many drafts cannot be kept, see CacheBounds.refuse_drafts.
    """

    def __init__(self, cache: KVCacheManager, running: RunningRows, limits: SchedulerLimits) -> None:
        cache.bounds.refuse_drafts(limits.num_speculative_tokens)
        self._cache = cache
        self._running = running
        self._most = limits.num_speculative_tokens
        self._proposed = np.zeros(limits.max_running, np.int64)
        self._tokens = np.zeros((limits.max_running, self._most), np.int32)
        self.drafted = self.accepted = np.zeros(0, np.int64)
        self._any = False

    def propose(self, drafts: Mapping[str, Sequence[int]], find: Callable[[str], Request | None]) -> None:
        """See Scheduler.propose. find: a request that is here, by id. O(drafts)."""
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
        """Rows of which one token is left to run and no result is to come, bool[rows]."""
        columns, running = self._cache.rows, self._running
        decodes: NDArray[np.bool_] = (running.steps[rows] == 0) & (
            columns.num_tokens[rows] - columns.num_computed[rows] == 1
        )
        return decodes

    def room(self, rows: Int64, shares: Int64, builder: StepBuilder) -> Int64 | None:
        """How many drafts each of ``rows`` runs behind its share, int64[rows]; None when nobody has any.

        builder: of the step, ``shares`` not taken from its tokens. First come first served.
        """
        if not self._any:
            return None
        most = self._running.limit[rows] - 1 - self._cache.rows.num_tokens[rows]
        asked = np.minimum(self._proposed[rows], most)
        asked[(asked < 0) | (shares != 1) | ~self._decodes(rows)] = 0
        return share_budget(asked, builder.for_running - int(shares.sum())) if asked.any() else None

    def tokens_of(self, rows: Int64, counts: Int64) -> Csr:
        """The first ``counts[i]`` drafts of each of ``rows``."""
        indptr = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=indptr[1:])
        return Csr(indptr, self._tokens[rows][np.arange(self._most) < counts[:, None]])

    def drop(self, row: int) -> None:
        """The drafts of ``row`` do not fit."""
        self._proposed[row] = 0

    def forget(self) -> None:
        """No proposal outlives the step it was made for."""
        if self._any:
            self._proposed[:] = 0
            self._any = False

    def verify(self, num_drafts: Int64 | None, accepted: NDArray[np.int32] | None) -> None:
        """A step brought its result: drafts of each row, and tokens accepted with the one sampled behind them."""
        if num_drafts is None or accepted is None:
            return
        position = np.arange(max(len(self.drafted), num_drafts.max()))[:, None]
        more = len(position) - len(self.drafted)
        self.drafted = np.pad(self.drafted, (0, more)) + (position < num_drafts).sum(axis=1)
        self.accepted = np.pad(self.accepted, (0, more)) + (position < accepted - 1).sum(axis=1)


def check_drafts(drafts: Mapping[str, Sequence[int]]) -> None:
    """ConfigError unless all are token ids."""
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
