"""Prompts as tokens, without running them."""

from typing import Any

from serve_support import Served

from hybridkv.runner import Engine
from hybridkv.runner.chat import chat_ids

SAID = [{"role": "user", "content": "Why?"}]


def test_tokens_of_a_text_and_back(llama: Served) -> None:
    answer = llama.post("/tokenize", prompt="caf\u00e9", return_token_strs=True)
    assert answer["tokens"] == [*"caf\u00e9".encode()]
    assert (answer["count"], answer["max_model_len"]) == (5, llama.front.max_model_len)
    assert answer["token_strs"][:3] == ["c", "a", "f"]
    assert llama.post("/detokenize", tokens=answer["tokens"]) == {"prompt": "caf\u00e9"}
    assert llama.post("/detokenize", tokens=[]) == {"prompt": ""}
    assert "token_strs" not in llama.post("/tokenize", prompt="a")


def test_tokens_of_a_conversation(llama: Served, alone: Engine) -> None:
    ids = chat_ids(alone.loaded, SAID)
    assert llama.post("/tokenize", messages=SAID)["tokens"] == ids
    rendered = llama.post("/v1/chat/completions/render", messages=SAID, max_tokens=5, cache_salt="s")
    assert (rendered["token_ids"], rendered["max_tokens"], rendered["cache_salt"]) == (ids, 5, "s")


def test_what_completions_would_ask(llama: Served) -> None:
    steps = llama.statistics.steps
    first, second = llama.client.post("/v1/completions/render", json={"prompt": ["a", "bc"], "max_tokens": 3}).json()
    assert (first["token_ids"], second["token_ids"]) == ([97], [98, 99])
    assert first["request_id"] != second["request_id"]
    assert llama.statistics.steps == steps


def test_what_cannot_be_is_refused(llama: Served) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": SAID}),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [1 << 70]}),
        ("/v1/completions/render", {"prompt": "a", "suffix": "b"}),
        ("/v1/chat/completions/render", {"messages": []}),
    ]
    for path, body in bodies:
        llama.refused(path, 400, **body)
    llama.refused("/tokenize", 404, prompt="a", model="b")
