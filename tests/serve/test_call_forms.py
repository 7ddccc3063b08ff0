"""Frames around forms: what a family writes fits, and whatever fits is read back as calls that obey their schemas."""

import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from how_much import how_many
from hybridkv.errors import ConfigError
from hybridkv.request import StructuredOutput
from hybridkv.runner import LoadedModel, load
from hybridkv.runner.sampling.structured import Grammars
from hybridkv.serve.answers import AnswerParser, Part
from hybridkv.serve.bodies import ChatBody, TemplateBody
from hybridkv.serve.call_forms import framed
from hybridkv.serve.formats import CALLS, OBJECTS, REASONING, Formats
from hybridkv.serve.forms import formats_of
from written_calls import TOOLS, WRITTEN, random_calls

CLOSED = {"type": "object", "additionalProperties": False}
STRICT: dict[str, dict[str, Any]] = {name: {**CLOSED, **schema} for name, schema in TOOLS.items()}
STRICT["get_weather"] = {
    **STRICT["get_weather"],
    "properties": {
        **TOOLS["get_weather"]["properties"],
        "where": {**CLOSED, "properties": {"at": {"$ref": "#/$defs/at"}}, "required": ["at"]},
        "tags": {"type": "array", "items": {"enum": ["a b", "<b>", None]}, "maxItems": 2},
        "unit": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]},
        "level": {"$ref": "#/$defs/level"},
    },
    "required": ["city", "days", "unit", "level"],
    "$defs": {
        "unit": {"enum": ["°C", "K"], "type": "string"},
        "at": {"type": "integer", "maximum": 9},
        "level": {"type": "integer", "minimum": 3, "maximum": 11},
    },
}
FAMILIES = [name for name in CALLS if CALLS[name].written]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<|channel|>", "<|message|>", "[ARGS]"]
END = 256


def offered(schemas: dict[str, dict[str, Any]] = STRICT, *, strict: bool = True) -> TemplateBody:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in schemas.items()
    ]
    return TemplateBody.model_validate({"tools": tools})


def formats(name: str | None) -> Formats:
    return Formats(None if name is None else CALLS[name], REASONING["openai_gptoss" if name == "openai" else "qwen3"])


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """Bytes, the end, and marks that are one special token."""
    found = load("tiny:llama")
    found.tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    return found


@pytest.fixture(scope="module")
def grammars(loaded: LoadedModel) -> Iterator[Grammars]:
    made = Grammars(loaded)
    yield made
    made.close()


class Walk:
    """A parser that reads tokens."""

    def __init__(self, grammars: Grammars, form: StructuredOutput | None) -> None:
        grammar = grammars.of(form)
        assert grammar is not None
        self.parser = grammar.parser()
        self.bits = allocate_token_bitmask(1, END + 1 + len(MARKS))

    def allowed(self) -> list[int]:
        fill_next_token_bitmask(self.parser, self.bits, 0)
        assert not self.parser.is_error(), self.parser.get_error()
        return [int(one) for one in np.flatnonzero(np.unpackbits(self.bits.view(np.uint8), bitorder="little"))]

    def fits(self, ids: list[int]) -> bool:
        """Whether an output of ``ids`` may be, and end."""
        return self.parser.try_consume_tokens(ids) == len(ids) and self.parser.is_accepting()


def tokens(loaded: LoadedModel, text: str, *, spelled: bool = False) -> list[int]:
    ids: list[int] = [*text.encode()] if spelled else loaded.tokenizer.encode(text, add_special_tokens=False)
    return ids


def steered(walk: Walk, wanted: list[int], rng: random.Random, most: int = 900) -> list[int] | None:
    """Tokens that follow ``wanted`` where they may, and others where not; None if they have no end by ``most``."""
    made = list[int]()
    for one in [*wanted, *[END] * most][:most]:
        allowed = walk.allowed()
        if one not in allowed:
            if one != END and rng.random() < 0.3:
                continue
            some = [at for at in allowed if at in {*b'"}])'} or at > END or 48 <= at < 123]
            one = rng.choice(some or allowed)  # noqa: PLW2901
        if one == END:
            return made
        made.append(one)
        assert walk.parser.consume_token(one)
        if walk.parser.is_stopped():
            return made
    return None


