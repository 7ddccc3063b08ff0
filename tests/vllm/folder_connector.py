"""Hands requests over from one engine to another by files in a folder that both see; states with their tokens.

router   the prompt but its last token, 1 token to answer  ->  first engine   {"handover": NAME, "send": true}
         the whole prompt                                  ->  second engine  {"handover": NAME}
first    a request ends: its blocks stay held while NAME/RANK-LAYER.safetensors are written; last NAME/whole.json
second   waits for whole.json; a request is admitted for its tokens and waits; blocks are written beside the steps
         what cannot be had is computed: a handover that never comes, is of other tokens, or whose files are gone

A recurrent layer hands over one state: the one behind exactly the tokens that whole.json says. There is no other
number of tokens that could be gone on from, so a load is whole or fails.

kv_connector_extra_config   folder; patience_s: how long whole.json is waited for; delay: steps that a load takes;
                            within: loads are of the step that goes on from them, and end the engine where they fail;
                            fault: one of FAULTS
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

WHOLE: Final = "whole.json"
COLUMNS: Final = "columns"
FAULTS: Final = ("a state one token late", "a state that did not come", "blocks one column off")
"""What a deliberately wrong connector does; the first needs a first engine that is asked for one token more."""


@dataclass(frozen=True)
class Send:
    """tables: block ids by group, of the first ``tokens`` tokens."""

    request: str
    name: str
    tokens: int
    tables: tuple[list[int], ...]


@dataclass
class Load:
    """hit: leading tokens that are here already. waits: steps."""

    request: str
    name: str
    tokens: int
    hit: int
    tables: tuple[list[int], ...]
    waits: int


@dataclass
class Told(KVConnectorMetadata):  # type: ignore[misc] # vLLM is not typed here
    """What the scheduler's end tells the workers' in a step."""

    sends: list[Send] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


@dataclass(frozen=True)
class Kept:
    """Of one layer. blocks: its tensors, blocks first. size: tokens of a block. state: whether it keeps one a row.

    rows: of its tensors, for each block: a kernel may cut them.
    """

    group: int
    rows: int
    blocks: tuple[torch.Tensor, ...]
    size: int
    state: bool

    def of(self, tensor: torch.Tensor, table: Sequence[int], columns: Sequence[int]) -> Iterator[torch.Tensor]:
        """Its blocks, one by one."""
        return (tensor[table[column] * self.rows : (table[column] + 1) * self.rows] for column in columns)

    def columns(self, tokens: int, hit: int = 0) -> range:
        """Of the table, those that hold what tokens behind ``tokens`` may read, but those of a hit."""
        end = -(-tokens // self.size)
        return range(end - 1 if self.state else hit // self.size, end)


class FolderConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # as above
    """Both ends: vLLM makes one for the scheduler and one for each worker."""

    supports_natural_layout = True

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(vllm_config, role, kv_cache_config)
        said = self._kv_transfer_config.get_from_extra_config
        self._folder = Path(said("folder", ""))
        self._patience_s, self._delay = float(said("patience_s", 5)), int(said("delay", 0))
        self._within, self._fault = bool(said("within", None)), said("fault", None)
        # the scheduler's
        self._told = Told()
        self._asked_at: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._refused: set[str] = set()
        self._sending: dict[str, Send] = {}
        self._prompts: dict[str, list[int]] = {}
        # a worker's
        self._layers: dict[str, Kept] = {}
        self._loads: list[Load] = []
        self._sent: set[str] = set()

    # -- the scheduler's: what is handed over

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401 - vLLM's
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ANN401 - vLLM's
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        asked = request.kv_transfer_params or {}
        name, tokens = asked.get("handover"), request.num_prompt_tokens
        for known in (self._asked_at, self._tokens):
            known.pop(request.request_id, None)
        self._refused.discard(request.request_id)
        if name is None:
            return False, None
        if not asked.get("send"):
            shutil.rmtree(self._folder / name, ignore_errors=True)
            return False, None
        if request.num_computed_tokens != tokens:  # aborted, or gone on from: its state is of other tokens
            return False, None
        if self._fault == FAULTS[0]:
            tokens -= 1
        send = Send(request.request_id, name, tokens, block_ids)
        self._told.sends.append(send)
        self._sending[send.request] = send
        self._prompts[send.request] = list(request.all_token_ids[:tokens])
        return True, {"handover": name, "tokens": tokens}

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401 - vLLM's
        for request in connector_output.finished_sending or ():
            send = self._sending.pop(request)
            whole = {"tokens": self._prompts.pop(request), "sizes": self._sizes()}
            folder = self._folder / send.name
            (folder / "new").write_text(json.dumps(whole), "utf-8")
            (folder / "new").rename(folder / WHOLE)
        self._refused.update(connector_output.failed_recving or ())

    # -- the scheduler's: what is taken

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401 - vLLM's
        asked, name = request.kv_transfer_params or {}, request.request_id
        if asked.get("handover") is None or asked.get("send") or name in self._refused:
            return 0, False
        try:
            whole = json.loads((self._folder / asked["handover"] / WHOLE).read_text("utf-8"))
        except FileNotFoundError:
            since = self._asked_at.setdefault(name, time.monotonic())
            if time.monotonic() - since < self._patience_s:
                return None, False
            self._refused.add(name)
            return 0, False
        tokens = whole["tokens"]
        fits = whole["sizes"] == self._sizes() and len(tokens) < request.num_tokens
        if not fits or tokens != list(request.all_token_ids[: len(tokens)]):
            return 0, False
        self._tokens[name] = len(tokens)
        more = max(len(tokens) - num_computed_tokens, 0)
        return more, more > 0 and not self._within

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401 - vLLM's
        if num_external_tokens:
            name, tokens = request.kv_transfer_params["handover"], self._tokens[request.request_id]
            hit, tables = tokens - num_external_tokens, blocks.get_block_ids()
            self._told.loads.append(Load(request.request_id, name, tokens, hit, tables, self._delay))

    def build_connector_meta(self, scheduler_output: Any) -> Told:  # noqa: ANN401 - vLLM's
        del scheduler_output
        told, self._told = self._told, Told()
        return told

    def _sizes(self) -> dict[str, int]:
        """Tokens of a block, by layer: engines of other sizes do not understand each other, of other groups they do."""
        groups = self._kv_cache_config.kv_cache_groups
        return {layer: group.kv_cache_spec.block_size for group in groups for layer in group.layer_names}

    # -- a worker's

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        blocks = getattr(self._kv_cache_config, "blocks_of_layer", {})  # in the natural layout each has its own number
        for number, group in enumerate(self._kv_cache_config.kv_cache_groups):
            state, size = hasattr(group.kv_cache_spec, "shapes"), group.kv_cache_spec.block_size
            for name in group.layer_names:
                given = kv_caches[name]
                tensors = (given,) if isinstance(given, torch.Tensor) else tuple(given)
                rows = tensors[0].shape[0] // blocks.get(name, self._kv_cache_config.num_blocks)
                self._layers[name] = Kept(number, rows, tensors, size, state)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        del forward_context, kwargs
        loads = self._get_connector_metadata().loads
        if not self._within:
            self._loads += loads
            return
        for load in loads:
            for layer, kept in self._layers.items():
                self._read(load, layer, kept)

    def wait_for_layer_load(self, layer_name: str) -> None:
        del layer_name

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        del layer_name, kv_layer, attn_metadata, kwargs

    def wait_for_save(self) -> None:
        for send in self._get_connector_metadata().sends:
            (self._folder / send.name).mkdir(parents=True, exist_ok=True)
            for layer, kept in self._layers.items():
                self._write(send, layer, kept)
            self._sent.add(send.request)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        del finished_req_ids
        results = KVConnectorTransferResults(self._sent)
        self._sent = set()
        due = [load for load in self._loads if load.waits <= 0]
        self._loads = [load for load in self._loads if load.waits > 0]
        for load in self._loads:
            load.waits -= 1
        for load in due:
            results.finished_recving.add(load.request)
            try:
                for layer, kept in self._layers.items():
                    self._read(load, layer, kept)
            except (OSError, KeyError):
                results.failed_recving.add(load.request)
        return results

    def _file(self, name: str, layer: str) -> Path:
        return self._folder / name / f"{get_tensor_model_parallel_rank()}-{layer}.safetensors"

    def _write(self, send: Send, layer: str, kept: Kept) -> None:
        """The blocks that there are: windows have given back those that are read no longer."""
        table = send.tables[kept.group]
        columns = [column for column in kept.columns(send.tokens) if table[column]]
        parts = {
            str(place): torch.stack([block.contiguous() for block in kept.of(tensor, table, columns)])
            for place, tensor in enumerate(kept.blocks)
        }
        safetensors.torch.save_file({COLUMNS: torch.tensor(columns), **parts}, self._file(send.name, layer))

    def _read(self, load: Load, layer: str, kept: Kept) -> None:
        """OSError for a file that is gone, KeyError for a block that is not in it."""
        parts = safetensors.torch.load_file(self._file(load.name, layer))
        places = {column: place for place, column in enumerate(parts[COLUMNS].tolist())}
        table = load.tables[kept.group]
        columns = [column for column in kept.columns(load.tokens, load.hit) if table[column]]
        found = [places[column] for column in columns]
        if kept.state and self._fault == FAULTS[1]:
            return
        if self._fault == FAULTS[2] and not kept.state:
            found = found[1:] + found[:1]
        for number, tensor in enumerate(kept.blocks):
            for place, block in zip(found, kept.of(tensor, table, columns), strict=True):
                block.copy_(parts[str(number)][place])
