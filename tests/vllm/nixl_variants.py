"""NixlConnector with deliberate faults, and one that loads within the step: both must show in ``pd_duel.py``.

kv_connector_extra_config   fault: one of FAULTS
                            within: loads belong to the step that resumes after them
                            failing: every so many-th read fails
                            slow: steps for which a read is not polled, so that requests wait for it

``Onlooker`` loads and stores nothing. It is a second connector for MultiConnector, in both layouts.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from hybridkv.vllm.nixl import NaturalNixlConnector

FAULTS: Final = ("a state one token late", "a state that did not come", "blocks one column off")


class Variant(NixlConnector):  # type: ignore[misc] # vLLM is not typed here
    """Before a connector. Both ends: vLLM makes one for the scheduler and one for each worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(*args, **kwargs)
        asked = self._kv_transfer_config.get_from_extra_config
        self._fault, self._within = asked("fault", None), asked("within", None)
        self._states = [hasattr(group.kv_cache_spec, "shapes") for group in self._kv_cache_config.kv_cache_groups]
        if self.connector_worker is not None:
            self._paired = self.connector_worker._apply_prefix_caching
            self.connector_worker._apply_prefix_caching = self._pair
            if failing := asked("failing", 0):
                fail_reads(self.connector_worker.nixl_wrapper, failing)
            if slow := asked("slow", 0):
                poll_later(self.connector_worker, slow)

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401 - vLLM's
        """A prefill engine leaves the last token of a model with states out, but for the first fault."""
        if self._fault != FAULTS[0]:
            super().on_new_request(request)

    def _pair(self, **given: Any) -> tuple[Any, Any]:  # noqa: ANN401 - vLLM's
        """The blocks to write and those to read, group by group."""
        mine, theirs = (list(ids) for ids in self._paired(**given))
        for group, state in enumerate(self._states):
            if state and self._fault == FAULTS[1]:
                mine[group], theirs[group] = [], []
            if not state and self._fault == FAULTS[2]:
                theirs[group] = [*theirs[group][1:], *theirs[group][:1]]
        return mine, theirs

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401 - vLLM's
        found, beside = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not self._within or not found:
            return found, beside
        return min(found, request.num_tokens - 1 - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401 - vLLM's
        """NixlConnector loads the blocks without a hash. Within the step, all blocks have theirs already."""
        if self._within:
            unhashed = ([KVCacheBlock(one.block_id, is_null=one.is_null) for one in group] for group in blocks.blocks)
            blocks = KVCacheBlocks(tuple(unhashed))
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        super().start_load_kv(forward_context, **kwargs)
        asked = self._get_connector_metadata().reqs_to_recv if self._within else {}
        due = {name for name, one in asked.items() if any(one.local_block_ids)}  # others have all blocks
        while due:
            self.connector_worker.start_load_kv(NixlConnectorMetadata())
            due -= self.connector_worker.get_transfer_results().finished_recving


def fail_reads(agent: Any, every: int) -> None:  # noqa: ANN401 - NIXL's
    """Let ``agent`` report the failure of every so many-th transfer, whatever became of it."""
    begin, state, numbers, failing = agent.transfer, agent.check_xfer_state, count(1), set[Any]()

    def transfer(handle: Any, *args: Any) -> Any:  # noqa: ANN401 - as above
        (failing.discard if next(numbers) % every else failing.add)(handle)
        return begin(handle, *args)

    agent.transfer = transfer
    agent.check_xfer_state = lambda handle: "ERR" if handle in failing else state(handle)


def poll_later(worker: Any, steps: int) -> None:  # noqa: ANN401 - vLLM's
    """Let ``worker`` poll the transfers of a request only after this many steps."""
    pop, seen = worker._pop_done_transfers, dict[str, int]()

    def popped(transfers: dict[str, list[int]]) -> Any:  # noqa: ANN401 - vLLM's
        for name in transfers:
            seen[name] = seen.get(name, 0) + 1
        due = {name: handles for name, handles in transfers.items() if seen[name] > steps}
        asked = list(due)
        found = pop(due)
        for name in asked:
            if name in due:
                transfers[name] = due[name]
            else:
                del transfers[name], seen[name]
        return found

    worker._pop_done_transfers = popped


class Onlooker(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # vLLM is not typed here
    """A connector that loads nothing. Its transfer parameters are the number of blocks of a finished request."""

    supports_natural_layout = True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ANN401 - vLLM's
        """Nothing is stored here."""
        del request, num_computed_tokens
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401 - vLLM's
        """The worker needs nothing."""
        del scheduler_output
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ANN401 - vLLM's
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, int]]:
        """The blocks of all groups, which may be freed."""
        del request
        return False, {"seen_blocks": sum(map(len, block_ids))}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, int]]:  # noqa: ANN401 - vLLM's
        """The same, of the only group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def nothing(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        """Do nothing."""

    update_state_after_alloc = start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = nothing


class VariantNixlConnector(Variant):
    """Of vLLM's connector."""


class VariantNaturalNixlConnector(Variant, NaturalNixlConnector):
    """Of ours."""
