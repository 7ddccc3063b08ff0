"""Selective scans that go on from a state: transformers' scan starts from zero, and the state's part is added.

The recurrence h_t = exp(A dt_t) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t (Mamba, arXiv 2312.00752, equation 2) is
linear in h: what h_0 leaves at token t is exp(A * (dt_1 + ... + dt_t)) h_0, whatever x was. So the scan runs from
zero, and

    y_t += C_t exp(A * cumsum(dt)_t) h_0    before the gate
    h_T += exp(A * sum(dt)) h_0             the state behind the last token
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name

from hybridkv.errors import WorkerError

SCAN: Final = "mamba_selective_scan"
"""What modelling modules call the scan over a sequence, as a global that their mixers' forward looks up."""


def own_forward(module: torch.nn.Module) -> Callable[..., Any]:
    """That of its class, without what decorates it."""
    forward: Callable[..., Any] = inspect.unwrap(type(module).forward)
    return forward


def with_globals(forward: FunctionType, replaced: Mapping[str, Any]) -> FunctionType:
    """``forward`` that finds ``replaced`` by their names: its class and its modelling module stay as they are."""
    own_globals = {**forward.__globals__, **replaced}
    bound = FunctionType(forward.__code__, own_globals, forward.__name__, forward.__defaults__, forward.__closure__)
    bound.__kwdefaults__ = forward.__kwdefaults__
    return bound


def has_scan(module: torch.nn.Module) -> bool:
    """Whether the forward of ``module``'s class runs a selective scan that can be superposed."""
    forward = own_forward(module)
    return isinstance(forward, FunctionType) and SCAN in forward.__code__.co_names and SCAN in forward.__globals__


def superposed_forward(module: torch.nn.Module, initial: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The forward of ``module``'s class, each of whose scans goes on from ``initial`` instead of zero.

    initial: [rows, channels, state size], or [rows, heads, channels, state size] for a mixer that scans head by head.
    The class and its modelling module stay as they are: the forward is run with globals of its own.
    Raises WorkerError when the forward has no scan, or scans more or less often than there are heads.
    """
    forward = own_forward(module)
    if not isinstance(forward, FunctionType) or not has_scan(module):
        raise WorkerError(f"{type(module).__name__} runs no {SCAN}: it cannot be superposed")
    heads = initial.unbind(1) if initial.dim() == 4 else (initial,)
    scans = _Scans(forward.__globals__[SCAN], heads)
    bound = with_globals(forward, {SCAN: scans})

    def run(*args: object, **kwargs: object) -> torch.Tensor:
        out: torch.Tensor = bound(module, *args, **kwargs)
        scans.require_all()
        return out

    return run


class _Scans:
    """Stands in for the scan; its n-th call goes on from the n-th of ``initial``, [rows, channels, state size] each."""

    def __init__(self, scan: Callable[..., Any], initial: Sequence[torch.Tensor]) -> None:
        self._scan = scan
        self._left: Iterator[torch.Tensor] = iter(initial)

    def __call__(
        self,
        *scanned: torch.Tensor,
        return_last_state: bool = False,
        **options: Any,  # noqa: ANN401 - go on to the scan
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As transformers' scan of hidden states, dt, a, b and c, in this order.

        hidden states, dt, options' z: [rows, channels, tokens]; b, c: [rows, state size, tokens]. a: [channels, state
        size], negative. options' delta_bias: [channels].
        """
        state = next(self._left, None)
        if state is None:
            raise WorkerError("the mixer scans more often than it has heads: it cannot be superposed")
        out, final = self._scan(*scanned, return_last_state=True, **options)
        _, dt, a, _, c = scanned
        steps = _step_sizes(dt, options.get("delta_bias"), softplus=options.get("delta_softplus", False))
        elapsed = steps.cumsum(dim=-1)
        added = _left_behind(state.float(), elapsed, a, c)
        z = options.get("z")
        if z is not None:
            added *= F.silu(z.float())
        out = (out.float() + added).to(out.dtype)
        final = final + torch.exp(a[None] * elapsed[..., -1:]) * state.float()
        return (out, final) if return_last_state else out

    def require_all(self) -> None:
        """WorkerError when some head was not scanned."""
        if next(self._left, None) is not None:
            raise WorkerError("the mixer scans less often than it has heads: it cannot be superposed")


def _step_sizes(dt: torch.Tensor, bias: torch.Tensor | None, *, softplus: bool) -> torch.Tensor:
    """[rows, channels, tokens] in float32, as the scan makes them."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)[..., None]
    return (F.softplus(dt) if softplus else dt).float()


def _left_behind(state: torch.Tensor, elapsed: torch.Tensor, a: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """C_t exp(A * elapsed_t) h_0, [rows, channels, tokens].

    One term of the state after the other: a tensor of all of them would be as large as the scan's largest.
    """
    out = torch.zeros_like(elapsed)
    for one in range(state.shape[-1]):
        out += torch.exp(a[None, :, one, None] * elapsed) * state[..., one, None] * c[:, None, one].float()
    return out
