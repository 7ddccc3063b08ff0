"""Both ends of a connection: ``serve`` runs at the worker, ``RemoteWorker`` stands for the worker at the scheduler.

    Steps, in order            0   1   2   3                4
    sent                      [0] [1] [2] [3]              [4]     after: 1, 2 and 3 have failed by then
    the worker                 ok  ok  raises  refused: builds on 2   ok
    replies, one a message     R0  R1  F2      F3 is passed over      R4

Replies come in the order of the Steps. A worker that raised goes on: Scheduler.fail undoes its Step, and ``after`` of
the next Step says which Steps count. A connection carries whole byte strings; hybridkv.wire.connection says which peers
may connect.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from hybridkv.errors import HybridKVError, SchemaError, WireError, WorkerError
from hybridkv.step import Step, StepResult
from hybridkv.wire.connection import MOST_BYTES, Channel, check_size, next_message, require_trust
from hybridkv.wire.messages import decode_reply, decode_step, encode_reply, encode_step
from hybridkv.wire.schema import Reply, StepFailure, Unreadable

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs Steps; hybridkv.runner.ModelRunner is one."""

    def execute(self, step: Step) -> StepResult:
        """One forward."""
        ...


# -- the worker's end


def serve(channel: Channel, worker: Executor, *, trusted: bool = False, most_bytes: int = MOST_BYTES) -> int:
    """Run the Steps that come in, one reply each, until the other end is closed. Return how many brought a result.

    channel: a pipe, or what ``connect`` and ``Listener.accept`` give; another TCP connection is a ConfigError, unless
    ``trusted`` says that its other end was asked for a key elsewhere. most_bytes: of a message, either way.

    A Step that ``worker`` refuses, or whose forward raises, is answered with a StepFailure, and so is every Step that
    builds on it, which ``worker`` never sees. Bytes that are no Step of this schema, and messages that are longer than
    ``most_bytes`` or end in the middle, are answered with Unreadable, and then raise WireError or SchemaError here:
    nothing behind them can be trusted. Beside that raises what ``channel`` raises as TimeoutError.
    """
    require_trust(channel, trusted=trusted)
    served = 0
    failed: int | None = None
    while True:
        try:
            data = _next(channel, most_bytes)
            if data is None:
                return served
            step = decode_step(data)
        except (SchemaError, WireError) as error:
            _answer(channel, encode_reply(Unreadable.of(error)))
            raise
        if failed is not None and step.after >= failed:
            refusal = WorkerError(
                f"Step {step.id} was not run: it builds on Step {step.after}, and Step {failed} failed here"
            )
            _answer(channel, encode_reply(StepFailure.of(step.id, refusal)))
            continue
        reply, ran = _run(worker, step, most_bytes)
        served, failed = served + ran, None if ran else step.id
        _answer(channel, reply)


def _run(worker: Executor, step: Step, most_bytes: int) -> tuple[bytes, bool]:
    """Run ``step``. Return the reply, and whether it is a result."""
    try:
        reply = encode_reply(worker.execute(step))
        check_size("the result", reply, most_bytes)
    except Exception as error:  # whatever a forward raises costs its Step, not the worker
        # the message of a named error says all there is to know
        trace = None if isinstance(error, HybridKVError) else error
        logger.warning("step %d failed: %s", step.id, error, exc_info=trace)
        return encode_reply(StepFailure.of(step.id, error)), False
    return reply, True


def _next(channel: Channel, most_bytes: int) -> bytes | None:
    """Return the next message, None once the other end is closed."""
    try:
        return next_message(channel, most_bytes)
    except (EOFError, ConnectionError):
        return None


def _answer(channel: Channel, reply: bytes) -> None:
    try:
        channel.send_bytes(reply)
    except TimeoutError:
        raise
    except OSError as error:
        logger.warning("a reply was lost: the other end is closed (%s)", error)


# -- the scheduler's end


