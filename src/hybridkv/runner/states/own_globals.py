"""A mixer's own forward, run with other functions in place of some that it looks up as globals of its module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch


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
