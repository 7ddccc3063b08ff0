"""Texts that no model has room for, and many of them; clients that take turns: who waits for whom, and who does not."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from serve_support import LONGEST, PATH, WAIT, Served, engine_of, serving, until
from tokenizers import AddedToken

from hybridkv.errors import ConfigError
from hybridkv.runner import Engine
from hybridkv.runner.chat import chat_ids
from hybridkv.serve import ApiKeys, ServeOptions, front
from hybridkv.serve.front import SHORT, Piece, Turns

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
def test_oversized_text_is_not_tokenized(
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


def test_text_that_may_fit_is_tokenized(llama: Served) -> None:
    text = "<eos>" * (LONGEST - 1)
    assert llama.post("/tokenize", prompt=text)["count"] == LONGEST - 1
    assert llama.post(PATH, prompt=text, max_tokens=1)["usage"]["prompt_tokens"] == LONGEST - 1
    said = llama.post("/tokenize", prompt="x" * LONGEST * PER_TOKEN)
    assert (said["count"], said["max_model_len"]) == (LONGEST * PER_TOKEN, LONGEST)


def test_token_ids_beyond_the_context_are_rejected(llama: Served) -> None:
    for path, body in ((PATH, {"prompt": [1] * (LONGEST + 1)}), ("/detokenize", {"tokens": [1] * (LONGEST + 1)})):
        error = llama.refused(path, 400, **body)
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(f"{LONGEST + 1} tokens do not fit")
    assert len(llama.post("/detokenize", tokens=[65] * LONGEST)["prompt"]) == LONGEST


def test_prompts_beyond_the_places_are_rejected_untokenized(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.front.tokens, "run", None)
    assert llama.refused(PATH, 400, prompt=["a"] * 321)["message"].startswith("321 outputs asked for at once")
    assert llama.refused(PATH, 400, prompt=["a"] * 161, n=2)["message"].startswith("322 outputs")


def test_absorbed_spaces_do_not_count_as_length() -> None:
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
    monkeypatch.setattr(front, "SHORT", 100)  # so that two texts of 80 are no one piece
    monkeypatch.setattr(front, "_LANES", (100, None))
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


def test_long_text_delays_no_short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with slow(monkeypatch) as (served, slowed):
        long = asking(served, prompt="*" * 101, max_tokens=1)
        until(lambda: slowed.begun == 1)
        assert served.post(PATH, **FEW)["usage"]["completion_tokens"] == 1
        slowed.let_go()
        long.join(WAIT)
        assert not long.is_alive()


def test_tenant_with_many_texts_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_texts_of_departed_client_are_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    with slow(monkeypatch) as (served, slowed):
        for body in ({"prompt": ["*" * 80] * 20}, {"prompt": "*"}):
            with pytest.raises(httpx2.TimeoutException):
                served.client.post(PATH, json=body, timeout=0.2)
            assert slowed.begun == 1
        until(lambda: not served.front.tokens._turns._lanes[0][1]._waiting)
        slowed.let_go()
        assert served.post(PATH, **FEW)["usage"]["completion_tokens"] == 1
        assert slowed.begun == 1


def test_chat_that_is_not_utf8_is_rejected(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates write tool calls as JSON, where a lone surrogate is no error yet."""
    loaded = llama.front.loaded
    monkeypatch.setattr(loaded.tokenizer, "apply_chat_template", lambda *_, **__: "a\ud800")
    with pytest.raises(ConfigError, match="surrogates not allowed"):
        chat_ids(loaded, [{"role": "user", "content": "a"}], check=lambda _: None)


# -- turns


class Held:
    """Work that takes until it is let go. begun: names, in order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._go = threading.Event()

    def piece(self, name: str, size: int = SHORT + 1) -> Piece[str]:
        def work() -> str:
            self.begun.append(name)
            assert self._go.wait(WAIT)
            return name

        return Piece(size, work)

    def let_go(self) -> None:
        self._go.set()


def in_turns(work: Callable[[Turns, Held], Any], *, parallel: bool = True) -> None:
    async def whole() -> None:
        turns, held = Turns(parallel=parallel), Held()
        try:
            async with asyncio.timeout(WAIT):
                await work(turns, held)
        finally:
            held.let_go()
            turns.close()

    asyncio.run(whole())


async def held_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # nothing tells
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("parallel", [False, True])
def test_tokenizer_clients_take_turns(*, parallel: bool) -> None:
    """One that asked nine times before waits no more than one that asked once."""

    async def work(turns: Turns, held: Held) -> None:
        blockers = ["x", "y"][: 1 + parallel]  # which hold all threads
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(turns.run(one, [held.piece(one)])) for one in blockers]
        await held_until(lambda: held.begun == blockers)
        order: list[str] = []

        def piece(name: str) -> Piece[None]:
            return Piece(SHORT + 1, lambda: order.append(name))

        tasks += [asyncio.create_task(turns.run("a", [piece("a")])) for _ in range(9)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(turns.run(name, [piece(name)] * 2)) for name in ("b", "c")]
        await asyncio.sleep(0)
        held.let_go()
        await asyncio.gather(*tasks)
        assert len(order) == 13
        assert max(order.index("b"), order.index("c")) <= 3

    in_turns(work, parallel=parallel)


def test_tokenizer_work_error_is_raised() -> None:
    async def work(turns: Turns, held: Held) -> None:
        def failing() -> str:
            raise KeyError("no such word")

        with pytest.raises(KeyError, match="no such word"):
            await turns.run("a", [Piece(1, failing), held.piece("never", 1)])
        assert not held.begun

    in_turns(work)


def test_tokenizer_of_one_thread_is_never_used_by_two() -> None:
    async def work(turns: Turns, held: Held) -> None:
        at_once, most = [0], [0]

        def busy() -> None:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
            threading.Event().wait(0.002)
            at_once[0] -= 1

        sizes = (1, SHORT + 1, 1 << 20) * 4
        await asyncio.gather(*(turns.run(f"client {number}", [Piece(n, busy)]) for number, n in enumerate(sizes)))
        assert most == [1]
        assert not held.begun

    in_turns(work, parallel=False)


def test_waiting_turns_are_cancelled_on_close() -> None:
    async def work(turns: Turns, held: Held) -> None:
        tasks = [asyncio.create_task(turns.run("a", [held.piece(str(one))])) for one in range(2)]
        await held_until(lambda: held.begun == ["0"])
        turns.close()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        held.let_go()
        assert await tasks[0] == ["0"]

    in_turns(work)
