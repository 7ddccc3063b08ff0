"""Answers, split into reasoning, content and calls: what each family writes is read back, wherever a stream cuts it."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import regex

from how_much import how_many
from hybridkv.errors import ConfigError
from hybridkv.serve.answers import AnswerParser
from hybridkv.serve.formats import CALLS, OBJECTS, REASONING, Formats
from written_calls import TOOLS, WRITTEN, random_calls

THINKS = [*REASONING]
Split = tuple[str, str, list[tuple[str | None, str]]]
"""Content, reasoning, and name and arguments of each call."""


def split(text: str, calls: str | None = None, reasoning: str | None = None, *cuts: int, **more: Any) -> Split:  # noqa: ANN401  # arguments of AnswerParser
    """An answer that is read in parts: the parts together. Checks their order."""
    format_ = OBJECTS if calls == "objects" else CALLS.get(calls or "")
    parser = AnswerParser(format_, REASONING.get(reasoning or ""), TOOLS, **more)
    content = thought = ""
    made: list[tuple[str | None, str]] = []
    ends = [*sorted(cuts), len(text)]
    for begin, end in zip([0, *ends], ends, strict=False):
        part = parser.feed(text[begin:end], ended=end is ends[-1])
        content, thought = content + part.content, thought + part.reasoning
        for one in part.calls:
            if one.name is not None:
                assert one.index == len(made)
                assert one.id
                made.append((one.name, ""))
            assert one.index == len(made) - 1
            made[-1] = (made[-1][0], made[-1][1] + one.arguments)
    assert parser.called == bool(made)
    return content, thought, made


def every_cut(text: str, calls: str | None, reasoning: str | None, **more: Any) -> Split:  # noqa: ANN401  # same
    """The same, which must not depend on where the answer is cut."""
    whole = split(text, calls, reasoning, **more)
    for at in range(len(text) + 1):
        assert split(text, calls, reasoning, at, **more) == whole, text[:at]
    assert split(text, calls, reasoning, *range(1, len(text)), **more) == whole
    return whole


def loaded(found: Split) -> list[tuple[str | None, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in found[2]]


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_each_family_are_read_back(name: str) -> None:
    bare = CALLS[name].bare
    for seed in range(how_many(40)):
        rng = random.Random(f"{name}{seed}")
        wanted = random_calls(rng)
        if CALLS[name].python:
            wanted = [(one.replace("-", "_"), given) for one, given in wanted]
        before, after = ("" if bare else rng.choice(["", "See:", "Let me see.\n"])), rng.choice(["", "\n", " Done."])
        thought = rng.choice(["", "Hm,\n<b>\n"])
        marks = REASONING["openai_gptoss" if name == "openai" else "qwen3"]
        said = f"{marks.start}\n{thought}{marks.end}\n\n" if thought else ""
        text = said + before + WRITTEN[name](wanted) + after
        reasoning = "openai_gptoss" if name == "openai" else "qwen3"
        found = every_cut(text, name, reasoning) if seed < 2 else split(text, name, reasoning)
        assert loaded(found) == wanted, text
        assert (found[0].split(), found[1]) == ([*before.split(), *after.split()], thought.strip()), text


def test_all_families_are_tried() -> None:
    assert set(WRITTEN) == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_parts_of_any_text_do_not_depend_on_the_cuts(name: str) -> None:
    for seed in range(how_many(30)):
        rng = random.Random(f"{name}{seed}")
        reasoning = rng.choice(THINKS)
        marks = [*CALLS[name].begin, *CALLS[name].around, *REASONING[reasoning].around]
        marks += [REASONING[reasoning].start, REASONING[reasoning].end]
        written = WRITTEN[name](random_calls(rng))
        pieces = []
        for _ in range(rng.randint(1, 6)):
            begin = rng.randrange(len(written))
            piece = written[begin : begin + rng.randint(1, 60)]
            pieces.append(
                rng.choice([piece, written, rng.choice(marks), rng.choice(["\n", " ", "x", "{", "]", '"', "\\"])])
            )
        text = "".join(pieces)[:400]
        every_cut(text, name, reasoning, inside=rng.random() < 0.3, parallel=rng.random() < 0.7)


FAULTY = [
    ("hermes", 'a <tool_call>\n{"name": "f"}\n</tool_call>', 'a <tool_call>\n{"name": "f"}\n</tool_call>', []),
    ("hermes", '\n<tool_call>{"name": "f", "arguments": {}}</tool_call> bye', "bye", [("f", "{}")]),
    ("hermes", "<tool_call> is a tag", "<tool_call> is a tag", []),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
    ("hermes", '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\\', "", [("f", '{"a": "b\\')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}} x', "}} x", [("f", '{"a": [1')]),
    ("hermes", '<tool_call>{"arguments": "{}", "name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": "7"}</tool_call>.', ".", [("f", "{}")]),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}, {"x": 1}]', ', {"x": 1}]', [("f", "{}")]),
    ("hermes", '<tool_call>{"arguments": [1e999], "name": "f"}', '<tool_call>{"arguments": [1e999], "name": "f"}', []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3_json", 'x {"name": "f", "parameters": {}}', 'x {"name": "f", "parameters": {}}', []),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("qwen3_coder", "<function=now>\n<parameter=a>\ncut", "", [("now", '{"a": "cut')]),
    ("qwen3_coder", "<function=now>\n<parameter=a>\nb\n</parameter>\n", "", [("now", '{"a": "b"')]),
    ("qwen3_coder", "<tool_call>\n<fun", "<tool_call>\n<fun", []),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=days>soon</parameter></function></tool_call>",
        "",
        [("get_weather", '{"days": "soon"}')],
    ),
    *(
        (
            "qwen3_coder",
            f"<function=get_weather><parameter=ratio>{raw}</parameter></function>",
            "",
            [("get_weather", f'{{"ratio": {read}}}')],
        )
        for raw, read in {"NaN": '"NaN"', " 1e999\n": "1e999", "2.50": "2.50", "null": '"null"'}.items()
    ),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(a=b)]", "[f(a=b)]", []),
    ("openai", "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}", "", [("f", "{}")]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), FAULTY)
def test_calls_that_are_unusual_or_cut_off(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """What is no call stays content; what has begun as a call is passed on as it is."""
    assert every_cut(text, name, None) == (content, "", calls)


@pytest.mark.parametrize(
    ("text", "inside", "content", "reasoning"),
    [
        ("<think>a</think>b", False, "b", "a"),
        ("a</think>\n\nb", True, "b", "a"),
        ("a", True, "", "a"),
        ("a</think>b", False, "a</think>b", ""),
        ("b <think>a</think>", False, "b <think>a</think>", ""),
        ("<think>a</think>b <think>", False, "b <think>", "a"),
        (" <think>", False, "", ""),
        (" b\n", False, " b\n", ""),
        ("<think>a</think> b \n", False, "b", "a"),
        ('x <tool_call>{"a"} y</think>', True, "", 'x <tool_call>{"a"} y'),
        ('x <tool_call>{"name": "f", "arguments": {}}</tool_call> y', True, "y", "x"),
    ],
)
def test_reasoning_ends_at_its_mark_or_at_a_call(text: str, inside: bool, content: str, reasoning: str) -> None:
    assert every_cut(text, "hermes", "deepseek_r1", inside=inside)[:2] == (content, reasoning)


def test_forced_answers_are_calls() -> None:
    both = '[{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]'
    assert every_cut(both, "objects", None)[2] == [("f", '{"a": [1]}'), ("g", "{}")]
    assert every_cut(both, "objects", None, parallel=False)[2] == [("f", '{"a": [1]}')]
    assert every_cut('{"a": "}"}', None, None, named="f") == ("", "", [("f", '{"a": "}"}')])


def test_text_without_formats_is_content() -> None:
    for text in (" a\n", "", "<think><tool_call>"):
        assert every_cut(text, None, None) == (text, "", [])


class Named:
    """A tokenizer that names a family."""

    def __init__(self, template: str, tokens: Sequence[str] = ()) -> None:
        self.chat_template = template
        self.added_tokens_decoder = dict(enumerate(tokens))


@pytest.mark.parametrize(
    ("calls", "reasoning", "tokenizer"),
    [
        ("hermes", None, Named("{{ '<tool_call>' }}")),
        ("hermes", "deepseek_r1", Named("{{ '<tool_call>' }}", ["<think>", "</think>"])),
        ("qwen3_coder", None, Named("<tool_call><function=x><parameter=y>")),
        ("llama3_json", None, Named('{"name": name, "parameters": {}}', ["<|python_tag|>"])),
        ("mistral", "mistral", Named("[TOOL_CALLS]", ["[THINK]", "[/THINK]"])),
        ("deepseek_v3", "deepseek_r1", Named("<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json </think><think>")),
        ("deepseek_v31", None, Named("<｜tool▁call▁begin｜>", ["<tool_call>"])),
        ("kimi_k2", None, Named("", ["<|tool_call_begin|>"])),
        ("glm45", None, Named("<tool_call><arg_key>")),
        ("openai", "openai_gptoss", Named("<|channel|>analysis<|message|> to=functions <|end|>")),
        ("granite", None, Named("<|start_of_role|>", ["<|tool_call|>"])),
        (None, None, Named("{{ messages }} <think>")),
        (None, None, None),
    ],
)
def test_format_is_the_one_that_the_tokenizer_names(
    calls: str | None, reasoning: str | None, tokenizer: object
) -> None:
    found = Formats.of(tokenizer, None, None)
    assert found == Formats(CALLS.get(calls or ""), REASONING.get(reasoning or ""))


def test_format_is_the_one_asked_for() -> None:
    named = Named("<tool_call><think></think>")
    assert Formats.of(named, "mistral", "granite") == Formats(CALLS["mistral"], REASONING["granite"])
    assert Formats.of(named, "none", "none") == Formats(None, None)
    with pytest.raises(ConfigError, match=r"--tool-call-parser must be one of qwen3_coder, .*, none, got 'hermés'"):
        Formats.of(named, "hermés", None)


@pytest.mark.parametrize("name", CALLS)
def test_no_word_of_a_damaged_answer_is_lost(name: str) -> None:
    for seed in range(how_many(300)):
        rng = random.Random(f"{name}{seed}")
        count = rng.randint(1, 3)
        calls = [("now", {f"key{one}": [f"word{one}", {f"in{one}": f"deep{one}"}]}) for one in range(count)]
        text = f"before {WRITTEN[name](calls)} after"
        for _ in range(rng.randint(1, 3)):
            begin = rng.randrange(len(text))
            end = begin + rng.randint(0, 12)
            text = text[:begin] + rng.choice(["", "{", '"', "}", "lost", text[begin:end]]) + text[end:]
        content, _, made = split(text, name, None, rng.randrange(len(text) + 1))
        shown = content + "".join(f"{one} {arguments}" for one, arguments in made)
        assert [word for word in regex.findall(r"(?:key|word|in|deep)\d|before|after", text) if word not in shown] == []
