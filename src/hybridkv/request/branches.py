"""Ids of the outputs of one request."""

from __future__ import annotations

from hybridkv.arguments import integer, text
from hybridkv.request.sampling import MOST_OUTPUTS


def branch_id(request_id: str, number: int) -> str:
    """The id of the ``number``-th branch of a request."""
    return f"{request_id}#{number}"


def output_ids(request_id: str, n: int) -> list[str]:
    """Ids of the ``n`` outputs of a request: its own, then those of its branches. ConfigError for other numbers."""
    text("request_id", request_id)
    integer("n", n, 1, MOST_OUTPUTS)
    return [request_id, *(branch_id(request_id, number) for number in range(1, n))]
