"""Completions, chats and responses are those of the engine alone, told in OpenAI's forms; so are their tokens."""

import json
from typing import Any

import pytest
from openai import OpenAI
from serve_support import LONGEST, PATH, Served, engine_of, serving

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine
from hybridkv.runner.chat import chat_ids
from hybridkv.serve import ServeOptions
from hybridkv.serve.bodies import CompletionBody
from hybridkv.serve.errors import ApiError

PROMPT = "one two three one two"
DRAWN: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 30,
    "min_p": 0.01,
    "seed": 7,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "max_tokens": 8,
    "logit_bias": {"65": 2.0},
    "min_tokens": 3,
    "ignore_eos": True,
}


def chunks(served: Served, path: str, **body: object) -> list[dict[str, Any]]:
    """Those of a stream, which ends as it should."""
    answer = served.client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(one) for one in lines[:-1]]


def test_completion_matches_the_engine(llama: Served, alone: Engine) -> None:
    (expected,) = alone.generate([PROMPT], SamplingParams(**DRAWN))
    answer = llama.post(PATH, model="tiny:llama", prompt=PROMPT, **DRAWN)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, "length")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny:llama")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (len(PROMPT), 8, 29)


def test_completion_passes_every_sampling_field_to_the_engine() -> None:
    others: dict[str, Any] = {**DRAWN, "stop": ["a", "b"], "stop_token_ids": [3]}
    del others["max_tokens"]  # as much of it as there is room for
    for name, value in others.items():
        body = CompletionBody.model_validate({"prompt": "a", "seed": 5, name: value})
        assert body.sampling(9, n=2) == SamplingParams(
            **{"temperature": 1.0, "seed": 5, "max_tokens": 9, "n": 2, name: value}
        )
    assert CompletionBody(prompt="a", top_k=-1).sampling(9).top_k == 0


def test_completion_with_stop_string_ends_before_it(llama: Served) -> None:
    whole = llama.post(PATH, prompt=PROMPT, **DRAWN)["choices"][0]["text"]
    stop = whole[5:7]
    (choice,) = llama.post(PATH, prompt=PROMPT, **DRAWN, stop=["\0never", stop])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    told = chunks(llama, PATH, prompt=PROMPT, **DRAWN, stop=[stop])
    assert "".join(one["choices"][0]["text"] for one in told) == choice["text"]


def test_completion_of_several_prompts_numbers_outputs_in_order(llama: Served, alone: Engine) -> None:
    prompts = ["first of all", "second", "and a third"]
    expected = alone.generate(prompts, SamplingParams(**DRAWN, n=2))
    answer = llama.post(PATH, prompt=prompts, n=2, **DRAWN)
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [one["text"] for one in answer["choices"]] == [one.text for one in expected]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 6 * 8
    told = chunks(llama, PATH, prompt=prompts, n=2, **DRAWN)
    texts = ["".join(one["choices"][0]["text"] for one in told if one["choices"][0]["index"] == at) for at in range(6)]
    assert texts == [one.text for one in expected]


def test_completion_accepts_token_ids_as_prompt(llama: Served) -> None:
    text = llama.post(PATH, prompt=[PROMPT], **DRAWN)["choices"]
    ids = [*PROMPT.encode()]
    assert llama.post(PATH, prompt=ids, **DRAWN)["choices"] == text
    assert llama.post(PATH, prompt=[ids], **DRAWN)["choices"] == text


def test_completion_stream_matches_and_reports_usage_at_the_end(llama: Served) -> None:
    whole = llama.post(PATH, prompt=PROMPT, **DRAWN, logprobs=2)
    told = chunks(llama, PATH, prompt=PROMPT, **DRAWN, logprobs=2, stream_options={"include_usage": True})
    *parts, last = told
    assert "".join(one["choices"][0]["text"] for one in parts) == whole["choices"][0]["text"]
    for name, values in whole["choices"][0]["logprobs"].items():
        assert [value for one in parts for value in one["choices"][0]["logprobs"][name]] == values
    assert [one["choices"][0]["finish_reason"] for one in parts[-2:]] == [None, "length"]
    assert {one["usage"] for one in parts} == {None}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 8
    assert len({one["id"] for one in told}) == 1


