"""`hybridkv serve` as a process of its own, OpenAI's clients that ask it, and how it ends."""

import asyncio
import gc
import json
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx2
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from serve_support import PATH, WAIT, Quiet, answering
from test_operations import PROMPT, told_until_cleared

from hybridkv.cli import main
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine
from hybridkv.runner.chat import chat_ids
from hybridkv.serve import Server
from warm import Warm

MODEL = ["--model", "tiny:llama", "--memory", "4MiB", "--max-model-len", "1024", "--port", "0"]
SAID: ChatCompletionUserMessageParam = {"role": "user", "content": "Why?"}
LONG = {"prompt": "go on", "max_tokens": 300, "ignore_eos": True, "stream": True}


@contextmanager
def command(*more: str, model: Sequence[str] = MODEL, alone: bool = False) -> Iterator[tuple[Warm, str, str]]:
    """Give the process, its first line, and where it serves. alone: see ``Warm``."""
    environment = {"OMP_NUM_THREADS": "1"}
    with Warm(["-m", "hybridkv", "serve", *model, *more], environment=environment, alone=alone) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"^serving (\S+) at (http://\S+):", line)
            assert found, line
            yield process, line, found.group(2)
        finally:
            process.kill()


def ended(process: Warm) -> tuple[int, str, str]:
    """Its exit code, and what it said."""
    out, err = process.communicate(timeout=WAIT)
    return process.wait(), out, err


def test_serve_command_freezes_loaded_objects_for_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = []

    def run(_: Server, sockets: list[socket.socket]) -> None:
        sockets[0].close()
        frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(Server, "run", run)
    monkeypatch.setattr(sys, "argv", ["hybridkv", "serve", *MODEL])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert frozen[0] > 100_000
    assert gc.get_freeze_count() < 1000  # libraries report what the interpreter keeps at its end as leaked


class Collector(Quiet, BaseHTTPRequestHandler):
    """Keeps the spans that it is sent."""

    got: list[bytes] = []  # noqa: RUF012 - of the one collector

    def do_POST(self) -> None:
        self.got.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()


@pytest.mark.parametrize("fronts", [0, 2])
def test_serve_command_answers_openai_clients_and_drains(
    alone: Engine, fronts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        events, replay = (f"tcp://127.0.0.1:{free.getsockname()[1]}" for free in (one, other))
    asked = ("--speculate", "ngram:2", "--served-model-name", "small", "--spans", "--kv-events", events)
    asked_fronts = ("--front-workers", str(fronts))
    kept = ("--eviction", "hazard", "--share", "mine=20%..50%", "--host-memory", "4MiB", "--kv-events-medium", "CPU")
    Collector.got.clear()
    with answering(Collector) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        with command(*asked, *asked_fronts, *kept, "--kv-events-replay", replay, "--kv-events-form", "exact") as (
            process,
            _,
            url,
        ):
            _events(url, replay)
            with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                _blocking(client, alone)
            asyncio.run(_asynchronous(url, alone))
            with httpx2.stream("POST", f"{url}{PATH}", json={**LONG, "max_tokens": 60}, timeout=WAIT) as answer:
                lines = answer.iter_lines()
                first = json.loads(next(lines).removeprefix("data: "))
                process.send_signal(signal.SIGTERM)
                assert [one for one in lines if one][-1] == "data: [DONE]"
            assert ended(process) == (0, "drained: all requests were answered\n", "")
    sent = b"".join(Collector.got)
    assert b"text_completion small" in sent
    assert first["id"].encode() in sent


def _events(url: str, replay: str) -> None:
    """A prompt's blocks are told, and that they are gone."""
    body = {"prompt": PROMPT, "max_tokens": 4, "cache_salt": "mine", "ignore_eos": True}
    for asked in (body, {"prompt": "b", "max_tokens": 1}):  # the end of an output goes down with the next step
        assert httpx2.post(f"{url}{PATH}", json=asked, timeout=WAIT).status_code == 200
    assert httpx2.post(f"{url}/reset_prefix_cache", timeout=WAIT).status_code == 200
    told_until_cleared(replay, ["CPU"])


def _blocking(client: OpenAI, alone: Engine) -> None:
    """Models, answers whole and streamed, errors by their classes."""
    assert [one.id for one in client.models.list()] == ["small"]
    (expected,) = alone.generate(["one two"], SamplingParams(temperature=0.7, seed=4, max_tokens=9))
    completion = client.completions.create(model="small", prompt="one two", temperature=0.7, seed=4, max_tokens=9)
    assert completion.choices[0].text == expected.text
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(expected.token_ids)
    (answer,) = alone.generate([chat_ids(alone.loaded, [dict(SAID)])], SamplingParams(max_tokens=9))
    chat = client.chat.completions.create(
        model="small", messages=[SAID], temperature=0, max_tokens=9, logprobs=True, top_logprobs=1
    )
    assert chat.choices[0].message.content == answer.text
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert len(chat.choices[0].logprobs.content) == len(answer.token_ids)
    parts = list(
        client.chat.completions.create(
            model="small",
            messages=[SAID],
            temperature=0,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"cache_salt": "mine"},
        )
    )
    assert "".join(one.choices[0].delta.content or "" for one in parts if one.choices) == answer.text
    usage = parts[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0  # of another salt
    with pytest.raises(NotFoundError, match="served here"):
        client.completions.create(model="large", prompt="one")
    with pytest.raises(BadRequestError, match="user is not offered") as refused:
        client.completions.create(model="small", prompt="one", user="me")
    assert (refused.value.param, refused.value.code) == ("user", "not_offered")


async def _asynchronous(url: str, alone: Engine) -> None:
    """Answers side by side, and one that is left."""
    prompts = ["first", "second of them", "third"]
    expected = alone.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asking = [
            client.completions.create(
                model="small", prompt=one, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
            )
            for one in prompts
        ]
        assert [one.choices[0].text for one in await asyncio.gather(*asking)] == [one.text for one in expected]
        left = await client.completions.create(
            model="small", prompt="go on", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(left))
        await left.close()
    async with asyncio.timeout(WAIT), httpx2.AsyncClient(base_url=url) as plain:
        idle = 'num_requests_running{model_name="small"} 0.0'
        while idle not in (await plain.get("/metrics")).text:  # noqa: ASYNC110  # another process makes it so
            await asyncio.sleep(0.01)


def test_serve_command_of_readme_cuts_requests_after_the_grace() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    shown = re.search(r"^    \$ hybridkv serve (.*)\n    (serving .*)$", text, re.MULTILINE)
    assert shown is not None
    more = ("--port", "0", "--grace", "0.3", "--allow-host", "llm.example", "--body-memory", "1MiB")
    with command(*more, model=shown[1].split()) as (process, line, url):
        assert re.sub(r":\d+: ", ":8000: ", line).strip() == shown[2]
        for host, status in (("llm.example", 200), ("evil.example", 403)):
            assert httpx2.get(f"{url}/version", headers={"Host": host}).status_code == status
        with httpx2.stream("POST", f"{url}{PATH}", json={**LONG, "max_tokens": 1000}, timeout=WAIT) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx2.TransportError):
                list(lines)
        assert ended(process)[:2] == (1, "stopped: 1 answers took longer than the 0.3 s of --grace and were cut off\n")


