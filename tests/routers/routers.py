"""The routers, each started from an environment of its own: which worker a prompt goes to, with which credit."""

import json
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from servers import Server, free_port, is_listening
from workers import BLOCK, ENVIRONMENTS, Answer, Worker, address, asked, completed

SETTLED_S = 20.0


class Router(Protocol):
    """A router of workers whose events come from some ports. It ends with a stack."""

    def __init__(self, workers: Sequence[Worker], ports: Sequence[int], folder: Path, stack: ExitStack) -> None: ...

    def restart(self) -> None:
        """Kill it, and start it anew, with nothing but its settings."""

    def leave_out(self, worker: int, /) -> None:
        """Tell it that a worker was killed, if an operator of it has to."""

    def take_back(self) -> None:
        """Wait until it noticed that a worker was started again. The sockets of Dynamo wait five seconds at most."""

    def ask(self, body: dict[str, Any]) -> Answer:
        """Send a request where it says, while all workers are idle."""


class VllmRouter:
    """It forwards requests, and its log says what it credits."""

    DECIDED = re.compile(r'KV prefix decision .*?worker="(?P<worker>[^"]+)".*?credited_prefix_tokens=(?P<credited>\d+)')

    def __init__(
        self, workers: Sequence[Worker], ports: Sequence[int], folder: Path, stack: ExitStack, *, replays: bool = True
    ) -> None:
        self._workers, port = workers, free_port()
        command = [str(ENVIRONMENTS / "vllm-router/bin/vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(free_port()), "--log-level", "debug"]
        command += ["--policy", "kv_aware", "--worker-urls", *(worker.url for worker in workers)]
        for worker, events in zip(workers, ports, strict=True):
            command += ["--kv-event-source", f"{worker.url}={address(events)}"]
            if replays:
                command += ["--kv-event-replay-source", f"{worker.url}={address(worker.replay)}"]
        command += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", workers[0].model]
        command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
        self._log, self._url = folder / f"router {port}.log", f"http://127.0.0.1:{port}"
        self._server = stack.enter_context(Server(command, port, self._log, seconds=120))
        self._wait()

    def restart(self) -> None:
        self._server.kill()
        self._log.unlink()
        self._server.start()
        self._wait()

    def _wait(self) -> None:
        while not all(f"subscriber for {worker.url}" in self._log.read_text("utf-8") for worker in self._workers):
            time.sleep(0.05)
        time.sleep(1.5)  # its subscriptions reach the publishers, which pause a second between two

    def leave_out(self, _: int, /) -> None:
        """It asks workers for their health itself."""
        time.sleep(3)

    def take_back(self) -> None:
        time.sleep(8)

    def ask(self, body: dict[str, Any]) -> Answer:
        begun = len(self._log.read_text("utf-8"))
        answer = completed(self._url, self._workers[0].model, body)
        told = read(self.DECIDED, self._log, begun)
        worker = [one.url for one in self._workers].index(told["worker"])
        return answer_of(worker, int(told["credited"]), answer)


class Dynamo:
    """The selection service says where to send a request. It listens on all interfaces."""

    def __init__(self, workers: Sequence[Worker], ports: Sequence[int], folder: Path, stack: ExitStack) -> None:
        self._workers, self._ports, port = workers, ports, free_port()
        python = str(ENVIRONMENTS / "dynamo/bin/python")
        command = [python, "-m", "dynamo.select_service", "--port", str(port), "--threads", "1"]
        self._url, self._ids, self._known = f"http://127.0.0.1:{port}", count(), set(range(len(workers)))
        self._server = stack.enter_context(Server(command, port, folder / f"dynamo {port}.log", seconds=120))
        self._register()

    def _register(self) -> None:
        for number in self._known:
            worker = self._workers[number]
            events = {"kv_events_endpoint": address(self._ports[number]), "replay_endpoint": address(worker.replay)}
            served = {"model_name": worker.model, "endpoint": worker.url, "block_size": BLOCK}
            asked(f"{self._url}/workers", {"worker_id": number, **served, **events})
        time.sleep(1.5)  # its subscriptions reach the publishers, which pause a second between two

    def restart(self) -> None:
        self._server.kill()
        self._server.start()
        self._register()

    def leave_out(self, worker: int, /) -> None:
        asked(f"{self._url}/workers/{worker}", method="DELETE")
        self._known.discard(worker)

    def take_back(self) -> None:
        time.sleep(8)

    def ask(self, body: dict[str, Any]) -> Answer:
        request = f"request {next(self._ids)}"
        model = self._workers[0].model
        asked_for = {"model_name": model, "selection_id": request, "token_ids": body["prompt"]}
        chosen = asked(f"{self._url}/select_and_reserve", asked_for)
        answer = self._workers[chosen["worker_id"]].post(body)
        asked(f"{self._url}/reservations/{request.replace(' ', '%20')}", method="DELETE")
        return answer_of(chosen["worker_id"], chosen["overlap"]["longest_matched"], answer)


class Ray:
    """Ray Serve's KVAwareRouter, without vLLM: ray_front.py."""

    def __init__(self, workers: Sequence[Worker], ports: Sequence[int], folder: Path, stack: ExitStack) -> None:
        self._workers, port = workers, free_port()
        places = [
            {"endpoint": address(events), "replay_endpoint": address(worker.replay)}
            for worker, events in zip(workers, ports, strict=True)
        ]
        served = {"block_size": BLOCK, "max_num_batched_tokens": 512, "dp_rank": 0}
        told = [
            {"url": worker.url, "events": {**served, **place}} for worker, place in zip(workers, places, strict=True)
        ]
        front = str(Path(__file__).with_name("ray_front.py"))
        command = [str(ENVIRONMENTS / "ray/bin/python"), front, str(port), json.dumps(told)]
        self._url = f"http://127.0.0.1:{port}"
        self._server = stack.enter_context(Server(command, port, folder / f"ray {port}.log", seconds=200))
        stack.callback(self._stop)
        self._wait(len(workers))

    def _wait(self, known: int) -> None:
        end = time.monotonic() + 120
        while self._known() != known:
            assert time.monotonic() < end, "Ray did not notice which workers there are"
            time.sleep(0.2)
        time.sleep(1.5)  # its subscriptions reach the publishers, which pause a second between two

    def _known(self) -> int:
        try:
            return int(asked(self._url))
        except OSError:  # the application is starting
            return -1

    def restart(self) -> None:
        self._stop()
        self._server.start()
        self._wait(len(self._workers))

    def _stop(self) -> None:
        """End it by a signal after which it ends its own processes."""
        self._server.process.terminate()
        self._server.process.wait(60)
        while is_listening(self._server.port):
            time.sleep(0.05)

    def leave_out(self, _: int, /) -> None:
        """It asks workers for their health itself."""
        self._wait(len(self._workers) - 1)

    def take_back(self) -> None:
        self._wait(len(self._workers))
        time.sleep(8)

    def ask(self, body: dict[str, Any]) -> Answer:
        told = asked(self._url, body)
        worker = [one.url for one in self._workers].index(told["server"])
        return answer_of(worker, told["credited"], self._workers[worker].post(body))


class Smg:
    """It forwards requests to gRPC workers, smg_front.py, and its log says what it credits."""

    SELECTED = re.compile(r'Event-driven routing worker="(?P<worker>[^"]+)".*? overlap_blocks=(?P<blocks>\d+)')

    def __init__(self, workers: Sequence[Worker], ports: Sequence[int], folder: Path, stack: ExitStack) -> None:
        self._model, port, here = workers[0].model, free_port(), Path(__file__)
        tokenizer = folder / "tokenizer"  # texts of words "t5 t6" for token ids 5 and 6
        tokenizer.mkdir()
        words = {"type": "WordLevel", "vocab": {f"t{token}": token for token in range(256)}, "unk_token": "t0"}
        described = {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": words}
        (tokenizer / "tokenizer.json").write_text(json.dumps(described), "utf-8")
        self._fronts = list[str]()
        for worker, events in zip(workers, ports, strict=True):
            place = {"endpoint": address(events), "replay_endpoint": address(worker.replay)}
            told = {"url": worker.url, "model": self._model, "tokenizer": str(tokenizer), "events": place}
            python, front = str(ENVIRONMENTS / "smg/bin/python"), free_port()
            command = [python, str(here.with_name("smg_front.py")), str(front), json.dumps(told)]
            stack.enter_context(Server(command, front, folder / f"front {front}.log", seconds=60))
            self._fronts.append(f"grpc://127.0.0.1:{front}")
        command = [str(ENVIRONMENTS / "smg/bin/smg"), "launch", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "debug"]
        command += ["--policy", "cache_aware", "--block-size", str(BLOCK), "--backend", "vllm"]
        command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
        self._log, self._url = folder / f"smg {port}.log", f"http://127.0.0.1:{port}"
        self._server = stack.enter_context(Server([*command, "--worker-urls", *self._fronts], port, self._log))
        time.sleep(8)

    def restart(self) -> None:
        self._server.kill()
        self._log.unlink()
        self._server.start()
        time.sleep(8)

    def leave_out(self, _: int, /) -> None:
        """It asks workers for their health itself."""
        time.sleep(5)

    def take_back(self) -> None:
        time.sleep(8)

    def ask(self, body: dict[str, Any]) -> Answer:
        begun = len(self._log.read_text("utf-8"))
        text = " ".join(f"t{token}" for token in body["prompt"])
        answer = completed(self._url, self._model, {**body, "prompt": text})
        told = read(self.SELECTED, self._log, begun)
        return answer_of(self._fronts.index(told["worker"]), int(told["blocks"]) * BLOCK, answer)


def read(decision: re.Pattern[str], log: Path, begun: int) -> re.Match[str]:
    """The decision that a log tells after so many characters."""
    end = time.monotonic() + SETTLED_S
    while not (told := decision.search(re.sub(r"\x1b\[[0-9;]*m", "", log.read_text("utf-8")[begun:]))):
        assert time.monotonic() < end, "the router told no decision"
        time.sleep(0.02)
    return told


def answer_of(worker: int, credited: int, answer: dict[str, Any]) -> Answer:
    usage = answer["usage"]
    return Answer(worker, credited, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])


ROUTERS: dict[str, type[Router]] = {"vllm-router": VllmRouter, "dynamo": Dynamo, "ray": Ray, "smg": Smg}
