"""Structured outputs over HTTP: in OpenAI's names and in vLLM's, and what is rejected before a request is queued."""

import json
import threading
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from serve_support import Served

from hybridkv.request import SamplingParams, StructuredOutput
from hybridkv.runner import Engine
from hybridkv.runner.chat import chat_ids
from hybridkv.runner.sampling.structured import Grammar, Grammars

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SAID = [{"role": "user", "content": "Who?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
NAMED = {"name": "person", "description": "Whom you see.", "schema": SCHEMA, "strict": True}
MOST = 200


def text_of(path: str, answer: dict[str, Any]) -> str:
    if path == RESPONSES:
        return str(answer["output"][0]["content"][0]["text"])
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"] if path == CHAT else choice["text"])


BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID, "max_tokens": MOST},
    COMPLETIONS: {"prompt": "Who?", "max_tokens": MOST},
    RESPONSES: {"input": "Who?", "max_output_tokens": MOST},
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
        (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", **NAMED}, "verbosity": "medium"}}),
        (CHAT, {"structured_outputs": {"json": SCHEMA}}),
        (COMPLETIONS, {"structured_outputs": {"json": json.dumps(SCHEMA), "json_object": False}}),
        (RESPONSES, {"structured_outputs": {"json": SCHEMA, "disable_fallback": True}}),
    ],
)
def test_answer_obeys_its_schema(llama: Served, alone: Engine, path: str, body: dict[str, Any]) -> None:
    answer = llama.post(path, **BASES[path], **body, temperature=0, seed=5)
    Draft202012Validator(SCHEMA).validate(json.loads(text_of(path, answer)))
    params = SamplingParams(structured=StructuredOutput("json_schema", json.dumps(SCHEMA)), max_tokens=MOST)
    prompt = "Who?" if path == COMPLETIONS else chat_ids(alone.loaded, SAID)
    (expected,) = alone.generate([prompt], params)
    assert text_of(path, answer) == expected.text


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[ab]-1"}, {"a-1", "b-1"}),
        ({"grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
    ],
)
@pytest.mark.parametrize("path", BASES)
def test_answer_obeys_forms_of_vllm(llama: Served, path: str, form: dict[str, Any], allowed: set[str]) -> None:
    assert text_of(path, llama.post(path, **BASES[path], structured_outputs=form)) in allowed


def test_json_object_is_an_object_in_every_name(llama: Served) -> None:
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"response_format": {"type": "json_object"}},
        COMPLETIONS: {"structured_outputs": {"json_object": True}},
        RESPONSES: {"text": {"format": {"type": "json_object"}}},
    }
    for path, body in bodies.items():
        answer = llama.post(path, **BASES[path], **body, temperature=0)
        assert isinstance(json.loads(text_of(path, answer)), dict)
        if path == RESPONSES:
            assert answer["text"] == body["text"]


def test_stream_and_outputs_obey_their_schema(llama: Served) -> None:
    body: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": NAMED}, **BASES[COMPLETIONS]}
    answer = llama.post(COMPLETIONS, **body, n=3, seed=1)
    for choice in answer["choices"]:
        Draft202012Validator(SCHEMA).validate(json.loads(choice["text"]))
    with llama.client.stream("POST", COMPLETIONS, json={**body, "seed": 1, "stream": True}) as stream:
        parts = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert "".join(part["choices"][0]["text"] for part in parts) == answer["choices"][0]["text"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {"response_format": {"type": "json_schema"}}, "a format has a schema if its type is json_schema"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "add the schema"),
        (CHAT, {"response_format": {"type": "text", "json_schema": NAMED}}, "or change the type"),
        (CHAT, {"response_format": {"type": "yaml"}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_object", "x": 1, "y": 2}}, "response_format.x is not offered"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "x": 1}}}, "json_schema.x is not"),
        (COMPLETIONS, {"structured_outputs": {}}, "structured_outputs needs exactly one of json, regex"),
        (COMPLETIONS, {"structured_outputs": {"regex": "a", "json": {}}}, "needs exactly one of"),
        (COMPLETIONS, {"structured_outputs": {"json": SCHEMA, "structural_tag": "x"}}, "structural_tag is not offered"),
        (COMPLETIONS, {"structured_outputs": {"json": "{"}}, "text of json_schema is not JSON"),
        (COMPLETIONS, {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (COMPLETIONS, {"structured_outputs": {"regex": "[a-"}}, "regex '[a-' cannot be compiled"),
        (COMPLETIONS, {"structured_outputs": {"grammar": "start: x"}}, "cannot be compiled"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "add the schema"),
        (RESPONSES, {"text": {"format": {"type": "text"}, "verbosity": "high"}}, "text.verbosity is not offered"),
        (
            CHAT,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs and a format both say what the output must be",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            'cannot be compiled, correct it: Unimplemented keys: ["not"]',
        ),
        (CHAT, {"guided_json": SCHEMA}, "guided_json is not offered: use structured_outputs"),
    ],
)
def test_form_that_cannot_be_is_rejected(llama: Served, path: str, body: dict[str, Any], said: str) -> None:
    before = llama.statistics
    assert said in llama.refused(path, 400, **BASES[path], **body)["message"]
    assert llama.statistics == before


def test_form_is_compiled_outside_of_the_engine(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use of a form is in a thread for texts, before its request is queued."""
    threads: dict[str, str] = {}
    of = Grammars.of

    def noted(self: Grammars, form: StructuredOutput | None) -> Grammar | None:
        if form is not None:
            threads.setdefault(form.text, threading.current_thread().name)
        return of(self, form)

    monkeypatch.setattr(Grammars, "of", noted)
    for path, body in BASES.items():
        llama.post(path, **body, structured_outputs={"regex": f"only for {path}"})
    assert threads == dict.fromkeys([f"only for {path}" for path in BASES], "hybridkv-tokens")
