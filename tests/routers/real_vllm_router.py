"""vllm-router in front of two servers credits a worker with the tokens that it finds, for each kind of model."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
import zmq
from workers import Answer, Between, Change, Worker, same, words

from routers import VllmRouter

KINDS = ("llama", "qwen3_next", "granite_hybrid", "gemma3", "llama4", "deepseek_v3")
"""Full attention, gated delta rule, Mamba 2, windows, chunks, latents."""


class Fleet:
    """Two workers and a router in front of them. Events that are changed are not asked for again."""

    def __init__(self, model: str, folder: Path, stack: ExitStack, change: Change | None = None) -> None:
        self.workers = [Worker(f"tiny:{model}", folder) for _ in range(2)]
        for worker in self.workers:
            stack.enter_context(worker.server)
        ports = [worker.events for worker in self.workers]
        if change is not None:
            context = stack.enter_context(zmq.Context())
            between = [Between(context, worker, change) for worker in self.workers]
            for one in between:
                stack.callback(one.close)
            ports = [one.port for one in between]
        self._router = VllmRouter(self.workers, ports, folder, stack, replays=change is None)

    def prime(self, worker: int, body: dict[str, Any]) -> None:
        """Ask a worker past the router."""
        self.workers[worker].post(body)

    def ask(self, body: dict[str, Any]) -> Answer:
        """Ask the router while all workers are idle."""
        return self._router.ask(body)


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
