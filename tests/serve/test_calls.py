"""Chats with tools and reasoning, as OpenAI's own client reads them. The model is made to write a given answer."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from scripted_server import TEMPLATE, Script, scripted
from serve_support import Served, engine_of, serving

from hybridkv.errors import ConfigError
from hybridkv.serve import ServeOptions

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}},
    {"type": "function", "function": {"name": "wait"}},
]
CALLED = (
    'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "the \\"sea\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def server(script: Script) -> Iterator[Served]:
    with scripted(script) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def streamed(server: Served, **body: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message that the deltas of a stream make, and the deltas."""
    with server.client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    made: dict[str, Any] = {"content": "", "finish_reason": choices[-1]["finish_reason"], "tool_calls": []}
    for one in choices:
        for name in ("content", "reasoning", "reasoning_content"):
            if name in one["delta"]:
                made[name] = made.get(name, "") + one["delta"][name]
        for call in one["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(made["tool_calls"])
                made["tool_calls"].append({"id": call["id"], "type": call["type"], "function": {**call["function"]}})
            else:
                assert set(call) == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
                assert call["function"]["arguments"]
                made["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return made, [one["delta"] for one in choices]


def test_calls_are_read_whole_and_streamed(server: Served, script: Script, client: Any) -> None:  # noqa: ANN401  # takes plain dictionaries
    script.text = CALLED
    whole = client.chat.completions.create(model="tiny:llama", messages=[USER], tools=TOOLS, n=2)
    for choice in whole.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        called = [(one.function.name, json.loads(one.function.arguments)) for one in choice.message.tool_calls]
        assert called == [("look", {"at": 'the "sea"'}), ("wait", {})]
    ids = [one.id for choice in whole.choices for one in choice.message.tool_calls]
    assert len(set(ids)) == 4
    made, deltas = streamed(server, messages=[USER], tools=TOOLS)
    assert (made["content"], made["finish_reason"]) == ("Let me see.", "tool_calls")
    assert [one["function"] for one in made["tool_calls"]] == [
        {"name": "look", "arguments": '{"at": "the \\"sea\\""}'},
        {"name": "wait", "arguments": "{}"},
    ]
    pieces = [one for delta in deltas for one in delta.get("tool_calls", ())]
    assert len(pieces) > 10  # arguments come as they are written
    with client.chat.completions.stream(model="tiny:llama", messages=[USER], tools=TOOLS) as events:
        final = events.get_final_completion().choices[0].message
    assert [one.function.arguments for one in final.tool_calls] == ['{"at": "the \\"sea\\""}', "{}"]


def test_conversation_continues_after_a_call(server: Served, script: Script) -> None:
    script.text = CALLED
    message = server.post(CHAT, messages=[USER], tools=TOOLS)["choices"][0]["message"]
    answers = [{"role": "tool", "tool_call_id": one["id"], "content": "blue"} for one in message["tool_calls"]]
    script.text = "It is blue."
    said = [USER, {**message, "reasoning": "hm"}, *answers]
    answer = server.post(CHAT, messages=said, tools=TOOLS, return_token_ids=True)
    assert answer["choices"][0]["message"]["content"] == "It is blue."
    assert (
        bytes(answer["prompt_token_ids"]).decode()
        == "[look][wait]user: a; assistant: Let me see.(hm/hm); tool: blue; tool: blue; "
    )


def test_parallel_calls_may_be_switched_off(server: Served, script: Script) -> None:
    script.text = CALLED
    for made in (
        server.post(CHAT, messages=[USER], tools=TOOLS, parallel_tool_calls=False)["choices"][0]["message"],
        streamed(server, messages=[USER], tools=TOOLS, parallel_tool_calls=False)[0],
    ):
        assert [one["function"]["name"] for one in made["tool_calls"]] == ["look"]


def test_calls_without_tools_are_content(server: Served, script: Script) -> None:
    script.text = CALLED
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = server.post(CHAT, messages=[USER], **body)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALLED, "stop")
        assert "tool_calls" not in choice["message"]


def test_call_that_is_cut_off_is_passed_on(server: Served, script: Script) -> None:
    script.text = CALLED
    (choice,) = server.post(CHAT, messages=[USER], tools=TOOLS, max_tokens=70)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == CALLED[CALLED.index('{"at"') : 70]
    assert choice["finish_reason"] == "length"


def test_reasoning_is_separated(server: Served, script: Script) -> None:
    script.text = "<think>\nHm, hm.\n</think>\n\nYes."
    for made in (server.post(CHAT, messages=[USER])["choices"][0]["message"], streamed(server, messages=[USER])[0]):
        assert (made["content"], made["reasoning"], made["reasoning_content"]) == ("Yes.", "Hm, hm.", "Hm, hm.")
    for made in (
        server.post(CHAT, messages=[USER], include_reasoning=False)["choices"][0]["message"],
        streamed(server, messages=[USER], include_reasoning=False)[0],
    ):
        assert made["content"] == "Yes."
        assert "reasoning" not in made


def test_reasoning_that_the_prompt_begins_is_separated(server: Served, script: Script) -> None:
    script.text = "Hm.\n</think>\n\n" + CALLED
    asked: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}}
    for made in (server.post(CHAT, **asked)["choices"][0]["message"], streamed(server, **asked)[0]):
        assert (made["content"], made["reasoning_content"]) == ("Let me see.", "Hm.")
        assert len(made["tool_calls"]) == 2
    script.text = "No end"
    (choice,) = server.post(CHAT, **asked)["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("", "No end")


@pytest.mark.parametrize("field", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parser_is_rejected_before_a_model_is_loaded(field: str) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} must be one of .*, got 'hermés'"):
        ServeOptions(**{field: "hermés"})  # type: ignore[arg-type]  # by name


def test_tools_in_an_unknown_format_are_rejected(script: Script) -> None:
    script.text = CALLED
    plain = TEMPLATE.replace("<tool_call>", "").replace("</think>", "")
    with scripted(script, plain) as served:
        said = served.refused(CHAT, 400, messages=[USER], tools=TOOLS)["message"]
        assert "how tiny:llama writes calls is not known: start the server with --tool-call-parser" in said
        assert served.post(CHAT, messages=[USER], tools=TOOLS, tool_choice="none")["choices"]
    with scripted(script, plain, ServeOptions(tool_call_parser="hermes", reasoning_parser="none")) as served:
        assert len(served.post(CHAT, messages=[USER], tools=TOOLS)["choices"][0]["message"]["tool_calls"]) == 2


CLOSED = {"type": "object", "additionalProperties": False}
POINT = {**CLOSED, "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["x"]}
FORCED: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in {
        "go": {
            **CLOSED,
            "properties": {"to": {"$ref": "#/$defs/Point"}},
            "required": ["to"],
            "$defs": {"Point": POINT},
        },
        "say": {**CLOSED, "properties": {"word": {"enum": ["yes", "no"]}}, "required": ["word"]},
        "stop": None,
    }.items()
]
CHECKS: dict[str, Any] = {
    "go": lambda given: isinstance(given.pop("to")["x"], int),
    "say": lambda given: given.pop("word") in ("yes", "no"),
    "stop": lambda given: given == {},
}


@pytest.fixture(scope="module")
def free() -> Iterator[Served]:
    """A server whose model writes what it likes, in no known format."""
    engine = engine_of("llama")
    engine.loaded.tokenizer.chat_template = TEMPLATE.replace("<tool_call>", "").replace("</think>", "")
    with serving(engine) as served:
        yield served


@pytest.mark.parametrize("choice", ["required", "go", "say", "stop"])
def test_forced_calls_have_valid_arguments(free: Served, choice: str) -> None:
    named = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    for seed in range(6):
        body: dict[str, Any] = {
            "messages": [USER],
            "tools": FORCED,
            "tool_choice": named,
            "seed": seed,
            "max_tokens": 300,
        }
        if seed % 2:
            body["parallel_tool_calls"] = False
        if seed > 2:
            body["chat_template_kwargs"] = {"enable_thinking": True}
        (made,) = free.post(CHAT, **body, return_token_ids=True)["choices"]
        message = made["message"]
        assert (made["finish_reason"], message["content"]) == ("tool_calls", None), made
        for call in message["tool_calls"]:
            assert choice in ("required", call["function"]["name"])
            given = json.loads(call["function"]["arguments"])
            assert CHECKS[call["function"]["name"]](given), call
        if choice != "required" or seed % 2:
            assert len(message["tool_calls"]) == 1
            assert bytes(made["token_ids"][:-1]).count(b'"name"') == (choice == "required")  # none is written in vain
        told, _ = streamed(free, **body)
        wanted = [one["function"] for one in message["tool_calls"]]
        assert ([one["function"] for one in told["tool_calls"]], told["content"]) == (wanted, "")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice forces a call of a function, which is not in tools"),
        ({"tools": FORCED, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "a call of fly"),
        ({"tools": FORCED, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "leave one of them out"),
        ({"tools": [FORCED[0], {**FORCED[0], "function": {"name": "g", "parameters": {"$defs": {"Point": {}}}}}],
          "tool_choice": "required"}, "two tools define 'Point' in their $defs"),
        ({"tools": FORCED, "tool_choice": "any"}, "tool_choice"),
    ],
)  # fmt: skip
def test_forced_call_that_cannot_be_is_rejected(free: Served, body: dict[str, Any], said: str) -> None:
    assert said in free.refused(CHAT, 400, messages=[USER], **body)["message"]


def test_reasoning_of_a_response_is_an_item_of_its_own(server: Served, script: Script, client: Any) -> None:  # noqa: ANN401  # takes plain dictionaries
    script.text = "<think>\nHm, hm.\n</think>\n\nYes."
    whole = client.responses.create(model="tiny:llama", input="a")
    assert [one.type for one in whole.output] == ["reasoning", "message"]
    assert (whole.output[0].content[0].text, whole.output_text) == ("Hm, hm.", "Yes.")
    events = list(client.responses.create(model="tiny:llama", input="a", stream=True))
    assert [one.sequence_number for one in events] == [*range(len(events))]
    kinds = [one.type.removeprefix("response.") for one in events if not one.type.endswith("delta")]
    assert kinds == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    for kind, place, text in (("reasoning_text", 0, "Hm, hm."), ("output_text", 1, "Yes.")):
        deltas = [one for one in events if one.type == f"response.{kind}.delta"]
        assert ("".join(one.delta for one in deltas), {one.output_index for one in deltas}) == (text, {place})
    made = [one.model_dump(exclude={"id"}) for one in events[-1].response.output]
    assert made == [one.model_dump(exclude={"id"}) for one in whole.output]
    script.text = "Blue."
    turns = [USER, *(one.model_dump() for one in whole.output), USER]
    render = server.post(
        "/tokenize", messages=[USER, {"role": "assistant", "content": "Yes.", "reasoning": "Hm, hm."}, USER]
    )
    again = server.post("/v1/responses", input=turns)
    assert again["usage"]["input_tokens"] == render["count"]
    assert "input has no message" in server.refused("/v1/responses", 400, input=turns[1:2])["message"]
