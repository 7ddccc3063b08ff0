"""Texts that no model has room for, and many of them: others are answered as if nobody sent them."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from serve_support import LONGEST, PATH, WAIT, Served, engine_of, serving, until
from starlette.types import Message, Receive, Scope, Send
from tokenizers import AddedToken

from hybridkv.errors import ConfigError
from hybridkv.runner import Engine
from hybridkv.runner.chat import chat_ids
from hybridkv.serve import ApiKeys, ServeOptions, tokens
from hybridkv.serve.bodies import (
    MOST_MESSAGES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResponseBody,
)
from hybridkv.serve.errors import ApiError
from hybridkv.serve.gates import MOST_VALUES, BodyGate, Pace, ValueCounter

PER_TOKEN = len("<eos>")
"""Most characters of a token of tiny models."""
FEW = {"prompt": "hello", "max_tokens": 1, "temperature": 0}
TEXTS: list[tuple[str, Callable[[str], dict[str, Any]]]] = [
    (PATH, lambda text: {"prompt": text, "max_tokens": 1}),
    (PATH, lambda text: {"prompt": ["a", text], "max_tokens": 1}),
    (f"{PATH}/render", lambda text: {"prompt": text}),
    ("/tokenize", lambda text: {"prompt": text}),
    ("/tokenize", lambda text: {"messages": [{"role": "user", "content": text}]}),
    ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
    (
        "/v1/chat/completions",
        lambda text: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
    ),
    ("/v1/chat/completions/render", lambda text: {"messages": [{"role": "user", "content": text}] * 2}),
    ("/v1/responses", lambda text: {"input": text}),
    ("/v1/responses", lambda text: {"input": "a", "instructions": text}),
]


@pytest.mark.parametrize(("path", "body"), TEXTS)
def test_a_text_that_cannot_fit_is_never_tokenized(
    llama: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: Callable[[str], dict[str, Any]]
) -> None:
    longest: list[int] = []
    encode = llama.front.loaded.tokenizer._encode_plus

    def counted(text: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401  # transformers'
        longest.append(len(text))
        return encode(text, *arguments, **named)

    monkeypatch.setattr(llama.front.loaded.tokenizer, "_encode_plus", counted)
    error = llama.refused(path, 400, **body("x" * (LONGEST * PER_TOKEN + 1)))
    assert error["code"] == "context_length_exceeded"
    assert f"has {LONGEST} tokens for prompt and output together" in error["message"]
    assert max(longest, default=0) <= 1


def test_a_text_that_might_fit_is_tokenized(llama: Served) -> None:
    text = "<eos>" * (LONGEST - 1)
    assert llama.post("/tokenize", prompt=text)["count"] == LONGEST - 1
    assert llama.post(PATH, prompt=text, max_tokens=1)["usage"]["prompt_tokens"] == LONGEST - 1
    said = llama.post("/tokenize", prompt="x" * LONGEST * PER_TOKEN)
    assert (said["count"], said["max_model_len"]) == (LONGEST * PER_TOKEN, LONGEST)


def test_more_ids_than_fit_are_refused(llama: Served) -> None:
    for path, body in ((PATH, {"prompt": [1] * (LONGEST + 1)}), ("/detokenize", {"tokens": [1] * (LONGEST + 1)})):
        error = llama.refused(path, 400, **body)
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(f"{LONGEST + 1} tokens do not fit")
    assert len(llama.post("/detokenize", tokens=[65] * LONGEST)["prompt"]) == LONGEST


def test_more_prompts_than_places_are_refused_untokenized(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.front.tokens, "run", None)
    assert llama.refused(PATH, 400, prompt=["a"] * 321)["message"].startswith("321 outputs asked for at once")
    assert llama.refused(PATH, 400, prompt=["a"] * 161, n=2)["message"].startswith("322 outputs")


def test_spaces_that_tokens_swallow_are_no_length() -> None:
    engine = engine_of("llama")
    engine.loaded.tokenizer.add_special_tokens({"eos_token": AddedToken("<eos>", lstrip=True, rstrip=True)})
    with serving(engine) as served:
        spaces = " " * (LONGEST * 16)
        said = served.post("/tokenize", prompt=f"{spaces}<eos>{spaces}")
        assert said["count"] == 1
        long = f"{spaces}{'x' * (LONGEST * 6 + 1)}{spaces}"
        assert served.refused("/tokenize", 400, prompt=long)["code"] == "context_length_exceeded"


# -- many texts, and a tokenizer that takes its time


class SlowTokenizer:
    """Holds a server's tokenizer for texts with a star in them, until it is let go."""

    def __init__(self, engine: Engine) -> None:
        self.begun = 0
        self._go = threading.Event()
        self._encode = engine.loaded.tokenizer._encode_plus
        engine.loaded.tokenizer._encode_plus = self._encode_plus

    def _encode_plus(self, text: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401  # transformers'
        if "*" in text:
            self.begun += 1
            assert self._go.wait(WAIT)
        return self._encode(text, *arguments, **named)

    def let_go(self) -> None:
        self._go.set()


@contextmanager
def slow(
    monkeypatch: pytest.MonkeyPatch, options: ServeOptions | None = None
) -> Iterator[tuple[Served, SlowTokenizer]]:
    monkeypatch.setattr(tokens, "SHORT", 100)  # so that two texts of 80 are no one piece
    monkeypatch.setattr(tokens, "_LANES", (100, None))
    engine = engine_of("llama")
    slowed = SlowTokenizer(engine)
    with serving(engine, options) as served:
        try:
            yield served, slowed
        finally:
            slowed.let_go()


def asking(served: Served, *keys: str, **body: object) -> threading.Thread:
    """A client of its own."""

    def ask() -> None:
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        assert httpx2.post(f"{served.url}{PATH}", json=body, headers=headers, timeout=WAIT).status_code == 200

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_a_long_text_that_fits_holds_up_no_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with slow(monkeypatch) as (served, slowed):
        long = asking(served, prompt="*" * 101, max_tokens=1)
        until(lambda: slowed.begun == 1)
        assert served.post(PATH, **FEW)["usage"]["completion_tokens"] == 1
        slowed.let_go()
        long.join(WAIT)
        assert not long.is_alive()


def test_a_tenant_with_many_texts_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ApiKeys({"a": "salt-a", "b": "salt-b"})
    with slow(monkeypatch, ServeOptions(keys=keys)) as (served, slowed):
        threads = [asking(served, "a", prompt=["*" * 80] * 20, max_tokens=1) for _ in range(4)]
        until(lambda: slowed.begun == 1)
        other = served.client.post(PATH, json=FEW, headers={"Authorization": "Bearer b"})
        assert other.status_code == 200
        assert slowed.begun == 1
        slowed.let_go()
        for one in threads:
            one.join(WAIT)


def test_texts_of_a_client_that_left_are_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    with slow(monkeypatch) as (served, slowed):
        for body in ({"prompt": ["*" * 80] * 20}, {"prompt": "*"}):
            with pytest.raises(httpx2.TimeoutException):
                served.client.post(PATH, json=body, timeout=0.2)
            assert slowed.begun == 1
        until(lambda: not served.front.tokens._turns._lanes[0][1]._waiting)
        slowed.let_go()
        assert served.post(PATH, **FEW)["usage"]["completion_tokens"] == 1
        assert slowed.begun == 1


def test_beside_long_texts_others_take_their_time(llama: Served) -> None:
    """Texts of 2 MB, one behind the other: each took seconds of the one thread that all texts went through."""
    raw = json.dumps({"prompt": "x" * 2_000_000, "max_tokens": 1}).encode()
    stop, answers = threading.Event(), []

    def attack() -> None:
        with httpx2.Client(base_url=llama.url, timeout=WAIT) as client:
            while not stop.is_set():
                answer = client.post(PATH, content=raw, headers={"content-type": "application/json"})
                answers.append((answer.status_code, answer.elapsed.total_seconds()))

    def one() -> float:
        begun = time.perf_counter()
        llama.post(PATH, **FEW)
        return time.perf_counter() - begun

    alone = sorted(one() for _ in range(10))
    attacker = threading.Thread(target=attack)
    attacker.start()
    until(lambda: bool(answers))
    beside = sorted(one() for _ in range(10))
    stop.set()
    attacker.join(WAIT)
    assert {status for status, _ in answers} == {400}
    assert beside[5] < 10 * alone[5] + 0.1  # a machine of others; it was some hundred times as long


# -- bodies of many values, which are parsed while everybody waits


@given(st.lists(st.text() | st.integers() | st.lists(st.integers() | st.text(), max_size=3)), st.data())
def test_values_are_counted_wherever_a_body_is_cut(values: list[Any], data: st.DataObject) -> None:
    body = json.dumps(values, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=5)))
    counter = ValueCounter()
    counts = [counter.add(body[a:b]) for a, b in pairwise([0, *cuts, len(body)])]
    commas = max(len(values) - 1, 0) + sum(max(len(one) - 1, 0) for one in values if isinstance(one, list))
    assert counts[-1] == 1 + commas


