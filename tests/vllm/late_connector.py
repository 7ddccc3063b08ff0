"""A connector whose loads come steps later, beside the forwards, and some not at all: what ExampleConnector stored.

scheduler   a request is admitted for what is stored of it, and waits; its block ids go to the worker
worker      DELAY steps on the blocks are written; of every FAILS-th load the last block is not, and is named
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import safetensors.torch
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata

DELAY, FAILS = 3, 4


@dataclass
class Late(ExampleConnectorMetadata):  # type: ignore[misc] # vLLM is not typed here
    """loads: (request, its tokens, block ids) of this step's admissions."""

    loads: list[tuple[str, list[int], list[int]]] = field(default_factory=list)


@dataclass
class _Load:
    tokens: list[int]
    blocks: list[int]
    number: int
    waits: int = DELAY


class LateConnector(ExampleConnector):  # type: ignore[misc] # vLLM is not typed here
    """Both ends: vLLM makes one for the scheduler and one for the worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(*args, **kwargs)
        self._layers = args[0].compilation_config.static_forward_context
        self._admitted: list[tuple[str, list[int], list[int]]] = []
        self._loads: dict[str, _Load] = {}
        self._failed: set[int] = set()
        self._numbers = count(1)

    # -- the scheduler's

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ANN401 - vLLM's
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)[0] or 0
        return max(found, 0), found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401 - vLLM's
        if num_external_tokens > 0:
            (ids,) = blocks.get_block_ids()
            self._admitted.append((request.request_id, list(request.prompt_token_ids), list(ids)))

    def build_connector_meta(self, scheduler_output: Any) -> Late:  # noqa: ANN401 - vLLM's
        stores = super().build_connector_meta(scheduler_output)
        late, self._admitted = Late(stores.requests, self._admitted), []
        return late

    # -- the worker's

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        del forward_context, kwargs
        for name, tokens, blocks in self._get_connector_metadata().loads:
            self._loads[name] = _Load(tokens, blocks, next(self._numbers))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        del finished_req_ids
        done = set()
        for name, load in self._loads.items():
            load.waits -= 1
            if load.waits < 0:
                self._write(load)
                done.add(name)
        for name in done:
            del self._loads[name]
        return None, done

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def _write(self, load: _Load) -> None:
        size = self._block_size
        whole = (len(load.tokens) - 2) // size  # as many as get_num_new_matched_tokens finds
        written = whole - 1 if load.number % FAILS == 0 else whole
        if written < whole:
            self._failed.add(load.blocks[whole - 1])
        tokens = torch.tensor(load.tokens)[: whole * size]
        for name, layer in self._layers.items():
            if getattr(layer, "kv_cache", None) is None:
                continue
            kept = safetensors.torch.load_file(self._generate_filename_debug(name, tokens, []))["kv_cache"]
            for place in range(written):
                part = kept[place * size : (place + 1) * size]
                layer.kv_cache[load.blocks[place]] = part.transpose(0, 1)
