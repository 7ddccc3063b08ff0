"""The placements: frozen values that say at which token counts a request's recurrent state is kept.

    checkpoints(request, start, end)     positions in start + 1 .. end, ascending
    next_checkpoint(request, after)      the first position after ``after``

All placements except NoStates also keep the positions that the caller marked. ``keeps_final_state`` says whether the
running state of a request that ends, or is preempted, becomes a checkpoint; the cache does this without a position. A
placement does not know how much room there is: the cache may decline a position.
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
"""Most tokens between two multiples; no token count is larger."""


@runtime_checkable
class Placement(Protocol):
    """Says at which token counts states are kept. To add one, see CONTRIBUTING.md."""

    @property
    def name(self) -> str:
        """Its name on the command line."""
        ...

    @property
    def keeps_states(self) -> bool:
        """Whether any state is kept."""
        ...

    @property
    def keeps_final_state(self) -> bool:
        """Whether the state at the end of a request becomes a checkpoint."""
        ...

    @property
    def alignment(self) -> int:
        """Tokens of which every resume point is a multiple."""
        ...

    def checkpoints(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """Return the token counts at which the state should be kept, ascending. O(positions).

        Args:
            request: The request.
            start: Tokens computed before.
            end: Tokens computed after; the positions lie in start + 1 .. end.
        """
        ...

    def next_checkpoint(self, request: Request, after: int) -> int:
        """Return the least position after ``after``; NEVER without one. At most O(marks).

        Args:
            request: The request.
            after: A token count.
        """
        ...

    def is_supersedable(self, request: Request, tokens: int) -> bool:
        """Return whether a position serves only the request that resumes there, once.

        Args:
            request: The request.
            tokens: The position.
        """
        ...


@dataclass(frozen=True, slots=True)
class NoStates:
    """Keeps no state, not even at marked positions."""

    name: str = "none"
    keeps_states: bool = False
    keeps_final_state: bool = False
    alignment: int = 1

    def checkpoints(self, request: Request, start: int, end: int) -> tuple[int, ...]:  # noqa: ARG002 - a method of Placement
        """Return no position."""
        return ()

    def next_checkpoint(self, request: Request, after: int) -> int:  # noqa: ARG002 - a method of Placement
        """Return NEVER."""
        return NEVER

    def is_supersedable(self, request: Request, tokens: int) -> bool:  # noqa: ARG002 - a method of Placement
        """Return False: there are no positions."""
        return False


@dataclass(frozen=True, slots=True)
class AlignPlacement:
    """Keeps states where the reference layout (vLLM's ``align`` mode) does: at ends of its state blocks.

        chunk   [ ... | B | B | B | rest ]        kept: the last multiple of B in it

    Kept are the last multiple that a chunk reaches, the last one that serves the same prompt again (token P-1 must be
    run), and the last one before a branch point. ``split_at_blocks`` ends chunks there. Raises ConfigError for tokens
    out of range.

    Attributes:
        tokens: Tokens of a state block, B.
    """

    tokens: int
    keeps_states: bool = True
    keeps_final_state: bool = False
    alignment: int = 1

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)

    @property
    def name(self) -> str:
        """``align:N``."""
        return f"align:{self.tokens}"

    def checkpoints(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """Return up to three multiples, and marks.

        For a part of a chunk there may be more than for the chunk. O(marks).
        """
        ends = (end, request.num_prompt_tokens - 1, request.branch_tokens)
        mine = {one // self.tokens * self.tokens for one in ends}
        return tuple(sorted({one for one in mine if start < one <= end}.union(_between(request.marks, start, end))))

    def next_checkpoint(self, request: Request, after: int) -> int:
        """Return the next multiple, or mark: every chunk that reaches it has a position."""
        return min((after // self.tokens + 1) * self.tokens, _next(request.marks, after))

    def is_supersedable(self, request: Request, tokens: int) -> bool:  # noqa: ARG002 - a method of Placement
        """Return False: other requests may resume at multiples."""
        return False


@dataclass(frozen=True, slots=True)
class BoundaryPlacement:
    """Says where resume points of the reference layout are: at multiples of B, where its hits may end.

        prompt   [ chunk ..... : rest | chunk ... : rest : last token ]   output [ .... : .... : rest ]
                               ^ at_chunk_ends    ^ the same prompt again               ^      ^ the end

    Its states are columns of the rows, saved where chunks end; nothing is copied. So these positions only say which
    prefixes are valued. They are the last multiples before the prompt's last token, branch points and marks. With
    states, each chunk's last multiple is one too, also in the output, whose earlier states the row drops. A position
    without a saved state is ignored. With full attention alone, every block of a kept prefix can end a hit. The end of
    the prompt is still a position. If outputs are not sent back, no request resumes at the end of another, so the
    ranking would never see a hit (docs/design/0033).

    Attributes:
        tokens: B, the tokens of which every hit is a multiple.
        at_chunk_ends: Whether states are saved, so that hits can end where chunks ended, and nowhere between.
    """

    tokens: int
    at_chunk_ends: bool
    name: str = "boundaries"
    keeps_states: bool = True
    keeps_final_state: bool = True

    def checkpoints(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """Return these positions. O(marks)."""
        own = _own(request)
        asked = (*own, end) if self.at_chunk_ends else own
        last = end if self.at_chunk_ends else min(end, request.num_prompt_tokens)
        return tuple(sorted({one for one in map(self._boundary, asked) if start < one <= last}))

    def next_checkpoint(self, request: Request, after: int) -> int:
        """Return the next multiple with states, else the next position in the prompt. O(marks)."""
        if self.at_chunk_ends:
            return (after // self.tokens + 1) * self.tokens
        own, prompt = map(self._boundary, _own(request)), request.num_prompt_tokens
        return min((one for one in own if after < one <= prompt), default=NEVER)

    @property
    def alignment(self) -> int:
        """B."""
        return self.tokens

    def _boundary(self, tokens: int) -> int:
        return tokens // self.tokens * self.tokens

    def is_supersedable(self, request: Request, tokens: int) -> bool:  # noqa: ARG002 - a method of Placement
        """Return False: the ranking learns which resume points are passed."""
        return False


@dataclass(frozen=True, slots=True)
class IntervalPlacement:
    """Keeps states every ``tokens`` tokens, in prompt and output, and at the end of the request.

    Raises ConfigError for tokens out of range.
    """

    tokens: int
    keeps_states: bool = True
    keeps_final_state: bool = True
    alignment: int = 1

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)

    @property
    def name(self) -> str:
        """``interval:N``."""
        return f"interval:{self.tokens}"

    def checkpoints(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """Return multiples and marks."""
        return _merged(_multiples(self.tokens, start, end), _between(request.marks, start, end))

    def next_checkpoint(self, request: Request, after: int) -> int:
        """Return the next multiple, or mark."""
        return min((after // self.tokens + 1) * self.tokens, _next(request.marks, after))

    def is_supersedable(self, request: Request, tokens: int) -> bool:  # noqa: ARG002 - a method of Placement
        """Return False: other requests may resume at multiples."""
        return False


@dataclass(frozen=True, slots=True)
class EndsPlacement:
    """Keeps states at prompt ends, output ends and branch points (``branch_tokens``).

    Token P-1 must be run for its logits, so a later state cannot serve the same prompt again. A branch point that was
    seen once gets a state the next time. The end of the output is no position: the cache keeps the running state of a
    request that ends, or is preempted, without a copy (``keeps_final_state``).
    """

    name: str = "ends"
    keeps_states: bool = True
    keeps_final_state: bool = True
    alignment: int = 1

    def checkpoints(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """Return these two positions, and marks. O(marks)."""
        return _between(_own(request), start, end)

    def next_checkpoint(self, request: Request, after: int) -> int:
        """Return the next of them. O(marks)."""
        return _next(_own(request), after)

    def is_supersedable(self, request: Request, tokens: int) -> bool:
        """Return whether it is before the prompt's last token, neither marked nor a branch point."""
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
