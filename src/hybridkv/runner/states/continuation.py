"""Self-check at load: how a recurrent mixer goes on from a state over several tokens.

A mixer may take a state and silently start from zero. So one mixer of every class runs on noise, in float32:

    prompt     from the state at a cut, in the way that is checked, over the rest; against one call over all tokens
    disturbed  from a state that no token led to, large enough to matter to any output; against token by token

The first of native, superposition and token by token that agrees in both is taken.

Drafts run in one call where that leaves, behind each of a few tokens of two rows, the states that token by token does:

    drafts     from the cut and from the disturbed state
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import torch

from hybridkv.errors import UnsupportedModelError
from hybridkv.runner.states.every_state import Recurrence, recurrence_of, run_every
from hybridkv.runner.states.recurrent import Continuation, MixerState, RecurrentMixer, States, run_decode, run_segment
from hybridkv.runner.states.superposition import has_scan

logger = logging.getLogger(__name__)

TOLERANCE: Final = 2e-4
"""Largest difference in float32, as a share of the largest value."""

_TOKENS: Final = 72
"""More than a chunk of the delta rule's kernels (64)."""
_CUT: Final = 29
_DRAFTS: Final = 4

Answer = TypeVar("Answer")
Result = tuple[torch.Tensor, States]


def continuations(mixers: Sequence[RecurrentMixer]) -> tuple[Continuation, ...]:
    """How each of ``mixers`` continues; one of every class and state layout is checked, the others are alike.

    Raises UnsupportedModelError as ``continuation`` does.
    """
    return _of_each_kind(mixers, continuation)


def continuation(mixer: RecurrentMixer) -> Continuation:
    """How ``mixer`` continues: the first of native, superposition and token by token that agrees in both comparisons.

    Where token by token differs from a prompt in one call in plain transformers too (NemotronH and Zamba2 bound the
    step size in prompts only), native needs to agree with the prompt alone, and the log tells. Works on a copy of the
    mixer in float32; about 100 forwards. Raises UnsupportedModelError, with the differences, where nothing agrees.
    """
    name = type(mixer.module).__name__
    check = _Check(mixer)
    prompt = {how: check.prompt(how) for how in _ways(mixer)}
    for how, difference in prompt.items():
        if difference > TOLERANCE:
            continue
        if check.disturbed(how) <= TOLERANCE:
            return how
        if how is Continuation.NATIVE and (apart := prompt[Continuation.TOKEN]) > TOLERANCE:
            logger.warning(
                "%s: a prompt in one call and token by token differ by %.1e of the largest value, without any cache of "
                "ours: what a request decodes depends on where its prompt ends",
                name,
                apart,
            )
            return how
    measured = ", ".join(f"{how} {difference:.1e}" for how, difference in prompt.items())
    raise UnsupportedModelError(
        f"{name} does not continue from its own state: over several tokens it differs from one call over all of them "
        f"({measured} of the largest value): not supported"
    )


def recurrences(mixers: Sequence[RecurrentMixer]) -> tuple[Recurrence | None, ...]:
    """How each of ``mixers`` runs drafts in one call, None where token by token; checked as ``continuations`` are."""
    return _of_each_kind(mixers, recurrence)


def recurrence(mixer: RecurrentMixer) -> Recurrence | None:
    """How ``mixer`` runs drafts in one call; None where it does not, or not as token by token, and the log tells.

    Works on a copy of the mixer in float32; some ten forwards of up to five tokens.
    """
    name, check = type(mixer.module).__name__, _Check(mixer)
    try:
        found = check.recurrence()
        apart = float("inf") if found is None else check.drafts(found)
    except Exception as error:  # noqa: BLE001  # of whatever kernels there are: what cannot do this does it token by token
        found, apart = None, float("inf")
        logger.info("%s: several tokens with the state behind each failed: %r", name, error)
    if found is None or apart > TOLERANCE:
        logger.info("%s verifies drafts token by token (%.1e of the largest value)", name, apart)
        return None
    return found