def test_completion_stream_reports_continuous_usage_on_request(llama: Served) -> None:
    told = chunks(llama, PATH, prompt=PROMPT, **DRAWN, stream_options={"continuous_usage_stats": True})
    counts = [one["usage"]["completion_tokens"] for one in told]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert len(told) > 3


def test_completion_logprobs_and_echo_match_the_engine(llama: Served, alone: Engine) -> None:
    asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    (expected,) = alone.generate([PROMPT], asked)
    assert expected.logprobs is not None
    assert expected.prompt_logprobs is not None
    body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": 3}
    (choice,) = llama.post(PATH, **body, echo=True)["choices"]
    found = choice["logprobs"]
    assert choice["text"] == PROMPT + (expected.text or "")
    values = [None, *(one.logprob for one in expected.prompt_logprobs + expected.logprobs)]
    assert found["token_logprobs"] == pytest.approx(values, abs=1e-4)
    assert "".join(found["tokens"][: len(PROMPT)]) == PROMPT
    assert found["text_offset"][: len(PROMPT) + 1] == [*range(len(PROMPT) + 1)]
    assert all(len(one) in {3, 4} for one in found["top_logprobs"][1:])
    assert all(token in best for token, best in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True))
    parts = chunks(llama, PATH, **body, echo=True)
    assert "".join(one["choices"][0]["text"] for one in parts) == choice["text"]
    tokens = [value for one in parts for value in one["choices"][0]["logprobs"]["tokens"]]
    assert tokens == found["tokens"]


@pytest.mark.parametrize(
    "more", [{}, {"stop": "a"}, {"stop_token_ids": [97]}, {"structured_outputs": {"choice": ["a"]}}]
)
def test_completion_of_zero_tokens_echoes_prompt_logprobs(llama: Served, alone: Engine, more: dict[str, Any]) -> None:
    (eos,) = alone.loaded.eos_token_ids
    bias = {"97" if more else str(eos): 100}  # the token that is not sent would end the output
    answer = llama.post(PATH, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, logit_bias=bias, **more)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == 0
    assert "echo" in llama.refused(PATH, 400, prompt=PROMPT, max_tokens=0)["message"]


