"""Which requests vLLM's loop over outputs may skip, and what ends them."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.vllm.requests import Ends, ends_of

LONGEST = 100


def request_of(sampling: Mapping[str, Any] | None = None, **more: object) -> SimpleNamespace:
    """Return the fields of vLLM's request that decide, for a prompt of 10 tokens and an output of 20."""
    fields: dict[str, Any] = {"pooling_params": None, "structured_output_request": None, "resumable": False}
    asked = {"num_logprobs": None, "repetition_detection": None, "eos_token_id": None, "stop_token_ids": None}
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**(asked | dict(sampling or {}))),
        num_prompt_tokens=10,
        max_tokens=20,
        **(fields | {"mm_features": []} | more),
    )


def test_request_of_tokens_alone_ends_at_its_length_or_a_stop_token() -> None:
    assert ends_of(request_of(), LONGEST) == Ends(30, frozenset())
    assert ends_of(request_of(), 25) == Ends(25, frozenset())
    stops = ends_of(request_of({"eos_token_id": 2, "stop_token_ids": [7, 9]}), LONGEST)
    assert stops == Ends(30, frozenset({2, 7, 9}))


@pytest.mark.parametrize("sampling", [{"num_logprobs": 0}, {"repetition_detection": object()}])
def test_request_with_more_than_tokens_is_left_to_vllm(sampling: dict[str, Any]) -> None:
    assert ends_of(request_of(sampling), LONGEST) is None


@pytest.mark.parametrize(
    "more",
    [
        {"pooling_params": object()},
        {"structured_output_request": object()},
        {"mm_features": [object()]},
        {"resumable": True},
    ],
)
def test_request_that_vllm_checks_in_each_step_is_left_to_vllm(more: Mapping[str, Any]) -> None:
    assert ends_of(request_of(**more), LONGEST) is None


def test_request_without_sampling_is_left_to_vllm() -> None:
    asked = request_of()
    asked.sampling_params = None
    assert ends_of(asked, LONGEST) is None
