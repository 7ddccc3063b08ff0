"""Health, the document, the cache forgotten; events of what is stored; the Python of pages on serving and events."""

import re
import socket
from collections.abc import Collection
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from serve_support import LONG, LONGEST, PATH, WAIT, Served, engine_of, serving

from hybridkv.errors import ConfigError
from hybridkv.kv_events import KVEventPublisher
from hybridkv.runner import AsyncEngine, Engine, EngineOptions, load
from hybridkv.runner.tiny import tiny_model
from hybridkv.serve.server import listen


def test_health_version_and_models_are_answered(llama: Served) -> None:
    assert llama.client.get("/health").json() == {"status": "ok"}
    assert llama.client.get("/ready").json() == {"status": "ok"}
    assert llama.client.get("/version").json()["version"]
    (model,) = llama.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny:llama", llama.front.max_model_len)
    assert llama.client.get("/v1/models/tiny:llama").json() == model
    assert llama.client.get("/v1/models/tiny/other").json()["error"]["code"] == "model_not_found"


def test_draining_server_is_not_ready(llama: Served) -> None:
    llama.front.draining = True
    try:
        assert llama.client.get("/ready").status_code == 503
        assert llama.client.get("/health").status_code == 200
    finally:
        llama.front.draining = False


def test_reset_prefix_cache_clears_the_cache(llama: Served) -> None:
    asked = {"prompt": "remember this until you are told to forget", "max_tokens": 1}
    llama.post(PATH, **asked)
    assert llama.post(PATH, **asked)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert llama.client.post("/reset_prefix_cache").json() == {"reset": True}
    assert llama.post(PATH, **asked)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_reset_prefix_cache_with_running_request_is_rejected(llama: Served) -> None:
    with llama.streaming(**LONG):
        assert llama.client.post("/reset_prefix_cache").status_code == 409


def test_unknown_route_or_method_is_rejected(llama: Served) -> None:
    answer = llama.client.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    answer = llama.client.get(PATH)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"].startswith("GET /v1/completions")


def test_body_with_invalid_length_is_rejected(llama: Served) -> None:
    headers = {"content-type": "application/json"}
    answer = llama.client.post(PATH, content=b" " * (33 << 20), headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'"a"', b"null"):
        answer = llama.client.post(PATH, content=content, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), content


def test_openapi_document_names_every_route_and_field(llama: Served) -> None:
    document = llama.client.get("/openapi.json").json()
    assert {PATH, "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= document["paths"].keys()
    body = document["components"]["schemas"]["CompletionBody"]
    assert {"prompt", "echo", "logprobs", "cache_salt", "ignore_eos"} <= body["properties"].keys()
    assert body["additionalProperties"] is False


def test_answers_on_a_kept_connection_are_not_delayed() -> None:
    """Of the piece before: 40 ms for each answer on a connection that is kept."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# -- events

PROMPT = "a prompt of three blocks, each of sixteen tokens"


@pytest.mark.parametrize(("model", "exact"), [("tiny:llama", False), ("tiny:qwen3_next", True)])
def test_server_publishes_stored_and_removed_blocks(model: str, exact: bool) -> None:
    options = EngineOptions(kv_events=True)
    engine = Engine(load(model), memory="4MiB", max_model_len=LONGEST, options=options)
    anywhere = "tcp://127.0.0.1:0"
    with (
        KVEventPublisher(engine.plan.config, anywhere, anywhere, exact=exact) as publisher,
        serving(engine, events=publisher) as served,
    ):
        served.post("/v1/completions", prompt=PROMPT, max_tokens=2, cache_salt="mine")
        assert served.client.post("/reset_prefix_cache").status_code == 200
        assert publisher.replay_endpoint is not None
        told_until_cleared(publisher.replay_endpoint)


@pytest.mark.parametrize("exact", [False, True])
def test_server_publishes_blocks_of_host_memory_with_their_medium(exact: bool) -> None:
    options = EngineOptions(kv_events=True)
    engine = Engine(load("tiny:gemma3"), memory="4MiB", max_model_len=LONGEST, options=options, host_memory="8MiB")
    anywhere = "tcp://127.0.0.1:0"
    with (
        KVEventPublisher(engine.plan.config, anywhere, anywhere, exact=exact) as publisher,
        serving(engine, events=publisher) as served,
    ):
        served.post("/v1/completions", prompt=PROMPT, max_tokens=4, cache_salt="mine", ignore_eos=True)
        served.post("/v1/completions", prompt="b", max_tokens=1)  # the end of an output goes down with the next step
        assert served.client.post("/reset_prefix_cache").status_code == 200
        assert publisher.replay_endpoint is not None
        told_until_cleared(publisher.replay_endpoint, {"GPU", "CPU"})


def told_until_cleared(replay_endpoint: str, media: Collection[str] = ("GPU",)) -> None:
    """The prompt's three blocks in each of the media, and that they are gone."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(replay_endpoint)
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] != "AllBlocksCleared":
            socket.send_multipart((b"", (0).to_bytes(8, "big")))
            events = []
            while True:
                assert socket.poll(int(WAIT * 1000))
                _, _, number, batch = socket.recv_multipart()
                if int.from_bytes(number, "big", signed=True) < 0:
                    break
                events += msgspec.msgpack.decode(batch)[1]
    told = [one for one in events if one.get("kv_cache_spec_kind") == "full_attention" and "cache_salt" in one]
    told = [one for one in told if one["group_idx"] == told[0]["group_idx"]]
    assert {one["medium"] for one in told} == set(media)
    for medium in media:
        stored = [one for one in told if one["medium"] == medium]
        assert [token for one in stored for token in one["token_ids"]] == [*PROMPT.encode()]
        assert {one["cache_salt"] for one in stored} == {"mine"}
        assert stored[0]["block_size"] == 16


def test_publisher_for_engine_without_events_is_rejected() -> None:
    class Nobody:
        def publish(self, events: object) -> None:
            raise NotImplementedError

    with engine_of("llama") as engine, pytest.raises(ConfigError, match="kv_events=True"):
        AsyncEngine(engine, events=Nobody())


# -- pages

DOCS = Path(__file__).parents[2] / "docs"


def snippets(name: str) -> list[str]:
    """Those that need more than is there: ``py``, where pages whose snippets run by themselves say ``python``."""
    return re.findall(r"```py\n(.*?)```", (DOCS / name).read_text("utf-8"), re.DOTALL)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_serving_page_openai_example_runs(llama: Served) -> None:
    snippet = "".join(snippets("serving.md"))
    assert "http://127.0.0.1:8000" in snippet
    said = StringIO()
    with redirect_stdout(said):
        names: dict[str, Any] = {}
        exec(snippet.replace("http://127.0.0.1:8000", llama.url), names)  # noqa: S102 - our own page
        names["client"].close()
    assert len(said.getvalue()) > 3
    assert "hints" in snippet


def test_events_page_example_publishes_events() -> None:
    (snippet,) = snippets("events.md")
    for port in ("5557", "5558"):
        assert port in snippet
        snippet = snippet.replace(port, str(free_port()))
    names: dict[str, object] = {"model": tiny_model("llama")}
    exec(snippet, names)  # noqa: S102 - our own page
    names["engine"].close()  # type: ignore[attr-defined]  # made by the snippet
