"""Health, the document, and the cache forgotten."""

import socket

from serve_support import LONG, PATH, Served

from hybridkv.serve.server import listen


def test_health_version_and_models(llama: Served) -> None:
    assert llama.client.get("/health").json() == {"status": "ok"}
    assert llama.client.get("/ready").json() == {"status": "ok"}
    assert llama.client.get("/version").json()["version"]
    (model,) = llama.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny:llama", llama.front.max_model_len)
    assert llama.client.get("/v1/models/tiny:llama").json() == model
    assert llama.client.get("/v1/models/tiny/other").json()["error"]["code"] == "model_not_found"


def test_a_server_that_drains_is_not_ready(llama: Served) -> None:
    llama.front.draining = True
    try:
        assert llama.client.get("/ready").status_code == 503
        assert llama.client.get("/health").status_code == 200
    finally:
        llama.front.draining = False


def test_the_cache_is_forgotten(llama: Served) -> None:
    asked = {"prompt": "remember this until you are told to forget", "max_tokens": 1}
    llama.post(PATH, **asked)
    assert llama.post(PATH, **asked)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert llama.client.post("/reset_prefix_cache").json() == {"reset": True}
    assert llama.post(PATH, **asked)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_cache_is_not_forgotten_under_a_request(llama: Served) -> None:
    with llama.streaming(**LONG):
        assert llama.client.post("/reset_prefix_cache").status_code == 409


def test_no_such_route_or_method(llama: Served) -> None:
    answer = llama.client.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    answer = llama.client.get(PATH)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"].startswith("GET /v1/completions")


def test_a_body_has_a_length(llama: Served) -> None:
    headers = {"content-type": "application/json"}
    answer = llama.client.post(PATH, content=b" " * (33 << 20), headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'"a"', b"null"):
        answer = llama.client.post(PATH, content=content, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), content


def test_the_document_names_every_route_and_field(llama: Served) -> None:
    document = llama.client.get("/openapi.json").json()
    assert {PATH, "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= document["paths"].keys()
    body = document["components"]["schemas"]["CompletionBody"]
    assert {"prompt", "echo", "logprobs", "cache_salt", "ignore_eos"} <= body["properties"].keys()
    assert body["additionalProperties"] is False


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """Of the piece before: 40 ms for each answer on a connection that is kept."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