def read(name: str, text: str, **more: Any) -> tuple[list[tuple[str, Any]], Part]:  # noqa: ANN401  # of the parser
    known = formats(name)
    part = AnswerParser(known.calls, known.reasoning, STRICT, **more).feed(text, ended=True)
    return [(one.name or "", json.loads(one.arguments)) for one in part.calls], part


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_fit_as_their_family_writes_them(name: str, grammars: Grammars, loaded: LoadedModel) -> None:
    """Whether a mark is a token of its own or spelled; also of tools that are not strict, beside one that is."""
    other = {"other": {**CLOSED, "properties": {}}}
    for seed in range(how_many(30)):
        rng = random.Random(f"{name}{seed}")
        calls = random_calls(rng)
        text = WRITTEN[name](calls).removesuffix("<|call|>").replace("<|call|>", "<|end|>")
        if not CALLS[name].listed:
            text = rng.choice(["", "See:\n", "<think>Hm.</think>\n"]) + text + rng.choice(["", "\nDone."])
        for schemas in (TOOLS, {**TOOLS, **other}):
            tools = offered(schemas, strict=schemas is TOOLS)
            if tools.tools and schemas is not TOOLS:
                tools.tools[-1].function.strict = True
            form = framed(None, formats(name), tools, inside=False, parallel=True)
            for spelled in (False, True):
                assert Walk(grammars, form).fits(tokens(loaded, text, spelled=spelled)), (text, spelled)
        one = framed(None, formats(name), offered(TOOLS), inside=False, parallel=False)
        if name != "openai":  # each message of it is free
            assert Walk(grammars, one).fits(tokens(loaded, text)) == (len(calls) == 1), text


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_fits_is_read_as_calls_that_obey(name: str, grammars: Grammars, loaded: LoadedModel) -> None:
    met = 0
    for seed in range(how_many(80)):
        rng = random.Random(f"{name}{seed}")
        inside, parallel = rng.random() < 0.4, rng.random() < 0.7
        known = formats(name)
        assert known.reasoning is not None
        wanted = f"Hm.{known.reasoning.end if inside else ''}{WRITTEN[name](random_calls(rng))} bye"
        for _ in range(rng.randint(0, 3)):
            at = rng.randrange(len(wanted))
            more = ["", "{", '"', "}", wanted[at : at + 9], *MARKS, '; {"name": "now", "arguments": {"x": 5}}']
            wanted = wanted[:at] + rng.choice(more) + wanted[at + rng.randint(0, 9) :]
        form = framed(None, known, offered(), inside=inside, parallel=parallel)
        made = steered(Walk(grammars, form), tokens(loaded, wanted), rng)
        if made is None:
            continue
        text = loaded.tokenizer.decode(made, skip_special_tokens=False)
        calls, _ = read(name, text, inside=inside)
        for called, given in calls:
            Draft202012Validator(STRICT[called]).validate(given)
        assert parallel or len(calls) <= 1, text
        met += len(calls)
    assert met


PERSON = StructuredOutput("json_schema", json.dumps({**CLOSED, "properties": {"a": {"const": 1}}, "required": ["a"]}))


AFTER_REASONING = [
    ("Hm {}</think>\n\nFORM", True, True),
    ("</think>FORM", True, True),
    ("FORM", True, False),
    ("Hm</think>FORM</think>FORM", True, False),
    ("Hm</think> x FORM", True, False),
    ("FORM", False, True),
    ("<think>Hm</think>FORM", False, True),
    ("<think>FORM", False, False),
    ("Hm</think>FORM", False, False),
    ("\nFORM", False, False),
]
"""A text, whether the prompt has begun the reasoning, and whether it fits."""
FORMS = [
    PERSON,
    StructuredOutput("regex", '.."a": 1.'),
    StructuredOutput("choice", '["{ \\"a\\": 1}"]'),
    StructuredOutput("grammar", 'start: "{" " " /"a": 1}/'),
    StructuredOutput("json_object"),
]


@pytest.mark.parametrize("form", FORMS, ids=[form.kind for form in FORMS])
def test_form_begins_after_reasoning(form: StructuredOutput, grammars: Grammars, loaded: LoadedModel) -> None:
    for text, inside, fits in AFTER_REASONING:
        whole = framed(form, formats(None), TemplateBody(), inside=inside, parallel=True)
        made = text.replace("FORM", '{ "a": 1}')
        for spelled in (False, True):
            assert Walk(grammars, whole).fits(tokens(loaded, made, spelled=spelled)) == fits, text


