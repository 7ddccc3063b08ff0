"""What is called next: requests that share prefixes, chunks of any size, drafts, delays, preemption, pressure."""

from random import Random

from calls import Call, Decode, DecodeRow, Free, Grow, Known, Preempt, Probe, Publish, Reset, Start
from cases import Case
from duel import Duel

MOST_RESIDENT = (6, 6, 6, 16)
LONGEST_PROMPT = 150


class Caller:
    """Draws the next call from what a duel knows."""

    def __init__(self, random: Random, case: Case) -> None:
        self._random = random
        self._case = case
        self._last_token = 0
        self._streams = [self._fresh_tokens(LONGEST_PROMPT) for _ in range(random.randint(1, 3))]
        self._number = 0
        self._most = random.choice(MOST_RESIDENT)
        self._aligned = random.choice((1.0, 1.0, 1.0, 0.97, 0.5) if case.has_states else (1.0, random.random()))
        self._delays = random.choice((0.0, 0.0, 0.2))
        self._lookahead = random.choice((0, 0, 1, 3, 7))
        self._decodes = random.choice((0.05, 0.2, 0.5))
        self._drafted = random.choice((0.0, 0.0, 0.5))
        self._externals = random.choice((0.0, 0.5)) if len(case.groups) == 1 and case.caching else 0.0

    def next(self, duel: Duel) -> Call:
        """One in a hundred empties the cache, seven probe it; the others are about requests."""
        draw = self._random.random()
        if draw < 0.01:
            return Reset(empty=self._random.random() < 0.5)
        if draw < 0.08:
            return Probe(self._prompt())
        if self._random.random() < self._decodes and (rows := self._decoding(duel)):
            return Decode(rows, self._ahead(), self._step())
        return self._about_a_request(duel)

    def _decoding(self, duel: Duel) -> tuple[DecodeRow, ...]:
        """Most resident requests in any order; those that still have a prompt to run where chunks may end anywhere."""
        drafts = self._case.drafts if self._random.random() < self._drafted else 0
        rows = [
            self._decode_row(name, request, drafts)
            for name, request in duel.requests.items()
            if request.resident and self._random.random() < 0.9
            if request.tokens == request.computed + 1 or self._random.random() >= self._aligned
        ]
        self._random.shuffle(rows)
        return tuple(rows)

    def _decode_row(self, name: str, request: Known, drafts: int) -> DecodeRow:
        drafts = self._random.randint(0, drafts) if request.tokens == request.computed + 1 else 0
        rejected = self._random.randint(0, drafts)
        return DecodeRow(name, self._fresh_tokens(drafts - rejected + 1), drafts, rejected, self._processed(request))

    def _about_a_request(self, duel: Duel) -> Call:
        resident = [name for name, request in duel.requests.items() if request.resident]
        waiting = [name for name in duel.requests if name not in resident]
        if waiting and (not resident or self._random.random() < 0.3):
            return self._start(self._random.choice(waiting), ())
        if not resident or (len(duel.requests) < self._most and self._random.random() < 0.25):
            self._number += 1
            return self._start(f"r{self._number}", self._prompt())
        name = self._random.choice(resident)
        if self._random.random() < 0.03 * len(resident):
            return self._end(name)
        return self._grow(name, duel.requests[name])

    def _fresh_tokens(self, count: int) -> tuple[int, ...]:
        """Tokens never used before, one after the other, so that a trace is short to write."""
        first, self._last_token = self._last_token, self._last_token + count
        return tuple(range(first, self._last_token))

    def _prompt(self) -> tuple[int, ...]:
        stream = self._random.choice(self._streams)
        cut = self._random.randint(0, len(stream))
        if self._random.random() < 0.4:
            cut = max(1, cut // self._case.alignment * self._case.alignment)
        tail = self._random.choice((0, 0, 1, self._random.randint(1, 40)))
        return (stream[:cut] + self._fresh_tokens(tail)) or self._fresh_tokens(1)

    def _start(self, name: str, tokens: tuple[int, ...]) -> Start:
        external = self._random.randint(1, 40) if self._random.random() < self._externals else 0
        sampled = self._fresh_tokens(1)
        return Start(name, tokens, self._chunk(), self._ahead(), self._delay(), sampled, self._step(), external)

    def _end(self, name: str) -> Call:
        return self._random.choice((Free(name), Free(name), Preempt(name), Publish(name)))

    def _chunk(self) -> int:
        chunk = self._random.choice((1, self._random.randint(1, 20), self._random.randint(1, LONGEST_PROMPT)))
        if self._random.random() < self._aligned:
            chunk = max(1, chunk // self._case.alignment) * self._case.alignment
        return chunk

    def _grow(self, name: str, request: Known) -> Call:
        left = request.tokens - request.computed
        if left > 1 and (chunk := self._prefill(request)) < left:
            return Grow(
                name, chunk, self._ahead(), self._delay(), step=self._step(), processed=self._processed(request)
            )
        drafts = self._random.randint(0, self._case.drafts if left == 1 else 0)
        chunk = left + drafts
        if request.computed + chunk >= self._case.max_model_len:
            return Free(name)
        rejected = self._random.randint(0, drafts)
        sampled = self._fresh_tokens(drafts - rejected + 1)
        processed = self._processed(request)
        return Grow(name, chunk, self._ahead(), self._delay(), rejected, sampled, self._step(), processed)

    def _prefill(self, request: Known) -> int:
        """A chunk that ends on the alignment as often as this run likes it."""
        computed, unit = request.computed, self._case.alignment
        end = computed + self._chunk()
        if self._random.random() < self._aligned:
            end = max(end // unit, computed // unit + 1) * unit
        return end - computed

    def _processed(self, request: Known) -> int | None:
        return self._random.randint(request.processed, request.computed) if self._case.overlapped else None

    def _ahead(self) -> int:
        return self._random.randint(0, self._lookahead)

    def _delay(self) -> bool:
        return self._random.random() < self._delays

    def _step(self) -> bool:
        return self._random.random() >= self._case.stepless
