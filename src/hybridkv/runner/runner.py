"""ModelRunner: executes Steps on an unmodified transformers model and returns the tokens.

Step -> tables.apply -> stores, moves, zeroing, copies, loads -> slots
     -> [1, tokens] forward, or one for each row (Forwards): StepCache writes pages, the attention backend reads them,
        and PagedMixers resume at stored states
     -> logits of the rows that sample -> tokens, verified drafts -> StepResult

Large float32 layers on a CPU get rows of zeros if 16 rows run faster than fewer. MKL's float32 product changes its
algorithm at 16 rows: 15 rows take up to twice as long (design record 0028). The limit is measured once for each process
and number of threads.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import PreTrainedModel

from hybridkv.arguments import instance, integer, one_of
from hybridkv.errors import ConfigError, WorkerError
from hybridkv.models import Model
from hybridkv.planner.config import KVCacheConfig
from hybridkv.runner import step_context
from hybridkv.runner.attention import gather
from hybridkv.runner.attention.caches import CrossAttention, CrossLayer, RowCache, StepCache
from hybridkv.runner.attention.compressors import Compressor, compressor_steps, keeps_rows, keeps_states, place_of
from hybridkv.runner.attention.formulas import (
    AttentionBackend,
    LayerRead,
    PagedStep,
    attention_backend,
    kernel_of,
    write_of,
)
from hybridkv.runner.attention.gather import GatherBatch, PagesRead, gather_batch, segment_biases
from hybridkv.runner.decode_graphs import DecodeGraphs, compile_option, refusal
from hybridkv.runner.images import ImageRead, StepImages, attends_both_ways, towers_of
from hybridkv.runner.inputs import require_blocks, require_callable
from hybridkv.runner.load import require_model
from hybridkv.runner.lora import Adapters, LoraRows
from hybridkv.runner.model_call import ModelCall, decode, vocabulary_of
from hybridkv.runner.probe import (
    FormNotes,
    Forwards,
    attends,
    forms_of,
    forwards_of,
    is_indexer,
    kept_attention,
    page_layout,
    probe,
    rows_of,
    set_attention,
    state_layout,
)
from hybridkv.runner.sampling.draws import Draws, LogprobRows, check_drafts, logprobs_of
from hybridkv.runner.sampling.sampler import NONE_DRAWN, RowState, sample
from hybridkv.runner.sampling.structured import Grammars, Masks
from hybridkv.runner.states.continuation import continuation, decodes_together, of_each_kind, recurrence
from hybridkv.runner.states.recurrent import RecurrentMixer
from hybridkv.runner.states.state_batch import PagedMixer, StateBatch, require_class_forwards, state_batch
from hybridkv.runner.step_context import StandIn, StepContext, on_device
from hybridkv.specs import Keeps, KVCacheSpec, MambaSpec
from hybridkv.step import Csr, Logprobs, Step, StepResult, ranges
from hybridkv.stores import BlockStore
from hybridkv.units import MOST_COUNT
from hybridkv.worker import (
    CAUSAL,
    AttentionMask,
    BlockCopier,
    HostTierCopier,
    KVPages,
    MultiGroupBlockTable,
    PagedStorage,
    copy_kernels,
    layer_pages,
)
from hybridkv.worker.store import StoreForm
from hybridkv.worker.tables import group_reads
from hybridkv.worker.triton_attention import LayerShape

logger = logging.getLogger(__name__)

Int64 = NDArray[np.int64]
_Slot = tuple[str, int]
"""Where a mixer's states lie: the layer's name, and the number of states before its own in the layer's page."""
Observer = Callable[[Step, torch.Tensor], None]
"""Called before sampling with the Step and the logits of ``Draws.of(step)``, float32[n, vocabulary]."""
Undrawn = Callable[[str, Exception], object]
"""Called with a request's id and the error that kept its token from being drawn. That token is arbitrary."""