@dataclass(frozen=True, slots=True)
class RemoteStatistics:
    """Counts so far. steps: sent. failures: how often the Steps in flight failed."""

    steps: int
    failures: int
    sent_bytes: int
    received_bytes: int


class RemoteWorker:
    """A worker at the other end of ``channel``: Steps go out, and one reply to each comes back, in order.

        reply = worker.receive()
        if isinstance(reply, StepFailure):
            scheduler.fail(reply.id, str(reply))
        else:
            scheduler.update(reply)

    One thread. ``send`` waits while the channel is full: unread replies to all Steps in flight must fit in it, 12 bytes
    a row each. channel, trusted, most_bytes: as in ``serve``.
    """

    def __init__(self, channel: Channel, *, trusted: bool = False, most_bytes: int = MOST_BYTES) -> None:
        require_trust(channel, trusted=trusted)
        self._channel, self._most_bytes = channel, most_bytes
        self._in_flight: deque[int] = deque()
        self._given_up = -1
        self._counts = dict.fromkeys(("steps", "failures", "sent_bytes", "received_bytes"), 0)

    @property
    def num_in_flight(self) -> int:
        """Steps whose replies are not in."""
        return len(self._in_flight)

    def send(self, step: Step) -> None:
        """Send ``step``.

        Raises as ``encode_step``, WireError for more than ``most_bytes``, and WorkerError when the worker is gone.
        """
        data = encode_step(step)
        check_size(f"Step {step.id}", data, self._most_bytes)
        try:
            self._channel.send_bytes(data)
        except TimeoutError:
            raise
        except OSError as error:
            raise self._gone() from error
        self._in_flight.append(step.id)
        self._counts["steps"] += 1
        self._counts["sent_bytes"] += len(data)

    def receive(self) -> StepResult | StepFailure:
        """Wait for the reply to the oldest Step in flight.

        A failure carries the id of that Step, whatever the worker could not go on with (it may have missed this
        one, and refused the next): hand it to ``Scheduler.fail``, which fails all Steps in flight, as they are here.
        Raises WorkerError when nothing is in flight or the worker is gone, SchemaError or WireError as
        ``decode_reply``, and WireError for a reply that is longer than ``most_bytes`` or ends in the middle.
        """
        self._require_one()
        reply = self._next_reply()
        if not isinstance(reply, StepResult):
            return self._failed(reply.error, reply.message)
        self._in_flight.popleft()
        return reply

    def give_up(self, error: BaseException) -> StepFailure:
        """Fail all Steps in flight for ``error``, say a time-out. Later replies to them are passed over.

        Returns the failure of the oldest, as ``receive`` does. Raises WorkerError when nothing is in flight.
        """
        self._require_one()
        return self._failed(type(error).__name__, str(error))

    def statistics(self) -> RemoteStatistics:
        """Return the counts so far."""
        return RemoteStatistics(**self._counts)

    def _require_one(self) -> None:
        if not self._in_flight:
            raise WorkerError("no Step is in flight, so no reply will come: send a Step first")

    def _failed(self, error: str, message: str) -> StepFailure:
        """Fail all Steps in flight. Return the failure of the oldest."""
        self._counts["failures"] += 1
        oldest, self._given_up = self._in_flight[0], self._in_flight[-1]
        self._in_flight.clear()
        return StepFailure(oldest, error, message)

    def _next_reply(self) -> Reply:
        """Return the next reply to a Step that was not given up."""
        while True:
            try:
                data = next_message(self._channel, self._most_bytes)
            except (EOFError, ConnectionError) as error:
                raise self._gone() from error
            self._counts["received_bytes"] += len(data)
            reply = decode_reply(data)
            if isinstance(reply, Unreadable) or reply.id > self._given_up:
                return reply

    def _gone(self) -> WorkerError:
        return WorkerError(
            f"the worker closed the connection, {len(self._in_flight)} Steps unanswered: its log says why; a new "
            "worker knows none of the rows, so start it with a new scheduler"
        )
