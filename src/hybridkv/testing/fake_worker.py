"""A worker in plain Python whose storage is one bytearray, addressed by the plan's offsets and strides.

It is fed by Steps alone: its tables come from finished_rows, new_rows and cells, its token histories from new_rows
and its own samples. After the writes of a step every token that a row reads is compared with the digest of that
row's history, in every layer; the sampled token is a function of what was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hybridkv.errors import ConfigError
from hybridkv.plan.config import KVCacheConfig
from hybridkv.step import Csr, NewRow, Step, StepResult
from hybridkv.testing.model import DIGEST_BYTES, DigestModel


class ContentError(Exception):
    """A step read something else than the row's tokens, or does not fit the worker's state."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Where a layer's tokens lie: bytes at offset + block * stride + (token % block_size) * token_bytes."""

    name: str
    group: int
    block_size: int
    offset: int
    stride: int
    token_bytes: int


@dataclass(slots=True)
class _Row:
    """What a row is: its request's tokens and, per group, column -> block."""

    request_id: str
    tokens: list[int]
    tables: tuple[dict[int, int], ...]
    sampled: int | None = None
    expected: dict[str, list[bytes]] = field(default_factory=dict)


class FakeWorker:
    """Executes Steps with a DigestModel. ConfigError for a page too small for one digest a token."""

    def __init__(self, config: KVCacheConfig, model: DigestModel) -> None:
        self.model = model
        self.storage = bytearray(config.arena_bytes)
        self.last_applied = -1
        self.tokens_checked = 0
        self._num_blocks = config.num_blocks
        self._num_groups = len(config.groups)
        self._layers = _layers(config)
        self._rows: dict[int, _Row] = {}

    def request_of(self, row: int) -> str:
        """The id of the request that has ``row``."""
        return self._live(row).request_id

    def execute(self, step: Step) -> StepResult:
        """One forward. ContentError if a row reads what its history does not say."""
        self._apply(step)
        self.last_applied = step.id
        for i, row in enumerate(step.rows.tolist()):
            self._write(self._live(row), *self._span(step, i))
        return StepResult(step.id, Csr.from_lists([self._read(step, i) for i in range(len(step))]))

    def break_down(self, step: Step, random: Random) -> None:
        """``step`` fails on the way: its tables may be written, and anything may stand where it writes."""
        if random.random() < 0.5:
            return
        self._apply(step)
        for i, row in enumerate(step.rows.tolist()):
            computed, end = self._span(step, i)
            for layer in self._layers:
                for position in range(computed, end):
                    at = self._slot(layer, self._live(row), position)
                    self.storage[at : at + DIGEST_BYTES] = random.randbytes(DIGEST_BYTES)

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
        tables: tuple[dict[int, int], ...] = tuple({} for _ in range(self._num_groups))
        self._rows[new.row] = _Row(new.request_id, new.token_ids.tolist(), tables)

    def _set_cell(self, group: int, row: int, column: int, block: int) -> None:
        self._live(row).tables[group][column] = block

    def _live(self, row: int) -> _Row:
        if row not in self._rows:
            raise ContentError(f"row {row} belongs to nobody")
        return self._rows[row]

    # -- one row

    def _span(self, step: Step, i: int) -> tuple[int, int]:
        """First and last token + 1 that the step computes for its i-th row; its tokens must be the row's own."""
        row = self._live(int(step.rows[i]))
        computed, count = int(step.num_computed[i]), int(step.num_scheduled[i])
        tokens = [row.sampled if token < 0 else token for token in step.token_ids[i].tolist()]
        if tokens != row.tokens[computed : computed + count] or len(tokens) != count:
            raise ContentError(f"step {step.id} runs {tokens} for {row.request_id!r} at {computed}, not its tokens")
        if bool(step.samples[i]) != (computed + count == len(row.tokens)):
            raise ContentError(f"step {step.id} samples for {row.request_id!r} at the wrong token")
        return computed, computed + count

    def _write(self, row: _Row, computed: int, end: int) -> None:
        """The digests of tokens computed .. end - 1, each built on what storage holds before it."""
        for layer in self._layers:
            for position in range(computed, end):
                before = self._stored(layer, row, position - 1) if position else self.model.root(layer.name)
                at = self._slot(layer, row, position)
                self.storage[at : at + DIGEST_BYTES] = self.model.extend(before, row.tokens[position])

    def _read(self, step: Step, i: int) -> list[int]:
        """Check all tokens that the i-th row reads; the token sampled behind them, if one is."""
        row = self._live(int(step.rows[i]))
        end = int(step.num_computed[i] + step.num_scheduled[i])
        for layer in self._layers:
            expected = self._expected(layer, row, end)
            for position in range(end):
                if self._stored(layer, row, position) != expected[position]:
                    raise ContentError(f"step {step.id}: {row.request_id!r} reads a wrong token {position}, {layer}")
        self.tokens_checked += end
        if not step.samples[i]:
            return []
        row.sampled = self.model.sample([self._stored(layer, row, end - 1) for layer in self._layers])
        row.tokens.append(row.sampled)
        return [row.sampled]

    def _expected(self, layer: _Layer, row: _Row, end: int) -> list[bytes]:
        """Digests of the row's history, computed without storage."""
        digests = row.expected.setdefault(layer.name, [])
        while len(digests) < end:
            before = digests[-1] if digests else self.model.root(layer.name)
            digests.append(self.model.extend(before, row.tokens[len(digests)]))
        return digests

    # -- storage

    def _stored(self, layer: _Layer, row: _Row, position: int) -> bytes:
        at = self._slot(layer, row, position)
        return bytes(self.storage[at : at + DIGEST_BYTES])

    def _slot(self, layer: _Layer, row: _Row, position: int) -> int:
        column, within = divmod(position, layer.block_size)
        block = row.tables[layer.group].get(column)
        if block is None or not 0 < block < self._num_blocks:
            raise ContentError(f"{row.request_id!r} has block {block} in column {column} of group {layer.group}")
        at = layer.offset + block * layer.stride + within * layer.token_bytes
        if at + DIGEST_BYTES > len(self.storage):
            raise ContentError(f"block {block} of {layer} lies outside the arena of {len(self.storage)} bytes")
        return at


def _layers(config: KVCacheConfig) -> tuple[_Layer, ...]:
    tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
    layers = []
    for number, group in enumerate(config.groups):
        token_bytes = group.spec.page_size_bytes // group.spec.block_size
        if token_bytes < DIGEST_BYTES:
            raise ConfigError(f"{token_bytes} bytes a token hold no digest: use pages of {DIGEST_BYTES} or more")
        for name in group.layer_names:
            tensor = tensors[name]
            layers.append(
                _Layer(
                    name,
                    number,
                    group.spec.block_size,
                    tensor.offset_bytes,
                    tensor.block_stride_bytes,
                    token_bytes,
                )
            )
    return tuple(layers)
