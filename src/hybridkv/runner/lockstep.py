"""Several tensor parallel ranks as one worker: each Step runs on all of them, and one scheduler decides.

lead     rank 0    scheduler -> Step --+--> its own runner ------+--> result -> scheduler
follow   rank 1                        '~~> its runner ~~~~~~~~~~'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from hybridkv.arguments import each, instance
from hybridkv.errors import ConfigError, WorkerError
from hybridkv.request import SamplingParams
from hybridkv.step import Step, StepResult
from hybridkv.units import shown
from hybridkv.wire import Channel, Executor, RemoteWorker, StepFailure, serve

if TYPE_CHECKING:  # an engine asks its Lockstep
    from hybridkv.runner.engine import Engine

_LOST: Final = -1.0


class Lockstep:
    """Runs Steps on all ranks.

    A transfer has ended when it has on every rank. It has arrived if it has on every rank: each has its own bytes.

    Args:
        own: the runner of rank 0, whose tokens count.
        others: the other ranks, in order.
    """

    def __init__(self, own: Executor, others: Sequence[RemoteWorker]) -> None:
        self._own, self._others = own, tuple(others)
        self._ended = dict[int, list[float]]()  # by transfer: the seconds on each rank where it has ended

    def execute(self, step: Step) -> StepResult:
        """Run a Step.

        Args:
            step: the Step.

        Raises:
            WorkerError: another rank failed, or has closed its connection.
            Exception: as ``own`` raises.
        """
        try:
            for one in self._others:
                one.send(step)
            results = [self._own.execute(step)]
            results += [_result(rank, one.receive()) for rank, one in enumerate(self._others, 1)]
        except BaseException as error:
            for one in self._others:
                if one.num_in_flight:
                    one.give_up(error)
            raise
        return self._joined(results)

    def _joined(self, results: Sequence[StepResult]) -> StepResult:
        """Return the result of rank 0 with the transfers that have ended on all ranks."""
        for one in results:
            took = one.arrived_s.tolist() or [0.0] * len(one.arrived)
            ended = [*zip(one.arrived.tolist(), took, strict=True), *((lost, _LOST) for lost in one.lost.tolist())]
            for number, seconds in ended:
                self._ended.setdefault(number, []).append(seconds)
        over = {number: took for number, took in self._ended.items() if len(took) == len(results)}
        for number in over:
            del self._ended[number]
        arrived = {number: max(took) for number, took in over.items() if _LOST not in took}
        return replace(
            results[0],
            arrived=np.array([*arrived], np.int32),
            lost=np.array([number for number in over if number not in arrived], np.int32),
            arrived_s=np.array([*arrived.values()], np.float32),
        )


def _result(rank: int, reply: StepResult | StepFailure) -> StepResult:
    if isinstance(reply, StepFailure):
        raise WorkerError(f"rank {rank}: {reply}")
    return reply


def lead(engine: Engine, channels: Sequence[Channel]) -> None:
    """Let the engine of rank 0 run each Step on the other ranks, too. Their processes call ``follow``.

    Args:
        engine: the engine of rank 0, which has run nothing.
        channels: connections to ranks 1, 2 and so on, in order, as for a ``RemoteWorker``.

    Raises:
        ConfigError: the engine is not of rank 0 of so many ranks, its model takes encoder inputs, or something else is
            no connection.
    """
    _require_engine(engine)
    ends = each(_channel)("channels", channels)
    share = engine.loaded.share
    if share is None or share.rank or share.ranks != len(ends) + 1:
        said = "no ModelShare" if share is None else f"rank {share.rank} of {share.ranks}"
        raise ConfigError(
            f"the engine has {said}, and there are {len(ends)} connections: lead with rank 0, and give one to each "
            "of the others"
        )
    if engine.runner.cross is not None:
        raise ConfigError("encoder inputs are not sent to other ranks: run an encoder-decoder on one rank")
    engine.worker = Lockstep(engine.runner, [RemoteWorker(one) for one in ends])


def follow(engine: Engine, channel: Channel) -> None:
    """Run the Steps of rank 0 on the model of an engine, until rank 0 closes the connection.

    Args:
        engine: an engine made with the same arguments as that of rank 0, but the model of another rank. Its own
            scheduler stays unused.
        channel: a connection to rank 0, as for ``serve``.

    Raises:
        ConfigError: the channel is no connection.
        WireError: a message is no Step.
        SchemaError: a message has another schema version.
    """
    _require_engine(engine)
    serve(_channel("channel", channel), engine.runner)


def _require_engine(engine: object) -> None:
    from hybridkv.runner.engine import Engine  # noqa: PLC0415 - an engine asks its Lockstep, so it imports this module

    instance("engine", engine, Engine)


def _channel(name: str, value: object) -> Channel:
    if not all(callable(getattr(value, one, None)) for one in ("send_bytes", "recv_bytes")):
        raise ConfigError(f"{name} must have send_bytes and recv_bytes, got {shown(value)}: give a Link or a pipe")
    return cast("Channel", value)


def require_alone(worker: object) -> None:
    """Raise ConfigError if an engine leads other ranks, whose pages session files would lack.

    Args:
        worker: what runs its Steps.
    """
    if isinstance(worker, Lockstep):
        raise ConfigError(
            "a session file has the pages of one rank, and this engine leads others: give both engines the same store, "
            "such as StoreUrl('file:///FOLDER'), and the same tokens"
        )


def require_sendable(worker: object, sampling: SamplingParams, images: object) -> None:
    """Raise ConfigError if an engine leads other ranks, and a request cannot be sent to them.

    Args:
        worker: what runs the engine's Steps.
        sampling: of the request.
        images: of the request.
    """
    if isinstance(worker, Lockstep) and (images or sampling.logits_processors):
        raise ConfigError("images and logits_processors are not sent to other ranks: leave them out, or use one rank")
