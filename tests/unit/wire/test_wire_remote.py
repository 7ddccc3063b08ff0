"""Both ends of a connection: failures, Steps that were lost, other schemas, an end that is gone, long random runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from hybridkv.cache import KVCacheManager
from hybridkv.errors import SchemaError, WireError, WorkerError
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.step import Csr, Step, StepResult
from hybridkv.testing import FakeWorker, attention_config, digest_model
from hybridkv.wire import (
    Channel,
    Executor,
    RemoteStatistics,
    RemoteWorker,
    StepFailure,
    encode_reply,
    encode_step,
    serve,
)
from wire_support import example_step

pytestmark = pytest.mark.usefixtures("quiet")

CONFIG = attention_config(20, (4,))
MODEL = digest_model(CONFIG, vocabulary=5)


class Server:
    """``serve`` in a thread, and what came of it."""

    def __init__(self, worker: Executor) -> None:
        self.channel, self._other = Pipe()
        self.served: int | None = None
        self.error: BaseException | None = None
        self._worker = worker
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.served = serve(self._other, self._worker)
        except Exception as error:  # noqa: BLE001  # the tests look at it
            self.error = error
        finally:
            self._other.close()

    def close(self) -> None:
        """The scheduler's side goes."""
        self.channel.close()
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()


class Faulty:
    """A worker whose forward raises at ``raising`` Steps, garbage written; keeps the ids that it saw."""

    def __init__(self, raising: frozenset[int] = frozenset()) -> None:
        self.worker = FakeWorker(CONFIG, MODEL)
        self.raising = raising
        self.seen: list[int] = []
        self._random = Random(1)

    def execute(self, step: Step) -> StepResult:
        self.seen.append(step.id)
        if step.id in self.raising:
            self.worker.break_down(step, self._random)
            raise RuntimeError(f"the device is gone at {step.id}")
        return self.worker.execute(step)


class Losing:
    """A channel that loses the messages with these numbers; TimeoutError when no reply can come."""

    def __init__(self, channel: Connection, lost: frozenset[int]) -> None:
        self._channel, self._lost = channel, lost
        self.sent = self.unanswered = 0

    def send_bytes(self, buf: bytes, /) -> None:
        if self.sent not in self._lost:
            self._channel.send_bytes(buf)
            self.unanswered += 1
        self.sent += 1

    def recv_bytes(self, maxlength: int, /) -> bytes:
        if not self.unanswered:
            raise TimeoutError("no reply in 30 s")
        self.unanswered -= 1
        return self._channel.recv_bytes(maxlength)


@pytest.fixture
def faulty() -> Faulty:
    return Faulty()


@pytest.fixture
def server(faulty: Faulty) -> Iterator[Server]:
    made = Server(faulty)
    yield made
    made.close()


def scheduler(in_flight: int, prompts: int = 4, *, max_tokens: int = 9) -> Scheduler:
    """Requests that share a beginning, in a pool that is too small for all of them at once."""
    cache = KVCacheManager(CONFIG, max_model_len=40)
    made = Scheduler(cache, SchedulerLimits(max_running=3, max_batched_tokens=16, max_in_flight=in_flight))
    for number in range(prompts):
        prompt = [0, 1, 2, 3] * 3 + [number % 5] * (number + 1)
        made.add(Request(f"r{number}", prompt, SamplingParams(max_tokens=max_tokens), hasher=cache.hasher))
    return made


def drive(sched: Scheduler, worker: RemoteWorker) -> tuple[dict[str, list[int]], list[StepFailure]]:
    """Until nothing is left; outputs and failures."""
    outputs: dict[str, list[int]] = {}
    failures: list[StepFailure] = []
    for _ in range(500):
        if sched.drained and not worker.num_in_flight:
            return outputs, failures
        while worker.num_in_flight < sched.limits.max_in_flight and not sched.drained:
            worker.send(sched.schedule())
        try:
            reply = worker.receive()
        except TimeoutError as error:
            reply = worker.give_up(error)
        if isinstance(reply, StepFailure):
            sched.fail(reply.id, str(reply))
            failures.append(reply)
        else:
            done = sched.update(reply).finished
            outputs |= {one.request.request_id: one.request.token_ids().tolist() for one in done}
        sched.check()
        assert sched.num_in_flight == worker.num_in_flight
    raise AssertionError("500 replies, and it is not over")


