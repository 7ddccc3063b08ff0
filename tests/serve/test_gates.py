"""API keys and tenants; pages of other sites; bodies of many values, which are parsed while everybody waits."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from serve_support import PATH, Served, engine_of, serving
from starlette.types import Message, Receive, Scope, Send

from hybridkv.errors import ConfigError
from hybridkv.serve import ApiKeys, ServeOptions
from hybridkv.serve.bodies import MOST_MESSAGES, ChatBody, CompletionBody, DetokenizeBody
from hybridkv.serve.errors import ApiError
from hybridkv.serve.gates import MOST_VALUES, BodyGate, Pace, ValueCounter
from hybridkv.serve.response_bodies import ResponseBody

FILE = "# who may ask\n\noperator\nalice  salt-of-alice\nbob\tsalt-of-bob\n"


def test_api_key_sets_the_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(FILE)
    with serving(engine_of("llama"), ServeOptions(keys=ApiKeys.read(file))) as served:
        _only_known_keys(served)
        _tenants_share_nothing(served)
        _operators_alone(served)


def ask_with(served: Served, key: str, **body: object) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = served.client.post(PATH, json=body, headers=headers)
    return answer.status_code, answer.json()


def _only_known_keys(served: Served) -> None:
    for key in ("", "carol", "alice salt-of-alice", "salt-of-alice", "ALICE"):
        status, said = ask_with(served, key, prompt="a", nonsense=1)
        assert (status, said["error"]["code"]) == (401, "invalid_api_key")
    assert served.client.post(PATH, json={}, headers={"Authorization": "Basic alice"}).status_code == 401
    assert served.client.get("/health").status_code == 200
    assert served.client.get("/ready").status_code == 200
    assert served.client.get("/metrics").status_code == 401
    assert served.client.get("/v1/models", headers={"Authorization": "bearer bob"}).status_code == 200


def _tenants_share_nothing(served: Served) -> None:
    prompt = "what alice asked is alice's alone, whoever holds a clock"

    def cached(key: str, **body: object) -> int:
        status, said = ask_with(served, key, prompt=prompt, max_tokens=1, **body)
        assert status == 200, said
        found: int = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached("alice") == 0
    assert cached("bob") == 0
    assert cached("operator") == 0
    assert cached("operator", cache_salt="other") == 0
    assert cached("alice") > 32
    assert cached("alice", cache_salt="salt-of-alice") > 32
    for key, salt in (("alice", "mine"), ("alice", "salt-of-bob"), ("operator", "salt-of-alice")):
        status, said = ask_with(served, key, prompt=prompt, cache_salt=salt)
        assert (status, said["error"]["param"]) == (403, "cache_salt")


def _operators_alone(served: Served) -> None:
    for path, method in (("/metrics", "GET"), ("/reset_prefix_cache", "POST")):
        for key, status in (("alice", 403), ("operator", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert served.client.request(method, path, headers=headers).status_code == status


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "holds no API key"), ("# a\n", "holds no API key"), ("a b c", "line 1"), ("a\n\na b", "line 3")],
)
def test_api_key_file_that_is_invalid_is_rejected(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        ApiKeys.read(file)
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys.read(tmp_path / "none")


def test_api_key_is_not_in_repr(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret\n")
    assert "secret" not in repr(ApiKeys.read(file))


# -- pages of others in a browser, by the headers that browsers send, and pages cannot change

APP = "https://app.example"
FEW = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def allowing() -> Iterator[Served]:
    """A server that a page and a name are told to."""
    with serving(engine_of("llama"), ServeOptions(allow_hosts=["LLM.example."], allow_origins=[APP])) as served:
        yield served


def ask(served: Served, path: str = "/version", *, method: str = "GET", **headers: str) -> httpx2.Response:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return served.client.request(method, path, headers=sent, json=FEW if method == "POST" else None)


def refused(answer: httpx2.Response) -> str:
    assert answer.status_code == 403, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert "--allow-" in error["message"]
    code: str = error["code"]
    return code


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "https://evil.example:8000",
        "null",
        "file://",
        "chrome-extension://abc",
        "http://127.0.0.1:1",
    ],
)
def test_foreign_origin_is_rejected(llama: Served, path: str, origin: str) -> None:
    assert refused(ask(llama, path, method="POST", Origin=origin)) == "origin_not_allowed"


@pytest.mark.parametrize("path", ["/metrics", "/", "/live", "/health", "/v1/models"])
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "evil.com.", "local.com"],
)
def test_rebound_host_name_is_rejected(llama: Served, path: str, host: str) -> None:
    """DNS rebinding: the page's own name leads to this server, and its requests are of its own origin."""
    assert refused(ask(llama, path, Host=host, Origin=f"http://{host}")) == "host_not_allowed"
    assert refused(ask(llama, path, Host=host)) == "host_not_allowed"


@pytest.mark.parametrize("host", ["a@b.example", "[::1", "127.0.0.1:x", "a/b.c", ".", "evil.example#.local"])
def test_invalid_host_is_rejected(llama: Served, host: str) -> None:
    assert refused(ask(llama, Host=host)) == "host_not_allowed"


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "127.0.0.1:8000",
        "10.1.2.3",
        "[::1]:8000",
        "[fe80::1%25eth0]",
        "llm",
        "llm:8000",
        "llm.default.svc.cluster.local",
        "host.docker.internal:80",
        "box.home.arpa",
        "a.localhost",
        "",
        socket.gethostname(),
    ],
)
def test_local_host_name_is_answered(llama: Served, host: str) -> None:
    assert ask(llama, Host=host).status_code == 200
    if host:
        assert ask(llama, Host=host, Origin=f"http://{host}").status_code == 200