def test_completion_tokens_of_equal_text_are_shown_as_ids(llama: Served) -> None:
    body: dict[str, Any] = {"prompt": [195, 169, 200], "max_tokens": 1, "temperature": 0, "logprobs": 5, "echo": True}
    columns = llama.post(PATH, **body, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert columns["tokens"][:3] == ["token_id:195", "token_id:169", "token_id:200"]
    assert len(columns["top_logprobs"][-1]) == 5


def test_completion_usage_counts_cached_tokens(llama: Served) -> None:
    prompt = "what is asked twice is found the second time, but for its last tokens"
    first = llama.post(PATH, prompt=prompt, max_tokens=1, temperature=0, n=2)["usage"]
    second = llama.post(PATH, prompt=prompt, max_tokens=1, temperature=0, n=2)["usage"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 16
    assert second["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({}, "prompt is missing", "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix is not offered", "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of is not offered", "best_of"),
        ({"prompt": "a", "n": True}, "valid integer", "n"),
        ({"prompt": "a", "n": 0}, "n must be at least 1", None),
        ({"prompt": "a", "temperature": -1}, "temperature must be 0", None),
        ({"prompt": "a", "temperature": "hot"}, "valid number", "temperature"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens must be at least 1", None),
        ({"prompt": "a", "logprobs": 21}, "less than or equal to 20", "logprobs"),
        ({"prompt": "a", "stream_options": {}}, "stream_options need stream", None),
        ({"prompt": "a", "stream_options": {"x": 1}, "stream": True}, "not offered", "stream_options.x"),
        ({"prompt": ""}, "empty", None),
        ({"prompt": []}, "empty", None),
        ({"prompt": ["a", ""]}, "empty", None),
        ({"prompt": [1, "a"]}, "", None),
        ({"prompt": [300]}, "outside the vocabulary", None),
        ({"prompt": "\ud800"}, "", None),
        ({"prompt": "a", "cache_salt": ""}, "at least 1 character", "cache_salt"),
        ({"prompt": "a", "\ud800": ""}, "unicode", None),
    ],
)
def test_completion_with_invalid_field_is_rejected(
    llama: Served, body: dict[str, Any], said: str, param: str | None
) -> None:
    answer = llama.client.post(PATH, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]
    assert param is None or error["param"] == param


def test_completion_beyond_the_context_is_rejected(llama: Served) -> None:
    for body in ({"prompt": "a" * LONGEST}, {"prompt": "a", "max_tokens": LONGEST}):
        error = llama.refused(PATH, 400, **body)
        assert error["code"] == "context_length_exceeded"
    last = llama.post(PATH, prompt="a" * (LONGEST - 1), temperature=0)
    assert last["usage"]["completion_tokens"] == 1  # the default of 16 gives way


def test_completion_with_neutral_fields_is_accepted(llama: Served) -> None:
    llama.post(PATH, prompt="a", max_tokens=1, best_of=1, suffix=None, user=None, logprobs=None, stop=None, top_k=-1)
    nothing = {"response_format": {"type": "text"}, "store": False, "modalities": ["text"], "user": None}
    llama.post(CHAT, messages=SAID, max_tokens=1, **nothing)
    routed = {"no_stop_trim": False, "return_hidden_states": False, "skip_special_tokens": True}
    llama.post(PATH, prompt="a", max_tokens=1, **routed)
    reasons = {"separate_reasoning": True, "stream_reasoning": True, "include_reasoning": True}
    llama.post(CHAT, messages=SAID, max_tokens=1, **routed, **reasons)
    llama.refused(PATH, 400, prompt="a", return_hidden_states=True)


def test_error_with_lone_surrogate_is_valid_json() -> None:
    assert ApiError(400, "a \ud800 b").response().body == (
        rb'{"error":{"message":"a \\ud800 b","type":"invalid_request_error","param":null,"code":null}}'
    )


def test_completion_of_token_ids_skips_the_tokenizer(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.front.tokens, "run", None)
    assert llama.post(PATH, prompt=[[1, 2], [3]], max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 4


# -- chats

CHAT = "/v1/chat/completions"
SAID = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
SIX: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% if thinks %}think {% endif %}"
    "{% for one in messages %}{{ one.role }}{{ one.name or '' }}: {{ one.content }}"
    "{% for call in one.tool_calls or [] %}{{ call.function.arguments.at }}{% endfor %}; {% endfor %}"
)


def test_chat_matches_the_engine(llama: Served, alone: Engine) -> None:
    (expected,) = alone.generate([chat_ids(alone.loaded, SAID)], SamplingParams(**SIX))
    answer = llama.post(CHAT, model="tiny:llama", messages=SAID, **SIX)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert (choice["finish_reason"], answer["object"]) == ("length", "chat.completion")
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    told = chunks(llama, CHAT, messages=SAID, **SIX, stream_options={"include_usage": True})
    assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in told[:-1]) == expected.text
    assert told[-2]["choices"][0]["finish_reason"] == "length"
    assert told[-1]["usage"]["completion_tokens"] == 6


def test_chat_with_several_outputs_numbers_them(llama: Served, alone: Engine) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 6, "n": 2}
    expected = [one.text for one in alone.generate([chat_ids(alone.loaded, SAID)], SamplingParams(**drawn))]
    answer = llama.post(CHAT, messages=SAID, **drawn)
    assert [one["message"]["content"] for one in answer["choices"]] == expected
    told = chunks(llama, CHAT, messages=SAID, **drawn)
    assert {one["choices"][0]["index"] for one in told} == {0, 1}


