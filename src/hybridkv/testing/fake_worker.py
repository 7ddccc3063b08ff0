"""A worker in plain Python that checks the content that each Step reads.

Its storage is one bytearray, addressed by the offsets and strides of the plan. Steps are its only input: tables come
from ``finished_rows``, ``new_rows`` and ``cells``; the history of a row comes from ``new_rows`` and its own samples.

    attention            after the writes of a step, every token that a scheduled token reads must be the digest of
                         the row's history, in every layer
    compressed layers    the same for each state of several tokens, and for each of several states of a token
    rings                before a step writes, the rings must have the raw keys of the states that it completes; a ring
                         written for a position has the raw keys of the group that is open there
    recurrent layers     the state that a row reads must be the state of its history; the state written for a position
                         is the state after that many tokens
    cross attention      a new row with an encoder writes a digest for each token of the encoder's output; each row must
                         read the output for its own input
    drafts               run like known tokens; the model accepts the drafts that it would sample, and the entries of
                         rejected drafts stay in storage

Moves and copies carry bytes of any content. The sampled token is a function of the digests that were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from random import Random

import numpy as np

from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig, KVCacheTensor
from hybridkv.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from hybridkv.step import Copy, Csr, EncoderRead, NewRow, Step, StepResult
from hybridkv.testing.fake_tier import ContentError, FakeTier, TierFaults
from hybridkv.testing.model import DIGEST_BYTES, ZERO_STATE, DigestModel, Prefix
from hybridkv.units import ceil_div


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with one digest for each item, at offset + block * stride + byte_of(item % items).

    An item is a token, or a compressed state. A recurrent layer has one digest, at the start of its block.

    Attributes:
        name: name of the layer.
        group: its cache group.
        block_size: tokens of a block.
        offset: byte offset of block 0 in the arena.
        stride: bytes from one block to the next.
        item_bytes: bytes of an item, or of a recurrent state.
        recurrent: whether it has recurrent states.
        rate: tokens of an item.
        ring: whether it has the last tokens alone, in one block.
        pools: tokens of the groups that a ring serves.
        window: tokens of the sliding window; 0 without one.
        chunk: tokens of an attention chunk; 0 without chunks.
        parts: kernel blocks in a block; each has its part of every layer of the group.
    """

    name: str
    group: int
    block_size: int
    offset: int
    stride: int
    item_bytes: int
    recurrent: bool = False
    rate: Fraction = Fraction(1)
    ring: bool = False
    pools: int = 0
    window: int = 0
    chunk: int = 0
    parts: int = 1

    @property
    def items(self) -> int:
        """Items of a block."""
        return self.ended(self.block_size)

    @property
    def is_compressed(self) -> bool:
        """Whether an item is not a token."""
        return self.rate.numerator != self.rate.denominator

    def byte_of(self, within: int) -> int:
        """Return the byte offset of item ``within`` of a block, from the layer's first byte in the block."""
        part, rest = divmod(within, self.items // self.parts)
        return part * (self.stride // self.parts) + rest * self.item_bytes

    def ended(self, tokens: int) -> int:
        """Return the items that the first ``tokens`` tokens complete."""
        return tokens * self.rate.denominator // self.rate.numerator

    def last_token(self, item: int) -> int:
        """Return the position of the token that completes an item."""
        return ceil_div((item + 1) * self.rate.numerator, self.rate.denominator) - 1

    def written(self, first: int, end: int) -> range:
        """Return the items that tokens ``first`` .. ``end`` - 1 leave, if one step runs them."""
        return range(max(first, end - self.items), end) if self.ring else range(self.ended(first), self.ended(end))

    def first_read(self, position: int) -> int:
        """Return the position of the first token that the token at ``position`` reads."""
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(0, position - self.window + 1) if self.window else 0


def layers_of(config: KVCacheConfig) -> tuple[Layer, ...]:
    """Return the layers that store their own tokens or states. ConfigError if a page is too small for digests."""
    return _layers(config, lambda spec: not isinstance(spec, CrossAttentionSpec | EncoderOnlyAttentionSpec))


def cross_layers_of(config: KVCacheConfig) -> tuple[Layer, ...]:
    """Return the layers that store an encoder's output. ConfigError if a page is too small for digests."""
    return _layers(config, lambda spec: isinstance(spec, CrossAttentionSpec))


def _layers(config: KVCacheConfig, wanted: Callable[[KVCacheSpec], bool]) -> tuple[Layer, ...]:
    tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
    return tuple(
        _layer(name, number, spec, tensors[name], config.kernel_blocks_of(number))
        for number, group in enumerate(config.groups)
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True)
        if wanted(spec)
    )


def digest_model(config: KVCacheConfig, vocabulary: int = 4) -> DigestModel:
    """Return a DigestModel with the layers of a config.

    Args:
        config: the config of a plan.
        vocabulary: number of token ids.

    Raises:
        ConfigError: a page is too small for one digest of 8 bytes for each token or state.
    """
    layers = layers_of(config)
    return DigestModel(
        [layer.name for layer in layers], vocabulary, [layer.name for layer in layers if layer.recurrent]
    )


def _layer(name: str, group: int, spec: KVCacheSpec, tensor: KVCacheTensor, parts: int) -> Layer:
    rate = Fraction(spec.tokens_per_state) if isinstance(spec, AttentionSpec) else Fraction(spec.block_size)
    item_bytes = spec.content_bytes // int(spec.block_size / rate)
    if item_bytes < DIGEST_BYTES:
        raise ConfigError(f"layer {name!r} has {item_bytes} bytes for a digest; give it {DIGEST_BYTES} or more")
    return Layer(
        name,
        group,
        spec.block_size,
        tensor.offset_bytes,
        tensor.block_stride_bytes,
        item_bytes,
        recurrent=isinstance(spec, MambaSpec),
        rate=rate,
        ring=isinstance(spec, CircularBufferSpec),
        pools=spec.pools if isinstance(spec, CircularBufferSpec) else 0,
        window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0,
        chunk=spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else 0,
        parts=parts,
    )


@dataclass(slots=True)
class WorkerRow:
    """The state of a row.

    Attributes:
        request_id: id of its request.
        tokens: the request's tokens, accepted drafts and samples included.
        tables: one dict for each group, column -> block.
        encoder: the encoder output that the row reads, if any.
        heard: what the model hears besides the tokens: the digest of the encoder's input, and more if a test says so.
        sampled: the token that the last step sampled.
        expected: layer name -> digests of ``tokens``, computed without storage.
    """

    request_id: str
    tokens: list[int]
    tables: tuple[dict[int, int], ...]
    encoder: EncoderRead | None = None
    heard: str = ""
    sampled: int | None = None
    expected: dict[str, list[bytes]] = field(default_factory=dict)


class FakeWorker:
    """Executes Steps with a DigestModel and checks all content that they read.

    The small private methods for cells, copies, clears and states are separate so that tests can inject faults.

    Args:
        config: the config of the cache's plan.
        model: the model; its layers are the layers of ``config`` (see ``digest_model``).
        sharded: whether the worker is one of several context parallel ranks. A rank cannot see all tokens, so it checks
            rows, tokens and the order of steps, but no content.
        tier: the config of the host tier; without it, Steps must have no transfers.
        faults: which transfers of the tier fail or are late; none by default.

    Attributes:
        model: the model.
        storage: the bytes of the arena, random at the start.
        last_applied: id of the last executed Step, or -1.
        tokens_checked: tokens and compressed states compared with their row's history.
        states_checked: states compared with their row's history.
        encoders_run: runs of an encoder.
        tier: the host tier; ``None`` without one.
        heard: by request id, what decides the content of its blocks besides its tokens, such as its salt. Empty at
            first: requests with equal tokens and encoder inputs have equal blocks.

    Raises:
        ConfigError: a page is too small for one digest of 8 bytes for each token, or the tier has other groups.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        model: DigestModel,
        *,
        sharded: bool = False,
        tier: KVCacheConfig | None = None,
        faults: TierFaults | None = None,
    ) -> None:
        self.model = model
        self.storage = bytearray(Random(1).randbytes(config.arena_bytes))  # noqa: S311 - not zeros, which are a valid state
        self.tier = None if tier is None else FakeTier(config, self.storage, tier, faults)
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
        self.heard: dict[str, str] = {}
        self._rows: dict[int, WorkerRow] = {}
        self._states: dict[tuple[int, int, int], int] = {}

    def request_of(self, row: int) -> str:
        """Return the id of the request that has a row.

        Args:
            row: number of the row.

        Raises:
            ContentError: no request has the row.
        """
        return self._live(row).request_id

    def execute(self, step: Step) -> StepResult:
        """Execute one Step. O(tokens that its rows read).

        Args:
            step: the Step; its ``after`` must be at most ``last_applied``.

        Returns:
            The tokens that each row sampled, accepted drafts included.

        Raises:
            ContentError: a row reads other content than its history, or the Step does not fit the tables.
        """
        self._apply(step)
        self.last_applied = step.id
        spans = [self._span(step, i) for i in range(len(step))]
        self._begin_transfers(step)
        if not self._sharded:
            self._move(step)
            self._zero(step)
            self._copy(step, "before")
        if self.tier is not None:
            self.tier.load(step)
        if not self._sharded:
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
        result = StepResult(step.id, Csr.from_lists(sampled), accepted)
        if self.tier is None:
            return result
        arrived, lost = self.tier.finish()
        return replace(result, arrived=arrived, lost=lost)

    def break_down(self, step: Step, random: Random) -> None:
        """Simulate a Step that fails halfway.

        Either nothing happens, or the tables are updated, some of the copies are made, transfers begin, and the blocks
        that the Step writes get random bytes.

        Args:
            step: the Step.
            random: decides how far the Step gets.
        """
        if random.random() < 0.5:
            return
        self._apply(step)
        self._begin_transfers(step)
        if self._sharded:
            return
        for copy in step.copies[: random.randint(0, len(step.copies))]:
            self._copy_one(copy)
        if self.tier is not None:
            self.tier.load(step)
        for new in step.new_rows:
            self._write_encoded(new, lambda *_: random.randbytes(DIGEST_BYTES))
        for layer in self._layers:
            for at in self._written(layer, step):
                self._put(at, random.randbytes(DIGEST_BYTES))

    def _written(self, layer: Layer, step: Step) -> Iterator[int]:
        """Yield the byte offsets at which the forward of ``step`` writes in ``layer``."""
        if layer.recurrent or layer.ring:
            blocks = [block for _, group, _, block in step.state_writes.tolist() if group == layer.group]
            yield from (self._at(layer, block) for block in blocks)
        if layer.recurrent:
            return
        for i, row in enumerate(step.rows.tolist()):
            for item in layer.written(*self._span(step, i)):
                yield self._slot(layer, self._live(row), item)

    def holds(self, group: int, block: int, prefix: Prefix) -> bool:
        """Return whether a block has the content of the end of a prefix, in every layer of a group. O(tokens).

        Args:
            group: number of the group.
            block: id of the block.
            prefix: origin and tokens. The block must have the last tokens of the prefix, back to its first token, or
                the state after the prefix.
        """
        origin, tokens = prefix
        heard = origin[1] if isinstance(origin, tuple) else ""
        if any(layer.group == group for layer in self._cross):
            return self._holds_encoded(group, block, heard, *tokens)
        places = {name: i for i, name in enumerate(self.model.layers)}
        for layer in self._layers:
            if layer.group != group:
                continue
            place, last = places[layer.name], len(tokens) - 1
            if layer.recurrent:
                if self._get(self._at(layer, block)) != self.model.digests(tokens, heard)[place]:
                    return False
                continue
            first = layer.ended(last // layer.block_size * layer.block_size)
            for item in range(first, layer.ended(len(tokens))):
                digest = self.model.digests(tokens[: layer.last_token(item) + 1], heard)[place]
                if self._get(self._at(layer, block) + layer.byte_of(item - first)) != self._of_item(
                    layer, item, digest
                ):
                    return False
        return True

    def _holds_encoded(self, group: int, block: int, heard: str, num_tokens: int, column: int) -> bool:
        """Return whether ``block`` has column ``column`` of an encoder's output of ``num_tokens`` tokens."""
        return all(
            self._get(self._at(layer, block) + layer.byte_of(position - column * layer.block_size))
            == self.model.encode(layer.name, heard, position)
            for layer in self._cross
            if layer.group == group
            for position in range(column * layer.block_size, min((column + 1) * layer.block_size, num_tokens))
        )

    # -- tables

    def _begin_transfers(self, step: Step) -> None:
        if self.tier is not None:
            self.tier.begin(step)
        elif step.has_transfers:
            raise ContentError(f"step {step.id} has transfers, but the worker has no host tier")

    def _apply(self, step: Step) -> None:
        """Update the tables: finished rows, new rows, then cells."""
        if not step.after <= self.last_applied < step.id:
            raise ContentError(
                f"step {step.id} must follow step {step.after}, but step {self.last_applied} was the last"
            )
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
            raise ContentError(f"row {new.row} begins for {new.request_id!r}, but its last request has not finished")
        tables: tuple[dict[int, int], ...] = tuple({} for _ in self._ids)
        heard = ("" if new.encoder is None else str(new.encoder.digest)) + self.heard.get(new.request_id, "")
        self._rows[new.row] = WorkerRow(new.request_id, new.token_ids.tolist(), tables, new.encoder, heard)

    def _set_cell(self, group: int, row: int, column: int, block: int) -> None:
        if block:
            self._refuse_foreign(group, block)
        self._live(row).tables[group][column] = block

    def _live(self, row: int) -> WorkerRow:
        if row not in self._rows:
            raise ContentError(f"no request has row {row}")
        return self._rows[row]

    # -- the encoder's output

    def _encode(self, step: Step) -> None:
        """Run the encoders of new rows that need it."""
        for new in step.new_rows:
            self._write_encoded(new, self.model.encode)

    def _write_encoded(self, new: NewRow, content: Callable[[str, str, int], bytes]) -> None:
        """Write ``content``(layer, encoder input, position) to the cross attention blocks of a new row."""
        if new.encoder is None or not new.encoder.encodes:
            return
        self.encoders_run += 1
        row = self._live(new.row)
        for layer in self._cross:
            for position in range(new.encoder.num_tokens):
                self._put(self._slot(layer, row, position), content(layer.name, row.heard, position))

    def _check_encoded(self, step: Step) -> None:
        """Check that each row reads the encoder output of its own input."""
        for row in map(self._live, step.rows.tolist()):
            for layer in self._cross if row.encoder is not None else ():
                for position in range(0 if row.encoder is None else row.encoder.num_tokens):
                    if self._stored(layer, row, position) != self.model.encode(layer.name, row.heard, position):
                        raise ContentError(f"step {step.id}: {row.request_id!r} reads another input's output, {layer}")

    # -- states

    def _zero(self, step: Step) -> None:
        for group, block in step.zero.tolist():
            self._clear(group, block)

    def _clear(self, group: int, block: int) -> None:
        for layer in self._layers:
            if layer.group == group:
                at = self._at(layer, block)
                self.storage[at : at + layer.item_bytes] = bytes(layer.item_bytes)

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
        """Copy all bytes of a block, since any group of its class may own it."""
        if self._config.slabs is None:
            raise ContentError(f"step copies all of block {source} of group {group}, but the layout has no slabs")
        size = self._config.block_bytes_of(group)
        for block in (source, destination):
            self._refuse_foreign(group, block)
        self.storage[destination * size : (destination + 1) * size] = self.storage[source * size : (source + 1) * size]

    def _check_states(self, step: Step) -> None:
        """Check that each row reads the state after its computed tokens."""
        for i, row in enumerate(step.rows.tolist()):
            computed = int(step.num_computed[i])
            for layer in self._layers:
                if not layer.recurrent:
                    continue
                block = int(step.state_read[i, layer.group])
                known = self._expected(layer, self._live(row), computed)
                if self._get(self._at(layer, block)) != (known[computed - 1] if computed else ZERO_STATE):
                    request_id = self._live(row).request_id
                    raise ContentError(f"step {step.id}: {request_id!r} reads a wrong state at {computed}, {layer}")
                self.states_checked += 1

    def _write_states(self, step: Step) -> None:
        """Write the states of the step, each at its position; two rows must not write one block."""
        written = set()
        self._states = {}
        for i, group, position, block in step.state_writes.tolist():
            if not step.num_computed[i] < position <= step.num_computed[i] + step.num_scheduled[i]:
                raise ContentError(f"step {step.id} writes the state at {position}, which its tokens do not include")
            owner = self._config.owner_of(group)
            if (owner, block) in written:
                raise ContentError(f"step {step.id} writes the state in block {block} of group {group} twice")
            written.add((owner, block))
            self._states[i, group, position] = block
            row = self._live(int(step.rows[i]))
            for layer in self._layers:
                if layer.ring and layer.group == group:
                    self._check_ring(layer, row, position - position % layer.pools, int(step.num_computed[i]))
            self._write_state(row, group, position, block)

    def _state_of(self, step: Step, i: int, group: int, tokens: int) -> int:
        """Return the block to which the step writes the state of its i-th row after ``tokens`` tokens."""
        if (i, group, tokens) not in self._states:
            raise ContentError(f"step {step.id} writes no state at {tokens} of row {step.rows[i]} in group {group}")
        return self._states[i, group, tokens]

    def _write_state(self, row: WorkerRow, group: int, position: int, block: int) -> None:
        for layer in self._layers:
            if layer.group == group and layer.recurrent:
                known = self._expected(layer, row, min(position, len(row.tokens)))
                self._put(self._at(layer, block), known[position - 1] if position <= len(row.tokens) else b"\xff" * 8)
            elif layer.group == group and layer.ring:
                for token in range(position - position % layer.pools, position):
                    at = self._at(layer, block) + layer.byte_of(token % layer.items)
                    self._put(at, self._expected_item(layer, row, token))

    # -- one row

    def _span(self, step: Step, i: int) -> tuple[int, int]:
        """Check the tokens of the i-th row, and return the positions that it computes as (first, last + 1)."""
        row = self._live(int(step.rows[i]))
        computed, count = int(step.num_computed[i]), int(step.num_scheduled[i])
        drafts = step.drafts[i].tolist()
        certain = count - len(drafts)
        tokens = [row.sampled if token < 0 else token for token in step.token_ids[i].tolist()]
        if tokens != row.tokens[computed : computed + certain] + drafts or len(tokens) != count:
            raise ContentError(f"step {step.id} runs {tokens} for {row.request_id!r} at {computed}, not its own tokens")
        ends = computed + certain == len(row.tokens)
        if bool(step.samples[i]) != ends or (drafts and not ends):
            raise ContentError(f"step {step.id} samples for {row.request_id!r} at the wrong token")
        return computed, computed + count

    def _write(self, row: WorkerRow, computed: int, end: int) -> None:
        """Write the digests of positions ``computed`` to ``end`` - 1, each from the stored digest before it.

        Compressed states and rings get the digests of the row's history, after the raw keys in rings were read.
        """
        self._read_rings(row, computed, end)
        for layer in self._layers:
            if layer.recurrent:
                continue
            if layer.ring or layer.is_compressed:
                for item in layer.written(computed, end):
                    self._put(self._slot(layer, row, item), self._expected_item(layer, row, item))
                continue
            for position in range(computed, end):
                if layer.first_read(position) < position:
                    before = self._stored(layer, row, position - 1)
                elif position:  # at the start of a chunk, storage has nothing that the layer may read
                    before = self._expected(layer, row, position)[position - 1]
                else:
                    before = self.model.root(layer.name)
                digest = self.model.extend(layer.name, before, row.tokens[position], row.heard)
                self._put(self._slot(layer, row, position), digest)

    def _read_rings(self, row: WorkerRow, computed: int, end: int) -> None:
        """Check the raw keys of tokens before ``computed`` that complete states with tokens up to ``end`` - 1.

        Without rings, the model keeps the raw keys of a row elsewhere.
        """
        begun = [layer for layer in self._layers if layer.ended(end) > layer.ended(computed) and not layer.recurrent]
        first = min((int(layer.ended(computed) * layer.rate) for layer in begun), default=computed)
        for layer in self._layers:
            if layer.ring:
                self._check_ring(layer, row, first, computed)

    def _check_ring(self, ring: Layer, row: WorkerRow, first: int, computed: int) -> None:
        """Check the raw keys of tokens ``first`` to ``computed`` - 1, of the group that is open."""
        for position in range(max(first, computed - computed % ring.pools) if ring.pools else first, computed):
            if self._stored(ring, row, position) != self._expected(ring, row, computed)[position]:
                raise ContentError(f"{row.request_id!r} reads a wrong raw key {position} at {computed}, {ring}")
            self.tokens_checked += 1

    def _read(self, step: Step, i: int) -> list[int]:
        """Check all tokens that the i-th row reads; return its accepted drafts and the next token, if it samples."""
        row = self._live(int(step.rows[i]))
        end = int(step.num_computed[i] + step.num_scheduled[i])
        drafts = step.drafts[i].tolist()
        certain = end - len(drafts)
        layers = [] if self._sharded else [self._read_layer(step, i, layer, row) for layer in self._layers]
        if not step.samples[i]:
            return []
        sampled = list[int]()
        for place in range(len(drafts) + 1):
            digests = [one[place] for one in layers] or list(
                self.model.digests(row.tokens[: certain + place], row.heard)
            )
            sampled.append(self.model.sample(digests))
            if place == len(drafts) or sampled[-1] != drafts[place]:
                break
        row.sampled = sampled[-1]
        row.tokens[certain:] = sampled
        for known in row.expected.values():
            del known[certain + len(sampled) - 1 :]
        return sampled

    def _read_layer(self, step: Step, i: int, layer: Layer, row: WorkerRow) -> list[bytes]:
        """Check all tokens that a layer reads, and return its digests of the last known token and of each draft."""
        last = int(step.num_computed[i] + step.num_scheduled[i])
        ends = range(last - len(step.drafts[i]), last + 1)
        if layer.recurrent:
            return [self._get(self._at(layer, self._state_of(step, i, layer.group, end))) for end in ends]
        computed = int(step.num_computed[i])
        end = computed + int(step.num_scheduled[i])
        expected = self._expected(layer, row, end)
        for item in () if layer.ring else range(layer.ended(layer.first_read(computed)), layer.ended(end)):
            if self._stored(layer, row, item) != self._expected_item(layer, row, item):
                what = "state" if layer.is_compressed else "token"
                raise ContentError(f"step {step.id}: {row.request_id!r} reads a wrong {what} {item}, {layer}")
            self.tokens_checked += 1
        return [expected[one - 1] for one in ends]

    def _expected_item(self, layer: Layer, row: WorkerRow, item: int) -> bytes:
        """Return what an item of the row's history leaves."""
        last = layer.last_token(item)
        return self._of_item(layer, item, self._expected(layer, row, last + 1)[last])

    def _of_item(self, layer: Layer, item: int, digest: bytes) -> bytes:
        """Return what an item leaves, from the digest of its last token. Several states of a token differ."""
        return self.model.extend(layer.name, digest, item) if layer.is_compressed else digest

    def _expected(self, layer: Layer, row: WorkerRow, end: int) -> list[bytes]:
        """Return the digests of the row's history, at least ``end`` of them, computed without storage."""
        digests = row.expected.setdefault(layer.name, [])
        while len(digests) < end:
            before = digests[-1] if digests else self.model.root(layer.name)
            digests.append(self.model.extend(layer.name, before, row.tokens[len(digests)], row.heard))
        return digests

    # -- storage

    def _stored(self, layer: Layer, row: WorkerRow, item: int) -> bytes:
        return self._get(self._slot(layer, row, item))

    def _get(self, at: int) -> bytes:
        return bytes(self.storage[at : at + DIGEST_BYTES])

    def _put(self, at: int, digest: bytes) -> None:
        self.storage[at : at + DIGEST_BYTES] = digest

    def _slot(self, layer: Layer, row: WorkerRow, item: int) -> int:
        column, within = divmod(item % layer.items if layer.ring else item, layer.items)
        block = row.tables[layer.group].get(column, 0)
        return self._at(layer, block) + layer.byte_of(within)

    def _refuse_foreign(self, group: int, block: int) -> None:
        if block not in self._ids[group]:
            raise ContentError(f"block {block} is not a block of group {group} that requests may use")

    def _at(self, layer: Layer, block: int) -> int:
        self._refuse_foreign(layer.group, block)
        at = layer.offset + block * layer.stride
        if at + layer.item_bytes > len(self.storage):
            raise ContentError(f"block {block} of {layer} lies outside the arena of {len(self.storage)} bytes")
        return at
