"""The same calls on both sides, compared after each."""

from collections import Counter
from collections.abc import Callable, Sequence

from calls import (
    Ask,
    Call,
    Decode,
    DecodeRow,
    Difference,
    Found,
    Free,
    Grow,
    Ids,
    Known,
    Preempt,
    Probe,
    Publish,
    Reset,
    Slots,
    Start,
)
from cases import Case, Kind
from our_side import OurSide
from vllm_side import VllmSide

PROBE = "probe"
EVERY = 8  # calls between two comparisons of everything
ON_RESIDENT = {Publish: "transfers done", Preempt: "preemptions", Free: "frees"}


class Duel:
    """A case being played. requests: those known, by name. fresh: keys of states published in this step.

    operations: calls compared, by kind. seen: what came of them. excused: look-ups that differ by a defect, which
    ``excuse`` names: the run goes on without that hit.
    """

    def __init__(self, case: Case, excuse: "Callable[[Difference, Duel], str | None]") -> None:
        self.case = case
        self.excuse = excuse
        self.theirs = VllmSide(case)
        self.ours = OurSide(case)
        self.requests: dict[str, Known] = {}
        self.fresh: set[bytes] = set()
        self.operations: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.excused: Counter[str] = Counter()
        self._calls = 0
        self._states = tuple({group.block_size for group in case.groups if group.kind is Kind.ALIGN})

    @property
    def sides(self) -> tuple[VllmSide, OurSide]:
        return self.theirs, self.ours

    def play(self, call: Call) -> Difference | None:
        """The first difference. A call that is impossible now is left out."""
        self._calls += 1
        try:
            found = self._dispatch(call)
            return found or (self._compare_all(call) if self._calls % EVERY == 0 else None)
        except Exception as error:  # noqa: BLE001 - whatever either side raises is a difference
            return Difference("error", call, _origin(error), repr(error))

    def finish(self) -> Difference | None:
        """Compare everything once more."""
        try:
            return self._compare_all(Reset())
        except Exception as error:  # noqa: BLE001 - as above
            return Difference("error", Reset(), _origin(error), repr(error))

    def _dispatch(self, call: Call) -> Difference | None:
        match call:
            case Start():
                return self._start(call)
            case Grow():
                return self._grow(call)
            case Decode():
                return self._decode(call)
            case Probe():
                return self._probe(call)
            case Publish() | Preempt() | Free():
                return self._on_resident(call)
            case Reset():
                return self._reset(call)

    # -- one call

    def _start(self, call: Start) -> Difference | None:
        request = self._arrive(call)
        if request is None:
            return None
        if call.step:
            self._begin_step()
        found = self._look_up(call, call.name, request)
        if isinstance(found, Difference):
            return found
        hit = found[0].tokens if found is not None else 0
        external = min(call.external, request.tokens - hit - 1)
        external -= (hit + external) % self.case.whole_states
        request.adopted(hit, external)
        chunk = min(call.chunk, request.tokens - request.computed)
        difference = self._allocate(call, chunk, found, external)
        if difference is None and not request.resident:
            request.restart()
        elif difference is None and request.computed == request.tokens:
            self._settle(call.name, request, call.sampled, 0)
        return difference

    def _arrive(self, call: Start) -> Known | None:
        if call.tokens:
            if call.name in self.requests:
                return None
            for side in self.sides:
                side.add(call.name, call.tokens)
            self.requests[call.name] = Known(len(call.tokens), len(call.tokens))
        request = self.requests.get(call.name)
        return None if request is None or request.resident else request

    def _grow(self, call: Grow) -> Difference | None:
        request = self.requests.get(call.name)
        if request is None or not request.resident:
            return None
        computed, end = request.computed, request.computed + call.chunk
        drafts = max(0, end - request.tokens)
        left = end - call.rejected
        samples = bool(call.sampled)
        if end > self.case.max_model_len or call.rejected > drafts or samples != (end >= request.tokens):
            return None
        if drafts > (self.case.drafts if request.tokens == computed + 1 else 0):
            return None
        if request.tokens + len(call.sampled) <= left - (0 if samples else 1):
            return None
        if call.step:
            self._begin_step()
        self._fly(call.name, request, call.processed)
        difference = self._allocate(call, call.chunk)
        if difference is not None or request.computed == computed:
            return difference
        self._settle(call.name, request, call.sampled, call.rejected)
        return None

    def _decode(self, call: Decode) -> Difference | None:
        """Those of the rows that can take part: all with the same look-ahead, in one batch of ours."""
        rows = [row for row in call.rows if self._can_decode(row)]
        if not rows:
            return None
        if call.step:
            self._begin_step()
        for row in rows:
            self._fly(row.name, self.requests[row.name], row.processed)
        before = [self._state_keys(row.name) for row in rows]
        drafts = any(row.drafts for row in rows)
        self.operations["decode steps with drafts" if drafts else "decode steps"] += 1
        theirs, ours = (side.decode(rows, call.lookahead) for side in self.sides)
        if theirs != ours:
            return Difference("slots", call, theirs, ours)
        self.seen["rows of decode steps"] += len(rows)
        self.seen["blocks of decode steps"] += len(theirs.cells)
        self.seen["decode steps cut short"] += theirs.accepted < len(rows)
        for row in rows[: theirs.accepted]:
            self._decoded(row)
        for row, old in zip(rows, before, strict=True):
            self.fresh |= self._state_keys(row.name) - old
        return self._compare_rows(call, rows, theirs)

    def _can_decode(self, row: DecodeRow) -> bool:
        """Resident, with room, and drafts only behind the last known token."""
        request = self.requests.get(row.name)
        if request is None or not request.resident or request.computed + 1 + row.drafts >= self.case.max_model_len:
            return False
        return not row.drafts or request.tokens == request.computed + 1

    def _decoded(self, row: DecodeRow) -> None:
        request = self.requests[row.name]
        for side in self.sides:
            side.advance(row.name, 1 + row.drafts)
        request.ran(request.computed, 1 + row.drafts, self._states)

    def _compare_rows(self, call: Decode, rows: Sequence[DecodeRow], slots: Slots) -> Difference | None:
        for at, row in enumerate(rows):
            request = self.requests[row.name]
            difference = self._compare(call, row.name, request)
            if difference is not None:
                return difference
            if at < slots.accepted and request.computed >= request.tokens:
                self._settle(row.name, request, row.sampled, row.rejected)
        return None

    def _probe(self, call: Probe) -> Difference | None:
        for side in self.sides:
            side.add(PROBE, call.tokens)
        known = Known(len(call.tokens), len(call.tokens))
        found = self._look_up(call, PROBE, known)
        for side in self.sides:
            side.forget(PROBE)
        return found if isinstance(found, Difference) else None

    def _on_resident(self, call: Publish | Preempt | Free) -> Difference | None:
        request = self.requests.get(call.name)
        if request is None or not request.resident:
            return None
        self.operations[ON_RESIDENT[type(call)]] += 1
        if isinstance(call, Publish):
            return self._publish(call, request)
        for side in self.sides:
            side.free(call.name)
        request.restart()
        difference = self._compare(call, call.name, request)
        if isinstance(call, Free):
            del self.requests[call.name]
            for side in self.sides:
                side.forget(call.name)
        return difference

    def _publish(self, call: Publish, request: Known) -> Difference | None:
        before = self._state_keys(call.name)
        for side in self.sides:
            side.publish(call.name, request.computed)
        self.fresh |= self._state_keys(call.name) - before
        return self._compare(call, call.name, request)

    def _reset(self, call: Reset) -> Difference | None:
        self.operations["resets"] += 1
        for name in list(self.requests) if call.empty else ():
            difference = self._on_resident(Free(name))
            if difference is not None:
                return difference
        theirs, ours = (side.reset() for side in self.sides)
        self.seen["resets done"] += theirs
        return None if theirs == ours else Difference("reset", call, theirs, ours)

    # -- parts of a call

    def _fly(self, name: str, request: Known, processed: int | None) -> None:
        settled = request.computed if processed is None else processed
        request.processed = min(max(settled, request.processed), request.computed)
        for side in self.sides:
            side.fly(name, request.computed - request.processed)

    def _settle(self, name: str, request: Known, sampled: tuple[int, ...], rejected: int) -> None:
        self.seen["rejections"] += rejected > 0
        for side in self.sides:
            side.append(name, sampled)
            side.advance(name, -rejected)
        request.tokens += len(sampled)
        request.computed -= rejected

    def _begin_step(self) -> None:
        self.fresh.clear()
        for side in self.sides:
            side.begin_step()

    def _look_up(self, call: Call, name: str, request: Known) -> tuple[Found, Found] | Difference | None:
        """What both sides found; None for a difference that is excused."""
        self.operations["look-ups"] += 1
        theirs, ours = (side.look_up(name) for side in self.sides)
        if theirs != ours:
            difference = Difference("hit", call, theirs, ours, request, name)
            excuse = self.excuse(difference, self)
            if excuse is None:
                return difference
            self.excused[excuse] += 1
            return None
        self.seen["hits"] += theirs.tokens > 0
        return theirs, ours

    def _allocate(
        self, call: Start | Grow, chunk: int, found: tuple[Found, Found] | None = None, external: int = 0
    ) -> Difference | None:
        self.operations["first chunks" if isinstance(call, Start) else "chunks"] += 1
        name, request = call.name, self.requests[call.name]
        before = self._state_keys(name)
        hits = found if found is not None else (None, None)
        asks = [Ask(chunk, call.lookahead, call.delay, hit, external) for hit in hits]
        theirs, ours = self.theirs.allocate(name, asks[0]), self.ours.allocate(name, asks[1])
        if (theirs is None) != (ours is None):
            return Difference("refusal", call, theirs, ours, request, name)
        if theirs is not None and ours is not None and theirs != self._last(ours, theirs, external):
            return Difference("new", call, theirs, ours, request, name)
        self.seen["refusals"] += theirs is None
        self.seen["external prefixes"] += external > 0 and theirs is not None
        if theirs is not None:
            for side in self.sides:
                side.advance(name, chunk + (0 if request.resident else request.computed))
            request.ran(request.computed, chunk, self._states)
        difference = self._compare(call, name, request)
        self.fresh |= self._state_keys(name) - before
        return difference

    def _last(self, ours: Ids, theirs: Ids, external: int) -> Ids:
        """Ours without leading columns that vLLM leaves out: of an external prefix, and before a replayed window."""
        if not external and not any(group.replayed for group in self.case.groups):
            return ours
        return tuple(mine[len(mine) - len(new) :] for mine, new in zip(ours, theirs, strict=True))

    def _state_keys(self, name: str) -> set[bytes]:
        if not self._states:
            return set()
        keys = self.theirs.keys(self.theirs.table(name))
        return {key for i in self.state_groups for key in keys[i] if key is not None}

    @property
    def state_groups(self) -> list[int]:
        """Numbers of the groups that keep states at block edges."""
        return [i for i, group in enumerate(self.case.groups) if group.kind is Kind.ALIGN]

    # -- comparing

    def _compare(self, call: Call, name: str, request: Known) -> Difference | None:
        """The table of one request, its keys, and how many blocks are free."""
        theirs, ours = (side.table(name) for side in self.sides)
        if theirs != ours:
            return Difference("table", call, theirs, ours, request, name)
        keys = self.theirs.keys(theirs), self.ours.keys(ours)
        if keys[0] != keys[1]:
            return Difference("keys", call, *keys, request, name)
        free = self.theirs.num_free(), self.ours.num_free()
        return None if free[0] == free[1] else Difference("free", call, *free, request, name)

    def _compare_all(self, call: Call) -> Difference | None:
        """All tables, the free order and its keys, usage; and our own invariants."""
        for name, request in self.requests.items():
            difference = self._compare(call, name, request)
            if difference is not None:
                return difference
        orders = self.theirs.free_order(), self.ours.free_order()
        if orders[0] != orders[1]:
            return Difference("order", call, *orders)
        keys = self.theirs.keys(orders[:1]), self.ours.keys(orders[1:])
        if keys[0] != keys[1]:
            return Difference("keys", call, *keys)
        usage = self.theirs.usage(), self.ours.usage()
        if abs(usage[0] - usage[1]) > 1e-12:
            return Difference("usage", call, *usage)
        self.ours.check()
        return None


def _origin(error: BaseException) -> str:
    """The innermost function that raised."""
    trace = error.__traceback__
    names = []
    while trace is not None:
        names.append(f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " > ".join(names[-4:])