def expected(prompts: int = 4, *, max_tokens: int = 9) -> dict[str, list[int]]:
    """The model without any cache."""
    outputs = {}
    for number in range(prompts):
        tokens = [0, 1, 2, 3] * 3 + [number % 5] * (number + 1)
        for _ in range(max_tokens):
            tokens.append(MODEL.next_token(tokens))
        outputs[f"r{number}"] = tokens
    return outputs


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_remote_worker_gives_the_same_tokens(in_flight: int, server: Server, faulty: Faulty) -> None:
    worker = RemoteWorker(server.channel)
    outputs, failures = drive(scheduler(in_flight), worker)
    assert (outputs, failures) == (expected(), [])
    stats = worker.statistics()
    assert (stats.steps, stats.failures) == (len(faulty.seen), 0)
    server.close()
    assert (server.served, server.error) == (len(faulty.seen), None)


def test_remote_worker_counts_its_bytes(server: Server) -> None:
    sched, worker = scheduler(1), RemoteWorker(server.channel)
    step = sched.schedule()
    worker.send(step)
    reply = worker.receive()
    assert worker.statistics() == RemoteStatistics(1, 0, len(encode_step(step)), len(encode_reply(reply)))


def test_remote_worker_skips_only_steps_based_on_a_failed_step() -> None:
    """Step 7 fails; 8 and 9 build on it; 10 builds on 6, and 11 on 10."""
    ran = []

    class Worker:
        def execute(self, step: Step) -> StepResult:
            ran.append(step.id)
            if step.id == 7:
                raise MemoryError
            return StepResult(step.id, Csr.empty(len(step)))

    server = Server(Worker())
    try:
        for step_id, after in ((6, 5), (7, 6), (8, 7), (9, 8), (10, 6), (11, 10)):
            server.channel.send_bytes(encode_step(example_step(id=step_id, after=after)))
        replies = [msgpack.decode(server.channel.recv_bytes()) for _ in range(6)]
    finally:
        server.close()
    assert [(one["kind"], one["id"]) for one in replies] == [
        ("result", 6),
        ("failure", 7),
        ("failure", 8),
        ("failure", 9),
        ("result", 10),
        ("result", 11),
    ]
    assert replies[1]["error"] == "MemoryError"
    assert replies[2]["error"] == "WorkerError"
    assert replies[2]["message"] == "Step 8 was not run: it builds on Step 7, and Step 7 failed here"
    assert replies[3]["message"] == "Step 9 was not run: it builds on Step 8, and Step 7 failed here"
    assert (ran, server.served) == ([6, 7, 10, 11], 3)


