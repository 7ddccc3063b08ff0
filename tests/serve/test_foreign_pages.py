"""Pages of others in a browser beside the server: by the headers that browsers send, and pages cannot change."""

import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from serve_support import Served, engine_of, serving

from hybridkv.errors import ConfigError
from hybridkv.serve import ApiKeys, ServeOptions

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
def test_a_page_of_others_posts_nothing(llama: Served, path: str, origin: str) -> None:
    assert refused(ask(llama, path, method="POST", Origin=origin)) == "origin_not_allowed"


def test_nothing_is_forgotten_for_a_page_of_others(llama: Served) -> None:
    asked = {"prompt": "remember this, whoever tells you to forget it", "max_tokens": 1}
    llama.post("/v1/completions", **asked)
    assert llama.client.post("/reset_prefix_cache", headers={"Origin": "http://evil.example"}).status_code == 403
    assert llama.post("/v1/completions", **asked)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("path", ["/metrics", "/", "/live", "/health", "/v1/models"])
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "evil.com.", "local.com"],
)
def test_a_name_that_others_can_point_here_reads_nothing(llama: Served, path: str, host: str) -> None:
    """DNS rebinding: the page's own name leads to this server, and its requests are of its own origin."""
    assert refused(ask(llama, path, Host=host, Origin=f"http://{host}")) == "host_not_allowed"
    assert refused(ask(llama, path, Host=host)) == "host_not_allowed"


@pytest.mark.parametrize("host", ["a@b.example", "[::1", "127.0.0.1:x", "a/b.c", ".", "evil.example#.local"])
def test_what_is_no_host_is_refused(llama: Served, host: str) -> None:
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
def test_names_that_nobody_can_register_are_answered(llama: Served, host: str) -> None:
    assert ask(llama, Host=host).status_code == 200
    if host:
        assert ask(llama, Host=host, Origin=f"http://{host}").status_code == 200


def test_a_proxy_may_have_taken_tls_off(llama: Served) -> None:
    for host, origin in (("llm", "https://llm"), ("llm:443", "https://llm"), ("llm", "https://LLM:443")):
        assert ask(llama, "/v1/completions", method="POST", Host=host, Origin=origin).status_code == 200
    assert refused(ask(llama, Host="llm:8443", Origin="https://llm")) == "origin_not_allowed"


def test_a_client_without_host_is_no_browser(llama: Served) -> None:
    with llama.connected() as one:
        one.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert one.recv(100).startswith(b"HTTP/1.1 200")


def test_names_and_pages_can_be_allowed(allowing: Served) -> None:
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


def test_any_name_can_be_allowed() -> None:
    with serving(engine_of("llama"), ServeOptions(allow_hosts=["*"])) as served:
        assert ask(served, Host="anything.example").status_code == 200
        assert refused(ask(served, Host="a.example", Origin="http://b.example")) == "origin_not_allowed"


def test_with_keys_any_name_and_page_is_answered() -> None:
    options = ServeOptions(keys=ApiKeys({"sk": None}), allow_origins=[APP])
    with serving(engine_of("llama"), options) as served:
        headers = {"Host": "llm.example", "Origin": "https://web.example", "Authorization": "Bearer sk"}
        assert ask(served, "/metrics", **headers).status_code == 200
        assert ask(served, "/v1/completions", method="POST", **headers).status_code == 200
        assert "access-control-allow-origin" not in ask(served, **headers).headers
        assert ask(served, **{**headers, "Authorization": "Bearer no"}).status_code == 401
        answer = ask(served, method="OPTIONS", Origin=APP, Access_Control_Request_Method="POST")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://", "*", "null", ""])
def test_an_origin_has_scheme_and_host(origin: str) -> None:
    with pytest.raises(ConfigError, match="allow_origins"):
        ServeOptions(allow_origins=[origin])


@pytest.mark.parametrize("host", ["https://a.example", "a.example:80", "a/b", "", "a@b"])
def test_a_host_is_a_name(host: str) -> None:
    with pytest.raises(ConfigError, match="allow_hosts"):
        ServeOptions(allow_hosts=[host])


def test_a_picture_or_script_of_another_page_gets_nothing(llama: Served) -> None:
    foreign = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}
    answer = ask(llama, "/metrics", **foreign)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert ask(llama, "/", **foreign | {"Sec_Fetch_Mode": "navigate"}).status_code == 200
    assert ask(llama, "/metrics", Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="no-cors").status_code == 200


@pytest.mark.parametrize("origin", ["https://[", "https://app.example:443", "http://app.example:80", "://app.example"])
def test_origins_that_no_browser_sends_are_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="must be an origin"):
        ServeOptions(allow_origins=[origin])
