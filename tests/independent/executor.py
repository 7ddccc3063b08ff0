"""A worker that believes nothing: executes Steps on bytes, and proves of each row that it reads what it must.

Memory is by the byte: every layer's pages where the plan puts them, on every context parallel rank. The arena does not
know which block holds what: whoever writes over a live block, of whatever group, destroys it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from content import Digests, Story, demand, digest
from numpy.typing import NDArray

from hybridkv.cache import KVCacheManager
from hybridkv.planner import KVCacheConfig
from hybridkv.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    Keeps,
    KVCacheSpec,
    MambaSpec,
    RequestLimits,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from hybridkv.step import Copy, Csr, NewRow, Step, StepResult

if TYPE_CHECKING:
    from host_memory import HostMemory  # which builds on Arena

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layer:
    """Where a layer's pages lie.

    items: tokens, compressed states or states in a block. item_bytes: of one. rate: tokens of one. tint: tells
    its content from other layers'.
    """

    name: str
    group: int
    spec: KVCacheSpec
    offset: int
    stride: int
    parts: int
    items: int
    item_bytes: int
    rate: Fraction
    tint: np.uint64

    def ended(self, tokens: int) -> int:
        """Items that the first ``tokens`` tokens complete."""
        return int(tokens / self.rate)

    def open_at(self, tokens: int) -> int:
        """The first token of the item that is incomplete after ``tokens`` tokens."""
        return int(self.ended(tokens) * self.rate)


def layers_of(config: KVCacheConfig) -> list[Layer]:
    """All layers that keep anything."""
    tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
    layers = []
    for number, group in enumerate(config.groups):
        parts = 1 if config.slabs is None else config.slabs.kernel_blocks[number]
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
            if spec.keeps is Keeps.NOTHING:
                continue
            rate = Fraction(spec.tokens_per_state if isinstance(spec, AttentionSpec) else spec.block_size)
            items = int(spec.block_size / rate)
            tensor = tensors[name]
            place = tensor.offset_bytes, tensor.block_stride_bytes, parts, items, spec.content_bytes // items
            layers.append(Layer(name, number, spec, *place, rate, np.uint64(digest("layer", name))))
    return layers


class Arena:
    """``ranks`` arenas of one plan, full of rubbish at first. written: places since the last ``take_written``."""

    def __init__(self, config: KVCacheConfig, ranks: int, interleave: int, rng: np.random.Generator) -> None:
        self.config, self.ranks, self.interleave = config, ranks, interleave
        self.layers = layers_of(config)
        self._rng = rng
        self._bytes = rng.integers(0, 256, ranks * config.arena_bytes, np.uint8)
        self._written: list[Places] = []
        self._null = [0 if config.slabs is None else config.slabs.class_of(g).blocks_per_slab - 1 for g in self.groups]

    @property
    def groups(self) -> range:
        """Their numbers."""
        return range(len(self.config.groups))

    def check_ids(self, group: int, blocks: NDArray[np.integer], what: str) -> None:
        """``blocks`` must be blocks of ``group``, and not null."""
        right = (blocks > self._null[group]) & (blocks < self.config.blocks_of(group))
        demand(right.all(), f"{what}: group {group} has no blocks {blocks[~right][:3].tolist()} to use")

    # -- tokens

    def places(self, layer: Layer, row: NDArray[np.int32], positions: Places, what: str) -> Places:
        """Bytes of the items at ``positions``, int64[n, item_bytes]. row: the block table's. Never a null block."""
        size = layer.items
        if layer.spec.keeps is Keeps.RING:
            positions = positions % size
        ranks = 1 if layer.spec.keeps is Keeps.ENCODER else self.ranks
        column, offset = positions // (size * ranks), positions % (size * ranks)
        demand(not len(column) or int(column.max()) < len(row), f"{what}: the table has no column for its tokens")
        blocks = row[column].astype(np.int64)
        self.check_ids(layer.group, blocks, what)
        rank = offset // self.interleave % ranks
        offset = offset // (ranks * self.interleave) * self.interleave + offset % self.interleave
        per = size // layer.parts
        start = rank * self.config.arena_bytes + layer.offset + blocks * layer.stride
        start += offset // per * (layer.stride // layer.parts) + offset % per * layer.item_bytes
        places: Places = start[:, None] + np.arange(layer.item_bytes)
        return places

    def whole_places(self, layer: Layer, places: Places) -> Places:
        """``places`` of rank 0, and of all other ranks too: what is whole on each."""
        all_ranks: Places = places + np.arange(self.ranks).reshape(-1, 1, 1) * self.config.arena_bytes
        return all_ranks.reshape(-1, layer.item_bytes)

    def state_places(self, layer: Layer, block: int) -> Places:
        """Bytes of the state in ``block``, on every rank."""
        start = layer.offset + block * layer.stride
        return self.whole_places(layer, start + np.arange(layer.item_bytes).reshape(1, -1))

    def write(self, layer: Layer, places: Places, content: Digests) -> None:
        """Fill each item with its digest."""
        self._written.append(places)
        self._bytes[places] = _pattern(layer, content)

    def holds(self, layer: Layer, places: Places, content: Digests) -> NDArray[np.bool_]:
        """Whether each item is there, bool[n]."""
        right: NDArray[np.bool_] = (self._bytes[places] == _pattern(layer, content)).all(axis=1)
        return right

    def is_zero(self, places: Places) -> bool:
        """Whether nothing but zeros is there."""
        return not self._bytes[places].any()

    # -- blocks

    def copy(self, group: int, source: int, target: int) -> None:
        """All of one block to another, on every rank."""
        places = self.block_places(group, target)
        self._bytes[places] = self._bytes[self.block_places(group, source)]
        self._written.append(places)

    def clear(self, group: int, block: int) -> None:
        """Zeros."""
        places = self.block_places(group, block)
        self._bytes[places] = 0
        self._written.append(places)

    def snapshot(self, group: int, block: int) -> bytes:
        """What a block holds."""
        return self._bytes[self.block_places(group, block)].tobytes()

    def block_places(self, group: int, block: int) -> Places:
        """Bytes of a block, on every rank."""
        if self.config.slabs is not None:
            size = self.config.slabs.class_of(group).block_bytes
            own = np.arange(block * size, (block + 1) * size)
        else:
            mine = [one for one in self.layers if one.group == group]
            pages = [one.offset + block * one.stride + np.arange(one.spec.page_size_bytes) for one in mine]
            own = np.concatenate(pages)
        places: Places = (own + np.arange(self.ranks)[:, None] * self.config.arena_bytes).reshape(-1)
        return places

    def put(self, places: Places, content: Bytes) -> None:
        """Bytes there."""
        self._bytes[places] = content

    # -- failures

    def note_written(self, places: Places) -> None:
        """Something is written there."""
        self._written.append(places)

    def take_written(self) -> list[Places]:
        """Where anything was written since the last call."""
        written, self._written = self._written, []
        return written

    def spoil(self, written: list[Places]) -> None:
        """Rubbish there: a step that failed may have left anything where it should have written."""
        for places in written:
            self._bytes[places] = self._rng.integers(0, 256, places.shape, np.uint8)


