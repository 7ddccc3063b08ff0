"""Check at load whether a recurrent mixer can resume at a state and run several tokens.

A mixer may accept a state and silently start from zero. So one mixer of every class runs on noise, in float32:

    prompt     the rest of a prompt from the state at a cut; compared with one call over all tokens
    disturbed  from a state that no tokens lead to, large enough to change any output; compared with token by token

The first of native, superposition and token by token that agrees in both is used.

Drafts run in one call if that gives the same states as token by token, after each of a few tokens of two rows:

    drafts     from the state at the cut, and from the disturbed state

Rows decode together if each gets the same as alone, from the state at the cut and from the disturbed state.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import torch

from hybridkv.errors import UnsupportedModelError
from hybridkv.runner.states.passing import States
from hybridkv.runner.states.recurrent import (
    SCAN,
    Continuation,
    MixerState,
    Recurrence,
    RecurrentMixer,
    functions_of,
    recurrence_of,
    run_decode,
    run_every,
    run_segment,
)

logger = logging.getLogger(__name__)

TOLERANCE: Final = 2e-4
"""Largest difference in float32, as a share of the largest value."""

_TOKENS: Final = 72
"""More than a chunk of the delta rule's kernels (64)."""
_CUT: Final = 29
"""Tokens before the cut, which is inside a chunk; chosen by hand."""
_DRAFTS: Final = 4
"""Drafts of each of the two rows; chosen by hand."""

Key = TypeVar("Key")
Answer = TypeVar("Answer")
Result = tuple[torch.Tensor, States]


def of_each_kind(mixers: Mapping[Key, RecurrentMixer], ask: Callable[[RecurrentMixer], Answer]) -> dict[Key, Answer]:
    """Return the answer of ``ask`` for each mixer; it is called once for every class and state layout."""
    found: dict[tuple[type, tuple[MixerState, ...]], Answer] = {}
    for mixer in mixers.values():
        kind = type(mixer.module), mixer.parts
        if kind not in found:
            found[kind] = ask(mixer)
    return {key: found[type(mixer.module), mixer.parts] for key, mixer in mixers.items()}


def continuation(mixer: RecurrentMixer) -> Continuation:
    """Find how ``mixer`` continues: the first of native, superposition and token by token that agrees in both.

    NemotronH and Zamba2 bound the step size in prompts only, so token by token differs from a prompt in one call even
    in plain transformers. Native then needs to agree with the prompt alone, and the log says so. It runs about 100
    forwards of a copy of the mixer in float32. Raises UnsupportedModelError, with the differences, if nothing agrees.
    """
    name, check = type(mixer.module).__name__, _Check(mixer)
    scans = SCAN in functions_of(mixer.module)
    prompt = {how: check.prompt(how) for how in Continuation if how is not Continuation.SUPERPOSITION or scans}
    for how, difference in prompt.items():
        if difference > TOLERANCE:
            continue
        if check.disturbed(how) <= TOLERANCE:
            return how
        if how is Continuation.NATIVE and (apart := prompt[Continuation.TOKEN]) > TOLERANCE:
            logger.warning(
                "%s: a prompt in one call and token by token differ by %.1e of the largest value even in plain "
                "transformers, so that the output of a request depends on where its prompt ends",
                name,
                apart,
            )
            return how
    measured = ", ".join(f"{how} {difference:.1e}" for how, difference in prompt.items())
    raise UnsupportedModelError(
        f"{name} does not continue from its own state: over several tokens it differs from one call over all of them "
        f"({measured} of the largest value, more than {TOLERANCE:.0e}); run this model with plain transformers"
    )


def recurrence(mixer: RecurrentMixer) -> Recurrence | None:
    """Find how ``mixer`` runs drafts in one call; None if that fails or differs from token by token. The log says so.

    It runs some ten forwards of up to five tokens, on a copy of the mixer in float32.
    """
    name, check, apart = type(mixer.module).__name__, _Check(mixer), float("inf")
    try:
        found = recurrence_of(check.mixer)
        if found is not None:
            apart = check.drafts(found)
    except Exception as error:  # noqa: BLE001  # a kernel may raise any error; drafts then run token by token
        logger.info("%s: several tokens with the state after each failed: %r", name, error)
    if apart > TOLERANCE:
        logger.info("%s verifies drafts token by token (%.1e of the largest value)", name, apart)
        return None
    return found


