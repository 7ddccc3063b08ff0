"""Whatever a body says, the answer is no error of the server: fields of the published document, any values."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_support import Served

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/completions/render": {"prompt": "a"},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
FEW = {"max_tokens": 2, "max_output_tokens": 2}
"""Of what a route takes: outputs are short unless a body says otherwise."""

TEXT = st.text(st.characters(codec=None), max_size=5)  # lone surrogates, too
NUMBERS = st.one_of(
    st.integers(-3, 9), st.sampled_from([0, 1, -1, 1 << 31, 1 << 63, 1 << 300, 10**400]), st.floats(-3, 3), st.floats()
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=6,
)
PARTS = st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "image_url"]), "text": TEXT})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer", "x"])},
        optional={
            "content": TEXT | st.lists(PARTS, max_size=2) | JSON,
            "name": TEXT,
            "tool_calls": JSON,
            "tool_call_id": TEXT,
        },
    ),
    max_size=2,
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "prompt": TEXT | st.lists(st.integers(-1, 300), max_size=4) | st.lists(TEXT, max_size=2),
    "tokens": st.lists(st.integers(-1, 300), max_size=4),
    "messages": MESSAGES,
    "input": TEXT | MESSAGES,
    "logit_bias": st.dictionaries(TEXT | st.integers(-1, 300).map(str), NUMBERS, max_size=2),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 300), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats"]), st.booleans()),
    "cache_salt": TEXT,
    "model": st.just("tiny:llama") | TEXT,
    "n": st.integers(-1, 4),
    "logprobs": st.booleans() | st.integers(-1, 21),
    "echo": st.booleans(),
}


@cache
def fields(served_url: str, path: str) -> tuple[str, ...]:
    """Those that the document names for a route."""
    document = DOCUMENTS[served_url]
    named = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return tuple(document["components"]["schemas"][named.rpartition("/")[2]]["properties"])


DOCUMENTS: dict[str, Any] = {}


@settings(max_examples=60)
@given(data=st.data())
def test_body_with_any_fields_causes_no_server_error(llama: Served, data: st.DataObject) -> None:
    _ask(llama, data)


@pytest.mark.thorough
@settings(max_examples=1500)
@given(data=st.data())
def test_body_with_any_fields_in_many_runs_causes_no_server_error(llama: Served, data: st.DataObject) -> None:
    _ask(llama, data)


def _ask(served: Served, data: st.DataObject) -> None:
    if served.url not in DOCUMENTS:
        DOCUMENTS[served.url] = served.client.get("/openapi.json").json()
    path = data.draw(st.sampled_from(sorted(ROUTES)))
    known = fields(served.url, path)
    body: dict[str, Any] = {**ROUTES[path], **{name: few for name, few in FEW.items() if name in known}}
    for name in data.draw(st.lists(st.sampled_from(known), max_size=4, unique=True)):
        body[name] = data.draw(st.one_of(LIKELY.get(name, JSON), LIKELY.get(name, NUMBERS), JSON), label=name)
    if data.draw(st.integers(0, 9)) == 0:
        body[data.draw(TEXT)] = data.draw(JSON)
    answer = served.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code in {200, 400, 404}, (body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert error["type"] in {"invalid_request_error", "not_found_error"}
    assert "server_error" not in answer.text, body