def _of_each_kind(mixers: Sequence[RecurrentMixer], ask: Callable[[RecurrentMixer], Answer]) -> tuple[Answer, ...]:
    """What is found of each of ``mixers``, asked once for every class and state layout."""
    found: dict[tuple[type, tuple[MixerState, ...]], Answer] = {}
    for mixer in mixers:
        key = type(mixer.module), mixer.parts
        if key not in found:
            found[key] = ask(mixer)
    return tuple(found[type(mixer.module), mixer.parts] for mixer in mixers)


def depends_on_calls(mixers: Sequence[RecurrentMixer]) -> bool:
    """Whether a prompt in one call and token by token differ for one of ``mixers``, without any cache of ours."""
    kinds = {(type(mixer.module), mixer.parts): mixer for mixer in mixers}
    checks = map(_Check, kinds.values())
    return any(one.prompt(Continuation.NATIVE) <= TOLERANCE < one.prompt(Continuation.TOKEN) for one in checks)


def _ways(mixer: RecurrentMixer) -> list[Continuation]:
    return [how for how in Continuation if how is not Continuation.SUPERPOSITION or has_scan(mixer.module)]


class _Check:
    """The inputs and states of one mixer's check."""

    def __init__(self, mixer: RecurrentMixer) -> None:
        device = next(mixer.module.parameters()).device
        parts = tuple(replace(part, dtype=torch.float32) for part in mixer.parts)
        self._mixer = replace(mixer, module=copy.deepcopy(mixer.module).float().eval(), parts=parts)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, _TOKENS, mixer.width, generator=generator).to(device)
        self._rest = hidden[:, _CUT:]
        with torch.inference_mode():
            out, end = run_segment(self._mixer, hidden, None, Continuation.NATIVE)
            self._whole = out[:, _CUT:], end
            _, self._cut = run_segment(self._mixer, hidden[:, :_CUT], None, Continuation.NATIVE)
        self._noise = tuple(
            state + state.square().mean().sqrt().clamp_min(1) * torch.randn(state.shape, generator=generator).to(device)
            for state in self._cut
        )

    def prompt(self, how: Continuation) -> float:
        """The largest difference between a prompt in two calls and in one."""
        return _difference(self._run(self._cut, how), self._whole)

    def disturbed(self, how: Continuation) -> float:
        """The largest difference from token by token, from the disturbed state."""
        return _difference(self._run(self._noise, how), self._run(self._noise, Continuation.TOKEN))

    def recurrence(self) -> Recurrence | None:
        """What would run token by token in a call over drafts."""
        return recurrence_of(self._mixer)

    def drafts(self, found: Recurrence) -> float:
        """The largest difference of a call over drafts from token by token, in what comes out and in every state."""
        hidden = torch.cat((self._rest[:, : _DRAFTS + 1], self._rest[:, -_DRAFTS - 1 :]))
        before = tuple(torch.cat(pair) for pair in zip(self._cut, self._noise, strict=True))
        with torch.inference_mode():
            out, behind = run_every(self._mixer, hidden, before, found)
            states, apart = before, 0.0
            for token, ours in enumerate(behind):
                wanted, states = run_decode(
                    self._mixer, hidden[:, token : token + 1], tuple(state.clone() for state in states)
                )
                apart = max(apart, _difference((out[:, token : token + 1], ours), (wanted, states)))
        return apart

    def _run(self, states: States, how: Continuation) -> Result:
        with torch.inference_mode():
            return run_segment(self._mixer, self._rest, states, how)


def difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference of two values, as a share of the largest of ``reference``; NaN is infinitely far off."""
    largest = reference.abs().max().clamp_min(torch.finfo(reference.dtype).tiny)
    share = float((ours - reference).abs().max() / largest)
    return float("inf") if math.isnan(share) else share


def _difference(ours: Result, reference: Result) -> float:
    """The largest ``difference`` of outputs and states."""
    return max(map(difference, (ours[0], *ours[1]), (reference[0], *reference[1])))
