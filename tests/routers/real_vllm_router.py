"""vllm-router in front of two servers credits a worker with the tokens that it finds. ROUTERS_BIN: its folder."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import msgspec
import pytest
import zmq
from servers import Server, free_port

BLOCK = 16
KINDS = ("llama", "qwen3_next", "granite_hybrid", "gemma3", "llama4", "deepseek_v3")
"""Full attention, gated delta rule, Mamba 2, windows, chunks, latents."""

DECIDED = re.compile(r'KV prefix decision .*?worker="(?P<worker>[^"]+)".*?credited_prefix_tokens=(?P<credited>\d+)')
SETTLED_S = 20.0
Change = Callable[[dict[str, Any]], dict[str, Any] | None]


class Answer(NamedTuple):
    """What the router expected a worker to find, and what it found, in tokens."""

    worker: int
    credited: int
    found: int
    prompt: int


class Worker:
    """A server of a tiny model that publishes its events."""

    def __init__(self, model: str, folder: Path) -> None:
        port, self.events, self.replay = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        sent = ("--kv-events", address(self.events), "--kv-events-replay", address(self.replay))
        room = ("--memory", "16MiB", "--max-model-len", "512", "--grace", "0.1")
        command = (sys.executable, "-m", "hybridkv", "serve", "--model", model, *room, "--port", str(port), *sent)
        self.server = Server(command, port, folder / f"worker {port}.log", seconds=120)

    def settle(self) -> None:
        """Wait until the last answer is published: the next step of the engine comes with the next request."""
        time.sleep(0.2)


class Between:
    """A proxy of a worker's events that changes or drops some."""

    def __init__(self, context: zmq.Context[Any], worker: Worker, change: Change) -> None:
        self.port = free_port()
        self._in, self._out, self._change, self._ended = context.socket(zmq.SUB), context.socket(zmq.PUB), change, False
        self._in.connect(address(worker.events))
        self._in.subscribe(b"")
        self._out.bind(address(self.port))
        self._thread = Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while not self._ended:
            if not self._in.poll(50):
                continue
            topic, number, batch = self._in.recv_multipart()
            seconds, events, rank = msgspec.msgpack.decode(batch)
            changed = [one for one in map(self._change, events) if one is not None]
            self._out.send_multipart((topic, number, msgspec.msgpack.encode([seconds, changed, rank])))

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self._in.close(0)
        self._out.close(0)


