"""The placements: frozen values that answer at which token counts a request's state should be kept.

    stops(request, start, end)     those in start + 1 .. end, ascending
    next_stop(request, after)      the first of them behind ``after``

All but NoStates keep the positions that the caller marked as well. ``ends``: whether the running state of a request
that ends, or is preempted, becomes a checkpoint; that is the cache's affair and no stop. A placement knows nothing of
room: what it asks for the cache may decline.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from hybridkv.cache.policies import NEVER
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.units import MOST_COUNT

MOST_TOKENS: Final = MOST_COUNT
"""Between two stops of a grid; token counts are no larger anywhere."""


@runtime_checkable
class Placement(Protocol):
    """See the module."""

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        ...

    @property
    def keeps_states(self) -> bool:
        """Whether any state is kept."""
        ...

    @property
    def keeps_final_state(self) -> bool:
        """Whether the state at the end of a request becomes a checkpoint."""
        ...

    def checkpoints(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """Token counts in start + 1 .. end at which the state should be kept, ascending. O(stops)."""
        ...

    def next_checkpoint(self, request: Request, after: int) -> int:
        """The least stop greater than ``after``, NEVER where there is none. At most O(marks)."""
        ...

    def is_supersedable(self, request: Request, tokens: int) -> bool:
        """Whether the stop at ``tokens`` only serves who goes on from there, once."""
        ...


@dataclass(frozen=True, slots=True)
class NoStates:
    """No state is kept, marked positions neither."""

    name: str = "none"
    keeps_states: bool = False
    keeps_final_state: bool = False

    def checkpoints(self, request: Request, start: int, end: int) -> tuple[int, ...]:  # noqa: ARG002 - as asked
        """None."""
        return ()

    def next_checkpoint(self, request: Request, after: int) -> int:  # noqa: ARG002 - as asked
        """NEVER."""
        return NEVER

    def is_supersedable(self, request: Request, tokens: int) -> bool:  # noqa: ARG002 - as asked
        """Never: there are none."""
        return False


@dataclass(frozen=True, slots=True)
class AlignPlacement:
    """Where the reference layout (vLLM's align mode) keeps them: at ends of the blocks that it gives to states.

    tokens: of such a block, B. Not every multiple: the last one that a chunk reaches, the last one that serves the same
    prompt again (token P-1 must be run), and the last one before a branch point: where split_at_blocks ends chunks.
    ConfigError for tokens out of range.

        chunk   [ ... | B | B | B | rest ]        kept: the last multiple in it
    """

    tokens: int
    keeps_states: bool = True
    keeps_final_state: bool = False

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)

    @property
    def name(self) -> str:
        """``align:N``."""
        return f"align:{self.tokens}"

    def checkpoints(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """Those up to three, and marks. Between boundaries that cut a chunk in two it may answer more. O(marks)."""
        boundaries = (end, request.num_prompt_tokens - 1, request.branch_tokens)
        mine = {boundary // self.tokens * self.tokens for boundary in boundaries}
        return tuple(sorted({one for one in mine if start < one <= end}.union(_between(request.marks, start, end))))

    def next_checkpoint(self, request: Request, after: int) -> int:
        """The next multiple, or mark: whichever chunk reaches it has a stop."""
        return min((after // self.tokens + 1) * self.tokens, _next(request.marks, after))

    def is_supersedable(self, request: Request, tokens: int) -> bool:  # noqa: ARG002 - as asked
        """Never: a grid serves whoever comes by."""
        return False


@dataclass(frozen=True, slots=True)
class IntervalPlacement:
    """Every ``tokens`` tokens, in prompt and output; the cache keeps the state where the request ends besides.

    ConfigError for tokens out of range.
    """

    tokens: int
    keeps_states: bool = True
    keeps_final_state: bool = True

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)

    @property
    def name(self) -> str:
        """``interval:N``."""
        return f"interval:{self.tokens}"

    def checkpoints(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """Multiples, and marks."""
        return _merged(_multiples(self.tokens, start, end), _between(request.marks, start, end))

    def next_checkpoint(self, request: Request, after: int) -> int:
        """The next multiple, or mark."""
        return min((after // self.tokens + 1) * self.tokens, _next(request.marks, after))

    def is_supersedable(self, request: Request, tokens: int) -> bool:  # noqa: ARG002 - as asked
        """Never: a grid serves whoever comes by."""
        return False


@dataclass(frozen=True, slots=True)
class EndsPlacement:
    """Before the prompt's last token, and where others branched off (``branch_tokens``).

    Token P-1 must be run for its logits, so no later state serves the same prompt again. A branch point seen once
    leaves a state the next time through. The end of the output is no stop: the cache keeps the running state of a
    request that ends, or is preempted, without a copy (``ends``).
    """

    name: str = "ends"
    keeps_states: bool = True
    keeps_final_state: bool = True

    def checkpoints(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """Those two, and marks. O(marks)."""
        return _between(_own(request), start, end)

    def next_checkpoint(self, request: Request, after: int) -> int:
        """The next of them. O(marks)."""
        return _next(_own(request), after)

    def is_supersedable(self, request: Request, tokens: int) -> bool:
        """Before the prompt's last token, unless it is marked or others branched off there."""
        return tokens == request.num_prompt_tokens - 1 and tokens not in {request.branch_tokens, *request.marks}


def _check_tokens(tokens: int) -> None:
    if not 0 < tokens <= MOST_TOKENS:
        raise ConfigError(f"a placement needs a number of tokens, 1 .. {MOST_TOKENS}, got {tokens}")


def _own(request: Request) -> tuple[int, ...]:
    return tuple(sorted({request.num_prompt_tokens - 1, request.branch_tokens, *request.marks} - {0}))


def _multiples(tokens: int, start: int, end: int) -> range:
    return range((start // tokens + 1) * tokens, end + 1, tokens)


def _between(marks: tuple[int, ...], start: int, end: int) -> tuple[int, ...]:
    return marks[bisect_right(marks, start) : bisect_right(marks, end)]


def _next(marks: tuple[int, ...], after: int) -> int:
    place = bisect_right(marks, after)
    return marks[place] if place < len(marks) else NEVER


def _merged(grid: range, marks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*grid, *marks})) if marks else tuple(grid)
