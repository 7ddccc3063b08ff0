"""The form of an output with reasoning and calls: a frame, in Lark's syntax, around the form of the rest.

    strict tools    (text without a mark, a mark, a call) ... text without a mark
    a form          reasoning, if there is any, then the form, or calls of the tools that are offered

A frame reads the text that ``answers`` reads, with special tokens. It allows calls only as the family writes them, so
that what ``answers`` reads as a call of a strict tool obeys the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import regex

from hybridkv.errors import ConfigError
from hybridkv.request import StructuredOutput
from hybridkv.runner.sampling.structured import SPACES
from hybridkv.serve.answers import choices, resolved, typed, value_types
from hybridkv.serve.bodies import FunctionTool, TemplateBody, arguments_schema
from hybridkv.serve.formats import CallFormat, Formats

_ANY: Final = "/(?s:.*)/"
_PLACES: Final = regex.compile(r"%(name|arguments|number)")
_NAME: Final = regex.compile(r"[\w\-]+", regex.ASCII)
_NOTES: Final = {"$comment", "default", "deprecated", "description", "examples", "title"}
"""Keywords of schemas that every value obeys."""
_ROOT: Final = {"$defs", "$schema", "additionalProperties", "definitions", "properties", "required", "type", *_NOTES}
"""Keywords of the schema of parameters that are written one by one."""


def framed(
    form: StructuredOutput | None, formats: Formats, tools: TemplateBody, *, inside: bool, parallel: bool
) -> StructuredOutput | None:
    """Return the form of the whole output; None if it is free. O(characters of the schemas).

    Args:
        form: of the output but reasoning and calls; None if that is free.
        formats: in which the output is read.
        tools: may be called in the format for calls.
        inside: whether the prompt has begun the reasoning.
        parallel: whether there may be several calls.

    Raises:
        ConfigError: the family's format cannot hold the calls of a strict tool to its schema.
    """
    calls, reasoning = formats.calls if tools.may_call else None, formats.reasoning
    if form is None and (calls is None or not any(one.function.strict for one in tools.tools or ())):
        return None
    around = (reasoning.around if reasoning else ()) + (calls.around if calls else ())
    gaps = " | ".join([r"/[ \n\r\t]{1,4}/", *map(_literal, dict.fromkeys(around))])
    rules = {"TEXT": _without(*calls.begin if calls else ()), "gap": f"({gaps}){{0,8}}"}
    before = ""
    if reasoning is not None:
        rules |= {"thought[lazy]": "THOUGHT", "THOUGHT": f"TEXT {_literal(reasoning.end)}"}
        another = f"({_literal(reasoning.start)} thought gap){'*' if reasoning.again else '?'}"
        before = "thought gap" if inside else "gap" if reasoning.around else ""
        before += f" {another}" if reasoning.again or not inside else ""
    start = f"{before} @form"
    if calls is not None:
        begin = _add_calls(rules, calls, tools, parallel=parallel)
        if not begin:
            start = f"{before} (call | @form)"
        elif form is not None:
            start = f"{before} ((head call){'+' if parallel else ''} gap | @form)"
            rules["head"] = f"gap {_literal(begin)}"
        else:
            start = f"(head call){'*' if parallel else '?'} @form"
            rules |= {"head[lazy]": "HEAD", "HEAD": f"TEXT {_literal(begin)}"}
        if form is None:
            opens = ["{", *([reasoning.start] if reasoning else [])]
            bare = "" if begin else rf" & ~(/[ \n\r\t]*/ ({_either(opens)}) {_ANY})"
            form = StructuredOutput("grammar", f"start: REST\nREST: {rules['TEXT']}{bare}")
    if form is None or start == " @form":
        return form
    return replace(form, frame="\n".join(f"{name}: {rule}" for name, rule in {"start": start, **rules}.items()))


def _add_calls(rules: dict[str, str], calls: CallFormat, tools: TemplateBody, *, parallel: bool) -> str:
    """Add the rule ``call`` and what it needs. Return the mark that calls begin with, which the rule leaves out."""
    if not calls.written:
        raise ConfigError(
            "strict is not offered in the format in which this model writes calls: leave it out, or set tool_choice to "
            "required or to a function"
        )
    opened, between, closed = calls.listed or ("", "", "")
    begin = next((one for one in calls.begin if (opened or calls.written).startswith(one)), "")
    functions = [one.function for one in tools.tools or ()]
    rules["one"] = " | ".join(_call(calls, one, "" if opened else begin) for one in functions)
    more = f"({_literal(between)} one)*" if between and parallel else ""
    rules["call"] = f"{_literal(opened.removeprefix(begin))} one {more} {_literal(closed)}"
    if calls.parameter:
        after = calls.parameter.partition("%value")[2]
        rules |= {"raw[lazy]": "RAW", "RAW": f"({_without(after.strip())}) {_literal(after)}", "KEY": r'/[^<>"\n]+/'}
    return begin


def _call(calls: CallFormat, function: FunctionTool, begin: str) -> str:
    """Return the rule of a call after ``begin``. The arguments of a function that is not strict are any object."""
    if not _NAME.fullmatch(function.name):
        raise ConfigError(f"tools have the name {function.name!r}: strict needs names of letters, digits, _ and -")
    strict = function.strict
    fields = {"name": _literal(function.name), "number": "/[0-9]{1,3}/"}
    if calls.parameter:
        fields["arguments"] = _parameters(calls, function) if strict else _any_parameters(calls)
    else:
        fields["arguments"] = _json(arguments_schema(function) if strict else {"type": "object"})
    parts = _PLACES.split(calls.written.removeprefix(begin))
    return " ".join(fields[part] if at % 2 else _literal(part) for at, part in enumerate(parts))


def _any_parameters(calls: CallFormat) -> str:
    before, _, after = calls.parameter.partition("%value")[0].partition("%key")
    return f"({_literal(before)} KEY {_literal(after)} raw)*"


def _parameters(calls: CallFormat, function: FunctionTool) -> str:
    """Return the rule of parameters between marks, in the order of the schema."""
    root = arguments_schema(function)
    known, required, others = root.get("properties", {}), root.get("required", []), sorted(root.keys() - _ROOT)
    if others or not isinstance(known, dict) or not isinstance(required, list):
        raise _unwritable(function, f"whose schema has {others or 'no properties'}")
    before, _, after = calls.parameter.partition("%value")
    made = []
    for key in dict.fromkeys([*known, *map(str, required)]):
        shown, schema = before.replace("%key", key), known.get(key)
        found = regex.fullmatch(calls.key, shown)
        values = _values(schema, root, value_types(schema, root), after.strip())
        if found is None or found["key"] != key or values is None:
            raise _unwritable(function, f"such as {key!r}")
        value = f"({' | '.join(values)}) {_literal(after)}" if values else "raw"
        made.append(f"({_literal(shown)} {value}){'' if key in required else '?'}")
    return " ".join(made)


def _values(
    schema: object, root: Mapping[str, Any], types: set[str], close: str, *, nested: bool = False
) -> list[str] | None:
    """Return rules of the values of ``schema``, one of which is read back; an empty list for any text.

    Args:
        schema: of a parameter, or one of its alternatives.
        root: where its references lead.
        types: of the parameter.
        close: the mark that ends it.
        nested: whether it is an alternative.

    Returns:
        None if text cannot be held to ``schema``.
    """
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return []
    if "string" not in value_types(schema, root):
        return [_json({**schema, **{place: root[place] for place in ("$defs", "definitions") if place in root}})]
    limits = schema.keys() - _NOTES
    if limits <= {"type"}:
        return []
    if limits <= {"type", "enum", "const"}:
        return _choices(schema, types, close)
    if limits != {"anyOf"} or nested or not isinstance(schema["anyOf"], list):
        return None
    parts = [resolved(one, root) for one in schema["anyOf"]]
    found = [_values(one, root, types, close, nested=True) for one in parts]
    made = [rule for rules in found for rule in rules or ()]
    free = [] in found and not all(not isinstance(one, Mapping) or one.keys() - _NOTES <= {"type"} for one in parts)
    return None if free or None in found else [] if [] in found else made


def _choices(schema: Mapping[str, Any], types: set[str], close: str) -> list[str] | None:
    """Return the rules of the values that ``schema`` names; None if one of them is not read back."""
    allowed = value_types({"type": schema["type"]}, {}) if "type" in schema else types
    values = [one for one in choices(schema) if value_types({"const": one}, {}) & allowed]
    raw = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in values]
    back = all(
        json.loads(typed(text, types)) == one and close not in text for text, one in zip(raw, values, strict=True)
    )
    return [*map(_literal, raw)] if back and raw else None


def _unwritable(function: FunctionTool, which: str) -> ConfigError:
    return ConfigError(
        f"this model writes parameters between marks, where strict cannot limit all of {function.name}, {which}: leave "
        "strict out, limit text by enum only, or set tool_choice to required or to a function"
    )


def _without(*marks: str) -> str:
    """Return a terminal for text that has none of ``marks``."""
    return f"{_ANY} & ~({_ANY} ({_either(marks)}) {_ANY})" if marks else _ANY


def _either(texts: Iterable[str]) -> str:
    return " | ".join(map(_literal, texts))


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": SPACES}})