def test_chat_accepts_max_completion_tokens(llama: Served) -> None:
    asked = {"messages": SAID, "temperature": 0, "ignore_eos": True}
    assert llama.post(CHAT, **asked, max_completion_tokens=2)["usage"]["completion_tokens"] == 2
    assert "differ" in llama.refused(CHAT, 400, **asked, max_completion_tokens=2, max_tokens=3)["message"]


def test_chat_logprobs_match_the_engine(llama: Served, alone: Engine) -> None:
    asked = SamplingParams(**SIX, logprobs=2)
    (expected,) = alone.generate([chat_ids(alone.loaded, SAID)], asked)
    assert expected.logprobs is not None
    body = {"messages": SAID, **SIX, "logprobs": True, "top_logprobs": 2}
    content = llama.post(CHAT, **body)["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in content] == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4)
    assert [len(one["top_logprobs"]) for one in content] == [2] * 6
    assert all(one["bytes"] == [*one["token"].encode()] for one in content if one["bytes"] is not None)
    told = [part["choices"][0]["logprobs"] for part in chunks(llama, CHAT, **body)]
    streamed = [one for part in told if part for one in part["content"]]
    assert [one["token"] for one in streamed] == [one["token"] for one in content]
    own = llama.post(CHAT, messages=SAID, **SIX, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [one["top_logprobs"] for one in own] == [[]] * 6


def test_chat_template_gets_messages_and_options() -> None:
    engine = engine_of("llama")
    engine.loaded.tokenizer.chat_template = TEMPLATE
    with serving(engine, ServeOptions(tool_call_parser="hermes")) as served:

        def rendered(*messages: dict[str, Any], **body: object) -> str:
            answer = served.post(CHAT, messages=messages, max_tokens=1, return_token_ids=True, **body)
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
        assert "not valid JSON" in served.refused(CHAT, 400, messages=[user, called])["message"]


def test_chat_without_max_tokens_fills_the_context(llama: Served) -> None:
    answer = llama.post(CHAT, messages=[{"role": "user", "content": "a" * 480}], temperature=0, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == llama.front.max_model_len
    assert json.dumps(answer)


# -- responses, as OpenAI's own client reads them

RESPONSES = "/v1/responses"
SEVEN: dict[str, Any] = {"temperature": 0, "max_output_tokens": 7, "ignore_eos": True}


def expected(alone: Engine, *said: tuple[str, str]) -> str:
    ids = chat_ids(alone.loaded, [{"role": role, "content": content} for role, content in said])
    (done,) = alone.generate([ids], SamplingParams(max_tokens=7, ignore_eos=True))
    return done.text or ""


def test_response_matches_the_next_chat_turn(llama: Served, alone: Engine) -> None:
    with OpenAI(base_url=f"{llama.url}/v1", api_key="none") as client:
        first = client.responses.create(
            model="tiny:llama",
            input="Why?",
            instructions="Be short.",
            temperature=0,
            max_output_tokens=7,
            extra_body={"ignore_eos": True},
        )
        assert first.output_text == expected(alone, ("system", "Be short."), ("user", "Why?"))
        assert (first.status, first.incomplete_details and first.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        assert first.usage is not None
        assert first.usage.output_tokens == 7
        turns = [("user", "Why?"), ("assistant", first.output_text), ("user", "So?")]
        back = [{"role": "user", "content": "Why?"}, first.output[0].model_dump(), {"role": "user", "content": "So?"}]
        again = llama.post(RESPONSES, input=back, **SEVEN)
        assert again["output"][0]["content"][0]["text"] == expected(alone, *turns)


def test_response_stream_has_openai_events(llama: Served, alone: Engine) -> None:
    with OpenAI(base_url=f"{llama.url}/v1", api_key="none") as client:
        events = list(
            client.responses.create(
                model="tiny:llama",
                input="Why?",
                temperature=0,
                max_output_tokens=7,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )
    kinds = [one.type for one in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [one.sequence_number for one in events] == [*range(len(events))]
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert text == last.response.output_text == expected(alone, ("user", "Why?"))


def test_response_that_stops_is_completed(llama: Served, alone: Engine) -> None:
    whole = expected(alone, ("user", "Why?"))
    answer = llama.post(RESPONSES, input="Why?", stop=whole[3], **SEVEN)
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert answer["output"][0]["content"][0]["text"] == whole[: whole.index(whole[3])]


BASES: dict[str, dict[str, Any]] = {CHAT: {"messages": SAID}, RESPONSES: {"input": "a"}}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {"messages": []}, "at least 1 item"),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user"}]}, "needs content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "content"),
        (CHAT, {"tools": [TOOL]}, "how tiny:llama writes calls is not known: start the server with --tool-call-parser"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "does not read 'tools'"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "does not read 'enable_thinking'"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs need logprobs"),
        (CHAT, {"store": True}, "store is not offered"),
        (CHAT, {"audio": {}}, "audio is not offered"),
        (CHAT, {"user": "me"}, "user is not offered"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id is not offered"),
        (RESPONSES, {"store": True}, "store is not offered"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "'web_search' is not offered: leave it out"),
        (RESPONSES, {"n": 2}, "n is not offered"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        (RESPONSES, {"input": ""}, "input"),
        (RESPONSES, {"max_output_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_unsupported_field_is_rejected(llama: Served, path: str, body: dict[str, Any], said: str) -> None:
    assert said in llama.refused(path, 400, **{**BASES[path], **body})["message"]


# -- prompts as tokens, without running them

ASKED = [{"role": "user", "content": "Why?"}]


def test_tokenize_and_detokenize_round_trip(llama: Served) -> None:
    answer = llama.post("/tokenize", prompt="caf\u00e9", return_token_strs=True)
    assert answer["tokens"] == [*"caf\u00e9".encode()]
    assert (answer["count"], answer["max_model_len"]) == (5, llama.front.max_model_len)
    assert answer["token_strs"][:3] == ["c", "a", "f"]
    assert llama.post("/detokenize", tokens=answer["tokens"]) == {"prompt": "caf\u00e9"}
    assert llama.post("/detokenize", tokens=[]) == {"prompt": ""}
    assert "token_strs" not in llama.post("/tokenize", prompt="a")


def test_tokenize_of_chat_matches_its_rendering(llama: Served, alone: Engine) -> None:
    ids = chat_ids(alone.loaded, ASKED)
    assert llama.post("/tokenize", messages=ASKED)["tokens"] == ids
    rendered = llama.post("/v1/chat/completions/render", messages=ASKED, max_tokens=5, cache_salt="s")
    assert (rendered["token_ids"], rendered["max_tokens"], rendered["cache_salt"]) == (ids, 5, "s")


def test_render_shows_the_request_without_running_it(llama: Served) -> None:
    steps = llama.statistics.steps
    first, second = llama.client.post("/v1/completions/render", json={"prompt": ["a", "bc"], "max_tokens": 3}).json()
    assert (first["token_ids"], second["token_ids"]) == ([97], [98, 99])
    assert first["request_id"] != second["request_id"]
    assert llama.statistics.steps == steps


def test_tokenize_with_invalid_body_is_rejected(llama: Served) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": ASKED}),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [1 << 70]}),
        ("/v1/completions/render", {"prompt": "a", "suffix": "b"}),
        ("/v1/chat/completions/render", {"messages": []}),
    ]
    for path, body in bodies:
        llama.refused(path, 400, **body)
    llama.refused("/tokenize", 404, prompt="a", model="b")