@pytest.mark.parametrize("piece", [b"1,", b'"a",', b'"\\"",', b'\\",', b'"a\\', b'{"a":1},'])
def test_counting_takes_no_longer_than_reading(piece: bytes) -> None:
    raw = piece * (2_000_000 // len(piece))
    begun = time.process_time()
    counter = ValueCounter()
    for at in range(0, len(raw), 1 << 16):
        counter.add(raw[at : at + (1 << 16)])
    assert time.process_time() - begun < 2  # it takes a tenth; what tries every quote, hours


@pytest.mark.parametrize(
    ("path", "begin", "piece"),
    [
        (PATH, b'{"prompt":[', b"1,"),
        (PATH, b'{"prompt":[', b'"a",'),
        ("/v1/chat/completions", b'{"messages":[', b'{"role":"user","content":"a"},'),
        ("/v1/completions", b'{"prompt":"a","logit_bias":{', b'"1":2,'),
    ],
)
def test_a_body_of_very_many_values_is_not_parsed(llama: Served, path: str, begin: bytes, piece: bytes) -> None:
    raw = begin + piece * (MOST_VALUES + 10)
    answer = llama.client.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 413  # and not 400, which it is for a parser
    assert f"at most {MOST_VALUES} are read" in answer.json()["error"]["message"]


MANY = 1000


@pytest.mark.parametrize(
    ("body", "given"),
    [
        (CompletionBody, {"prompt": [{}] * MANY}),
        (CompletionBody, {"prompt": [[1] * MANY + ["a"]]}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": [{}] * MANY}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(one): "a" for one in range(1 << 13)}}),
        (CompletionBody, {"prompt": "a"} | {f"field {one}": 1 for one in range(MANY)}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": "a"}], "tools": [{}] * MANY}),
        (DetokenizeBody, {"tokens": [{}] * MANY}),
        (ResponseBody, {"input": [{}] * MANY}),
    ],
    ids=str,
)
def test_one_wrong_value_of_many_is_told(body: type[BaseModel], given: dict[str, Any]) -> None:
    """An error for each of 262,144 values took the event loop four seconds."""
    with pytest.raises(ValidationError) as found:
        body.model_validate(given)
    assert found.value.error_count() < 8


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_values_cannot_hide_in_another_encoding(llama: Served, encoding: str) -> None:
    raw = ('{"prompt":["\u2200",' + "1," * (MOST_VALUES + 10) + "1]}").encode(encoding)
    answer = llama.client.post(PATH, content=raw, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "the body is no JSON: it must be UTF-8 text",
    )


def test_a_text_of_commas_is_one_value(llama: Served) -> None:
    error = llama.refused("/tokenize", 400, prompt="," * (MOST_VALUES + 10))
    assert error["code"] == "context_length_exceeded"


def test_more_messages_than_any_chat_has_are_refused(llama: Served) -> None:
    error = llama.refused(
        "/v1/chat/completions", 400, messages=[{"role": "user", "content": "a"}] * (MOST_MESSAGES + 1)
    )
    assert error["param"] == "messages"


def test_long_bodies_share_one_pace_and_short_ones_do_not_wait() -> None:
    piece, ended = b"x" * (64 << 10), list[str]()

    async def ended_app(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - as it is called
        await receive()
        ended.append(scope["path"])

    async def ask(gate: BodyGate, path: str, pieces: int) -> None:
        left = [piece] * pieces

        async def receive() -> Message:
            return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

        async def send(message: Message) -> None:
            raise AssertionError(message)

        await gate({"type": "http", "path": path, "headers": []}, receive, send)

    async def all_of_them() -> float:
        gate, begun = BodyGate(ended_app, MOST_VALUES, Pace(4 << 20)), time.monotonic()
        await asyncio.gather(ask(gate, "long", 8), ask(gate, "other", 8), ask(gate, "short", 1))
        return time.monotonic() - begun

    async def very_many() -> int:
        pace = Pace(1 << 20)
        came = await asyncio.gather(*(pace.take(1 << 16) for _ in range(20)), return_exceptions=True)
        return sum(isinstance(one, ApiError) and one.status == 503 for one in came)

    assert asyncio.run(very_many()) == 11  # nine of them begin within half a second
    taken = asyncio.run(all_of_them())
    assert ended[0] == "short"
    assert taken > 0.2  # 14 paced pieces of 64 KiB at 4 MiB a second are .22 s


def test_a_conversation_that_utf8_cannot_hold_is_refused(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates write tool calls as JSON, where a lone surrogate is no error yet."""
    loaded = llama.front.loaded
    monkeypatch.setattr(loaded.tokenizer, "apply_chat_template", lambda *_, **__: "a\ud800")
    with pytest.raises(ConfigError, match="surrogates not allowed"):
        chat_ids(loaded, [{"role": "user", "content": "a"}], check=lambda _: None)
