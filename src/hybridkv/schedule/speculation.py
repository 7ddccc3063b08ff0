"""Draft tokens of running rows: proposed for one step, then in flight until it is known which of them are accepted.

propose()      row -> tokens; those that do not fit are cut from the tail when the step is made
schedule()     tokens  [ last known | d0 | d1 | ... ]     the row runs them all, and samples behind each
in flight      how many tokens the row has, nobody knows: it is not scheduled
update()       the accepted ones stay
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.request import Request, token_array
from hybridkv.schedule.builder import StepBuilder, share_budget
from hybridkv.schedule.limits import SchedulerLimits
from hybridkv.schedule.running import RunningRows
from hybridkv.step import Csr
from hybridkv.units import shown

Int64 = NDArray[np.int64]


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
