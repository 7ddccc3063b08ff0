"""How a Step becomes forwards: all of its rows in one, or each row in one of its own.

    together   one flattened forward; the model is handed every token's position, and attends through
               transformers' attention interface
    by row     a forward a row: the model makes positions, biases and masks of its own from a cache that says how many
               tokens of this one request it has, as transformers' caches do

By row runs whatever runs on a standard cache, at the price of a forward for each row. What a model can do is seen from
a forward (``forwards_of``); whether it does it rightly, by the self-check.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum

import numpy as np
from transformers import PreTrainedModel

from hybridkv.errors import UnsupportedModelError
from hybridkv.runner.attention import attention_gather
from hybridkv.runner.attention.attention_form import attention_modules, eager_function
from hybridkv.runner.encoder_decoder import is_encoder_decoder
from hybridkv.runner.probe import Probed, attention_implementation
from hybridkv.step import Csr, Step


class Forwards(StrEnum):
    """Of a Step."""

    TOGETHER = "together"
    BY_ROW = "by row"


def forwards_of(model: PreTrainedModel, probed: Probed) -> Forwards:
    """TOGETHER where every layer that attends can be handed positions and gathered contexts, else BY_ROW.

    Raises UnsupportedModelError for attention in both directions (of an encoder-decoder, what is not causal in its
    decoder is cross attention), and for encoder-decoders that cannot run together.
    """
    crosses = is_encoder_decoder(model)
    modules = [one for one in attention_modules(model.get_decoder() if crosses else model) if one in probed.ran]
    for module in modules:
        if not (module.is_causal or crosses):
            raise UnsupportedModelError(f"{type(module).__name__} attends in both directions: not supported")
    if probed.attention and not probed.takes_positions:
        return Forwards.BY_ROW
    attention_gather.register()
    try:
        for module in modules:
            eager_function(module)
        with attention_implementation(model, attention_gather.NAME):
            pass
    except UnsupportedModelError:
        if crosses:
            raise
        return Forwards.BY_ROW
    return Forwards.TOGETHER


def rows_of(step: Step) -> Iterator[Step]:
    """``step`` row by row, as far as a forward is concerned: what is done before it is in none of them."""
    for row in range(len(step)):
        mine = slice(row, row + 1)
        writes = step.state_writes[step.state_writes[:, 0] == row].copy()
        writes[:, 0] = 0
        yield replace(
            step,
            rows=step.rows[mine],
            num_computed=step.num_computed[mine],
            num_scheduled=step.num_scheduled[mine],
            samples=step.samples[mine],
            token_ids=_row(step.token_ids, row),
            drafts=_row(step.drafts, row),
            finished_rows=np.empty(0, np.int32),
            new_rows=(),
            zero=np.empty((0, 2), np.int32),
            copies=(),
            state_read=step.state_read[mine],
            state_writes=writes,
        )


def _row(lists: Csr, row: int) -> Csr:
    """One of ``lists``, alone."""
    values = lists[row]
    return Csr(np.array([0, len(values)], np.int64), values)
