"""Tools and reasoning in responses, as OpenAI's own client reads them. The model is made to write a given answer."""

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai import OpenAI
from openai.types.responses import FunctionTool, ResponseFunctionToolCall
from scripted_server import TEMPLATE, Script, scripted
from serve_support import Served, engine_of, serving

from how_much import how_many
from hybridkv.request import Hints, SamplingParams
from hybridkv.runner import Completion, Increment
from hybridkv.schedule import FinishReason
from hybridkv.serve.answers import AnswerParser
from hybridkv.serve.formats import REASONING
from hybridkv.serve.forms import reasoning_tokens
from hybridkv.serve.generation import Asked
from hybridkv.serve.response_bodies import ResponseBody
from hybridkv.serve.responses import ResponseForm

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
CLOSED = {"type": "object", "additionalProperties": False}
LOOK = {**CLOSED, "properties": {"at": {"enum": ["sea", "sky"]}, "far": {"type": "boolean"}}, "required": ["at", "far"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "look", "description": "Look.", "parameters": LOOK, "strict": True},
    {"type": "function", "name": "wait", "parameters": None, "strict": None},
]
NESTED: list[dict[str, Any]] = [
    {"type": "function", "function": {key: one[key] for key in one if key != "type"}} for one in TOOLS
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea", "far": true}}\n</tool_call>'
ANSWER = (
    f'<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n<tool_call>\n{{"name": "wait", "arguments": {{}}}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def server(script: Script) -> Iterator[Served]:
    calls = "{% for call in one.tool_calls or [] %}[{{ call.id }} {{ call.function.arguments.at }}]{% endfor %}"
    with scripted(script, TEMPLATE.replace("{{ one.content }}", "{{ one.content }}" + calls)) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def nested(*, strict: bool) -> list[dict[str, Any]]:
    """Return the tools in the form of chats."""
    return [{"type": "function", "function": {**one["function"], "strict": strict}} for one in NESTED]


def without_ids(items: Any) -> list[dict[str, Any]]:  # noqa: ANN401  # of the client's classes, or plain
    plain = [one if isinstance(one, dict) else one.model_dump() for one in items]
    return [{key: value for key, value in one.items() if key not in ("id", "call_id")} for one in plain]


def test_calls_are_items_of_the_client(client: Any, script: Script) -> None:  # noqa: ANN401  # takes plain dictionaries
    script.text = ANSWER
    whole = client.responses.create(model="tiny:llama", input="a", tools=TOOLS)
    assert [one.type for one in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (whole.output[0].content[0].text, whole.output_text) == ("Hm.", "Let me see.")
    look, wait = whole.output[2:]
    assert isinstance(look, ResponseFunctionToolCall)
    assert (look.name, json.loads(look.arguments), look.status) == ("look", {"at": "sea", "far": True}, "completed")
    assert (wait.name, wait.arguments, wait.call_id != look.call_id) == ("wait", "{}", True)
    assert (whole.status, whole.tool_choice, whole.parallel_tool_calls) == ("completed", "auto", True)
    assert all(isinstance(one, FunctionTool) for one in whole.tools)
    assert [one.strict for one in whole.tools] == [True, None]
    one = client.responses.create(model="tiny:llama", input="a", tools=TOOLS, parallel_tool_calls=False)
    assert [call.name for call in one.output if call.type == "function_call"] == ["look"]
    script.text = f"Here:\n{CALL}\n\nDone."
    parts = client.responses.create(model="tiny:llama", input="a", tools=TOOLS).output
    assert [one.content[0].text if one.type == "message" else one.name for one in parts] == ["Here:", "look", "Done."]
    none = client.responses.create(model="tiny:llama", input="a", tools=TOOLS, tool_choice="none")
    assert CALL in none.output_text


def test_stream_of_calls_has_the_events_of_the_client(client: Any, script: Script) -> None:  # noqa: ANN401  # same
    script.text = ANSWER
    whole = client.responses.create(model="tiny:llama", input="a", tools=TOOLS)
    events = list(client.responses.create(model="tiny:llama", input="a", tools=TOOLS, stream=True))
    assert [one.sequence_number for one in events] == [*range(len(events))]
    kinds = [one.type.removeprefix("response.") for one in events if not one.type.endswith("delta")]

    def prose(kind: str) -> list[str]:
        return ["output_item.added", "content_part.added", f"{kind}.done", "content_part.done", "output_item.done"]

    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    begin = ["created", "in_progress"]
    assert kinds == [*begin, *prose("reasoning_text"), *prose("output_text"), *call, *call, "completed"]
    told = dict.fromkeys(range(4), "")
    for one in events:
        if one.type.endswith("delta"):
            assert one.item_id == events[-1].response.output[one.output_index].id
            told[one.output_index] += one.delta
    assert told == {0: "Hm.", 1: "Let me see.", 2: whole.output[2].arguments, 3: "{}"}
    assert sum(one.type == "response.function_call_arguments.delta" for one in events) > 10
    done = [one for one in events if one.type == "response.function_call_arguments.done"]
    assert [(one.output_index, one.arguments) for one in done] == [(2, told[2]), (3, "{}")]
    assert without_ids(events[-1].response.output) == without_ids(whole.output)
    with client.responses.stream(model="tiny:llama", input="a", tools=TOOLS[:1]) as stream:
        final = stream.get_final_response()
    assert final.output[2].parsed_arguments == {"at": "sea", "far": True}


def test_loop_of_calls_ends_in_an_answer(client: Any, server: Served, script: Script) -> None:  # noqa: ANN401  # same
    """The client's objects and its plain dictionaries go back as they are."""
    for plain in (False, True):
        script.text = ANSWER
        said: list[Any] = [{"role": "user", "content": "a"}]
        first = client.responses.create(model="tiny:llama", input=said, tools=TOOLS, instructions="Be short.")
        said += [one.model_dump() for one in first.output] if plain else first.output
        calls = [one for one in first.output if one.type == "function_call"]
        said += [{"type": "function_call_output", "call_id": one.call_id, "output": one.name} for one in calls]
        script.text = "It is blue."
        answer = client.responses.create(model="tiny:llama", input=said, tools=TOOLS, instructions="Be short.")
        assert [one.type for one in answer.output] == ["message"]
        assert answer.output_text == "It is blue."
        tools = [{"id": one.call_id, "function": {"name": one.name, "arguments": one.arguments}} for one in calls]
        messages = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "Let me see.", "reasoning": "Hm.", "tool_calls": tools},
            *({"role": "tool", "tool_call_id": one.call_id, "content": one.name} for one in calls),
        ]
        chat = server.post(CHAT, messages=messages, tools=NESTED, return_token_ids=True)
        text = bytes(chat["prompt_token_ids"]).decode()
        assert f"Let me see.[{calls[0].call_id} sea][{calls[1].call_id} ](Hm./Hm.); tool: look; tool: wait; " in text
        assert answer.usage.input_tokens == chat["usage"]["prompt_tokens"]


USER = {"role": "user", "content": "a"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]}
MADE = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "c"}]}
GIVEN = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "d"}]}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([USER, THOUGHT, SAID, MADE, MADE, GIVEN], ["user", "assistant c b 2", "tool"]),
        ([USER, MADE, GIVEN, THOUGHT, MADE], ["user", "assistant 1", "tool", "assistant c 1"]),
        ([MADE, GIVEN, SAID], ["assistant 1", "tool", "assistant b"]),
        ([USER, SAID, SAID, USER], ["user", "assistant b", "assistant b", "user"]),
        ([USER, MADE, SAID, GIVEN], ["user", "assistant b 1", "tool"]),
        ([THOUGHT, USER, THOUGHT], ["user"]),
        ([USER, SAID, THOUGHT, SAID], ["user", "assistant b", "assistant c b"]),
    ],
)  # fmt: skip
def test_items_of_one_turn_are_one_message(items: list[Any], messages: list[str]) -> None:
    made = []
    for one in ResponseBody.model_validate({"input": items}).messages:
        text = one.content[0].text if isinstance(one.content, list) else ""
        parts = [
            one.role,
            one.reasoning,
            text if one.role == "assistant" else "",
            one.tool_calls and len(one.tool_calls),
        ]
        made.append(" ".join(str(part) for part in parts if part))
    assert made == messages


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not offered: leave it out"),
        ({"tools": [{"type": "function"}]}, "tools.0.name is missing"),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "defer_loading is not offered"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "fly"}}, "a call of fly, which is not in tools"),
        ({"tool_choice": "required"}, "a call of a function, which is not in tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "call_id"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "'item_reference'"),
        ({"input": [{**MADE, "arguments": "["}]}, "not valid JSON"),
        ({"input": [THOUGHT]}, "input has no message"),
    ],
)
def test_tools_that_cannot_be_are_rejected(server: Served, body: dict[str, Any], said: str) -> None:
    assert said in server.refused(RESPONSES, 400, **{"input": "a", **body})["message"]


