"""NixlConnector with deliberate faults, and one that loads within the step: both must show in ``pd_duel.py``.

kv_connector_extra_config   fault: one of FAULTS
                            within: loads belong to the step that resumes after them
"""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

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

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        super().start_load_kv(forward_context, **kwargs)
        due = set(self._get_connector_metadata().reqs_to_recv) if self._within else set()
        while due:
            self.connector_worker.start_load_kv(NixlConnectorMetadata())
            due -= self.connector_worker.get_transfer_results().finished_recving


class VariantNixlConnector(Variant):
    """Of vLLM's connector."""


class VariantNaturalNixlConnector(Variant, NaturalNixlConnector):
    """Of ours."""
