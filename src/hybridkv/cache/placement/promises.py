"""What an end is made as: its kind, and what hints promise of it (docs/design/0026).

A promise is a class of its own for what learns, with a rate to begin with; what its like have done outweighs that.
"""

from __future__ import annotations

from typing import Final

from hybridkv.cache.placement.ends import BY_ALL, NEVER, NOTHING, SOMETIME, WITHIN, Kind
from hybridkv.request import NO_HINTS, Hints, Request

_BASE: Final = 4.0
_MOST: Final = 11
_KINDS: Final = len(Kind)


def kind_of(request: Request, tokens: int, *, ended: bool) -> Kind:
    """Of the end at ``tokens`` of ``request``. ended: it ends there."""
    if ended:
        return Kind.OUTPUT
    if tokens == request.branch_tokens or tokens in request.marks:
        return Kind.BRANCH
    return Kind.PROMPT if tokens == request.num_prompt_tokens - 1 else Kind.GRID


def promise_of(request: Request, tokens: int) -> int:
    """What is promised of the end at ``tokens`` of ``request``. O(marks)."""
    hints = request.hints
    if hints is NO_HINTS:
        return NOTHING
    if tokens <= hints.shared_tokens:
        return BY_ALL
    if tokens in request.marks:
        return of_session(hints)
    if tokens == request.branch_tokens:
        return NOTHING
    elsewhere = hints.goes_on and any(mark > hints.shared_tokens for mark in request.marks)
    return NEVER if elsewhere else of_session(hints)


def of_session(hints: Hints) -> int:
    """What is promised of where a session goes on."""
    if hints.over or hints.scratch:
        return NEVER
    if hints.within_s is not None:
        return WITHIN + _step_of(hints.within_s)
    return SOMETIME if hints.goes_on else NOTHING


def _step_of(seconds: float) -> int:
    step, bound = 0, _BASE
    while seconds > bound and step < _MOST:
        step, bound = step + 1, bound * _BASE
    return step


def is_of_session(promise: int) -> bool:
    """Whether it holds for one session, which keeps it by going on."""
    return promise not in {NOTHING, BY_ALL}


def in_words(promise: int) -> str:
    """What hints said, as they are named."""
    if promise >= WITHIN:
        return f"within {_BASE ** (1 + promise - WITHIN):.0f} s"
    return {NOTHING: "", NEVER: "never", BY_ALL: "by all", SOMETIME: "some time"}[promise]


# -- as part of a class


def class_kind(kind: Kind, promise: int) -> int:
    """One number for both."""
    return int(kind) + _KINDS * promise


def parts_of(number: int) -> tuple[Kind, int]:
    """Kind and promise of a ``class_kind``."""
    return Kind(number % _KINDS), number // _KINDS


def is_promised(number: int) -> bool:
    """Whether anything is promised of ends of ``class_kind`` ``number``."""
    return number >= _KINDS


def promised_rate(number: int, usual: float, age: float) -> float:
    """Hits a second to begin with, of ends of ``class_kind`` ``number`` at ``age`` seconds; of all together: usual."""
    promise = number // _KINDS
    if promise >= WITHIN:
        bound = _BASE ** (1 + promise - WITHIN)
        return max(usual, 2 / bound) if age < bound else usual
    return usual * {NOTHING: 1.0, NEVER: 1e-3, BY_ALL: 100.0, SOMETIME: 10.0}[promise]