_ROWS: Final = 16
"""Rows to fill up to."""
_LEAST_WEIGHTS: Final = 1 << 19
"""Least weights of a padded layer.

Smaller layers stay in the processor's cache, so added rows cost more than they save.
"""
_FEWEST: Final = 7
"""Least rows to pad: fewer are faster than 16 with any library."""
_PROBED: Final = (4096, 2048)
"""Shape of the measured layer: larger than a processor's cache, like the weights of all layers together."""
_REPEATS: Final = 3
"""Measurements of each number of rows, of which the fastest counts; chosen by hand."""
_WORTH: Final = 0.9
"""Largest ratio of the padded time to the unpadded time, so that small gains are left alone; chosen by hand."""


class ModelRunner:
    """Owns the worker's side of ``config``: arena, block tables and row state. It executes Steps in order.

    From construction on, the model attends through the pages; ``detach`` restores its own attention.

    Attributes:
        cross: the encoder's side of cross attention; ``None`` for a model without it.
        images: the images of prompts; ``None`` before ``take_images``.
        decode_graphs: the CUDA graphs of decoding steps; ``None`` if these run as usual.
        over: requests whose structured output is complete; the caller empties it.

    Args:
        model: a transformers model.
        config: the planned layout of its cache.
        planned: the planner's model from which ``config`` was made.
        max_running: rows.
        max_model_len: tokens of the longest request.
        max_batched_tokens: tokens of the largest Step.
        max_encoder_tokens: encoder tokens of a request, for cross attention.
        observer: called with the logits of every Step.
        undrawn: called if a request's logits cannot be edited. Without it, the Step fails.
        forwards: how Steps run; by default, the fastest way that a test forward allows.
        attention: how attention over pages runs. Layers that it cannot serve gather their contexts.
        compiled: "decode" for CUDA graphs of steps that only decode, if the model allows them.
        tier: the layout of the host tier: ``config`` with another number of blocks or slabs. Without it, Steps with
            transfers are rejected.
        store: a store behind the host tier; None without one. It stays open.
        hash_block: tokens of a hash block, for marks in the store.
        form: how blocks lie in the store; None: as they lie in the tier.
        grammars: compiles structured outputs; None rejects them.
        adapters: the adapters of the model; None for none.

    Raises:
        ConfigError: a forward caches other bytes than planned, another runner holds the model, or ``tier`` does not fit
            ``config``.
        UnsupportedModelError: the model cannot run on pages, or its recurrent mixers were patched.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: KVCacheConfig,
        planned: Model,
        *,
        max_running: int,
        max_model_len: int,
        max_batched_tokens: int,
        max_encoder_tokens: int = 0,
        observer: Observer | None = None,
        undrawn: Undrawn | None = None,
        forwards: Forwards | None = None,
        attention: AttentionBackend | str = AttentionBackend.GATHER,
        compiled: str | None = None,
        tier: KVCacheConfig | None = None,
        store: BlockStore | None = None,
        hash_block: int = 1,
        form: StoreForm | None = None,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        require_model(model)
        instance("config", config, KVCacheConfig)
        instance("planned", planned, Model)
        max_running = integer("max_running", max_running, 1, MOST_COUNT)
        max_model_len = integer("max_model_len", max_model_len, 1, MOST_COUNT)
        max_batched_tokens = integer("max_batched_tokens", max_batched_tokens, 1, MOST_COUNT)
        max_encoder_tokens = integer("max_encoder_tokens", max_encoder_tokens, 0, MOST_COUNT)
        require_callable(observer=observer, undrawn=undrawn)
        step_context.require_free(model)
        probed = probe(model)
        self.forwards = forwards_of(model, probed) if forwards is None else one_of(Forwards)("forwards", forwards)
        mixers = _slots(state_layout(planned, probed))
        require_class_forwards(mixers.values())
        self.continues = of_each_kind(mixers, continuation)
        self._together = of_each_kind(mixers, decodes_together)
        drafted = any(isinstance(one.spec, MambaSpec) and one.spec.num_speculative_blocks for one in config.groups)
        self.recurrences = of_each_kind(mixers, recurrence) if drafted else {}
        self.model, self.config, self.observer = model, config, observer
        self.attention, compiled = attention_backend("attention", attention), compile_option("compiled", compiled)
        self._prepare = kernel_of(self.attention, model.device)
        self._model_call = ModelCall(model)
        self._undrawn, self._request_of_row = undrawn, dict[int, str]()
        self._device = model.device
        self.storage = PagedStorage(config, page_layout(planned, probed), self._device)
        self._copier = BlockCopier(self.storage, kernels=copy_kernels(self._device))
        self._tier = None
        if tier is not None:
            self._tier = HostTierCopier(self.storage, tier, store=store, hash_block=hash_block, form=form)
        self.tables = MultiGroupBlockTable.of_config(
            config,
            max_num_reqs=max_running,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_batched_tokens,
            device=self._device,
            max_encoder_tokens=max_encoder_tokens,
        )
        self._vocabulary = vocabulary_of(model)
        self._rows, self.over = RowState(max_running, self._vocabulary, grammars), set[str]()
        self._logprobs = LogprobRows(max_running)
        self._context = StepContext()
        self._loras = LoraRows(adapters or Adapters(), self._context, max_running)
        self.images: StepImages | None = None
        self._give_pages(planned, mixers)
        self._attach()
        self.decode_graphs = None if compiled is None else self._captured_decoding(max_model_len)

    def _give_pages(self, planned: Model, mixers: Mapping[_Slot, RecurrentMixer]) -> None:
        """Give every layer its group and its views of the pages. ``mixers``: the recurrent mixers, by their place."""
        group_of = {name: number for number, group in enumerate(self.config.groups) for name in group.layer_names}
        crossing = [layer for layer in planned.layers if layer.spec.keeps is Keeps.ENCODER]
        indexing = [layer for layer in planned.layers if is_indexer(layer)]
        others = {layer.name for layer in crossing} | {name for name, _ in mixers}
        attending = [layer for layer in planned.layers if layer.name not in others and attends(layer)]
        self._reads = {
            layer.index: LayerRead(group_of[layer.name], AttentionMask.of(layer.spec)) for layer in attending
        }
        self._layer_pages = {
            layer.index: layer_pages(layer.spec, self.storage.views[layer.name]) for layer in attending
        }
        self._pages = dict[int, KVPages]()
        self._indexers = {layer.index: (group_of[layer.name], self.storage.views[layer.name]) for layer in indexing}
        pooled = {place_of(layer): layer for layer in planned.layers if keeps_states(layer)}
        self._compressors = {
            place_of(rows): Compressor(
                rows.pools,
                rows.spec.mask[0] or rows.pools,
                (group_of[rows.name], group_of[pooled[place_of(rows)].name]),
                *(self.storage.views[one.name][0] for one in (rows, pooled[place_of(rows)])),
            )
            for rows in planned.layers
            if keeps_rows(rows)
        }
        self._token_groups = sorted({group_of[layer.name] for layer in planned.layers if layer.name not in others})
        self._state_groups = sorted({group_of[name] for name, _ in mixers})
        self._mixers = [
            PagedMixer(
                mixer,
                self.continues[name, first],
                self.storage.views[name][first : first + len(mixer.parts)],
                self._context,
                group_of[name],
                recurrence=self.recurrences.get((name, first)),
            )
            for (name, first), mixer in mixers.items()
        ]
        by_token = {group_of[name] for name, first in mixers if self.recurrences.get((name, first)) is None}
        self._drafts_at_once = set(self._state_groups) - by_token
        self._by_row = {group_of[name] for name, first in mixers if not self._together[name, first]}
        cross = [CrossLayer(one.index, group_of[one.name], self.storage.views[one.name]) for one in crossing]
        self.cross = CrossAttention(self.model, cross, self.tables, self._context) if cross else None
        biases = segment_biases(self.model.get_decoder(), self._context) if cross else []
        self._stand_ins: list[StandIn | LoraRows] = [*self._mixers, *padded_linears(self.model), *biases, self._loras]

    def _attach(self) -> None:
        """Make the model run on pages from here on."""
        gather.register()
        self._own_attention: str = self.model.config._attn_implementation
        with kept_attention(towers_of(self.model)):
            set_attention(self.model, gather.NAME if self.forwards is Forwards.TOGETHER else "eager")
        self._attached = True
        step_context.attach(self.model, self._context)
        try:
            notes = None
            if self.forwards is Forwards.TOGETHER and self.attention is not AttentionBackend.EAGER:
                notes = forms_of(self.model, self._context)
            for one in self._stand_ins:
                one.install()
            if notes is not None:
                self._read_by(notes)
        except BaseException:  # after any error the model must be free again
            self.detach()
            raise

    def take_images(self, max_bytes: int) -> StepImages:
        """Return the runner's side of images; the first call makes it.

        Args:
            max_bytes: bytes of image features to keep.

        Raises:
            ConfigError: as ``ImageCall.of``; or images attend in both directions, which only gathered contexts can do.
        """
        if attends_both_ways(self.model) and (self._prepare is not None or self.forwards is not Forwards.TOGETHER):
            raise ConfigError(
                f"images of {type(self.model).__name__} attend in both directions: use attention=gather or eager"
            )
        if self.images is None:
            self.images = StepImages(self.model, max_bytes)
        return self.images

    def _read_by(self, notes: FormNotes) -> None:
        """Let layers with a known form of attention read parts of contexts, or their pages if a kernel can."""
        self._context.forms = notes.forms
        layers = notes.layers
        self._reads |= {layer: replace(self._reads[layer], whole=False) for layer in layers}
        if self._prepare is None:
            return
        for layer, heads in layers.items():
            pages = self._layer_pages[layer]
            if heads is not None and isinstance(pages, KVPages):  # no kernel reads codes with scales
                self._pages[layer] = pages
                shape = LayerShape.of(heads[0], pages, heads[1])
                self._reads[layer] = replace(self._reads[layer], heads=shape)
        gathered = len(self._reads) - len(self._pages)
        if gathered:
            logger.info("%s: contexts of %d layers are gathered all the same", type(self.model).__name__, gathered)

    def _captured_decoding(self, max_model_len: int) -> DecodeGraphs | None:
        """Return graphs of decoding steps. If the model does not allow them, log the reason and return None."""
        others = {
            "each row runs in a forward of its own": self.forwards is Forwards.BY_ROW,
            "recurrent layers read states from blocks that the host looks up": self._mixers,
            "cross attention is gathered": self.cross,
        }
        other = next((why for why, there in others.items() if there), None)
        why, name = refusal(self._device, self.attention, self._reads, other=other), type(self.model).__name__
        if why is not None:
            logger.warning("%s: steps that only decode run as they are: %s", name, why)
            return None
        return DecodeGraphs(
            self._decoded, self._reads, self._pages, self.tables, max_model_len=max_model_len, name=name
        )

    def detach(self) -> None:
        """Restore the model's own attention and recurrent mixers. A second call does nothing."""
        if not self._attached:
            return
        self._attached = False
        if self._tier is not None:
            self._tier.close()
        for one in self._stand_ins:
            one.remove()
        step_context.detach(self.model, self._context)
        set_attention(self.model, self._own_attention)

    def settled_tier(self) -> PagedStorage | None:
        """Return the memory of the host tier, once no transfer writes it; None without a tier. Between Steps only."""
        return None if self._tier is None else self._tier.settled(self.storage)

    def execute(self, step: Step) -> StepResult:
        """Run one forward over all tokens of ``step``, and draw the tokens of every row that samples.

        If the forward raises, tables and row state have already followed the Step. After ``Scheduler.fail(step.id)``
        the next Step can run. O(tokens), in addition to the model.

        Args:
            step: the next Step of the scheduler.

        Raises:
            WorkerError: the Step does not fit; nothing is changed.
            Exception: an error of the forward.
        """
        self._check(instance("step", step, Step))
        states = self._state_batches(step)
        self.tables.apply(step)
        for rows in (self._rows, self._logprobs, self._loras):
            rows.end(step.finished_rows)
            for new in step.new_rows:
                rows.begin(new)
        self._request_of_row |= {new.row: new.request_id for new in step.new_rows}
        self.tables.commit_block_table(self.tables.max_num_reqs)
        if self._tier is not None:
            self._tier.begin(step)
        self._copier.execute_before(step)
        if self._tier is not None:
            self._tier.load(step)
        if self.cross is not None:
            self.cross.begin(step)
        if not step.num_tokens:
            return self._result(step, Csr.empty(len(step)))
        draws, prompts = Draws.of(step), self._logprobs.of_prompts(step)
        masking = self._rows.begin_masks(step.rows[draws.row], draws.before)
        try:
            after = self._forward(step, self._resolved(step), np.concatenate((draws.source, prompts.source)), states)
        finally:
            masks = None if masking is None else masking.result()
        logits, of_prompts = after[: len(draws)].float(), after[len(draws) :]
        if self.observer is not None:
            self.observer(step, logits)
        drawn, wrong = self._drawn(step, draws, logits, masks)
        kept = draws.kept(drawn)
        over = self._rows.completed(step.rows[draws.row], drawn, kept)
        self._report_undrawn(step, draws, {draw: error for draw, error in wrong.items() if kept[draw]})
        sampled = draws.appended(drawn, kept, len(step))
        self._rows.drawn(step.rows, sampled)
        prompts = prompts._replace(source=np.arange(len(prompts.source)))
        wanted = logprobs_of([(of_prompts, prompts), (logits, self._logprobs.of_drawn(step, draws, drawn, kept))])
        self.over |= {self._request_of_row[row] for row in over}
        accepted = np.diff(sampled.indptr).astype(np.int32) if len(step.drafts.values) else None
        return self._result(step, sampled, accepted, wanted)

    def _result(
        self, step: Step, sampled: Csr, accepted: NDArray[np.int32] | None = None, wanted: Logprobs | None = None
    ) -> StepResult:
        """Return the result of ``step``, with the transfers that ended."""
        result = StepResult(step.id, sampled, accepted, wanted)
        if self._tier is None:
            return result
        arrived, lost, arrived_s = self._tier.finish(step)
        return replace(result, arrived=arrived, lost=lost, arrived_s=arrived_s)

    # -- before the forward

    def _check(self, step: Step) -> None:
        """Raise WorkerError for a Step that this runner cannot run, or that would read a missing token or block."""
        if not self._attached:
            raise WorkerError(f"Step {step.id} cannot run: this runner gave its model back, so make another runner")
        if len(step) and step.num_scheduled.min() < 1:
            row = step.rows[step.num_scheduled.argmin()]
            raise WorkerError(f"Step {step.id} schedules row {row} without tokens: schedule at least one, or no row")
        check_drafts(step)
        self._rows.check(step.new_rows)
        self._loras.check(step.new_rows)
        tokens = step.token_ids.values
        if len(tokens) and (tokens.max() >= self._vocabulary or tokens.min() < NONE_DRAWN):
            raise WorkerError(
                f"Step {step.id}: token ids must lie in 0 .. {self._vocabulary - 1}, or be {NONE_DRAWN} for the last "
                f"sampled token, got {tokens.min()} .. {tokens.max()}"
            )
        drawn = self._owner_rows(step)[tokens == NONE_DRAWN]
        missing = drawn[self._rows.last_token[drawn] == NONE_DRAWN]
        if len(missing):
            raise WorkerError(
                f"Step {step.id} refers to the sampled token of row {missing[0]}, which sampled none: give its id"
            )
        self._copier.check(step)
        if self._tier is not None:
            self._tier.check(step)
        elif step.has_transfers:
            raise WorkerError(f"Step {step.id} has transfers, and this runner has no host tier: make it with tier=")
        # state_batch checks the groups of states
        context = step.num_computed.astype(np.int64) + step.num_scheduled
        for group in self._token_groups:
            require_blocks(step, self.tables[group], group, context, "tokens")
        if self.cross is not None:
            self.cross.check(step)

    @staticmethod
    def _owner_rows(step: Step) -> Int64:
        """Return the row of every token of the step."""
        return np.repeat(step.rows.astype(np.int64), step.num_scheduled)

    def _resolved(self, step: Step) -> Int64:
        """Return the step's tokens, int64[tokens]; -1 becomes the token that its row sampled last."""
        tokens = step.token_ids.values.astype(np.int64)
        unknown = np.flatnonzero(tokens == NONE_DRAWN)
        if len(unknown):
            tokens[unknown] = self._rows.last_token[self._owner_rows(step)[unknown]]
        return tokens

    # -- the forward

    def _forward(self, step: Step, tokens: Int64, wanted: Int64, states: Mapping[int, StateBatch]) -> torch.Tensor:
        """Return the logits after each of the tokens at the indices ``wanted``: [n, vocabulary]."""
        if self.forwards is Forwards.TOGETHER:
            return self._run(step, tokens, wanted, states)
        parts, places, first = [], [], 0
        for one in rows_of(step):
            end = first + one.num_tokens
            mine = np.flatnonzero((first <= wanted) & (wanted < end))
            parts.append(self._run(one, tokens[first:end], wanted[mine] - first, self._state_batches(one)))
            places.append(mine)
            first = end
        return torch.cat(parts)[on_device(np.argsort(np.concatenate(places)), self._device)]

    def _run(self, step: Step, tokens: Int64, wanted: Int64, states: Mapping[int, StateBatch]) -> torch.Tensor:
        """Run one forward over all of ``step``; return the logits as ``_forward`` does."""
        positions = ranges(step.num_computed.astype(np.int64), step.num_scheduled.astype(np.int64))
        owners = self._owner_rows(step)
        for group in self._token_groups:
            self.tables[group].compute_slot_mapping(owners, positions)
        if self.decode_graphs is not None and self.images is None:
            decoded = self.decode_graphs.logits(step, tokens, positions)
            if decoded is not None:
                return decoded[on_device(wanted, self._device)]
        for group in self._token_groups:
            self.tables[group].commit_slot_mapping(len(tokens))
        at = on_device(positions, self._device)
        images = None if self.images is None else self.images.read(step, tokens, positions)
        cross = None if self.cross is None else self.cross.reads(step)
        last_seen = None if images is None else images.last_seen
        attention, indexers = self._attention_of(step, last_seen), self._indexers_of(step)
        compressors = compressor_steps(step, self._compressors, self.tables, self.model.dtype)
        lora = self._loras.of(owners, self._device)
        running = self._context.running(
            attention, states, cross, at, indexers=indexers, compressors=compressors, lora=lora
        )
        with running, torch.inference_mode():
            return self._call(on_device(tokens, self._device), at, on_device(wanted, self._device), images)

    def _decoded(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Mapping[int, PagedStep]
    ) -> torch.Tensor:
        """Run a decoding step inside DecodeGraphs."""
        with self._context.running(attention, {}, None, positions), torch.inference_mode():
            return self._call(tokens, positions, torch.arange(len(tokens), device=self._device), None)

    def _call(
        self, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, images: ImageRead | None
    ) -> torch.Tensor:
        """Run the model over a flattened step; return the logits after the tokens ``keep``, [n, vocabulary]."""
        more = {} if images is None else images.arguments
        if self.forwards is Forwards.BY_ROW:
            masks = {layer: read.mask for layer, read in self._reads.items()}
            row = RowCache(self._layer_pages, self._context, positions, masks)
            return self._model_call.logits_after(tokens, keep, row, None, more)
        cache = StepCache(self._layer_pages, self._context, positions)
        if self.cross is not None:
            return decode(self.model, tokens, positions, None, caches=(cache, self.cross.cache()), keep=keep)
        return self._model_call.logits_after(tokens, keep, cache, positions, more)

    def _state_batches(self, step: Step) -> dict[int, StateBatch]:
        """Return the StateBatch of each group of states."""
        groups = self._state_groups if step.num_tokens else []
        return {
            group: state_batch(
                step, group, self._device, alike=group in self._drafts_at_once, alone=group in self._by_row
            )
            for group in groups
        }

    def _attention_of(self, step: Step, last_seen: Int64 | None) -> dict[int, GatherBatch | PagedStep]:
        """Return how each layer attends, by layer index. Layers with equal reads share one object."""
        groups = {read.group for read in self._reads.values() if read.heads is not None}
        reads = {group: group_reads(step, group, self.tables[group]) for group in groups}
        writes = {group: write_of(self.attention, self.tables[group], step.num_tokens) for group in groups}
        made: dict[LayerRead, GatherBatch | PagedStep] = {}
        for layer, read in self._reads.items():
            if read in made:
                continue
            if self._prepare is None or read.heads is None:
                table, dtype = self.tables[read.group], self.model.dtype
                made[read] = gather_batch(step, table, read.mask, dtype, whole=read.whole, last_seen=last_seen)
            else:
                attend = self._prepare(reads[read.group], read.mask, read.heads, self._pages[layer])
                made[read] = PagedStep(writes[read.group], self._pages, attend)
        return {layer: made[read] for layer, read in self._reads.items()}

    def _indexers_of(self, step: Step) -> dict[int, PagesRead]:
        """Return the reads of each indexer's keys, by layer index. Layers of one group share a GatherBatch."""
        dtype, groups = self.model.dtype, {group for group, _ in self._indexers.values()}
        batches = {group: gather_batch(step, self.tables[group], CAUSAL, dtype, whole=True) for group in groups}
        return {layer: (batches[group], pages) for layer, (group, pages) in self._indexers.items()}

    # -- after the forward

    def _drawn(
        self, step: Step, draws: Draws, logits: torch.Tensor, masks: Masks | None
    ) -> tuple[Int64, dict[int, Exception]]:
        """Return the token of each draw, int64[n], and the errors of failed edits by draw.

        Raises WorkerError for NaN logits.
        """
        if not len(draws):
            return np.empty(0, np.int64), {}
        wrong = torch.nonzero(logits.amax(dim=-1).isnan()).flatten().tolist()  # the largest of a row with NaN is NaN
        if wrong:
            raise WorkerError(
                f"Step {step.id}: the logits of row {step.rows[draws.row[wrong[0]]]} are NaN after token "
                f"{draws.position[wrong[0]] - 1}: check the model's weights and dtype"
            )
        batch = self._rows.batch(step.rows[draws.row], draws.position, draws.before, masks)
        with torch.inference_mode():
            drawn, failed = sample(logits, batch)
        return drawn.cpu().numpy(), failed

    def _report_undrawn(self, step: Step, draws: Draws, wrong: Mapping[int, Exception]) -> None:
        """Report failed draws. Draws after a rejected draft do not count and are not in ``wrong``."""
        for draw, error in wrong.items():
            if self._undrawn is None:
                raise error
            self._undrawn(self._request_of_row[step.rows.item(draws.row.item(draw))], error)


