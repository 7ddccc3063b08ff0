"""A scheduler and its worker in two processes: Steps go over TCP as bytes, replies come back.

    python examples/two_processes.py

The parent schedules and never imports torch. A client of its port must send a key, which the child gets when it starts.
On one machine you can use a ``multiprocessing.Pipe`` instead, which needs no key. The child runs a tiny random Llama on
paged memory. Four prompts with one shared prefix run. Then a Step is lost on the way, to show that the worker notices,
and that nothing is lost with it.
"""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Sequence

from hybridkv import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerLimits
from hybridkv.planner import plan_from_json, plan_to_json
from hybridkv.wire import Link, Listener, RemoteWorker, StepFailure, connect, serve

LIMITS = SchedulerLimits(max_running=8, max_batched_tokens=256, max_in_flight=2)
SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)
MAX_MODEL_LEN = 160  # tokens of a prompt and its output
BEGINNING = "You are a helpful assistant. Answer in one short sentence.\n\n"
QUESTIONS = ("What is a KV cache?", "What is a block table?", "Who frees a block?", "Why do prefixes repeat?")


def run_worker(address: tuple[str, int] | str, key: bytes) -> None:
    """Run the child: it knows model and memory, so it plans; then it runs Steps until the parent is done."""
    channel = connect(address, authkey=key)
    from hybridkv.runner import ModelRunner, load, plan_for  # noqa: PLC0415  # torch, in the child alone

    loaded = load("tiny:llama")
    plan = plan_for(loaded, [MAX_MODEL_LEN] * LIMITS.max_running)
    channel.send_bytes(plan_to_json(plan).encode())
    runner = ModelRunner(
        loaded.model,
        plan.config,
        plan.model,
        max_running=LIMITS.max_running,
        max_model_len=plan.max_model_len,
        max_batched_tokens=LIMITS.max_batched_tokens,
    )
    serve(channel, runner)


class LossyChannel:
    """A connection that loses the next message when told to."""

    def __init__(self, link: Link) -> None:
        self.link, self.lose_next = link, False

    def send_bytes(self, buf: bytes, /) -> None:
        """Send it, or not."""
        if not self.lose_next:
            self.link.send_bytes(buf)
        self.lose_next = False

    def recv_bytes(self, maxlength: int, /) -> bytes:
        """Return the next message."""
        return self.link.recv_bytes(maxlength)


def run(scheduler: Scheduler, worker: RemoteWorker, requests: Sequence[Request]) -> None:
    """Run the loop of every engine: Steps go out ahead of their replies, and replies arrive in order."""
    for request in requests:
        scheduler.add(request)
    while worker.num_in_flight or not scheduler.drained:
        while worker.num_in_flight < LIMITS.max_in_flight and not scheduler.drained:
            worker.send(scheduler.schedule())
        reply = worker.receive()
        if isinstance(reply, StepFailure):
            print(f"Step {reply.id} failed, and what was in flight behind it. The worker says: {reply}")
            scheduler.fail(reply.id, str(reply))
        else:
            scheduler.update(reply)
    for request in requests:
        output = bytes(request.token_ids().tolist()[request.num_prompt_tokens :]).decode("latin-1")
        print(f"{request.request_id}: {request.first_hit_tokens} of {request.num_prompt_tokens} hit, {output!r}")


def main() -> None:
    """Run the parent: everything except the model."""
    context = multiprocessing.get_context("spawn")
    key = secrets.token_bytes(32)  # goes to the child through a pipe that multiprocessing starts it with
    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        process = context.Process(target=run_worker, args=(listener.address, key))
        process.start()
        link = listener.accept(timeout_s=60)

    plan = plan_from_json(link.recv_bytes().decode())
    cache = KVCacheManager(plan)
    scheduler = Scheduler(cache, LIMITS)
    channel = LossyChannel(link)
    worker = RemoteWorker(channel)

    def request(name: str, text: str) -> Request:
        return Request(name, list(text.encode()), SAMPLING, hasher=cache.hasher)  # a token is a byte

    run(scheduler, worker, [request(f"request {i}", BEGINNING + text) for i, text in enumerate(QUESTIONS)])
    counts = worker.statistics()
    print(f"{counts.steps} Steps: {counts.sent_bytes:,} bytes went out, {counts.received_bytes:,} came back")

    channel.lose_next = True
    run(scheduler, worker, [request("after a loss", BEGINNING + QUESTIONS[0])])

    link.close()
    process.join()
    print(f"the worker ended with exit code {process.exitcode}")


if __name__ == "__main__":
    main()
