"""A worker in plain Python whose storage is one bytearray, addressed by the plan's offsets and strides.

It is fed by Steps alone: its tables come from finished_rows, new_rows and cells, its token histories from new_rows
and its own samples. Attention: after the writes of a step every token that a scheduled one reads is compared with the
digest of that row's history, in every layer. Recurrent layers: the state that a row reads is compared with that of
its history; what is written is the state after as many tokens as its label says. Blocks are moved, and copied, as
bytes, whatever they hold. The sampled token is a function of what was read. Drafts are run like known tokens; those
that are what the model draws are accepted, and what the others wrote stays where it is. Cross attention: a row whose
encoder runs writes a digest of its input for each token of its output; every row of every step reads all of them, and
they must be of its own input, which what the decoder keeps depends on as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import numpy as np

from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig, KVCacheTensor
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from hybridkv.step import Copy, Csr, EncoderRead, NewRow, Step, StepResult
from hybridkv.testing.model import DIGEST_BYTES, ZERO_STATE, DigestModel, Prefix


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that holds a digest a token, at offset + block * stride + byte_of(token % block_size).

    A recurrent one holds a single digest at the start of its block. window, chunk: 0 where all tokens are read.
    parts: kernel blocks that a block is made of, each with that part of every layer of the group.
    """

    name: str
    group: int
    block_size: int
    offset: int
    stride: int
    token_bytes: int
    recurrent: bool = False
    window: int = 0
    chunk: int = 0
    parts: int = 1

    def byte_of(self, within: int) -> int:
        """Where a token of a block lies, from the layer's first byte in the block."""
        part, rest = divmod(within, self.block_size // self.parts)
        return part * (self.stride // self.parts) + rest * self.token_bytes

    def first_read(self, position: int) -> int:
        """The first token that the one at ``position`` reads."""
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(0, position - self.window + 1) if self.window else 0


def layers_of(config: KVCacheConfig) -> tuple[Layer, ...]:
    """The layers that keep something of their own tokens. ConfigError for a page that holds no digest."""
    return _layers(config, lambda spec: not isinstance(spec, CrossAttentionSpec | EncoderOnlyAttentionSpec))


def cross_layers_of(config: KVCacheConfig) -> tuple[Layer, ...]:
    """The layers that keep the encoder's output, a digest for each of its tokens. ConfigError as ``layers_of``."""
    return _layers(config, lambda spec: isinstance(spec, CrossAttentionSpec))


def _layers(config: KVCacheConfig, wanted: Callable[[KVCacheSpec], bool]) -> tuple[Layer, ...]:
    tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
    return tuple(
        _layer(name, number, group.spec, tensors[name], config.kernel_blocks_of(number))
        for number, group in enumerate(config.groups)
        for name in group.layer_names
        if wanted(group.spec)
    )


def digest_model(config: KVCacheConfig, vocabulary: int = 4) -> DigestModel:
    """A model of the layers of ``config``."""
    layers = layers_of(config)
    return DigestModel(
        [layer.name for layer in layers], vocabulary, [layer.name for layer in layers if layer.recurrent]
    )


def _layer(name: str, group: int, spec: KVCacheSpec, tensor: KVCacheTensor, parts: int) -> Layer:
    recurrent = isinstance(spec, MambaSpec)
    token_bytes = spec.content_bytes if recurrent else spec.content_bytes // spec.block_size
    if token_bytes < DIGEST_BYTES:
        raise ConfigError(f"{token_bytes} bytes a token hold no digest: use pages of {DIGEST_BYTES} or more")
    return Layer(
        name,
        group,
        spec.block_size,
        tensor.offset_bytes,
        tensor.block_stride_bytes,
        token_bytes,
        recurrent=recurrent,
        window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0,
        chunk=spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else 0,
        parts=parts,
    )


class ContentError(Exception):
    """A step read something else than the row's tokens, or does not fit the worker's state."""


@dataclass(slots=True)
class WorkerRow:
    """What a row is: its request's tokens and, per group, column -> block."""

    request_id: str
    tokens: list[int]
    tables: tuple[dict[int, int], ...]
    encoder: EncoderRead | None = None
    sampled: int | None = None
    expected: dict[str, list[bytes]] = field(default_factory=dict)

    @property
    def heard(self) -> str:
        """The digest of the encoder's input, empty without one."""
        return "" if self.encoder is None else str(self.encoder.digest)


class FakeWorker:
    """Executes Steps with a DigestModel. ConfigError for a page too small for one digest a token.

    sharded: this is one of several context parallel ranks, which cannot see all tokens: only the rows, the tokens
    and the order of steps are checked, no content.
    """

    def __init__(self, config: KVCacheConfig, model: DigestModel, *, sharded: bool = False) -> None:
        self.model = model
        self.storage = bytearray(Random(1).randbytes(config.arena_bytes))  # noqa: S311 - anything but zeros
        self.last_applied = -1
        self.tokens_checked = 0
        self.states_checked = 0
        self._config = config
        # blocks that requests may get: not the null block, or any block of the null slab
        self._ids = [range(config.null_blocks_of(g), config.blocks_of(g)) for g in range(len(config.groups))]
        self._layers = layers_of(config)
        self._cross = cross_layers_of(config)
        self.encoders_run = 0
        self._sharded = sharded
        self._rows: dict[int, WorkerRow] = {}
        self._states: dict[tuple[int, int, int], int] = {}

    def request_of(self, row: int) -> str:
        """The id of the request that has ``row``."""
        return self._live(row).request_id

    def execute(self, step: Step) -> StepResult:
        """One forward. ContentError if a row reads what its history does not say."""
        self._apply(step)
        self.last_applied = step.id
        spans = [self._span(step, i) for i in range(len(step))]
        if not self._sharded:
            self._move(step)
            self._zero(step)
            self._copy(step, "before")
            self._encode(step)
            self._check_encoded(step)
            self._check_states(step)
        for i, row in enumerate(step.rows.tolist()):
            self._live(row).tokens += step.drafts[i].tolist()
        if not self._sharded:
            self._write_states(step)
            for row, span in zip(step.rows.tolist(), spans, strict=True):
                self._write(self._live(row), *span)
        sampled = [self._read(step, i) for i in range(len(step))]
        if not self._sharded:
            self._copy(step, "after")
        accepted = np.array([len(tokens) for tokens in sampled], np.int32) if len(step.drafts.values) else None
        return StepResult(step.id, Csr.from_lists(sampled), accepted)

    def break_down(self, step: Step, random: Random) -> None:
        """``step`` fails on the way: its tables may be written, and anything may stand where it writes."""
        if random.random() < 0.5:
            return
        self._apply(step)
        if self._sharded:
            return
        for copy in step.copies[: random.randint(0, len(step.copies))]:
            self._copy_one(copy)
        for new in step.new_rows:
            self._write_encoded(new, lambda *_: random.randbytes(DIGEST_BYTES))
        for layer in self._layers:
            for at in self._written(layer, step):
                self._put(at, random.randbytes(DIGEST_BYTES))

    def _written(self, layer: Layer, step: Step) -> Iterator[int]:
        """Where the forward of ``step`` writes in ``layer``."""
        if layer.recurrent:
            blocks = [block for _, group, _, block in step.state_writes.tolist() if group == layer.group]
            yield from (self._at(layer, block) for block in blocks)
            return
        for i, row in enumerate(step.rows.tolist()):
            for position in range(*self._span(step, i)):
                yield self._slot(layer, self._live(row), position)

    def holds(self, group: int, block: int, prefix: Prefix) -> bool:
        """Whether ``block`` has what its last token being the last of ``prefix`` means, in every layer of ``group``."""
        origin, tokens = prefix
        heard = origin[1] if isinstance(origin, tuple) else ""
        if any(layer.group == group for layer in self._cross):
            return self._holds_encoded(group, block, heard, *tokens)
        places = {name: i for i, name in enumerate(self.model.layers)}
        for layer in self._layers:
            if layer.group != group:
                continue
            first = len(tokens) if layer.recurrent else (len(tokens) - 1) // layer.block_size * layer.block_size + 1
            for end in range(first, len(tokens) + 1):
                at = self._at(layer, block) + (0 if layer.recurrent else layer.byte_of(end - first))
                if self._get(at) != self.model.digests(tokens[:end], heard)[places[layer.name]]:
                    return False
        return True

    def _holds_encoded(self, group: int, block: int, heard: str, num_tokens: int, column: int) -> bool:
        """Whether ``block`` is ``column`` of the ``num_tokens`` tokens of an encoder's output."""
        return all(
            self._get(self._at(layer, block) + layer.byte_of(position - column * layer.block_size))
            == self.model.encode(layer.name, heard, position)
            for layer in self._cross
            if layer.group == group
            for position in range(column * layer.block_size, min((column + 1) * layer.block_size, num_tokens))
        )

    # -- tables

    def _apply(self, step: Step) -> None:
        """Finished rows, new rows, cells, in this order."""
        if not step.after <= self.last_applied < step.id:
            raise ContentError(f"step {step.id} builds on {step.after}, applied is {self.last_applied}")
        for row in step.finished_rows.tolist():
            self._rows.pop(row, None)
        for new in step.new_rows:
            self._begin(new)
        cells = step.cells
        for group, row, column, block in zip(
            cells.group.tolist(), cells.row.tolist(), cells.column.tolist(), cells.block.tolist(), strict=True
        ):
            self._set_cell(group, row, column, block)

    def _begin(self, new: NewRow) -> None:
        if new.row in self._rows:
            raise ContentError(f"row {new.row} begins for {new.request_id!r} and never ended")
        tables: tuple[dict[int, int], ...] = tuple({} for _ in self._ids)
        self._rows[new.row] = WorkerRow(new.request_id, new.token_ids.tolist(), tables, new.encoder)

    def _set_cell(self, group: int, row: int, column: int, block: int) -> None:
        if block:
            self._refuse_foreign(group, block)
        self._live(row).tables[group][column] = block

    def _live(self, row: int) -> WorkerRow:
        if row not in self._rows:
            raise ContentError(f"row {row} belongs to nobody")
        return self._rows[row]

    # -- the encoder's output

    def _encode(self, step: Step) -> None:
        """The encoders of rows that begin run, where the Step says so."""
        for new in step.new_rows:
            self._write_encoded(new, self.model.encode)

    def _write_encoded(self, new: NewRow, content: Callable[[str, str, int], bytes]) -> None:
        """content: of a layer, for what was heard, at a position."""
        if new.encoder is None or not new.encoder.encodes:
            return
        self.encoders_run += 1
        row = self._live(new.row)
        for layer in self._cross:
            for position in range(new.encoder.num_tokens):
                self._put(self._slot(layer, row, position), content(layer.name, row.heard, position))

    def _check_encoded(self, step: Step) -> None:
        """What every row reads is the output of its own input."""
        for row in map(self._live, step.rows.tolist()):
            for layer in self._cross if row.encoder is not None else ():
                for position in range(0 if row.encoder is None else row.encoder.num_tokens):
                    if self._stored(layer, row, position) != self.model.encode(layer.name, row.heard, position):
                        raise ContentError(f"step {step.id}: {row.request_id!r} hears another input, {layer}")

    # -- states

    def _zero(self, step: Step) -> None:
        for group, block in step.zero.tolist():
            self._clear(group, block)

    def _clear(self, group: int, block: int) -> None:
        for layer in self._layers:
            if layer.group == group:
                at = self._at(layer, block)
                self.storage[at : at + layer.token_bytes] = bytes(layer.token_bytes)

    def _move(self, step: Step) -> None:
        for copy in step.copies:
            if copy.kind == "move":
                self._copy_one(copy)

    def _copy(self, step: Step, stage: str) -> None:
        for copy in step.copies:
            if copy.stage == stage and copy.kind != "move":
                self._copy_one(copy)

    def _copy_one(self, copy: Copy) -> None:
        if copy.kind == "state":
            self._copy_block(copy.group, copy.source, copy.destination)
        else:
            self._copy_whole(copy.group, copy.source, copy.destination)

    def _copy_block(self, group: int, source: int, destination: int) -> None:
        for layer in self._layers:
            if layer.group == group:
                self._put(self._at(layer, destination), self._get(self._at(layer, source)))

    def _copy_whole(self, group: int, source: int, destination: int) -> None:
        """All bytes of a block, whatever they are: it belongs to one group of the class at a time."""
        if self._config.slabs is None:
            raise ContentError(f"block {source} of group {group} is copied whole, but the layout has no slabs")
        size = self._config.block_bytes_of(group)
        for block in (source, destination):
            self._refuse_foreign(group, block)
        self.storage[destination * size : (destination + 1) * size] = self.storage[source * size : (source + 1) * size]

    def _check_states(self, step: Step) -> None:
        """What every row reads is the state after its computed tokens."""
        for i, row in enumerate(step.rows.tolist()):
            computed = int(step.num_computed[i])
            for layer in self._layers:
                if not layer.recurrent:
                    continue
                block = int(step.state_read[i, layer.group])
                known = self._expected(layer, self._live(row), computed)
                if self._get(self._at(layer, block)) != (known[computed - 1] if computed else ZERO_STATE):
                    who = self._live(row).request_id
                    raise ContentError(f"step {step.id}: {who!r} reads a wrong state at {computed}, {layer}")
                self.states_checked += 1

    def _write_states(self, step: Step) -> None:
        """The state of as many tokens as its label says, every block by one row only."""
        written = set()
        self._states = {}
        for i, group, label, block in step.state_writes.tolist():
            if not step.num_computed[i] < label <= step.num_computed[i] + step.num_scheduled[i]:
                raise ContentError(f"step {step.id} writes the state at {label}, which it does not pass")
            where = self._config.owner_of(group)
            if (where, block) in written:
                raise ContentError(f"step {step.id} writes the state in block {block} of group {group} twice")
            written.add((where, block))
            self._states[i, group, label] = block
            self._write_state(self._live(int(step.rows[i])), group, label, block)

    def _state_of(self, step: Step, i: int, group: int, tokens: int) -> int:
        """The block to which the step writes the state of the i-th row after ``tokens`` tokens."""
        if (i, group, tokens) not in self._states:
            raise ContentError(f"step {step.id} writes no state at {tokens} of row {step.rows[i]} in group {group}")
        return self._states[i, group, tokens]

    def _write_state(self, row: WorkerRow, group: int, label: int, block: int) -> None:
        for layer in self._layers:
            if layer.group == group and layer.recurrent:
                known = self._expected(layer, row, min(label, len(row.tokens)))
                self._put(self._at(layer, block), known[label - 1] if label <= len(row.tokens) else b"\xff" * 8)

    # -- one row

    def _span(self, step: Step, i: int) -> tuple[int, int]:
        """First and last token + 1 that the step computes for its i-th row; its tokens must be the row's own."""
        row = self._live(int(step.rows[i]))
        computed, count = int(step.num_computed[i]), int(step.num_scheduled[i])
        drafts = step.drafts[i].tolist()
        certain = count - len(drafts)
        tokens = [row.sampled if token < 0 else token for token in step.token_ids[i].tolist()]
        if tokens != row.tokens[computed : computed + certain] + drafts or len(tokens) != count:
            raise ContentError(f"step {step.id} runs {tokens} for {row.request_id!r} at {computed}, not its tokens")
        ends = computed + certain == len(row.tokens)
        if bool(step.samples[i]) != ends or (drafts and not ends):
            raise ContentError(f"step {step.id} samples for {row.request_id!r} at the wrong token")
        return computed, computed + count

    def _write(self, row: WorkerRow, computed: int, end: int) -> None:
        """The digests of tokens computed .. end - 1, each built on what the layer reads before it."""
        for layer in self._layers:
            if layer.recurrent:
                continue
            for position in range(computed, end):
                if layer.first_read(position) < position:
                    before = self._stored(layer, row, position - 1)
                elif position:  # a chunk begins: what came before is known from other layers
                    before = self._expected(layer, row, position)[position - 1]
                else:
                    before = self.model.root(layer.name)
                digest = self.model.extend(layer.name, before, row.tokens[position], row.heard)
                self._put(self._slot(layer, row, position), digest)

    def _read(self, step: Step, i: int) -> list[int]:
        """Check all tokens that the i-th row reads; the drafts accepted and the token behind them, if it samples."""
        row = self._live(int(step.rows[i]))
        end = int(step.num_computed[i] + step.num_scheduled[i])
        drafts = step.drafts[i].tolist()
        certain = end - len(drafts)
        read = [] if self._sharded else [self._read_layer(step, i, layer, row) for layer in self._layers]
        if not step.samples[i]:
            return []
        sampled = list[int]()
        for place in range(len(drafts) + 1):
            digests = [of[place] for of in read] or list(self.model.digests(row.tokens[: certain + place], row.heard))
            sampled.append(self.model.sample(digests))
            if place == len(drafts) or sampled[-1] != drafts[place]:
                break
        row.sampled = sampled[-1]
        row.tokens[certain:] = sampled
        for known in row.expected.values():
            del known[certain + len(sampled) - 1 :]
        return sampled

    def _read_layer(self, step: Step, i: int, layer: Layer, row: WorkerRow) -> list[bytes]:
        """What the layer has of the last certain token and of each draft, once all that it reads is checked."""
        last = int(step.num_computed[i] + step.num_scheduled[i])
        ends = range(last - len(step.drafts[i]), last + 1)
        if layer.recurrent:
            return [self._get(self._at(layer, self._state_of(step, i, layer.group, end))) for end in ends]
        computed = int(step.num_computed[i])
        end = computed + int(step.num_scheduled[i])
        expected = self._expected(layer, row, end)
        for position in range(layer.first_read(computed), end):
            if self._stored(layer, row, position) != expected[position]:
                raise ContentError(f"step {step.id}: {row.request_id!r} reads a wrong token {position}, {layer}")
            self.tokens_checked += 1
        return [expected[one - 1] for one in ends]

    def _expected(self, layer: Layer, row: WorkerRow, end: int) -> list[bytes]:
        """Digests of the row's history, computed without storage."""
        digests = row.expected.setdefault(layer.name, [])
        while len(digests) < end:
            before = digests[-1] if digests else self.model.root(layer.name)
            digests.append(self.model.extend(layer.name, before, row.tokens[len(digests)], row.heard))
        return digests

    # -- storage

    def _stored(self, layer: Layer, row: WorkerRow, position: int) -> bytes:
        return self._get(self._slot(layer, row, position))

    def _get(self, at: int) -> bytes:
        return bytes(self.storage[at : at + DIGEST_BYTES])

    def _put(self, at: int, digest: bytes) -> None:
        self.storage[at : at + DIGEST_BYTES] = digest

    def _slot(self, layer: Layer, row: WorkerRow, position: int) -> int:
        column, within = divmod(position, layer.block_size)
        block = row.tables[layer.group].get(column, 0)
        return self._at(layer, block) + layer.byte_of(within)

    def _refuse_foreign(self, group: int, block: int) -> None:
        if block not in self._ids[group]:
            raise ContentError(f"block {block} of group {group} is none of this cache's")

    def _at(self, layer: Layer, block: int) -> int:
        self._refuse_foreign(layer.group, block)
        at = layer.offset + block * layer.stride
        if at + layer.token_bytes > len(self.storage):
            raise ContentError(f"block {block} of {layer} lies outside the arena of {len(self.storage)} bytes")
        return at