def address(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


def asked(url: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 - what it says
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=60) as answer:  # noqa: S310 - loopback
        return json.load(answer)


class Fleet:
    """Two workers and a router in front of them."""

    def __init__(self, model: str, folder: Path, stack: ExitStack, change: Change | None = None) -> None:
        self.model, self._folder, self._stack = f"tiny:{model}", folder, stack
        self.workers = [Worker(self.model, folder) for _ in range(2)]
        for worker in self.workers:
            stack.enter_context(worker.server)
        self._ports = [worker.events for worker in self.workers]
        if change is not None:
            context = stack.enter_context(zmq.Context())
            between = [Between(context, worker, change) for worker in self.workers]
            for one in between:
                stack.callback(one.close)
            self._ports = [one.port for one in between]
        self._changed = change is not None
        self.start_router()

    def start_router(self) -> None:
        """Start a router that knows nothing. Events that were changed are not asked for again."""
        port = free_port()
        command = [str(Path(os.environ["ROUTERS_BIN"]) / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(free_port())]
        command += ["--policy", "kv_aware", "--worker-urls", *(worker.url for worker in self.workers)]
        for worker, events in zip(self.workers, self._ports, strict=True):
            command += ["--kv-event-source", f"{worker.url}={address(events)}"]
            if not self._changed:
                command += ["--kv-event-replay-source", f"{worker.url}={address(worker.replay)}"]
        command += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", self.model, "--log-level", "debug"]
        self._log, self.url = self._folder / f"router {port}.log", f"http://127.0.0.1:{port}"
        self.router = self._stack.enter_context(Server(command, port, self._log, seconds=120))
        while not all(worker.url in self._log.read_text("utf-8") for worker in self.workers):
            time.sleep(0.05)
        time.sleep(0.5)  # its subscriptions reach the publishers

    def prime(self, worker: int, body: dict[str, Any]) -> None:
        """Ask a worker past the router."""
        self._post(self.workers[worker].url, body)

    def ask(self, body: dict[str, Any]) -> Answer:
        """Ask the router while all workers are idle."""
        begun = len(self._log.read_text("utf-8"))
        answer = self._post(self.url, body)
        end = time.monotonic() + SETTLED_S
        while not (told := DECIDED.search(re.sub(r"\x1b\[[0-9;]*m", "", self._log.read_text("utf-8")[begun:]))):
            assert time.monotonic() < end, "the router told no decision"
            time.sleep(0.02)
        worker = [one.url for one in self.workers].index(told["worker"])
        usage = answer["usage"]
        found, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        return Answer(worker, int(told["credited"]), found, prompt)

    def _post(self, url: str, body: dict[str, Any]) -> Any:  # noqa: ANN401 - what it says
        answer = asked(f"{url}/v1/{'chat/' if 'messages' in body else ''}completions", {"model": self.model, **body})
        for worker in self.workers:
            worker.settle()
        return answer


def same(found: Answer) -> bool:
    """Whether the router credited the whole blocks of what was found.

    It credits all of a prompt that ends with a block, though its last token is always computed.
    """
    all_known = found.found == found.prompt - 1 and found.credited == found.prompt
    return all_known or found.credited == found.found // BLOCK * BLOCK


def words(random: Random, count: int) -> str:
    return " ".join("".join(random.choices("abcdefgh", k=5)) for _ in range(count))


def bodies(random: Random) -> Iterator[dict[str, Any]]:
    """Prompts of token ids, texts and chats. Each begins a conversation, or continues one that was asked before."""
    ids, text, turns = list[int](), "", list[dict[str, str]]()
    for number in range(6):
        if number % 3 == 0:
            ids, text, turns = [random.randrange(5, 200) for _ in range(40)], words(random, 12), []
        ids = [*ids, *(random.randrange(5, 200) for _ in range(random.randrange(1, 40)))]
        text = f"{text} {words(random, random.randrange(1, 5))}"
        turns = [*turns, {"role": "user", "content": words(random, 6)}]
        for given in ({"prompt": ids}, {"prompt": text}, {"messages": turns}):
            yield {**given, "max_tokens": 1}  # without outputs, which no later prompt contains
        turns = [*turns, {"role": "assistant", "content": words(random, 3)}]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.mark.parametrize("model", KINDS)
def test_router_credits_what_workers_find(model: str, tmp_path: Path, stack: ExitStack) -> None:
    fleet, random = Fleet(model, tmp_path, stack), Random(model)
    answers = list[Answer]()
    for body in bodies(random):
        if random.random() < 0.3:
            fleet.prime(random.randrange(2), body)
        answers.append(fleet.ask(body))
    assert [one for one in answers if not same(one)] == []
    assert sum(one.credited > 0 for one in answers) > len(answers) / 2
    assert {one.worker for one in answers} == {0, 1}


def test_router_expects_more_where_a_prompt_leaves_another_between_two_resume_points(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Routers count leading blocks (docs/events.md). Full attention can resume at each of them."""
    head = list(range(5, 101))
    for model, exact in (("llama", True), ("qwen3_next", False)):
        fleet = Fleet(model, tmp_path, stack)
        fleet.prime(0, {"prompt": [*head, *[7] * 40], "max_tokens": 1})
        left = fleet.ask({"prompt": [*head, *[8] * 40], "max_tokens": 1})
        assert (left.credited, same(left)) == (len(head), exact)


@pytest.mark.parametrize("form", ["ids", "text", "chat"])
def test_router_sends_prompts_to_the_worker_that_has_them(form: str, tmp_path: Path, stack: ExitStack) -> None:
    fleet, random = Fleet("qwen3_next", tmp_path, stack), Random(form)
    for _ in range(10):
        text, ids, worker = words(random, 15), [random.randrange(5, 200) for _ in range(80)], random.randrange(2)
        said = [{"role": "user", "content": text}]
        turns: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "ids": ({"prompt": ids}, {"prompt": [*ids, 7, 8, 9]}),
            "text": ({"prompt": text}, {"prompt": f"{text} and more"}),
            "chat": (
                {"messages": said},
                {"messages": [*said, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]},
            ),
        }
        first, then = turns[form]
        fleet.prime(worker, {**first, "max_tokens": 1})
        found = fleet.ask({**then, "max_tokens": 1})
        assert (found.worker, found.credited > 0, same(found)) == (worker, True, True)


def test_restarted_router_learns_what_workers_have(tmp_path: Path, stack: ExitStack) -> None:
    fleet = Fleet("granite_hybrid", tmp_path, stack)
    heads = [[random.randrange(5, 200) for _ in range(80)] for random in map(Random, range(6))]
    for number, head in enumerate(heads):
        fleet.prime(number % 2, {"prompt": head, "max_tokens": 1})
    fleet.router.kill()
    fleet.start_router()
    for worker in (0, 1):  # a batch, so that the router sees which ones it lacks
        fleet.prime(worker, {"prompt": [3 + worker] * 40, "max_tokens": 1})
    answers = [fleet.ask({"prompt": [*head, 1, 2], "max_tokens": 1}) for head in heads]
    assert [(one.worker, one.credited) for one in answers] == [(number % 2, 80) for number in range(6)]
    assert all(map(same, answers))


def test_restarted_worker_is_credited_what_it_has_after_one_request(tmp_path: Path, stack: ExitStack) -> None:
    """The router ignores batches whose numbers it knows, so it learns of a new process by an answer at most."""
    fleet = Fleet("qwen3_next", tmp_path, stack)
    body: dict[str, Any] = {"prompt": list(range(5, 105)), "max_tokens": 1}
    fleet.prime(1, body)
    first = fleet.ask(body)
    assert (first.worker, first.credited) == (1, 96)
    fleet.workers[1].server.kill()
    fleet.workers[1].server.start()
    fleet.prime(1, {"prompt": [3] * 40, "max_tokens": 1})
    assert fleet.ask(body).found == 0
    then = fleet.ask(body)
    assert (then.worker, then.credited, same(then)) == (1, 96, True)


def dropped(event: dict[str, Any]) -> dict[str, Any] | None:
    return None if event["type"] == "BlockStored" else event


def of_another_group(event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "group_idx": 2}


def reversed_chain(event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "token_ids": event["token_ids"][::-1]} if event["type"] == "BlockStored" else event


@pytest.mark.parametrize("fault", [dropped, of_another_group, reversed_chain])
def test_changed_events_are_noticed(fault: Change, tmp_path: Path, stack: ExitStack) -> None:
    answers: list[Answer] = []
    fleet = Fleet("qwen3_next", tmp_path, stack, fault)
    asked_before: Sequence[dict[str, Any]] = list(bodies(Random(2)))
    for body in asked_before:
        fleet.prime(0, body)
        fleet.prime(1, body)
    answers = [fleet.ask(body) for body in asked_before]
    assert [one for one in answers if not same(one)]
