"""What a request of vLLM's says to the cache: ``SamplingParams.extra_args``, over HTTP ``vllm_xargs``.

    {"hybridkv_marks": [1200], "hybridkv_tenant": "blue", "hybridkv_hints": {"within_s": 30}}

A scheduler may refuse no request: one that cannot be is named in the log and left out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from hybridkv.arguments import text
from hybridkv.request import Hints
from hybridkv.request.token_ids import checked_marks

MARKS: Final = "hybridkv_marks"
"""Token counts, as Request has them."""
TENANT: Final = "hybridkv_tenant"
"""As Request has it."""
HINTS: Final = "hybridkv_hints"
"""An object as Hints has it, or its JSON: over HTTP there are numbers, strings and lists alone."""

logger = logging.getLogger(__name__)


def wishes_of(request: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's Request
    """``marks``, ``tenant`` and ``hints`` for our Request, as far as ``request`` gives them, and they can be."""
    given: Mapping[str, Any] = getattr(request.sampling_params, "extra_args", None) or {}
    found: dict[str, Any] = {}
    for name, (field, read) in _READ.items() if given else ():
        asked = given.get(name)
        if asked is None:
            continue
        try:
            found[field] = read(asked)
        except (ValueError, RecursionError) as error:
            logger.warning("request %s has %s that cannot be, and goes without: %s", request.request_id, name, error)
    return found


def _hints(given: object) -> Hints:
    return Hints.parse(json.loads(given) if isinstance(given, str) else given)


_READ: Final[Mapping[str, tuple[str, Callable[[Any], object]]]] = {
    MARKS: ("marks", lambda given: checked_marks(given, MARKS)),
    TENANT: ("tenant", lambda given: text(TENANT, given)),
    HINTS: ("hints", _hints),
}
