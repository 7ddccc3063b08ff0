"""Chats are the chat template's prompts, answered as the engine alone answers them."""

import json
from typing import Any

import pytest
from serve_support import Served, engine_of, serving
from test_completions import chunks

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine
from hybridkv.runner.chat import chat_ids

PATH = "/v1/chat/completions"
SAID = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% if thinks %}think {% endif %}"
    "{% for one in messages %}{{ one.role }}{{ one.name or '' }}: {{ one.content }}"
    "{% for call in one.tool_calls or [] %}{{ call.function.arguments.at }}{% endfor %}; {% endfor %}"
)


def test_an_answer_is_that_of_the_engine_alone(llama: Served, alone: Engine) -> None:
    (expected,) = alone.generate([chat_ids(alone.loaded, SAID)], SamplingParams(**GREEDY))
    answer = llama.post(PATH, model="tiny:llama", messages=SAID, **GREEDY)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert (choice["finish_reason"], answer["object"]) == ("length", "chat.completion")
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    told = chunks(llama, PATH, messages=SAID, **GREEDY, stream_options={"include_usage": True})
    assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in told[:-1]) == expected.text
    assert told[-2]["choices"][0]["finish_reason"] == "length"
    assert told[-1]["usage"]["completion_tokens"] == 6


def test_outputs_of_one_conversation(llama: Served, alone: Engine) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 6, "n": 2}
    expected = [one.text for one in alone.generate([chat_ids(alone.loaded, SAID)], SamplingParams(**drawn))]
    answer = llama.post(PATH, messages=SAID, **drawn)
    assert [one["message"]["content"] for one in answer["choices"]] == expected
    told = chunks(llama, PATH, messages=SAID, **drawn)
    assert {one["choices"][0]["index"] for one in told} == {0, 1}


def test_the_newer_name_of_max_tokens(llama: Served) -> None:
    asked = {"messages": SAID, "temperature": 0, "ignore_eos": True}
    assert llama.post(PATH, **asked, max_completion_tokens=2)["usage"]["completion_tokens"] == 2
    assert "differ" in llama.refused(PATH, 400, **asked, max_completion_tokens=2, max_tokens=3)["message"]


def test_logprobs_of_a_chat(llama: Served, alone: Engine) -> None:
    asked = SamplingParams(**GREEDY, logprobs=2)
    (expected,) = alone.generate([chat_ids(alone.loaded, SAID)], asked)
    assert expected.logprobs is not None
    body = {"messages": SAID, **GREEDY, "logprobs": True, "top_logprobs": 2}
    content = llama.post(PATH, **body)["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in content] == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4)
    assert [len(one["top_logprobs"]) for one in content] == [2] * 6
    assert all(one["bytes"] == [*one["token"].encode()] for one in content if one["bytes"] is not None)
    told = [part["choices"][0]["logprobs"] for part in chunks(llama, PATH, **body)]
    streamed = [one for part in told if part for one in part["content"]]
    assert [one["token"] for one in streamed] == [one["token"] for one in content]
    own = llama.post(PATH, messages=SAID, **GREEDY, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [one["top_logprobs"] for one in own] == [[]] * 6


def test_what_a_template_is_given() -> None:
    engine = engine_of("llama")
    engine.loaded.tokenizer.chat_template = TEMPLATE
    with serving(engine) as served:

        def rendered(*messages: dict[str, Any], **body: object) -> str:
            answer = served.post(PATH, messages=messages, max_tokens=1, return_token_ids=True, **body)
            return bytes(answer["prompt_token_ids"]).decode()

        user = {"role": "user", "content": "a"}
        assert rendered(user) == "user: a; "
        assert rendered(user, tools=[TOOL]) == "[look]user: a; "
        assert rendered(user, tools=[TOOL], tool_choice="none") == "user: a; "
        assert rendered(user, chat_template_kwargs={"thinks": True}) == "think user: a; "
        assert rendered({"role": "developer", "content": "b"}, {**user, "name": "Eve"}) == "system: b; userEve: a; "
        parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
        assert rendered({"role": "user", "content": parts}) == "user: x\ny; "
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}
        called = {"role": "assistant", "content": None, "tool_calls": [call]}
        answered = {"role": "tool", "tool_call_id": "1", "content": "blue"}
        assert rendered(user, called, answered) == "user: a; assistant: sea; tool: blue; "
        call["function"] = {"name": "look", "arguments": "{"}
        assert "no JSON" in served.refused(PATH, 400, messages=[user, called])["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "needs content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "content"),
        ({"response_format": {"type": "json_object"}}, "response_format is not offered"),
        ({"tools": [TOOL]}, "reads no 'tools'"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "reads no 'enable_thinking'"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ({"top_logprobs": 2}, "top_logprobs need logprobs"),
        ({"store": True}, "store is not offered"),
        ({"audio": {}}, "audio is not offered"),
        ({"user": "me"}, "user is not offered"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(llama: Served, body: dict[str, Any], said: str) -> None:
    assert said in llama.refused(PATH, 400, **{"messages": SAID, **body})["message"]


def test_values_that_ask_for_nothing_are_taken(llama: Served) -> None:
    nothing = {"response_format": {"type": "text"}, "store": False, "modalities": ["text"], "user": None}
    llama.post(PATH, messages=SAID, max_tokens=1, **nothing)


def test_an_answer_is_as_long_as_there_is_room(llama: Served) -> None:
    answer = llama.post(PATH, messages=[{"role": "user", "content": "a" * 480}], temperature=0, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == llama.front.max_model_len
    assert json.dumps(answer)
