"""Run cells of a sweep as tasks of a Ray cluster, through the interface of ``concurrent.futures.Executor``."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

P = ParamSpec("P")
T = TypeVar("T")


class RayExecutor(Executor):
    """Runs submitted functions on the cluster that ``ray.init`` joined or started, with one core for each.

    hybridkv must be installed on every node of the cluster.
    """

    def __init__(self) -> None:
        self._run = ray.remote(_call)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` with these arguments on a node of the cluster.

        Args:
            fn: the function; it and its arguments must be picklable.
            args: positional arguments.
            kwargs: keyword arguments.

        Returns:
            The future of its result. An error that ``fn`` raises is raised again; if Ray loses the task, the future
            raises BrokenExecutor.
        """
        outcome: Future[T] = Future()
        outcome.set_running_or_notify_cancel()
        self._run.remote(fn, args, kwargs).future().add_done_callback(lambda done: _copy_outcome(done, outcome))
        return outcome


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - what fn gives
    return fn(*args, **kwargs)


def _copy_outcome(done: Future[T], outcome: Future[T]) -> None:
    """Set the result or the error of Ray's future ``done`` in ``outcome``."""
    error = done.exception()
    if error is None:
        outcome.set_result(done.result())
    elif isinstance(error, RayTaskError):
        outcome.set_exception(error.cause)
    else:
        outcome.set_exception(BrokenExecutor(str(error)) if isinstance(error, RayError) else error)