# -- whatever the model writes


def test_items_do_not_depend_on_the_cuts_of_a_stream(server: Served) -> None:
    rng = random.Random(7)
    pieces = [CALL, "<think>", "</think>", "\n", " ", "a", "<tool_call>", "}", '{"name": "wait", "arguments": {"x": "']
    for _ in range(how_many(150)):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(0, 8)))
        body = ResponseBody.model_validate({"input": "a", "tools": TOOLS})
        ids = tuple(text.encode())
        reason = rng.choice([FinishReason.STOP, FinishReason.LENGTH])
        done = Completion("r", (97,), ids, text, reason, 0, 0, 0)
        asked = Asked("r", [[97]], SamplingParams(), None, Hints())
        whole = ResponseForm(server.front, body, asked).whole([done])
        form, cuts = ResponseForm(server.front, body, asked), sorted(rng.choices(range(len(text) + 1), k=5))
        events = [*form.begin()]
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            last = done if end == len(text) and begin == ([0, *cuts][-1]) else None
            events += form.part(0, Increment("r", ids[begin:end], text[begin:end], last))
            if last is not None:
                break
        last_event = json.loads([*events, *form.end()][-1].split(b"data: ")[1])
        assert without_ids(last_event["response"]["output"]) == without_ids(whole["output"]), (text, cuts)
        assert last_event["response"]["usage"] == whole["usage"]
        kinds = [one["type"] for one in whole["output"]]
        assert all(one != other or one == "function_call" for one, other in pairwise(kinds))