def test_origin_with_tls_proxy_is_accepted(llama: Served) -> None:
    for host, origin in (("llm", "https://llm"), ("llm:443", "https://llm"), ("llm", "https://LLM:443")):
        assert ask(llama, "/v1/completions", method="POST", Host=host, Origin=origin).status_code == 200
    assert refused(ask(llama, Host="llm:8443", Origin="https://llm")) == "origin_not_allowed"


def test_client_without_host_header_is_answered(llama: Served) -> None:
    with llama.connected() as one:
        one.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert one.recv(100).startswith(b"HTTP/1.1 200")


def test_allowed_host_and_origin_are_answered(allowing: Served) -> None:
    assert ask(allowing, Host="llm.example:80").status_code == 200
    assert ask(allowing, Host="LLM.example.").status_code == 200
    assert refused(ask(allowing, Host="x.llm.example")) == "host_not_allowed"
    answer = ask(allowing, "/v1/completions", method="POST", Origin=APP)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)
    asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization, content-type"}
    answer = ask(allowing, "/v1/completions", method="OPTIONS", Origin=APP, **asked)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)
    assert refused(ask(allowing, Origin="https://other.example")) == "origin_not_allowed"
    assert refused(ask(allowing, method="OPTIONS", Origin="https://other.example", **asked)) == "origin_not_allowed"


def test_allowed_host_wildcard_answers_any_name() -> None:
    with serving(engine_of("llama"), ServeOptions(allow_hosts=["*"])) as served:
        assert ask(served, Host="anything.example").status_code == 200
        assert refused(ask(served, Host="a.example", Origin="http://b.example")) == "origin_not_allowed"


def test_host_and_origin_with_api_key_are_answered() -> None:
    options = ServeOptions(keys=ApiKeys({"sk": None}), allow_origins=[APP])
    with serving(engine_of("llama"), options) as served:
        headers = {"Host": "llm.example", "Origin": "https://web.example", "Authorization": "Bearer sk"}
        assert ask(served, "/metrics", **headers).status_code == 200
        assert ask(served, "/v1/completions", method="POST", **headers).status_code == 200
        assert "access-control-allow-origin" not in ask(served, **headers).headers
        assert ask(served, **{**headers, "Authorization": "Bearer no"}).status_code == 401
        answer = ask(served, method="OPTIONS", Origin=APP, Access_Control_Request_Method="POST")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("allow_origins", ["app.example", "https://app.example/", "https://", "*", "null", "", "https://["]),
        ("allow_origins", ["https://app.example:443", "http://app.example:80", "://app.example"]),
        ("allow_hosts", ["https://a.example", "a.example:80", "a/b", "", "a@b"]),
    ],
)
def test_allow_option_that_is_no_origin_or_host_is_rejected(name: str, values: list[str]) -> None:
    for one in values:
        with pytest.raises(ConfigError, match=name):
            ServeOptions(**{name: [one]})  # type: ignore[arg-type]  # by name


def test_embedded_request_of_another_page_is_rejected(llama: Served) -> None:
    foreign = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}
    answer = ask(llama, "/metrics", **foreign)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert ask(llama, "/", **foreign | {"Sec_Fetch_Mode": "navigate"}).status_code == 200
    assert ask(llama, "/metrics", Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="no-cors").status_code == 200


# -- bodies of many values, which are parsed while everybody waits


@given(st.lists(st.text() | st.integers() | st.lists(st.integers() | st.text(), max_size=3)), st.data())
def test_body_values_are_counted_across_pieces(values: list[Any], data: st.DataObject) -> None:
    body = json.dumps(values, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=5)))
    counter = ValueCounter()
    counts = [counter.add(body[a:b]) for a, b in pairwise([0, *cuts, len(body)])]
    commas = max(len(values) - 1, 0) + sum(max(len(one) - 1, 0) for one in values if isinstance(one, list))
    assert counts[-1] == 1 + commas


@pytest.mark.parametrize("piece", [b"1,", b'"a",', b'"\\"",', b'\\",', b'"a\\', b'{"a":1},'])
def test_body_value_count_is_as_fast_as_reading(piece: bytes) -> None:
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
def test_body_with_too_many_values_is_not_parsed(llama: Served, path: str, begin: bytes, piece: bytes) -> None:
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
def test_body_with_many_wrong_values_reports_one(body: type[BaseModel], given: dict[str, Any]) -> None:
    """An error for each of 262,144 values took the event loop four seconds."""
    with pytest.raises(ValidationError) as found:
        body.model_validate(given)
    assert found.value.error_count() < 8


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_body_values_in_another_encoding_are_counted(llama: Served, encoding: str) -> None:
    raw = ('{"prompt":["\u2200",' + "1," * (MOST_VALUES + 10) + "1]}").encode(encoding)
    answer = llama.client.post(PATH, content=raw, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "the body is not JSON: send it as UTF-8 text",
    )


def test_body_text_of_commas_is_one_value(llama: Served) -> None:
    error = llama.refused("/tokenize", 400, prompt="," * (MOST_VALUES + 10))
    assert error["code"] == "context_length_exceeded"


def test_chat_with_too_many_messages_is_rejected(llama: Served) -> None:
    error = llama.refused(
        "/v1/chat/completions", 400, messages=[{"role": "user", "content": "a"}] * (MOST_MESSAGES + 1)
    )
    assert error["param"] == "messages"


def test_short_body_does_not_wait_for_long_bodies() -> None:
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