def _slots(mixers: Mapping[str, Sequence[RecurrentMixer]]) -> dict[_Slot, RecurrentMixer]:
    """Return each mixer of each layer by its place."""
    found = dict[_Slot, RecurrentMixer]()
    for name, mine in mixers.items():
        first = 0
        for mixer in mine:
            found[name, first] = mixer
            first += len(mixer.parts)
    return found


def require_fit(planned: Model, config: KVCacheConfig) -> None:
    """Raise ConfigError unless ``config`` has exactly the layers of ``planned``, each with as many bytes a token.

    Blocks may be longer than in ``planned``: the reference layout aligns them.
    """
    wanted = {layer.name: _kept(layer.spec) for layer in planned.layers}
    given = {
        name: _kept(spec)
        for group in config.groups
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True)
    }
    if wanted == given:
        return
    missing = sorted(set(wanted) - set(given)) + sorted(set(given) - set(wanted))
    if missing:
        raise ConfigError(
            f"the plan is not of {planned.name}: it has {len(given)} layers, the model has {len(wanted)}, and "
            f"the first difference is {missing[0]}: make a plan of this model"
        )
    name = next(name for name in wanted if wanted[name] != given[name])
    raise ConfigError(
        f"the plan is not of {planned.name}: layer {name} keeps {given[name]} in the plan, {wanted[name]} in the "
        "model: make a plan of this model, with its dtype"
    )


