"""What differs."""

from dataclasses import dataclass
from typing import Any

from calls import Call, Known


@dataclass(frozen=True)
class Difference:
    """what: hit, refusal, new, table, keys, free, order, usage, reset or error. request: what it was about."""

    what: str
    call: Call
    theirs: Any
    ours: Any
    request: Known | None = None
    name: str = ""
