"""Clients that go away, a queue that is full, a forward that fails, a server that drains."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import httpx2
import pytest
from serve_support import LONG, LONGEST, PATH, WAIT, Served, engine_of, serving, until
from starlette.requests import Request

from hybridkv.serve import ServeOptions
from hybridkv.serve.bodies import CompletionBody
from hybridkv.serve.forms import CompletionForm, ask_completion
from hybridkv.serve.front import Front
from hybridkv.serve.generation import Answer
from hybridkv.serve.service import Service


def test_stream_of_departed_client_ends_within_a_step(llama: Served) -> None:
    with llama.streaming(**LONG, n=3):
        assert llama.statistics.running == 3
    left = llama.statistics.steps
    until(lambda: llama.statistics.running == 0)
    assert llama.statistics.steps - left < 100  # of some 500: the socket's end takes a moment to be heard of
    assert llama.service.places.taken == 0


def test_answer_of_departed_client_ends(llama: Served) -> None:
    before = llama.statistics
    with suppress(httpx2.TimeoutException):
        llama.client.post(PATH, json={**LONG, "prompt": ["one", "two"]}, timeout=0.3)
    until(lambda: llama.statistics.running == 0 and llama.service.places.taken == 0)
    now = llama.statistics
    assert now.requests_finished == before.requests_finished + 2
    assert now.steps - before.steps < LONGEST / 2  # of some 500


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


def run_streamed(body: CompletionBody, drive: Callable[[Service, Any], Awaitable[None]]) -> None:
    """Let ``drive`` call the answer to ``body`` as an ASGI server does."""

    async def work() -> None:
        service = Service(engine_of("llama"), ServeOptions())
        async with asyncio.timeout(WAIT), Front(service, ServeOptions()) as front:
            request = Request({"type": "http", "headers": [], "client": None, "state": {"tenant": None}}, never)
            asked = await ask_completion(front, body, request)
            answer = Answer(front, request, asked, CompletionForm(front, body, asked), stream=True)
            await drive(service, partial(answer, {}))
            assert service.places.taken == 0

    asyncio.run(work())


@pytest.mark.parametrize("n", [1, 3])
def test_stream_sends_one_message_per_step(n: int) -> None:
    """Messages are what a stream costs the interpreter that the engine's thread needs, too."""

    async def drive(service: Service, answer: Any) -> None:  # noqa: ANN401  # ASGI's
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:  # noqa: ANN401  # same
            sent.append(message)

        await answer(never, send)
        await asyncio.sleep(0)
        assert [one["type"] for one in sent] == ["http.response.start"] + ["http.response.body"] * (len(sent) - 1)
        assert [one.get("more_body") for one in sent[1:]] == [True] * (len(sent) - 2) + [False]
        assert len(sent) - 1 <= service.engine.statistics().steps
        events = b"".join(one["body"] for one in sent[1:]).split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        assert b'"finish_reason":"length"' in sent[-1]["body"]  # with the last token of all

    run_streamed(CompletionBody(prompt=list(range(40)), max_tokens=9, ignore_eos=True, stream=True, n=n), drive)


def test_request_of_departed_client_ends_during_a_send() -> None:
    """A server may wait long for room in a socket whose client has gone."""

    async def drive(service: Service, answer: Any) -> None:  # noqa: ANN401  # ASGI's
        gone, sent = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(_: object) -> None:
            gone.set()
            await sent.wait()

        answering = asyncio.create_task(answer(receive, send))
        await gone.wait()
        while service.engine.statistics().running:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.001)
        assert service.engine.statistics().steps < 100  # of some 400
        assert not answering.done()
        sent.set()
        await answering

    run_streamed(CompletionBody(prompt="go on", max_tokens=400, ignore_eos=True, stream=True), drive)


def test_answer_left_at_its_start_is_not_counted_as_complete() -> None:
    async def drive(_: Service, answer: Any) -> None:  # noqa: ANN401  # ASGI's
        gone, sent = asyncio.Event(), list[dict[str, Any]]()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:  # noqa: ANN401  # ASGI's
            sent.append(message)
            gone.set()
            await asyncio.sleep(0.01)

        await answer(receive, send)
        assert all(one["more_body"] for one in sent[1:])

    run_streamed(CompletionBody(**LONG, stream=True), drive)


def test_full_queue_answers_with_retry_after() -> None:
    with serving(engine_of("llama", max_running=1), ServeOptions(max_waiting=1)) as served:
        with served.streaming(**LONG):
            too_many = served.client.post(PATH, json={"prompt": "a", "n": 2})
            assert (too_many.status_code, too_many.headers["retry-after"]) == (429, "1")
            error = too_many.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            waiting = threading.Thread(target=served.post, args=[PATH], kwargs={"prompt": "a", "max_tokens": 1})
            waiting.start()
            until(lambda: served.service.places.taken == 2)
            assert served.refused(PATH, 429, prompt="a")["code"] == "queue_full"
            assert served.refused(PATH, 400, prompt="a", n=3)["message"].startswith("3 outputs")
        waiting.join(WAIT)
        assert not waiting.is_alive()


def test_failed_forward_is_a_server_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama")
    with serving(engine) as served:
        execute = engine.runner.execute
        calls = []

        def failing(*arguments: Any) -> Any:  # noqa: ANN401  # the runner's
            calls.append(arguments)
            if len(calls) % 4 == 1:
                raise RuntimeError("the device is gone: secret")
            return execute(*arguments)

        monkeypatch.setattr(engine.runner, "execute", failing)
        assert (
            served.refused(PATH, 500, prompt="a")["message"]
            == "the request failed with RuntimeError: read the server's log"
        )
        answer = served.client.post(PATH, json={**LONG, "stream": True, "return_token_ids": True})
        lines = [one for one in answer.text.split("\n\n") if one]
        assert answer.status_code == 200
        assert "token_ids" in lines[0]  # of a step that did not fail
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "server_error"
        monkeypatch.undo()
        assert served.post(PATH, prompt="a", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_forward_that_exits_the_process_is_answered(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama")
    with serving(engine) as served:

        def ends(*_: Any) -> Any:  # noqa: ANN401  # the runner's
            raise kind("secret")

        monkeypatch.setattr(engine.runner, "execute", ends)
        for _ in range(2):
            message = served.refused(PATH, 503, prompt="a")["message"]
            assert message == f"the engine's thread ended with {kind.__name__}: close the engine and make another one"
        assert served.client.get("/health").status_code == 503


def test_draining_server_answers_running_requests() -> None:
    with serving(engine_of("llama")) as served:
        with served.streaming(**{**LONG, "max_tokens": 60}) as lines:
            stopping = threading.Thread(target=served.stop)
            stopping.start()
            assert [one for one in lines if one][-1] == "data: [DONE]"
        stopping.join(WAIT)
        assert served.service.engine.ended
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{served.url}/health")


def test_slow_reader_delays_no_other_client(llama: Served) -> None:
    async def read(client: httpx2.AsyncClient, wait: float) -> str:
        text = ""
        body = {"prompt": f"slowly {wait}", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
        async with client.stream("POST", PATH, json=body) as answer:
            async for line in answer.aiter_lines():
                await asyncio.sleep(wait)
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def work() -> tuple[str, str]:
        async with httpx2.AsyncClient(base_url=llama.url, timeout=WAIT) as client:
            return await asyncio.gather(read(client, 0.01), read(client, 0))

    slow, fast = asyncio.run(work())
    asked = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    assert slow == llama.post(PATH, prompt="slowly 0.01", **asked)["choices"][0]["text"]
    assert fast == llama.post(PATH, prompt="slowly 0", **asked)["choices"][0]["text"]
