"""Fronts: servers over sockets to the service of an engine answer as one process does."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from random import Random
from typing import Any

import httpx2
import msgspec
import pytest
from serve_support import LONG, LONGEST, PATH, WAIT, Served, engine_of, serving, serving_app, until

from hybridkv.errors import ConfigError
from hybridkv.request import NO_HINTS, Hints, SamplingParams
from hybridkv.runner import Engine
from hybridkv.runner.completion import Completion, Increment
from hybridkv.runner.load import TextModel
from hybridkv.serve import ConnectionLimits, ServeOptions
from hybridkv.serve.app import app_of
from hybridkv.serve.front import Front
from hybridkv.serve.fronts import Desk, Fronts, _bare, listen_for
from hybridkv.serve.generation import Asked
from hybridkv.serve.messages import OF_FRONT, Ask, NewPart, Parts, framed
from hybridkv.serve.remote import FrontSettings, RemoteOutputs, RemoteService
from hybridkv.serve.service import Service

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "Why?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for one in messages %}{{ one.role }}: {{ one.content }}; {% endfor %}"
    "{% if enable_thinking %}<think>\n{% endif %}{# </think> <tool_call> #}"
)
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


class Fronted:
    """A service, and servers that have it over sockets."""

    def __init__(self, service: Service, fronts: list[Served], desks: list[Desk], lost: list[int]) -> None:
        self.service, self.fronts, self.desks, self.lost = service, fronts, desks, lost

    def cut(self) -> None:
        """End the engine's side of all links, as the end of its process does."""
        for desk in self.desks:
            desk._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


@contextmanager
def fronted(engine: Engine, fronts: int = 1, options: ServeOptions | None = None) -> Iterator[Fronted]:
    """``engine`` behind fronts, each in a thread of its own."""
    options = options or ServeOptions()
    service, pairs = Service(engine, options), [socket.socketpair() for _ in range(fronts)]
    told = FrontSettings(
        engine.loaded.without_weights,
        service.adapters,
        service.max_model_len,
        service.places.most,
        options,
        ConnectionLimits(),
    )
    desks, lost = list[Desk](), list[int]()

    async def answer(ours: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        desks.append(Desk(service, writer, lambda: None))
        await desks[-1].serve(reader)

    async def work() -> None:
        with suppress(SystemExit):  # of an engine that a test makes die of it
            async with service:
                await asyncio.gather(*(answer(ours) for ours, _ in pairs))

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    with ExitStack() as stack:
        stack.callback(thread.join, WAIT)
        remotes = [RemoteService(told, theirs, lambda: lost.append(1)) for _, theirs in pairs]
        apps = [app_of(Front(one, options)) for one in remotes]
        yield Fronted(service, [stack.enter_context(serving_app(app)) for app in apps], desks, lost)
    assert not thread.is_alive()


def chatty() -> Engine:
    """A model with a chat template that names tools and reasoning."""
    engine = engine_of("llama")
    engine.loaded.tokenizer.chat_template = TEMPLATE
    return engine


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Served, Served]]:
    """One process, and a front; engines of equal weights that get equal requests."""
    with serving(chatty()) as one, fronted(chatty()) as other:
        yield one, other.fronts[0]


def plain(answer: Any) -> Any:  # noqa: ANN401  # JSON
    """``answer`` without ids and times."""
    if isinstance(answer, dict):
        return {
            key: plain(value)
            for key, value in answer.items()
            if key not in {"id", "request_id", "created", "created_at"}
        }
    return [plain(one) for one in answer] if isinstance(answer, list) else answer