@pytest.fixture(scope="module")
def free() -> Iterator[Served]:
    """A server whose model writes what it likes."""
    engine = engine_of("llama")
    engine.loaded.tokenizer.chat_template = TEMPLATE.replace("</think>", "")
    with serving(engine) as served:
        yield served


@pytest.mark.parametrize("choice", ["required", "look"])
def test_forced_calls_of_responses_obey(free: Served, choice: str) -> None:
    named = choice if choice == "required" else {"type": "function", "name": choice}
    for seed in range(4):
        body: dict[str, Any] = {"input": "a", "tools": TOOLS, "tool_choice": named, "seed": seed}
        made = free.post(RESPONSES, **body, max_output_tokens=400)
        calls = [one for one in made["output"] if one["type"] == "function_call"]
        assert {one["type"] for one in made["output"]} <= {"reasoning", "function_call"}
        assert calls
        assert made["tool_choice"] == named
        for one in calls:
            assert obeys((one["name"], one["arguments"]))


WRONG = [
    '<tool_call>\n{"name": "look", "arguments": {"at": "sun", "far": 1}}\n</tool_call>',
    'Hm. <tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>',
    '<tool_call>{"name": "look", "arguments": {"far": true, "at": "sea", "more": [1]}}</tool_call>',
    "<think>\nHm\n</think>\n<tool_call>\nlook(sea)\n</tool_call>",
]


@pytest.mark.parametrize(("number", "path"), [(0, CHAT), (1, RESPONSES), (2, CHAT), (3, RESPONSES)])
def test_calls_of_a_strict_tool_obey_whatever_the_model_would_write(
    server: Served, script: Script, number: int, path: str
) -> None:
    script.text = WRONG[number]
    for seed in range(2):
        found = []
        for strict in (True, False):
            if path == CHAT:
                made = server.post(CHAT, messages=[USER], tools=nested(strict=strict), seed=seed, max_tokens=300)
                message = made["choices"][0]["message"]
                calls = [one["function"] for one in message.get("tool_calls", ())]
            else:
                tools = [{**one, "strict": strict} for one in TOOLS]
                made = server.post(RESPONSES, input="a", tools=tools, seed=seed, max_output_tokens=300)
                calls = [one for one in made["output"] if one["type"] == "function_call"]
            found.append([(one["name"], one["arguments"]) for one in calls])
        assert found[0]
        assert all(map(obeys, found[0])), found
        assert not found[1] or not all(map(obeys, found[1]))  # what the model would write


def obeys(call: tuple[str, str]) -> bool:
    name, arguments = call
    schema = {"look": LOOK, "wait": CLOSED}.get(name, False)
    return bool(Draft202012Validator(schema).is_valid(json.loads(arguments)))


# -- reasoning before forms