def _pattern(layer: Layer, content: Digests) -> Bytes:
    """uint8[n, item_bytes]: each digest, in the layer's tint, over and over."""
    eight = (content ^ layer.tint).view(np.uint8).reshape(-1, 8)
    times = -(-layer.item_bytes // 8)
    return np.tile(eight, (1, times))[:, : layer.item_bytes]


Table = NDArray[np.int32]


@dataclass(slots=True)
class Row:
    """A request that has a row. computed: tokens that its next step must find. known: tokens that the worker knows.

    raw: tokens with which the row began.
    """

    story: Story
    tables: list[Table]
    computed: int
    known: int
    begins: bool = True
    raw: int = 0


@dataclass(slots=True)
class Run:
    """What one row runs in one step. content: digests of all tokens up to the last, drafts included."""

    place: int
    row: Row
    name: str
    start: int
    certain: int
    drafts: list[int]
    samples: bool
    content: Digests = field(default_factory=lambda: np.empty(0, np.uint64))

    @property
    def end(self) -> int:
        """Behind the last token."""
        return self.certain + len(self.drafts)


class Executor:
    """Executes Steps in order. counts: how often what happened, row-steps among them."""

    def __init__(
        self,
        arena: Arena,
        cache: KVCacheManager,
        limits: RequestLimits,
        stories: dict[str, Story],
        *,
        segments: bool,
        host: HostMemory | None = None,
    ) -> None:
        self.arena, self.stories, self.segments = arena, stories, segments
        self.counts: Counter[str] = Counter() if host is None else host.counts
        self.rows: dict[int, Row] = {}
        self.last = -1
        self.written: dict[int, list[tuple[Arena, list[Places]]]] = {}
        self._groups = arena.config.groups
        self._widths = [group.spec.max_row_blocks(limits) for group in self._groups]
        self._states = [g for g, group in enumerate(self._groups) if group.spec.keeps is Keeps.STATE]
        self._recurrent = [one for one in arena.layers if one.spec.keeps is Keeps.STATE]
        self._crossing = [one for one in arena.layers if one.spec.keeps is Keeps.ENCODER]
        self._attention = [one for one in arena.layers if one.spec.keeps in {Keeps.TOKENS, Keeps.WINDOW}]
        self._compressed = [one for one in self._attention if one.rate != 1]
        self._raw = [one for one in self._attention if one.rate == 1]
        self._rings = [one for one in arena.layers if one.spec.keeps is Keeps.RING]
        self._sinks = self._fill_sinks(cache)
        self._host = host
        self._arenas = (arena,) if host is None else (arena, host.arena)

    # -- what the caller may ask and tell

    def lose(self, step: Step) -> None:
        """``step`` never arrived; but whose rows it ended is known."""
        for number in step.finished_rows.tolist():
            self.rows.pop(number, None)

    def spoil(self, step_id: int) -> None:
        """What ``step_id``, which failed, wrote is rubbish."""
        for arena, written in self.written[step_id]:
            arena.spoil(written)

    def audit(self) -> None:
        """Everything that live rows, and sinks, still need is there."""
        for number, row in self.rows.items():
            if not row.begins:
                self._read(row, row.computed, row.computed, row.story.digests(row.computed), f"audit of row {number}")
        for group, block, content in self._sinks:
            demand(self.arena.snapshot(group, block) == content, f"sink block {block} of group {group} was written")

    # -- one Step

    def execute(self, step: Step) -> StepResult:
        """The result of ``step``. DifferenceError for whatever is not as documented."""
        what = f"step {step.id}"
        demand(step.after <= self.last < step.id, f"{what} is after {step.after}, the last one was {self.last}")
        for arena in self._arenas:
            arena.take_written()
        self._apply_tables(step, what)
        runs = self._runs(step, what)
        demand(self._host or not step.has_transfers, f"{what} has transfers, and nobody has a tier")
        if self._host is not None:
            self._host.start(step, what)
        moves = self._leading_moves(step.copies, what)
        self._copy(step.copies[:moves], what)
        for group, block in step.zero.tolist():
            self.arena.check_ids(group, np.array([block]), f"{what} zeroes")
            self.arena.clear(group, block)
        self._copy([copy for copy in step.copies[moves:] if copy.stage == "before"], what)
        if self._host is not None:
            self._host.load(step, what)
        self._encode(step.new_rows, what)
        self._read_states(step, runs, what)
        self._read_kept(step, runs)
        self._forward(runs)
        self._write_states(step, runs, what)
        self._copy([copy for copy in step.copies if copy.stage == "after"], what)
        sampled = [self._sample(run) for run in runs]
        self.last = step.id
        self.written[step.id] = [(arena, arena.take_written()) for arena in self._arenas]
        self._count(step, runs)
        result = StepResult(step.id, Csr.from_lists(sampled), np.array([len(one) for one in sampled], np.int32))
        return result if self._host is None else self._host.report(step, result)

    def _apply_tables(self, step: Step, what: str) -> None:
        for number in step.finished_rows.tolist():
            self.rows.pop(number, None)
        for new in step.new_rows:
            demand(new.row not in self.rows, f"{what}: row {new.row} begins, but has not ended")
            story = self.stories[new.request_id]
            known = len(new.token_ids)
            right = known >= story.given and new.token_ids.tolist() == [story.token(i) for i in range(known)]
            demand(right, f"{what}: the tokens of {new.request_id} are not its own")
            same = new.num_prompt_tokens == story.request.num_prompt_tokens and new.sampling == story.sampling
            demand(same, f"{what}: prompt length or sampling of {new.request_id}")
            tables = [np.zeros(width, np.int32) for width in self._widths]
            self.rows[new.row] = Row(story, tables, -1, known)
        cells = step.cells
        listed = (cells.group.tolist(), cells.row.tolist(), cells.column.tolist(), cells.block.tolist())
        for group, number, column, block in zip(*listed, strict=True):
            demand(number in self.rows, f"{what} writes a cell of row {number}, which nobody has")
            demand(0 <= column < self._widths[group], f"{what} writes column {column} of group {group}")
            demand(0 <= block < self.arena.config.blocks_of(group), f"{what} names block {block} of group {group}")
            self.rows[number].tables[group][column] = block

    def _runs(self, step: Step, what: str) -> list[Run]:
        """What each row runs; its tokens and counts must be those of its story."""
        demand(len(set(step.rows.tolist())) == len(step.rows), f"{what} runs a row twice")
        runs = []
        for place, number in enumerate(step.rows.tolist()):
            demand(number in self.rows, f"{what} runs row {number}, which nobody has")
            row, name = self.rows[number], f"{what}, row {number} ({self.rows[number].story.request.request_id})"
            start, tokens = int(step.num_computed[place]), step.token_ids[place].tolist()
            drafts = step.drafts[place].tolist()
            demand(len(tokens) == step.num_scheduled[place] > len(drafts), f"{name}: number of tokens")
            certain = start + len(tokens) - len(drafts)
            demand(tokens[certain - start :] == drafts, f"{name}: drafts are not the tail of its tokens")
            run = Run(place, row, name, start, certain, drafts, bool(step.samples[place]))
            if row.begins:
                demand(0 <= start < row.known, f"{name} begins at {start} of {row.known} tokens")
                row.raw = start
            else:
                demand(start == row.computed, f"{name} begins at {start}, not at {row.computed}")
            demand(certain <= row.known, f"{name}: nobody knows token {certain - 1} yet")
            demand(not drafts or certain == row.known, f"{name}: drafts before its last token")
            demand(run.samples == (certain == row.known), f"{name}: whether it samples")
            for position, token in enumerate(tokens[: certain - start], start):
                last = position == row.known - 1 and position >= row.story.request.num_prompt_tokens
                demand(token == row.story.token(position) or (token == -1 and last), f"{name}: token {position}")
            run.content = row.story.with_drafts(certain, drafts)
            runs.append(run)
        beginning = {new.row for new in step.new_rows}
        demand(beginning <= set(step.rows.tolist()), f"{what}: a row begins without running")
        return runs

    def _leading_moves(self, copies: tuple[Copy, ...], what: str) -> int:
        moves = [copy.kind == "move" for copy in copies]
        demand(moves == sorted(moves, reverse=True), f"{what}: a move behind another copy")
        demand(all(copy.stage == "before" for copy in copies if copy.kind == "move"), f"{what}: a late move")
        return sum(moves)

    def _copy(self, copies: list[Copy] | tuple[Copy, ...], what: str) -> None:
        for copy in copies:
            self.arena.check_ids(copy.group, np.array([copy.source, copy.destination]), f"{what} copies")
            self.arena.copy(copy.group, copy.source, copy.destination)

    # -- the forward

    def _encode(self, new_rows: tuple[NewRow, ...], what: str) -> None:
        """Run the encoders that the Step asks for, once for each distinct input."""
        done = set()
        for new in new_rows:
            story, read = self.rows[new.row].story, new.encoder
            demand((read is None) == (story.encoder is None), f"{what}: the encoder input of {new.request_id}")
            if read is None or story.encoder is None:
                continue
            same = (read.digest, read.num_tokens) == (story.encoder.digest, story.encoder.num_tokens)
            demand(same, f"{what}: the encoder input of {new.request_id}")
            self.counts["encoder inputs run" if read.encodes else "encoder outputs shared"] += 1
            if not read.encodes:
                continue
            content = story.encoded()
            places = [self._encoder_places(layer, self.rows[new.row], what) for layer in self._crossing]
            key = (read.digest, content.tobytes(), *(where.tobytes() for where in places))
            demand(key not in done, f"{what}: {read.digest!r} is encoded twice")
            done.add(key)
            for layer, where in zip(self._crossing, places, strict=True):
                self.arena.write(layer, where, np.tile(content, self.arena.ranks))

    def _encoder_places(self, layer: Layer, row: Row, what: str) -> Places:
        tokens = np.arange(row.story.encoder.num_tokens if row.story.encoder else 0)
        return self.arena.whole_places(
            layer, self.arena.places(layer, row.tables[layer.group], tokens, f"{what}: encoder output")
        )

    def _forward(self, runs: list[Run]) -> None:
        """Layer by layer a model writes the keys of all rows, then all rows read. Rings are read before."""
        for run in runs:
            self._read_raw(run)
        for layer in self._attention + self._rings:
            for run in runs:
                self._write(layer, run)
        for run in runs:
            self._read(run.row, run.start, run.end, run.content, run.name)

    def _read_raw(self, run: Run) -> None:
        """The raw keys of states that tokens before the step began, and that it completes.

        They are in every ring. Without rings, they are in a layer that keeps each token, or enough of the last ones.
        """
        for layer in self._compressed:
            first = layer.open_at(run.start)
            if first < run.start and layer.ended(run.end) > layer.ended(run.start):
                self.counts["states begun in an earlier step"] += 1
                kept = self._rings or [one for one in self._raw if _first_read(one, run.start) <= first]
                demand(kept, f"{run.name}: no layer keeps the raw keys of {first} .. {run.start - 1}")
                self._check_raw(kept, run.row, (first, run.start), run.content, run.name)

    def _read_kept(self, step: Step, runs: list[Run]) -> None:
        """Before the forward, rings have the tokens before the step that it keeps rings of."""
        for place, group, tokens, _ in step.state_writes.tolist():
            rings = [ring for ring in self._rings if ring.group == group]
            run = runs[place]
            for ring in rings:
                span = min(tokens - tokens % _pools(ring), run.start), run.start
                self._check_raw([ring], run.row, span, run.content, run.name)

    def _check_raw(self, layers: list[Layer], row: Row, tokens: tuple[int, int], content: Digests, what: str) -> None:
        """tokens: the first, and behind the last."""
        for layer in layers:
            # a ring has the group that is open when the row begins, and all tokens behind that
            first = max(tokens[0], row.raw - row.raw % _pools(layer)) if _pools(layer) else tokens[0]
            positions = np.arange(first, tokens[1])
            places = self.arena.places(layer, row.tables[layer.group], positions, f"{what}, {layer.name}")
            wrong = positions[~self.arena.holds(layer, places, content[positions])].tolist()
            demand(not wrong, f"{what}: {layer.name} holds something else for {wrong[:3]} of {tokens}")
            self.counts["raw keys read from a ring"] += len(positions) * (layer.spec.keeps is Keeps.RING)

    def _write(self, layer: Layer, run: Run) -> None:
        """The tokens or states of a run, or those of its tokens that its ring keeps."""
        first, end = layer.ended(run.start), layer.ended(run.end)
        if layer.spec.keeps is Keeps.RING:
            first = max(first, end - layer.items)
        items = np.arange(first, end)
        places = self.arena.places(layer, run.row.tables[layer.group], items, f"{run.name} writes")
        self.arena.write(layer, places, _items(layer, items, run.content))
        self.counts["compressed states written"] += len(items) * (layer.rate != 1)

    def _read(self, row: Row, start: int, end: int, content: Digests, what: str) -> None:
        """All that tokens start .. end - 1 (the next one, if there is none) read must be there."""
        for layer in self._attention:
            # a state is read as long as any of its tokens is
            items = np.arange(min(layer.ended(_first_read(layer, start)), layer.ended(end)), layer.ended(end))
            places = self.arena.places(layer, row.tables[layer.group], items, f"{what}, {layer.name}")
            right = self.arena.holds(layer, places, _items(layer, items, content))
            wrong = items[~right].tolist()
            demand(not wrong, f"{what}: {layer.name} reads something else at {wrong[:3]}, running {start} .. {end - 1}")
        # what the next step may need of the rings, whichever drafts are accepted
        begun = min((layer.open_at(start) for layer in self._compressed), default=end)
        if self._rings and begun < start:
            kept = min(ring.items for ring in self._rings)
            self._check_raw(self._rings, row, (max(begun, end - kept), end), content, what)
        for layer in self._crossing:
            if row.story.encoder is not None:
                output = np.tile(row.story.encoded(), self.arena.ranks)
                right = self.arena.holds(layer, self._encoder_places(layer, row, what), output)
                demand(right.all(), f"{what}: {layer.name} reads another encoder's output")

    # -- states

    def _read_states(self, step: Step, runs: list[Run], what: str) -> None:
        """Before any row writes: kernels run rows side by side, so nobody may write what another row reads."""
        if not self._states:
            return
        demand(step.state_read.shape == (len(runs), len(self._groups)), f"{what}: shape of state_read")
        readers: dict[tuple[int, int], int] = {}
        for run in runs:
            blocks = step.state_read[run.place].tolist()
            for group, block in enumerate(blocks):
                demand((block < 0) == (group not in self._states), f"{run.name}: state_read of group {group}")
            for layer in self._recurrent:
                block = blocks[layer.group]
                self.arena.check_ids(layer.group, np.array([block]), f"{run.name} reads a state")
                places = self.arena.state_places(layer, block)
                if run.start == 0:
                    right = self.arena.is_zero(places)
                else:
                    content = np.full(self.arena.ranks, run.content[run.start - 1])
                    right = bool(self.arena.holds(layer, places, content).all())
                demand(right, f"{run.name}: {layer.name} reads another state than that after {run.start} tokens")
                readers[layer.group, block] = run.place
        writers: dict[tuple[int, int], int] = {}
        for place, group, _, block in step.state_writes.tolist():
            demand(readers.get((group, block), place) == place, f"{what}: a state is written that another row reads")
            demand(writers.setdefault((group, block), place) == place, f"{what}: two rows write one state")

    def _write_states(self, step: Step, runs: list[Run], what: str) -> None:
        left: set[tuple[int, int, int]] = set()
        blocks: set[tuple[int, int]] = set()
        for place, group, tokens, block in step.state_writes.tolist():
            rings = [ring for ring in self._rings if ring.group == group]
            demand(group in self._states or rings, f"{what} writes a state of group {group}")
            demand(0 <= place < len(runs), f"{what} writes a state of run {place}")
            run = runs[place]
            demand(run.start < tokens <= run.end, f"{run.name} writes a state after {tokens} tokens")
            demand(self.segments or tokens >= run.certain, f"{run.name} writes a state inside its chunk")
            demand((group, block) not in blocks, f"{run.name} writes two states to block {block} of group {group}")
            blocks.add((group, block))
            self.arena.check_ids(group, np.array([block]), f"{run.name} writes a state")
            for ring in rings:
                # the forward may have overwritten what the ring held before: it was checked then
                open_group = np.arange(tokens - tokens % _pools(ring), tokens)
                where = self.arena.places(ring, np.array([block], np.int32), open_group, f"{run.name} keeps a ring")
                self.arena.write(ring, where, run.content[open_group])
                self.counts["rings kept"] += 1
            left.add((place, group, tokens))
            self.counts["states written inside a chunk"] += tokens < run.certain
            for layer in self._recurrent:
                if layer.group == group:
                    content = np.full(self.arena.ranks, run.content[tokens - 1])
                    self.arena.write(layer, self.arena.state_places(layer, block), content)
        for run in runs:
            for group in self._states:
                ends = {(run.place, group, tokens) for tokens in range(run.certain, run.end + 1)}
                demand(ends <= left, f"{run.name}: group {group} does not write the states where the row may end")

    # -- afterwards

    def _sample(self, run: Run) -> list[int]:
        """Accepted drafts and the token behind them."""
        row = run.row
        row.begins = False
        row.computed = run.certain
        if not run.samples:
            return []
        sampled = [row.story.token(run.certain)]
        for draft in run.drafts:
            if draft != sampled[-1]:
                break
            sampled.append(row.story.token(run.certain + len(sampled)))
        row.computed += len(sampled) - 1
        row.known += len(sampled)
        self.counts["drafts accepted"] += len(sampled) - 1
        self.counts["drafts rejected"] += len(run.drafts) - len(sampled) + 1
        return sampled

    def _count(self, step: Step, runs: list[Run]) -> None:
        counts = self.counts
        counts["row-steps"] += len(runs)
        counts["rings hit"] += any(
            copy.kind == "block" and any(ring.group == copy.group for ring in self._rings) for copy in step.copies
        )
        beginning = {new.row for new in step.new_rows}
        for run in runs:
            if int(step.rows[run.place]) in beginning and run.start:
                counts["hits"] += 1
                counts["hits inside a block"] += any(
                    run.start % (layer.spec.block_size * self.arena.ranks) for layer in self._attention
                )
                counts["states hit"] += bool(self._states)
        for copy in step.copies:
            counts[f"copies of kind {copy.kind}"] += 1
        counts["rows that ended and began in one step"] += bool(beginning & set(step.finished_rows.tolist()))

    def _fill_sinks(self, cache: KVCacheManager) -> list[tuple[int, int, bytes]]:
        """What the layers' own blocks hold; no row may touch them."""
        sinks = []
        for group, spec in enumerate(self._groups):
            if isinstance(spec.spec.layer_spec(spec.layer_names[0]), SinkFullAttentionSpec):
                blocks = cache.block_pool.local(group, cache.sink_blocks[group]).tolist()
                sinks += [(group, block, self.arena.snapshot(group, block)) for block in blocks]
                demand(blocks, f"group {group} has no blocks for its sinks")
        return sinks


def _items(layer: Layer, items: Places, content: Digests) -> Digests:
    """What each token or state of a layer holds: its last token, and its place where several states have one token."""
    if layer.rate == 1:
        return content[items]
    last = -(-(items + 1) * layer.rate.numerator // layer.rate.denominator)
    return content[last - 1] ^ (items.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _pools(layer: Layer) -> int:
    """Tokens of the groups that a ring serves; 0 where that is unknown, and for other layers."""
    return layer.spec.pools if isinstance(layer.spec, CircularBufferSpec) else 0


def _first_read(layer: Layer, token: int) -> int:
    """The first token that ``token`` attends to."""
    match layer.spec:
        case SlidingWindowSpec(sliding_window=window):
            return max(0, token - window + 1)
        case ChunkedLocalAttentionSpec(attention_chunk_size=chunk):
            return token // chunk * chunk
        case MambaSpec():
            raise AssertionError(layer)
        case _:
            return 0