BODIES: list[tuple[str, dict[str, Any]]] = [
    (PATH, {"prompt": "one two", **GREEDY}),
    (PATH, {"prompt": "one two", "temperature": 0.9, "seed": 2**70, "top_p": 0.9, "n": 3, "max_tokens": 9}),
    (PATH, {"prompt": ["a", "b"], "n": 2, "seed": 5, "max_tokens": 5, "logprobs": 3, "return_token_ids": True}),
    (PATH, {"prompt": [1, 2, 3], **GREEDY, "echo": True, "logprobs": 2, "return_tokens_as_token_ids": True}),
    (PATH, {"prompt": "echo me", "echo": True, "logprobs": 1, "max_tokens": 0}),
    (PATH, {"prompt": "stop", **GREEDY, "stop": ["q", "X", "1", "e"], "min_tokens": 4}),
    (PATH, {"prompt": "never", **GREEDY, "stop": ["this text does not come"]}),
    (PATH, {"prompt": "bias", **GREEDY, "logit_bias": {"97": 90, "98": 90.5}, "frequency_penalty": 2, "min_p": 0.1}),
    (PATH, {"prompt": "Yes or no?", **GREEDY, "structured_outputs": {"choice": ["yes", "no"]}}),
    (PATH, {"prompt": "more", **GREEDY, "structured_outputs": {"regex": "[a-c]{3,5}"}, "n": 2}),
    (PATH, {"prompt": "wrong", "structured_outputs": {"regex": "(["}}),
    (PATH, {"prompt": "hinted and long enough for a block", **GREEDY, "hints": {"within_s": 3, "ttl_s": 9.5}}),
    (PATH, {"prompt": "hinted and long enough for a block", **GREEDY, "cache_salt": "mine"}),
    (PATH, {"prompt": "hinted and long enough for a block", **GREEDY}),
    (PATH, {"prompt": "x", "hints": {"over": True, "goes_on": True}}),
    (PATH, {"prompt": "x", "n": 400}),
    (PATH, {"prompt": "x", "logprobs": 99}),
    (PATH, {"prompt": "x", "stop_token_ids": [5000], "logit_bias": {"5000": 1}}),
    (PATH, {"prompt": [0] * LONGEST}),
    (PATH, {"prompt": "x", "model": "another"}),
    (CHAT, {"messages": [USER], **GREEDY, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": [USER], **GREEDY, "response_format": {"type": "json_object"}, "n": 2}),
    (CHAT, {"messages": [USER], **GREEDY, "tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"messages": [USER], **GREEDY, "tools": [TOOL]}),
    (CHAT, {"messages": [USER], **GREEDY, "chat_template_kwargs": {"enable_thinking": True}}),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"unread": True}}),
    (CHAT, {"messages": []}),
    (RESPONSES, {"input": "Why?", "temperature": 0, "max_output_tokens": 9}),
    (
        RESPONSES,
        {"input": "Why?", "temperature": 0, "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    ),
]
"""Bodies for answers and streams."""
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": ["the sea", "and the ships"], "dimensions": 8}),
    ("/v1/embeddings", {"input": [[1, 2], [3]], "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": "a", "dimensions": 65}),
    ("/tokenize", {"prompt": "some text", "return_token_strs": True}),
    ("/tokenize", {"messages": [USER]}),
    ("/detokenize", {"tokens": [104, 105, 240]}),
    ("/v1/completions/render", {"prompt": ["a", "b"], "max_tokens": 3}),
    ("/v1/chat/completions/render", {"messages": [USER], "max_tokens": 3}),
    ("/v1/completions/render", {"prompt": "a", "structured_outputs": {"grammar": "start: ("}}),
]


@pytest.mark.parametrize(("path", "body"), [*BODIES, *OTHERS])
def test_front_answers_as_one_process(pair: tuple[Served, Served], path: str, body: dict[str, Any]) -> None:
    one, other = (served.client.post(path, json=body) for served in pair)
    assert one.status_code in {200, 400, 404}
    assert (one.status_code, plain(one.json())) == (other.status_code, plain(other.json()))


PASSING = {"id", "item_id", "created", "created_at", "sequence_number", "model", "object", "type"}
BEGINNINGS = ("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added")


def join(found: dict[tuple[Any, ...], Any], at: tuple[Any, ...], value: Any) -> None:  # noqa: ANN401  # JSON
    """Add ``value`` to what was found at the same place: texts and lists of values one after another."""
    if isinstance(value, dict):
        place = value.get("index", value.get("output_index"))
        for key in value.keys() - PASSING:
            join(found, (*at, place, key), value[key])
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        for inner in value:
            join(found, at, inner)
    elif isinstance(value, str | list):
        found[at] = found.get(at, type(value)()) + value
    elif value is not None:
        found[at] = value


def gathered(answer: httpx2.Response) -> Any:  # noqa: ANN401  # JSON
    """What an answer says, however its tokens were cut into events."""
    if answer.headers["content-type"] == "application/json":
        return answer.status_code, plain(answer.json())
    found = dict[tuple[Any, ...], Any]()
    lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    for said in (json.loads(line) for line in lines if line.startswith("{")):
        if said.get("type") not in BEGINNINGS:
            join(found, (said.get("type"),), said)
    return found, lines[-1] == "[DONE]"


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_front_streams_as_one_process(pair: tuple[Served, Served], path: str, body: dict[str, Any]) -> None:
    more = {"stream": True}
    if path != RESPONSES:
        more["stream_options"] = {"include_usage": True}  # type: ignore[assignment]  # JSON
    one, other = (gathered(served.client.post(path, json=body | more)) for served in pair)
    assert one == other


def counts(served: Served) -> dict[str, float]:
    """Samples of /metrics that count."""
    lines = served.client.get("/metrics").text.splitlines()
    found = (line.rpartition(" ") for line in lines if not line.startswith("#") and not re.search("_bucket|_sum", line))
    return {name: float(value) for name, _, value in found}


def test_front_operations_are_those_of_one_process(pair: tuple[Served, Served]) -> None:
    for served in pair:
        assert served.client.post("/reset_prefix_cache").status_code == 200
        for body in (
            {"prompt": ["count these", "and these two"], "n": 2, **GREEDY},
            {"prompt": "count these", **GREEDY},
        ):
            served.post(PATH, **body)
    for path in (
        "/v1/models",
        "/v1/models/tiny:llama",
        "/v1/models/none",
        "/health",
        "/ready",
        "/version",
        "/openapi.json",
        "/",
    ):
        one, other = (served.client.get(path) for served in pair)
        assert one.status_code == other.status_code
        if "json" in one.headers["content-type"]:
            assert plain(one.json()) == plain(other.json())
    one_counts, other_counts = map(counts, pair)
    assert {*one_counts} == {*other_counts}
    changing = {name for name, value in one_counts.items() if value != other_counts[name]}
    assert all("steps" in name or "inter_token" in name for name in changing)  # arrivals may fall into one step or two
    with pair[1].streaming(**LONG):
        assert pair[1].refused("/reset_prefix_cache", 409)["message"].startswith("running requests hold blocks")
        with pair[1].client.stream("GET", "/live") as live:
            sample = json.loads(next(live.iter_lines()).removeprefix("data: "))
        assert sample["running"] == 1


def test_fronts_share_places_and_their_clients_leave_them() -> None:
    with fronted(engine_of("llama", max_running=2), 2, ServeOptions(max_waiting=0)) as made:
        first, second = made.fronts
        with first.streaming(**LONG), second.streaming(**LONG):
            for served in made.fronts:
                refused = served.client.post(PATH, json={"prompt": "a"})
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert made.service.places.taken == 2
        until(lambda: made.service.places.taken == 0 and made.service.engine.statistics().running == 0)
        assert first.post(PATH, prompt="a", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_tokens_of_a_step_are_one_message() -> None:
    with fronted(engine_of("llama")) as made:
        sent = list[Parts]()
        (desk,), send = made.desks, made.desks[0]._send

        def counted(message: msgspec.Struct) -> None:
            if isinstance(message, Parts):
                sent.append(message)
            send(message)

        desk._send = counted  # type: ignore[method-assign]  # counts
        made.fronts[0].post(PATH, prompt=["a", "b", "c", "d"], n=2, max_tokens=40, ignore_eos=True)
        assert sum(len(one.new.token_ids) for message in sent for one in message.parts) == 8 * 40
        assert len(sent) <= made.service.engine.statistics().steps


def test_engine_that_ends_fails_requests_of_its_fronts() -> None:
    with fronted(engine_of("llama")) as made:
        (served,) = made.fronts
        with served.streaming(**LONG) as lines:
            made.cut()
            last = [one for one in lines if one][-1]
        assert "the engine's process has ended" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert "the engine's process has ended" in served.refused(PATH, 503, prompt="a")["message"]
        assert served.client.get("/health").status_code == served.client.get("/metrics").status_code == 503
        assert made.lost == [1]


def test_forward_that_fails_is_answered_by_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama")
    with fronted(engine) as made:
        (served,) = made.fronts

        def fails(*_: Any) -> Any:  # noqa: ANN401  # the runner's
            raise RuntimeError("secret")

        monkeypatch.setattr(engine.runner, "execute", fails)
        said = served.refused(PATH, 500, prompt="a")["message"]
        assert said == "the request failed with RuntimeError: read the server's log"
        monkeypatch.undo()
        served.post(PATH, prompt="a", max_tokens=2)

        def ends(*_: Any) -> Any:  # noqa: ANN401  # the runner's
            raise SystemExit("secret")

        monkeypatch.setattr(engine.runner, "execute", ends)
        assert "ended with SystemExit" in served.refused(PATH, 503, prompt="a")["message"]
        assert served.client.get("/health").status_code == 503


async def read_in_pieces(
    model: TextModel, prompt: Sequence[int], params: SamplingParams, parts: Sequence[Increment], random: Random
) -> tuple[str, list[int], Completion]:
    """Give ``parts`` to a front, and read some of them together."""
    outputs = RemoteOutputs(Asked("a", [list(prompt)], params, None, NO_HINTS), model)
    text, tokens = "", list[int]()
    for part in parts:
        message = msgspec.msgpack.encode(NewPart(1, 0, _bare(part)))
        outputs.add(0, msgspec.msgpack.decode(message, type=NewPart).new)
        if random.random() < 0.4 or part.completion is not None:
            for _, new in await outputs.next():
                text, completion = text + (new.text or ""), new.completion
                tokens += new.token_ids
    assert outputs.ended
    assert completion is not None
    return text, tokens, completion


@pytest.mark.parametrize("stops", [False, True])
def test_output_read_in_any_pieces_is_that_of_the_engine(alone: Engine, stops: bool) -> None:
    random, stopped = Random(3), 0
    for seed in range(12):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=60, logprobs=1, ignore_eos=True)
        (right,) = alone.generate(["go on"], params)
        if stops:
            assert right.text is not None
            params = replace(params, stop=("never comes", right.text[20:23]))
            (right,) = alone.generate(["go on"], params)
            stopped += right.finish_reason == "stop"
        parts = [*alone.stream("go on", params).as_ids()]
        assert all((one.text is None) != stops for one in parts)
        model, prompt = alone.loaded.without_weights, right.prompt_token_ids
        text, tokens, completion = asyncio.run(read_in_pieces(model, prompt, params, parts, random))
        assert (text, tuple(tokens)) == (completion.text, completion.token_ids) == (right.text, right.token_ids)
        assert parts[-1].completion is not None
        assert (completion.finish_reason, completion.logprobs) == (right.finish_reason, parts[-1].completion.logprobs)
    assert stopped == (12 if stops else 0)


def test_bodies_are_the_same_after_their_message() -> None:
    hard = SamplingParams(
        temperature=0.3,
        seed=-(2**200),
        stop=("a", "b"),
        stop_token_ids=(3,),
        logit_bias={5: -1.0},
        bad_words=("x", (1, 2)),
        prompt_logprobs=0,
        n=3,
        skip_special_tokens=False,
    )
    for params, hints in ((SamplingParams(), NO_HINTS), (hard, Hints(ttl_s=2.5, shared_tokens=4))):
        asked = Asked("a-1", [[1, 2], [3]], params, "salt", hints, embeds=True)
        message = OF_FRONT.decode(framed(Ask.of(7, asked))[4:])
        assert isinstance(message, Ask)
        assert message.asked == asked


def test_fronts_listen_at_one_port_that_no_other_server_takes() -> None:
    sockets = listen_for("127.0.0.1", 0, 3)
    try:
        (port,) = {one.getsockname()[1] for one in sockets}
        for fronts in (1, 3):
            with pytest.raises(ConfigError, match="cannot listen"):
                listen_for("127.0.0.1", port, fronts)
        asked = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        taken = []
        for one in sockets:
            one.settimeout(0)
            with suppress(BlockingIOError):
                while True:
                    taken.append(one)
                    one.accept()[0].close()
        assert len(taken) == 40 + 3
        assert min(map(taken.count, sockets)) > 1  # but for 1 case in 3 million
        for client in asked:
            client.close()
    finally:
        for one in sockets:
            one.close()


def test_tokenizer_that_cannot_be_sent_is_rejected() -> None:
    class Odd:
        def encode(self, text: str) -> list[int]:
            return [*text.encode()]

        def decode(self, ids: list[int], **_: bool) -> str:
            return bytes(ids).decode()

    with engine_of("llama") as engine:
        service = Service(engine, ServeOptions())
        service.model = replace(engine.loaded, tokenizer=Odd())
        with pytest.raises(ConfigError, match="tokenizer of tiny:llama cannot be sent"):
            Fronts(service, ServeOptions(), ConnectionLimits(), lambda: None)
