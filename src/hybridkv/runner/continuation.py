"""Self-check at load: how a recurrent mixer goes on from a state over several tokens.

A mixer may take a state and silently start from zero. So every class of mixers is run, in float32 and on noise:

    whole      from the beginning over all tokens in one call
    parts      up to a cut, and from the state there, in the way that is checked, over the rest
    disturbed  the same, cut and uncut, from a state that no token led to, so large that it matters to any output

The first way that agrees is taken: native, superposition, token by token.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from hybridkv.errors import UnsupportedModelError
from hybridkv.runner.recurrent import Continuation, RecurrentMixer, StatePart, States, run_segment
from hybridkv.runner.superposition import has_scan

logger = logging.getLogger(__name__)

TOLERANCE: Final = 2e-4
"""Largest difference in float32, as a share of the largest value."""

_TOKENS: Final = 72
"""More than a chunk of the delta rule's kernels (64)."""
_CUT: Final = 29

Result = tuple[torch.Tensor, States]


def continuations(mixers: Sequence[RecurrentMixer]) -> tuple[Continuation, ...]:
    """How each of ``mixers`` continues; one of every class and state layout is checked, the others are alike.

    Raises UnsupportedModelError as ``continuation`` does.
    """
    found: dict[tuple[type, tuple[StatePart, ...]], Continuation] = {}
    for mixer in mixers:
        key = type(mixer.module), mixer.parts
        if key not in found:
            found[key] = continuation(mixer)
    return tuple(found[type(mixer.module), mixer.parts] for mixer in mixers)


def continuation(mixer: RecurrentMixer) -> Continuation:
    """The first of native, superposition and token by token that agrees with ``mixer`` over all tokens in one call.

    Works on a copy of the mixer in float32; about 200 forwards. A mixer whose prompts and decoding differ in
    themselves (NemotronH and Zamba2 bound the step size in prompts only) continues natively; the log tells.
    Raises UnsupportedModelError, with the differences, where nothing agrees.
    """
    check = _Check(mixer)
    differences: dict[Continuation, float] = {}
    for how in Continuation:
        if how is Continuation.SUPERPOSITION and not has_scan(mixer.module):
            continue
        differences[how] = check.difference(how)
        if differences[how] <= TOLERANCE:
            if (apart := check.from_tokens(how)) > TOLERANCE:
                logger.warning(
                    "%s: several tokens at once and token by token differ by %.1e of the largest value, in plain "
                    "transformers too",
                    type(mixer.module).__name__,
                    apart,
                )
            return how
    measured = ", ".join(f"{how} {difference:.1e}" for how, difference in differences.items())
    raise UnsupportedModelError(
        f"{type(mixer.module).__name__} does not continue from its own state: what it computes over several tokens "
        f"differs from one call over all of them ({measured} of the largest value): not supported"
    )


class _Check:
    """The inputs and states of one mixer's check."""

    def __init__(self, mixer: RecurrentMixer) -> None:
        device = next(mixer.module.parameters()).device
        parts = tuple(replace(part, dtype=torch.float32) for part in mixer.parts)
        self.mixer = replace(mixer, module=copy.deepcopy(mixer.module).float().eval(), parts=parts)
        generator = torch.Generator().manual_seed(0)
        with torch.inference_mode():
            self.hidden = torch.randn(1, _TOKENS, mixer.width, generator=generator).to(device)
            self.whole = self._run(self.hidden, None, Continuation.NATIVE)
            _, self.cut = self._run(self.hidden[:, :_CUT], None, Continuation.NATIVE)
            self.disturbed = tuple(
                state
                + state.square().mean().sqrt().clamp_min(1) * torch.randn(state.shape, generator=generator).to(device)
                for state in self.cut
            )

    def difference(self, how: Continuation) -> float:
        """The largest between running in one call and in two."""
        with torch.inference_mode():
            out, states = self._run(self.hidden[:, _CUT:], self.cut, how)
            real = _difference((out, states), (self.whole[0][:, _CUT:], self.whole[1]))
            uncut = self._run(self.hidden, self.disturbed, how)
            first, between = self._run(self.hidden[:, :_CUT], self.disturbed, how)
            second, states = self._run(self.hidden[:, _CUT:], between, how)
        return max(real, _difference((torch.cat((first, second), dim=1), states), uncut))

    def from_tokens(self, how: Continuation) -> float:
        """The largest between running in one call and token by token, from the disturbed state."""
        with torch.inference_mode():
            return _difference(
                self._run(self.hidden, self.disturbed, how),
                self._run(self.hidden, self.disturbed, Continuation.TOKEN),
            )

    def _run(self, hidden: torch.Tensor, states: States | None, how: Continuation) -> Result:
        return run_segment(self.mixer, hidden, states, how)


def _difference(ours: Result, reference: Result) -> float:
    """The largest of outputs and states, each as a share of its largest value; NaN counts as infinite."""
    pairs = zip((ours[0], *ours[1]), (reference[0], *reference[1]), strict=True)
    shares = [float((a - b).abs().max() / b.abs().max().clamp_min(torch.finfo(b.dtype).tiny)) for a, b in pairs]
    return max(share if share == share else float("inf") for share in shares)  # noqa: PLR0124  # NaN is not itself