def decodes_together(mixer: RecurrentMixer) -> bool:
    """Return whether ``mixer`` decodes several rows in one call as it decodes each alone.

    RWKV of transformers mixes the rows. It runs some six forwards of one token, on a copy of the mixer in float32.
    """
    check = _Check(mixer)
    try:
        apart = check.rows()
    except Exception as error:  # noqa: BLE001  # a kernel may raise any error; each row then runs alone
        logger.info("%s: several rows in one call failed: %r", type(mixer.module).__name__, error)
        return False
    return apart <= TOLERANCE


def depends_on_calls(mixers: Sequence[RecurrentMixer]) -> bool:
    """Return whether one of ``mixers`` computes a prompt differently in one call and token by token.

    The mixers run without any cache of this library.
    """

    def depends(mixer: RecurrentMixer) -> bool:
        check = _Check(mixer)
        return check.prompt(Continuation.NATIVE) <= TOLERANCE < check.prompt(Continuation.TOKEN)

    return any(of_each_kind(dict(enumerate(mixers)), depends).values())


class _Check:
    """The inputs and states of one mixer's check. ``mixer`` is a copy in float32."""

    def __init__(self, mixer: RecurrentMixer) -> None:
        device = next(mixer.module.parameters()).device
        parts = tuple(replace(part, dtype=torch.float32) for part in mixer.parts)
        self.mixer = replace(mixer, module=copy.deepcopy(mixer.module).float().eval(), parts=parts)
        generator = torch.Generator().manual_seed(0)
        hidden, at = torch.randn(1, _TOKENS, mixer.width, generator=generator).to(device), slice(_CUT, None)
        positions = torch.arange(_TOKENS, device=device)[None]
        self._rest, self._positions = hidden[:, at], positions[:, at]
        with torch.inference_mode():
            out, end = run_segment(self.mixer, hidden, None, Continuation.NATIVE, positions)
            self._whole = out[:, at], end
            begin = slice(_CUT)
            _, self._cut = run_segment(self.mixer, hidden[:, begin], None, Continuation.NATIVE, positions[:, begin])
        self._noise = tuple(
            state + state.square().mean().sqrt().clamp_min(1) * torch.randn(state.shape, generator=generator).to(device)
            for state in self._cut
        )

    def prompt(self, how: Continuation) -> float:
        """Return the largest difference between a prompt in two calls and in one."""
        return _difference(self._run(self._cut, how), self._whole)

    def disturbed(self, how: Continuation) -> float:
        """Return the largest difference from token by token, from the disturbed state."""
        return _difference(self._run(self._noise, how), self._run(self._noise, Continuation.TOKEN))

    def drafts(self, found: Recurrence) -> float:
        """Return the largest difference of a call over drafts from token by token, in the output and in every state."""
        hidden = torch.cat((self._rest[:, : _DRAFTS + 1], self._rest[:, -_DRAFTS - 1 :]))
        states, apart = tuple(torch.cat(pair) for pair in zip(self._cut, self._noise, strict=True)), 0.0
        with torch.inference_mode():
            out, after = run_every(self.mixer, hidden, states, found)
            for at, ours in enumerate(after):
                before = tuple(state.clone() for state in states)
                wanted, states = run_decode(self.mixer, hidden[:, at : at + 1], before)
                apart = max(apart, _difference((out[:, at : at + 1], ours), (wanted, states)))
        return apart

    def rows(self) -> float:
        """Return the largest difference of two rows in one call from each alone, in the output and in the states."""
        hidden = torch.cat((self._rest[:, :1], self._rest[:, -1:]))
        at = torch.cat((self._positions[:, :1], self._positions[:, -1:]))
        states = tuple(torch.cat(pair) for pair in zip(self._cut, self._noise, strict=True))
        with torch.inference_mode():
            alone = [
                run_segment(self.mixer, hidden[:1], self._cut, Continuation.NATIVE, at[:1]),
                run_segment(self.mixer, hidden[1:], self._noise, Continuation.NATIVE, at[1:]),
            ]
            out, after = run_decode(self.mixer, hidden, states, at)
        each = [(out[row : row + 1], tuple(state[row : row + 1] for state in after)) for row in range(len(alone))]
        return max(map(_difference, each, alone))

    def _run(self, states: States, how: Continuation) -> Result:
        with torch.inference_mode():
            return run_segment(self.mixer, self._rest, states, how, self._positions)


def difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference of two values, as a share of the largest of ``reference``; NaN gives infinity."""
    largest = reference.abs().max().clamp_min(torch.finfo(reference.dtype).tiny)
    share = float((ours - reference).abs().max() / largest)
    return float("inf") if math.isnan(share) else share


def _difference(ours: Result, reference: Result) -> float:
    """Return the largest ``difference`` of outputs and states."""
    return max(map(difference, (ours[0], *ours[1]), (reference[0], *reference[1])))
