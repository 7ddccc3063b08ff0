"""A request: its identity, tokens, block hashes and counts, and how its tokens are drawn."""

from hybridkv.request.branches import branch_id, output_ids
from hybridkv.request.protocols import Columns, Hasher
from hybridkv.request.request import Request, hash_error
from hybridkv.request.sampling import MOST_OUTPUTS, SamplingParams
from hybridkv.request.token_ids import MAX_TOKEN_ID, checked_marks, token_array

__all__ = [
    "MAX_TOKEN_ID",
    "MOST_OUTPUTS",
    "Columns",
    "Hasher",
    "Request",
    "SamplingParams",
    "branch_id",
    "checked_marks",
    "hash_error",
    "output_ids",
    "token_array",
]
