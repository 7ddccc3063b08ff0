"""A request: its identity, tokens, block hashes and counts, and how its tokens are drawn."""

from hybridkv.request.request import NO_HINTS, Hints, Request, cut, extended, hash_error
from hybridkv.request.sampling import (
    MOST_BIAS,
    MOST_OUTPUTS,
    LogitsProcessor,
    SamplingParams,
    branch_id,
    output_ids,
    takes_prompt,
)
from hybridkv.request.structured import StructuredKind, StructuredOutput
from hybridkv.request.tokens import MAX_TOKEN_ID, Hasher, Lender, Lent, checked_hasher, checked_marks, token_array

__all__ = [
    "MAX_TOKEN_ID",
    "MOST_BIAS",
    "MOST_OUTPUTS",
    "NO_HINTS",
    "Hasher",
    "Hints",
    "Lender",
    "Lent",
    "LogitsProcessor",
    "Request",
    "SamplingParams",
    "StructuredKind",
    "StructuredOutput",
    "branch_id",
    "checked_hasher",
    "checked_marks",
    "cut",
    "extended",
    "hash_error",
    "output_ids",
    "takes_prompt",
    "token_array",
]