def test_form_of_harmony_begins_after_its_header(grammars: Grammars, loaded: LoadedModel) -> None:
    known = Formats(None, REASONING["openai_gptoss"])
    form = framed(PERSON, known, TemplateBody(), inside=False, parallel=True)
    thought, final = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant", "<|channel|>final<|message|>"
    for text, fits in [
        (thought + final + '{"a": 1}', True),
        (thought + thought + final + '{"a": 1}', True),
        (final + '{"a": 1}', True),
        ('{"a": 1}', True),
        (thought + final + "Hm", False),
        (thought, False),
    ]:
        assert Walk(grammars, form).fits(tokens(loaded, text)) == fits, text


@pytest.mark.parametrize("name", [name for name in FAMILIES if not CALLS[name].bare])
def test_form_leaves_room_for_calls(name: str, grammars: Grammars, loaded: LoadedModel) -> None:
    """As agents ask that answer in JSON: a call or the form, whether tools are strict or not."""
    written = WRITTEN[name]([("now", {}), ("now", {})]).removesuffix("<|call|>").replace("<|call|>", "<|end|>")
    thought = "<|channel|>analysis<|message|>Hm<|end|>" if name == "openai" else "<think>Hm</think>\n"
    for strict in (False, True):
        form = framed(PERSON, formats(name), offered(strict=strict), inside=False, parallel=True)
        for text, fits in [
            (written, True),
            (thought + written, True),
            ('{"a": 1}', True),
            (thought + '{"a": 1}', True),
            ('{"a": 2}', False),
            ("", False),
            ("Hm" + written, False),
        ]:
            assert Walk(grammars, form).fits(tokens(loaded, text)) == fits, text
            hidden = f"<think>Hm {written}</think>{text}"  # would be read as a call that nothing limits
            assert not Walk(grammars, form).fits(tokens(loaded, hidden))


def test_calls_beside_a_form_need_marks() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "tools": offered().model_dump()["tools"]}
    assert not any("strict" in one["function"] for one in body["tools"])  # the chat template does not see it
    formed = ChatBody.model_validate({**body, "response_format": {"type": "json_object"}})
    for name, known in CALLS.items():
        front: Any = SimpleNamespace(formats=formats(name))
        beside = not known.bare and not known.python
        assert formats_of(front, formed) == Formats(known if beside else None, formats(name).reasoning)
        assert formats_of(front, ChatBody.model_validate(body)) == formats(name)


def test_output_without_strict_tools_is_free() -> None:
    for name in CALLS:
        assert framed(None, formats(name), offered(strict=False), inside=True, parallel=True) is None
        assert framed(None, Formats(None, None), offered(), inside=False, parallel=True) is None
    assert framed(PERSON, Formats(OBJECTS, None), TemplateBody(), inside=False, parallel=True) == PERSON


@pytest.mark.parametrize(
    ("name", "schema", "said"),
    [
        ("pythonic", {}, "strict is not offered in the format in which this model writes calls"),
        ("qwen3_coder", {"minProperties": 1}, "whose schema has ['minProperties']"),
        ("qwen3_coder", {"properties": 5}, "whose schema has no properties"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "maxLength": 3}}}, "such as 'a'"),
        ("qwen3_coder", {"properties": {"a>": {}}}, "such as 'a>'"),
        ("qwen3_coder", {"properties": {"a": {"enum": ["x</parameter>"]}}}, "such as 'a'"),
        ("qwen3_coder", {"properties": {"a": {"enum": ["5", 5]}}}, "such as 'a'"),
        ("glm45", {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 3}]}}}, "such as"),
        ("minimax_m2", {"properties": {"a": {"anyOf": 5, "type": "string"}}}, "such as 'a'"),
    ],
)
def test_tool_that_cannot_be_strict_is_rejected(name: str, schema: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", "\\[")):
        framed(None, formats(name), offered({"f": schema}), inside=False, parallel=True)
    with pytest.raises(ConfigError, match="strict needs names of letters, digits, _ and -"):
        framed(None, formats("hermes"), offered({"a b": {}}), inside=False, parallel=True)