@pytest.mark.parametrize("fronts", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_serve_command_with_two_ranks_answers_as_with_one(alone: Engine, fronts: int) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    (expected,) = alone.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True))
    with command("--tensor-parallel-size", "2", "--front-workers", str(fronts)) as (process, _, url):
        said = [httpx2.post(f"{url}{PATH}", json=asked, timeout=WAIT).json() for _ in range(2)]
        assert [one["choices"][0]["text"] for one in said] == [expected.text] * 2
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (0, "drained: all requests were answered\n", "")


@pytest.mark.thorough
def test_serve_command_second_signal_ends_at_once() -> None:
    with command() as (process, _, url):
        with httpx2.stream("POST", f"{url}{PATH}", json=LONG, timeout=WAIT) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            next(lines)
            again = threading.Timer(0.2, process.send_signal, [signal.SIGTERM])
            again.start()
            with pytest.raises(httpx2.TransportError):
                list(lines)
        assert process.wait(WAIT) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--api-key-file", "no such file"), "cannot read the API keys"),
        (("--host", "192.0.2.1"), "cannot listen at"),
        (("--speculate", "luck"), "--speculate"),
        (("--grace", "0"), "grace must be positive"),
        (("--allow-origin", "app.example"), "allow_origins must be an origin"),
        (("--kv-events-form", "raw"), "give --kv-events ENDPOINT too"),
        (("--kv-events-medium", "GPU"), "give --kv-events ENDPOINT too"),
        (("--kv-events-medium", "CPU", "--kv-events", "tcp://127.0.0.1:0"), "give --host-memory SIZE too"),
        (("--kv-events-medium", "TAPE"), "'TAPE' is not one of 'GPU', 'CPU'"),
        (("--replicas", "2", "--kv-events", "tcp://127.0.0.1:0"), "--kv-events does not work with --replicas"),
        (("--replicas", "2", "--front-workers", "1"), "--front-workers does not work with --replicas"),
        (("--data-parallel-size", "2", "--requests", "tcp://127.0.0.1:0"), "--requests does not work with --replicas"),
        (("--replicas", "0"), "--replicas"),
    ],
)
def test_serve_command_with_invalid_option_prints_one_line(
    asked: Sequence[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hybridkv", "serve", *MODEL, *asked])
    with pytest.raises(SystemExit, match="2"):
        main()
    found = capsys.readouterr()
    assert found.out == ""
    assert said in " ".join(found.err.split())