def test_reasoning_comes_before_forced_calls_and_forms(server: Served, script: Script) -> None:
    thinks: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    script.text = '\nI <b>think</b> {"at": 1}.\n</think>\n\n[{"name": "look", "arguments": {"at": "sea", "far": true}}]'
    for stream in (False, True):
        made = message_of(server, stream=stream, messages=[USER], tools=NESTED, tool_choice="required", **thinks)
        assert made["reasoning"] == 'I <b>think</b> {"at": 1}.'
        assert made["calls"] == [("look", '{"at": "sea", "far": true}')]
    script.text = '\nHm.\n</think>\n{"at": "sky", "far": false}'
    named = {"type": "function", "function": {"name": "look"}}
    for stream in (False, True):
        made = message_of(server, stream=stream, messages=[USER], tools=NESTED, tool_choice=named, **thinks)
        assert (made["reasoning"], made["calls"]) == ("Hm.", [("look", '{"at": "sky", "far": false}')])
        form = {"type": "json_schema", "json_schema": {"name": "look", "schema": LOOK}}
        made = message_of(server, stream=stream, messages=[USER], response_format=form, **thinks)
        assert (made["reasoning"], made["content"]) == ("Hm.", '{"at": "sky", "far": false}')
    script.text = '<think>\nHm.\n</think>\n{"at": "sky", "far": false}'  # the model itself begins it
    made = message_of(server, messages=[USER], tools=NESTED, tool_choice=named)
    assert (made["reasoning"], made["calls"]) == ("Hm.", [("look", '{"at": "sky", "far": false}')])
    text = {"format": {"type": "json_schema", "name": "look", "schema": LOOK}}
    answer = server.post(RESPONSES, input="a", text=text)
    assert [one["type"] for one in answer["output"]] == ["reasoning", "message"]
    assert json.loads(answer["output"][1]["content"][0]["text"]) == {"at": "sky", "far": False}
    script.text = CALL
    answer = server.post(RESPONSES, input="a", text=text, tools=TOOLS)  # agents that answer in JSON
    assert [one["type"] for one in answer["output"]] == ["function_call"]


def message_of(server: Served, *, stream: bool = False, **body: object) -> dict[str, Any]:
    """Reasoning, content and calls of a chat."""
    if not stream:
        deltas = [server.post(CHAT, **body)["choices"][0]["message"]]
    else:
        with server.client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    made: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for one in deltas:
        made["content"] += one.get("content") or ""
        made["reasoning"] += one.get("reasoning") or ""
        for call in one.get("tool_calls", ()):
            if "id" in call:
                made["calls"].append((call["function"]["name"], ""))
            name, arguments = made["calls"][-1]
            made["calls"][-1] = (name, arguments + call["function"]["arguments"])
    return made


# -- tokens of reasoning


@pytest.mark.parametrize(
    ("text", "inside", "thoughts"),
    [
        ("<think>\nHm \N{GRINNING FACE}é.\n</think>\n\nYes.", False, ["\nHm \N{GRINNING FACE}é.\n"]),
        ("\N{GRINNING FACE}é\n</think>Yes.", True, ["\N{GRINNING FACE}é\n"]),
        ("Hm, no end", True, ["Hm, no end"]),
        ("</think>Yes.", True, []),
        (f"Hm. {CALL}", True, ["Hm. "]),
        ("Yes.", False, []),
        ("Yes </think> <think>no</think>", False, []),
    ],
)
def test_usage_counts_tokens_of_reasoning(
    server: Served, script: Script, text: str, inside: bool, thoughts: list[str]
) -> None:
    """Each token is a byte."""
    script.text = text
    wanted = sum(len(one.encode()) for one in thoughts)
    tools = nested(strict=False)
    thinks: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": inside}}
    body: dict[str, Any] = {"messages": [USER], "tools": tools, "n": 2, **thinks}
    usage = server.post(CHAT, **body)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * wanted}
    assert usage["completion_tokens"] == 2 * len(text.encode()) + 2
    with server.client.stream(
        "POST", CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}}
    ) as told:
        *_, last, _ = [line for line in told.iter_lines() if line]
    assert json.loads(last.removeprefix("data: "))["usage"] | {"prompt_tokens_details": None} == {
        **usage,
        "prompt_tokens_details": None,
    }
    if not inside:
        answer = server.post(RESPONSES, input="a", tools=TOOLS)
        assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": wanted}


class Pieces:
    """A tokenizer whose tokens are any texts."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(self.pieces[one] for one in ids)


def test_tokens_of_reasoning_are_counted_where_tokens_hold_marks_and_text() -> None:
    for seed in range(how_many(300)):
        rng = random.Random(seed)
        text = "<think>" + "ab \n" * rng.randint(0, 6) + rng.choice(["", "</think>", "</think>yes"])
        cuts = [0, *sorted(rng.sample(range(1, len(text)), k=rng.randint(0, len(text) - 1))), len(text)]
        pieces = [text[begin:end] for begin, end in pairwise(cuts)]
        begin, end = len("<think>"), text.find("</think>") if "</think>" in text else len(text)
        wanted = sum(one < end and other > begin for one, other in pairwise(cuts)) if end > begin else 0
        front = SimpleNamespace(loaded=SimpleNamespace(tokenizer=Pieces([*pieces, ""]), eos_token_ids=(len(pieces),)))
        parser = AnswerParser(None, REASONING["qwen3"], {})
        parser.feed(text, ended=True)
        done = Completion("r", (), (*range(len(pieces) + 1),), text, FinishReason.STOP, 0, 0, 0)
        assert reasoning_tokens(front, done, parser) == wanted, pieces  # type: ignore[arg-type]  # all that is read of it
