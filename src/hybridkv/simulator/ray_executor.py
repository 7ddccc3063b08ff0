"""Ray as an Executor of concurrent.futures, of which it has none: a cell is a task, and its future that of the task."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

P = ParamSpec("P")
T = TypeVar("T")


class RayExecutor(Executor):
    """Runs what is submitted on the cluster that ``ray.init`` joined or began, a core each.

    What a function raises is raised as it was; where Ray lost it, BrokenExecutor. hybridkv must be installed there.
    """

    def __init__(self) -> None:
        self._run = ray.remote(_call)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """``fn`` of these arguments, in some worker."""
        told: Future[T] = Future()
        told.set_running_or_notify_cancel()
        self._run.remote(fn, args, kwargs).future().add_done_callback(lambda done: _tell(told, done))
        return told


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - what fn gives
    return fn(*args, **kwargs)


def _tell(told: Future[T], done: Future[T]) -> None:
    error = done.exception()
    if error is None:
        told.set_result(done.result())
    elif isinstance(error, RayTaskError):
        told.set_exception(error.cause)
    else:
        told.set_exception(BrokenExecutor(str(error)) if isinstance(error, RayError) else error)
