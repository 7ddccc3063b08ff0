"""ModelRunner: Steps into tokens, on an unmodified transformers model.

Step -> tables.apply -> slots -> [1, tokens] forward: StepCache writes pages, gather backend attends
     -> logits of the rows that sample -> tokens -> StepResult
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.models import Model
from hybridkv.plan.config import KVCacheConfig
from hybridkv.runner import attention_gather
from hybridkv.runner.probe import page_layout, probe, set_attention
from hybridkv.runner.rows import NONE_DRAWN, RowState
from hybridkv.runner.sampling import sample
from hybridkv.runner.step_cache import StepCache
from hybridkv.step import Csr, Step, StepResult
from hybridkv.worker import MultiGroupBlockTable, PagedStorage

logger = logging.getLogger(__name__)

Int64 = NDArray[np.int64]
Observer = Callable[[Step, torch.Tensor], None]
"""Called before sampling with the Step and float32[n, vocabulary], the logits of its n rows that sample, in order."""

_NOTHING_TO_SAMPLE: Final = np.empty(0, np.int32)


class ModelRunner:
    """Owns the worker's side of ``config``: arena, block tables, row state; executes Steps in order.

    model: a transformers causal language model. From here on it attends through the pages; ``detach``
    gives it its own attention back. planned: the model that ``config`` was planned for. max_running: rows.
    max_model_len: tokens of the longest request. max_batched_tokens: tokens of the largest Step.
    observer: sees the logits of every Step (see Observer); None for nobody.
    Raises ConfigError when a forward caches other bytes than planned, UnsupportedModelError for a model
    that cannot run on pages.
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
        observer: Observer | None = None,
    ) -> None:
        attention_gather.check_attention(model)
        layout = page_layout(planned, probe(model))
        self.model, self.config, self.observer = model, config, observer
        self._device = model.device
        self.storage = PagedStorage(config, layout, self._device)
        self.tables = MultiGroupBlockTable(
            max_running,
            max_model_len,
            max_batched_tokens,
            self._device.type == "cuda",
            self._device,
            [group.spec.block_size for group in config.groups],
            num_blocks=max(config.blocks_of(group) for group in range(len(config.groups))),
        )
        index = {layer.name: layer.index for layer in planned.layers}
        self._group_of = {index[name]: g for g, group in enumerate(config.groups) for name in group.layer_names}
        self._views = {index[name]: views for name, views in self.storage.views.items()}
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self._rows = RowState(max_running, self._vocabulary, self._device)
        attention_gather.register()
        self._own_attention: str = model.config._attn_implementation
        set_attention(model, attention_gather.NAME)

    def detach(self) -> None:
        """Give the model the attention back that it had before."""
        set_attention(self.model, self._own_attention)

    def execute(self, step: Step) -> StepResult:
        """Run ``step``: one forward over all its tokens, then one token for every row that samples.

        Raises WorkerError, with nothing changed, for a Step that does not fit. When the forward raises, the
        error passes through; tables and row state have followed the Step, so that after ``Scheduler.fail(step.id)``
        the next Step can run. O(tokens) beside the model.
        """
        self._check(step)
        self.tables.apply(step)
        self._rows.end(step.finished_rows)
        for new in step.new_rows:
            self._rows.begin(new)
        self.tables.commit_block_table(self.tables.max_num_reqs)
        for copy in step.copies:
            self.storage.copy_block(copy.group, copy.source, copy.destination)
        if not step.num_tokens:
            return StepResult(step.id, Csr.empty(len(step)))
        logits = self._forward(step, self._resolved(step))
        if self.observer is not None:
            self.observer(step, logits)
        return StepResult(step.id, self._sample(step, logits))

    # -- before the forward

    def _check(self, step: Step) -> None:
        """Refuse what this runner cannot do, or what would read a token or a block that is not there."""
        late = any(copy.stage != "before" or copy.kind == "state" for copy in step.copies)
        if len(step.drafts.values) or len(step.zero) or late or len(step.state_writes):
            raise WorkerError(
                f"Step {step.id} has drafts, zeroing, states or copies behind the forward: this runner has none of them"
            )
        if len(step) and step.num_scheduled.min() < 1:
            raise WorkerError(f"Step {step.id} schedules a row without tokens")
        tokens = step.token_ids.values
        if len(tokens) and (tokens.max() >= self._vocabulary or tokens.min() < NONE_DRAWN):
            raise WorkerError(f"Step {step.id}: token ids must lie in 0 .. {self._vocabulary - 1}")
        drawn = self._owner_rows(step)[tokens == NONE_DRAWN]
        if (self._rows.last_token[drawn] == NONE_DRAWN).any():
            raise WorkerError(f"Step {step.id} refers to a sampled token of a row that sampled none")
        self._check_blocks(step)

    def _check_blocks(self, step: Step) -> None:
        """Every row needs a block for each of its tokens, once the Step's cells are written. O(rows + cells)."""
        context = step.num_computed.astype(np.int64) + step.num_scheduled
        emptied = np.concatenate((step.finished_rows, [new.row for new in step.new_rows])).astype(np.int64)
        for group, table in enumerate(self.tables):
            held = table.num_blocks_per_row.copy()
            held[emptied] = 0
            mine = step.cells.group == group
            np.maximum.at(held, step.cells.row[mine], step.cells.column[mine] + 1)
            short = np.flatnonzero(held[step.rows].astype(np.int64) * table.block_size < context)
            if len(short):
                row = step.rows[short[0]]
                raise WorkerError(
                    f"Step {step.id}: row {row} needs blocks for {context[short[0]]} tokens in group {group}, "
                    f"it has {held[row]} of {table.block_size}"
                )

    @staticmethod
    def _owner_rows(step: Step) -> Int64:
        """The row of every token of the step."""
        return np.repeat(step.rows.astype(np.int64), step.num_scheduled)

    def _resolved(self, step: Step) -> Int64:
        """The step's tokens, int64[tokens], -1 replaced by what its row sampled last."""
        tokens = step.token_ids.values.astype(np.int64)
        unknown = np.flatnonzero(tokens == NONE_DRAWN)
        if len(unknown):
            tokens[unknown] = self._rows.last_token[self._owner_rows(step)[unknown]]
        return tokens

    # -- the forward

    def _forward(self, step: Step, tokens: Int64) -> torch.Tensor:
        """Logits behind the last token of every row that samples, float32[n, vocabulary]."""
        scheduled = step.num_scheduled.astype(np.int64)
        ends = np.cumsum(scheduled)
        inside = np.arange(len(tokens)) - np.repeat(ends - scheduled, scheduled)
        positions = np.repeat(step.num_computed.astype(np.int64), scheduled) + inside
        self.tables.compute_slot_mapping(self._owner_rows(step), positions)
        self.tables.commit_slot_mapping(len(tokens))
        by_group = [attention_gather.gather_batch(step, table, self.model.dtype) for table in self.tables]
        batches = {layer: by_group[group] for layer, group in self._group_of.items()}
        carried: dict[str, Any] = {attention_gather.BATCH_ARGUMENT: batches}
        with torch.inference_mode():
            out = self.model(
                input_ids=self._tensor(tokens)[None],
                position_ids=self._tensor(positions)[None],
                past_key_values=StepCache(self._views, batches),
                use_cache=True,
                logits_to_keep=self._tensor(ends[step.samples] - 1),
                **carried,
            )
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def _tensor(self, values: Int64) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    # -- behind it

    def _sample(self, step: Step, logits: torch.Tensor) -> Csr:
        """One token for every row that samples."""
        indptr = np.zeros(len(step) + 1, np.int64)
        np.cumsum(step.samples, out=indptr[1:])
        rows = step.rows[step.samples]
        if not len(rows):
            return Csr(indptr, _NOTHING_TO_SAMPLE)
        position = (step.num_computed.astype(np.int64) + step.num_scheduled)[step.samples]
        with torch.inference_mode():
            drawn: Int64 = sample(logits, self._rows.batch(rows, position)).cpu().numpy()
        self._rows.drawn(rows, drawn)
        return Csr(indptr, drawn.astype(np.int32))


def require_fit(planned: Model, config: KVCacheConfig) -> None:
    """Raise ConfigError unless ``config`` has exactly the layers of ``planned``, with the same pages."""
    wanted = {layer.name: (layer.spec.block_size, layer.spec.page_size_bytes) for layer in planned.layers}
    given = {
        name: (group.spec.block_size, group.spec.page_size_bytes)
        for group in config.groups
        for name in group.layer_names
    }
    if wanted == given:
        return
    missing = sorted(set(wanted) - set(given)) + sorted(set(given) - set(wanted))
    if missing:
        raise ConfigError(
            f"the plan is not of {planned.name}: {len(given)} layers planned, {len(wanted)} in the model; first that "
            f"differs: {missing[0]}. Plan this very model"
        )
    name = next(name for name in wanted if wanted[name] != given[name])
    raise ConfigError(
        f"the plan is not of {planned.name}: layer {name} has pages of {given[name][1]} bytes and {given[name][0]} "
        f"tokens in the plan, {wanted[name][1]} and {wanted[name][0]} in the model. Plan this very model, with its "
        "dtype and block size"
    )