def _kept(spec: KVCacheSpec) -> str:
    """Describe how many bytes a layer keeps, for a token or for a state."""
    if spec.keeps is Keeps.STATE:
        return f"{spec.content_bytes} bytes a state"
    return f"{spec.content_bytes // spec.block_size} bytes a token"


# -- linear layers of few rows


@lru_cache(maxsize=8)
def first_padded(threads: int) -> int:
    """Return the fewest rows, at most 16, that run slower than 16 rows. The measurement takes about 0.3 seconds.

    ``threads``: torch's current number of threads.
    """
    del threads  # only the cache's key needs it
    weight, hidden = torch.zeros(_PROBED), torch.zeros(_ROWS, _PROBED[1])
    took = dict.fromkeys(range(_FEWEST, _ROWS + 1), math.inf)
    for _ in range(_REPEATS):  # in turns, so that other work on the machine slows all numbers of rows alike
        for rows, best in took.items():
            began = time.perf_counter()
            functional.linear(hidden[:rows], weight)
            took[rows] = min(best, time.perf_counter() - began)
    return _FEWEST - 1 + first_slower(list(took.values()))


def first_slower(took: Sequence[float]) -> int:
    """Return the first number of rows from which on all take longer than the last. ``took``: seconds of 1, 2, .. rows.

    The last number is the result if no shorter one is slower.
    """
    rows = len(took)
    while rows > 1 and _WORTH * took[rows - 2] > took[-1]:
        rows -= 1
    return rows


