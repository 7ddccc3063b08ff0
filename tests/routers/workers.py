"""Servers of tiny models that publish their events, and what routers in front of them say of a prompt."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import msgspec
import zmq
from servers import Server, free_port

BLOCK = 16
ENVIRONMENTS = Path(os.environ["ROUTERS_ENV"])
"""A folder with one environment for each router."""

Change = Callable[[dict[str, Any]], dict[str, Any] | None]


class Answer(NamedTuple):
    """What the router expected a worker to find, and what it found, in tokens."""

    worker: int
    credited: int
    found: int
    prompt: int


def same(found: Answer) -> bool:
    """Whether the router credited the whole blocks of what was found.

    It credits all of a prompt that ends with a block, though its last token is always computed.
    """
    all_known = found.found == found.prompt - 1 and found.credited == found.prompt
    return all_known or found.credited == found.found // BLOCK * BLOCK


class Worker:
    """A server of a tiny model that publishes its events."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, port, self.events, self.replay = model, free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        sent = ("--kv-events", address(self.events), "--kv-events-replay", address(self.replay))
        room = ("--memory", "16MiB", "--max-model-len", "512", "--grace", "0.1")
        command = (sys.executable, "-m", "hybridkv", "serve", "--model", model, *room, "--port", str(port), *sent)
        self.server = Server(command, port, folder / f"worker {port}.log", seconds=120)

    def post(self, body: dict[str, Any]) -> Any:  # noqa: ANN401 - what it says
        return completed(self.url, self.model, body)


class Between:
    """A proxy of a worker's events that changes some, or loses whole batches. Subscriptions reach the worker."""

    def __init__(self, context: zmq.Context[Any], worker: Worker, change: Change = lambda event: event) -> None:
        self.port, self.is_losing = free_port(), False
        self._in, self._out, self._change, self._ended = (
            context.socket(zmq.XSUB),
            context.socket(zmq.XPUB),
            change,
            False,
        )
        self._out.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._in.connect(address(worker.events))
        self._out.bind(address(self.port))
        self._thread = Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._in, zmq.POLLIN)
        poller.register(self._out, zmq.POLLIN)
        while not self._ended:
            ready = dict(poller.poll(50))
            if self._out in ready:
                self._in.send(self._out.recv())
            if self._in in ready:
                topic, number, batch = self._in.recv_multipart()
                seconds, events, rank = msgspec.msgpack.decode(batch)
                changed = [one for one in map(self._change, events) if one is not None]
                if not self.is_losing:
                    self._out.send_multipart((topic, number, msgspec.msgpack.encode([seconds, changed, rank])))

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self._in.close(0)
        self._out.close(0)


def address(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


def asked(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:  # noqa: ANN401 - what it says
    data = None if body is None else json.dumps(body).encode()
    sent = Request(url, data, {"Content-Type": "application/json"}, method=method)  # noqa: S310 - loopback
    with urlopen(sent, timeout=60) as answer:  # noqa: S310 - same
        said = answer.read()
        return json.loads(said) if said else None


def completed(url: str, model: str, body: dict[str, Any]) -> Any:  # noqa: ANN401 - what it says
    """Complete a prompt or a chat, and wait until the last step is published, which comes with the next request."""
    answer = asked(f"{url}/v1/{'chat/' if 'messages' in body else ''}completions", {"model": model, **body})
    time.sleep(0.4)
    return answer


def words(random: Random, count: int) -> str:
    return " ".join("".join(random.choices("abcdefgh", k=5)) for _ in range(count))