def test_remote_worker_reports_a_lost_step_and_continues(server: Server, faulty: Faulty) -> None:
    sched, worker = scheduler(2), RemoteWorker(Losing(server.channel, frozenset({5})))
    outputs, failures = drive(sched, worker)
    assert failures == [StepFailure(5, "ContentError", "step 6 must follow step 5, but step 4 was the last")]
    assert 5 not in faulty.seen
    assert outputs == expected()


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(1, 3), st.frozensets(st.integers(0, 40), max_size=6), st.frozensets(st.integers(0, 40), max_size=6))
def test_remote_worker_with_random_failures_gives_the_same_tokens(
    in_flight: int, raising: frozenset[int], lost: frozenset[int]
) -> None:
    server = Server(Faulty(raising))
    try:
        worker = RemoteWorker(Losing(server.channel, lost))
        outputs, failures = drive(scheduler(in_flight), worker)
    finally:
        server.close()
    assert outputs == expected()
    assert server.error is None
    assert worker.statistics().failures == len(failures)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"schema_version": 7}, SchemaError, "schema version 7, this hybridkv reads version 6"),
        ({"rows": [1, 2]}, WireError, "step.rows: Expected `array` of at least length 3, got 2"),
    ],
)
def test_remote_worker_answers_invalid_bytes_and_ends(
    change: dict[str, object], error: type[Exception], message: str, server: Server, faulty: Faulty
) -> None:
    class Newer:
        """Sends what another version would."""

        def send_bytes(self, buf: bytes, /) -> None:
            server.channel.send_bytes(msgpack.encode({**msgpack.decode(buf), **change}))

        def recv_bytes(self, maxlength: int, /) -> bytes:
            return server.channel.recv_bytes(maxlength)

    sched, worker = scheduler(1), RemoteWorker(Newer())
    worker.send(sched.schedule())
    reply = worker.receive()
    assert isinstance(reply, StepFailure)
    assert (reply.id, reply.error) == (0, error.__name__)
    assert message in reply.message
    sched.fail(0, str(reply))
    with pytest.raises(WorkerError, match="the worker closed the connection"):  # noqa: PT012  # either of the two
        worker.send(sched.schedule())
        worker.receive()
    server.close()
    assert isinstance(server.error, error)
    assert faulty.seen == []


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (
            lambda step: StepResult(step.id, Csr(np.arange(len(step) + 1), np.zeros(len(step)))),  # type: ignore[arg-type]  # floats
            "WireError: result.sampled.values: no array of a message is float64",
        ),
        (lambda _: None, "WireError: a reply must be one of StepResult, StepFailure, Unreadable, got NoneType"),
    ],
)
def test_remote_result_that_cannot_be_encoded_is_a_failure(result: Callable[[Step], StepResult], said: str) -> None:
    class Careless:
        def execute(self, step: Step) -> StepResult:
            return result(step)

    server = Server(Careless())
    try:
        worker = RemoteWorker(server.channel)
        worker.send(scheduler(1).schedule())
        reply = worker.receive()
    finally:
        server.close()
    assert isinstance(reply, StepFailure)
    assert str(reply).startswith(said)
    assert server.served == 0


def test_remote_replies_to_abandoned_steps_are_skipped(server: Server) -> None:
    sched, worker = scheduler(2), RemoteWorker(server.channel)
    worker.send(sched.schedule())
    worker.send(sched.schedule())
    assert worker.give_up(TimeoutError("30 s")) == StepFailure(0, "TimeoutError", "30 s")
    sched.fail(0, "too late")
    assert worker.num_in_flight == sched.num_in_flight == 0
    with pytest.raises(WorkerError, match="no Step is in flight"):
        worker.give_up(TimeoutError())
    step = sched.schedule()
    worker.send(step)
    reply = worker.receive()
    assert isinstance(reply, StepResult)
    assert reply.id == step.id == 2
    sched.update(reply)
    assert drive(sched, worker)[0] == expected()


def test_remote_peer_that_is_gone_is_reported(server: Server) -> None:
    sched, worker = scheduler(2), RemoteWorker(server.channel)
    with pytest.raises(WorkerError, match="no Step is in flight"):
        worker.receive()
    here, there = Pipe()
    there.close()
    lonely = RemoteWorker(here)
    with pytest.raises(WorkerError, match="closed the connection, 0 Steps unanswered"):
        lonely.send(sched.schedule())
    here.close()

    class Silent:
        """Takes everything, then is gone."""

        def send_bytes(self, buf: bytes, /) -> None: ...

        def recv_bytes(self, _: int, /) -> bytes:
            raise EOFError

    silent = RemoteWorker(Silent())
    silent.send(sched.schedule())
    with pytest.raises(WorkerError, match=r"1 Steps unanswered: .* with a new scheduler"):
        silent.receive()


def test_remote_worker_without_scheduler_ends_cleanly() -> None:
    class Gone:
        """One Step comes in; nobody waits for the reply."""

        def __init__(self) -> None:
            self.left = [encode_step(example_step(id=0, after=-1))]

        def send_bytes(self, _: bytes, /) -> None:
            raise BrokenPipeError

        def recv_bytes(self, _: int, /) -> bytes:
            if not self.left:
                raise ConnectionResetError
            return self.left.pop()

    class Worker:
        def execute(self, step: Step) -> StepResult:
            return StepResult(step.id, Csr.empty(len(step)))

    channel: Channel = Gone()
    assert serve(channel, Worker()) == 1