class PaddedLinear(StandIn):
    """Replaces a linear layer's forward: it pads ``first`` rows or more, but fewer than 16, to 16."""

    def __init__(self, module: torch.nn.Linear, first: int) -> None:
        super().__init__(module)
        self._linear, self._first = module, first

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # as torch names it
        """Map [.., width] to [.., output width]."""
        module, rows = self._linear, input.numel() // input.shape[-1]
        if not self._first <= rows < _ROWS:
            return functional.linear(input, module.weight, module.bias)
        padded = functional.pad(input.reshape(rows, -1), (0, 0, 0, _ROWS - rows))
        out = functional.linear(padded, module.weight, module.bias)[:rows]
        return out.view(*input.shape[:-1], -1)


def padded_linears(model: torch.nn.Module) -> list[PaddedLinear]:
    """Make a PaddedLinear for every large, unpatched float32 linear layer on a CPU."""
    found = [
        one
        for one in model.modules()
        if type(one) is torch.nn.Linear
        and "forward" not in vars(one)
        and one.weight.device.type == "cpu"
        and one.weight.dtype is torch.float32
        and one.weight.numel() >= _LEAST_WEIGHTS
    ]
    first = first_padded(torch.get_num_threads()) if found else _ROWS
    return [PaddedLinear(one, first) for one in found] if first < _ROWS else []
