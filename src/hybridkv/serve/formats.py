"""How families of models mark calls of functions and reasoning in their answers, and which family a tokenizer names.

The names are those of vLLM's parsers. ``answers`` interprets the formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import regex

from hybridkv.errors import ConfigError

NONE: Final = "none"
"""The name that switches a parser off."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes calls. Patterns of ``regex``, matched where the text stands; none ends in a repetition.

        head         body                                      end            body, if
        <tool_call>  {"name": "f", "arguments": {...}}, or     </tool_call>
                     a list of such objects
        f[ARGS]      {...}                                                    ``head`` has the name
        <function=f> <parameter=key>value</parameter> ...      </function>    ``key`` is set
                     [f(a=1), g()]                                            ``python`` is set

    Attributes:
        head: everything before a body; may have the groups ``name`` and ``id`` of the call.
        begin: the texts that a head begins with, wherever they stand.
        bare: whether an answer may begin with a body.
        end: everything after a body, in parts that may be missing.
        around: marks around calls, which are no content.
        key: the beginning of a parameter, with the group ``key``.
        close: the end of a parameter's value.
        python: whether calls are written in Python.
        written: a call as models write it, with its %name and %arguments; %number is any. Empty if ``call_forms`` does
            not write it.
        parameter: one of the %arguments with its %key and %value; empty if they are JSON.
        listed: the texts before, between and after several calls. Empty if each is written alone.
        named: texts that name this format if a chat template and the special tokens have all of them.
    """

    head: str
    begin: tuple[str, ...] = ()
    bare: bool = False
    end: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    key: str = ""
    close: str = ""
    python: bool = False
    named: tuple[str, ...] = ()
    written: str = ""
    parameter: str = ""
    listed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family marks reasoning.

    Attributes:
        start, end: the texts before and after it. A prompt that ends in ``start`` has begun it.
        around: marks that are no content.
        again: whether it may begin after content.
    """

    start: str
    end: str
    around: tuple[str, ...] = ()
    again: bool = False


def _functions(start: str, end: str, *, named: tuple[str, ...]) -> CallFormat:
    """Return the format of Qwen3-Coder, with other marks around its functions. Models forget the first mark."""
    return CallFormat(
        head=rf"(?:{regex.escape(start)}\s*)?<function=(?P<name>[^<>\s]+)>",
        begin=(start, "<function="),
        end=(r"\s*</function>", rf"\s*{regex.escape(end)}"),
        key=r"\s*<parameter=(?P<key>[^<>\n]+)>(?:\n|(?=[^\n]))",
        close=r"\n?</parameter>",
        named=named,
        written=f"{start}\n<function=%name>%arguments\n</function>\n{end}",
        parameter="\n<parameter=%key>\n%value\n</parameter>",
    )


_OBJECT: Final = '{"name": "%name", "arguments": %arguments}'
_TOOL_CALL: Final = ("<tool_call>",)
_DEEPSEEK: Final = ("<｜tool▁call▁begin｜>",)
_DEEPSEEK_AROUND: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_HARMONY: Final = ("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>")
_HARMONY_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
OBJECTS: Final = CallFormat(head=r"\s*(?=[\[{])", bare=True)
"""An answer that is calls and nothing else."""

CALLS: Final[Mapping[str, CallFormat]] = {
    "qwen3_coder": _functions("<tool_call>", "</tool_call>", named=("<tool_call>", "<function=", "<parameter=")),
    "seed_oss": _functions("<seed:tool_call>", "</seed:tool_call>", named=("<seed:tool_call>",)),
    "glm45": CallFormat(
        head=r"<tool_call>\s*(?P<name>[^<>\s]+)\s*(?=<arg_key>|</tool_call>)",
        begin=_TOOL_CALL,
        end=(r"\s*</tool_call>",),
        key=r"\s*<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>",
        close=r"</arg_value>",
        named=("<arg_key>",),
        written="<tool_call>%name%arguments\n</tool_call>",
        parameter="\n<arg_key>%key</arg_key>\n<arg_value>%value</arg_value>",
    ),
    "minimax_m2": CallFormat(
        head=r'<invoke name="(?P<name>[^"<>]+)">',
        begin=("<invoke name=",),
        end=(r"\s*</invoke>",),
        around=("<minimax:tool_call>", "</minimax:tool_call>"),
        key=r'\s*<parameter name="(?P<key>[^"<>]+)">',
        close=r"</parameter>",
        named=("<minimax:tool_call>",),
        written='<invoke name="%name">%arguments\n</invoke>',
        parameter='\n<parameter name="%key">%value</parameter>',
    ),
    "kimi_k2": CallFormat(
        head=r"<\|tool_call_begin\|>\s*(?P<id>(?:\w+\.)?(?P<name>[^<>\s:]+):\d+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)",
        begin=("<|tool_call_begin|>",),
        end=(r"\s*<\|tool_call_end\|>",),
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        named=("<|tool_call_begin|>",),
        written="<|tool_call_begin|>functions.%name:%number<|tool_call_argument_begin|>%arguments<|tool_call_end|>",
    ),
    "deepseek_v3": CallFormat(
        head=r"<｜tool▁call▁begin｜>(?:function)?<｜tool▁sep｜>(?P<name>[^<>\s]+)\n```json\n\s*(?=\{)",
        begin=_DEEPSEEK,
        end=(r"\s*```<｜tool▁call▁end｜>",),
        around=_DEEPSEEK_AROUND,
        named=(*_DEEPSEEK, "```json"),
        written="<｜tool▁call▁begin｜>function<｜tool▁sep｜>%name\n```json\n%arguments\n```<｜tool▁call▁end｜>",
    ),
    "deepseek_v31": CallFormat(
        head=r"<｜tool▁call▁begin｜>\s*(?P<name>[^<>\s]+)\s*<｜tool▁sep｜>\s*(?=\{)",
        begin=_DEEPSEEK,
        end=(r"\s*<｜tool▁call▁end｜>",),
        around=_DEEPSEEK_AROUND,
        named=_DEEPSEEK,
        written="<｜tool▁call▁begin｜>%name<｜tool▁sep｜>%arguments<｜tool▁call▁end｜>",
    ),
    "mistral": CallFormat(
        head=r"\[TOOL_CALLS\]\s*(?:(?=[\[{])|(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*(?=\{))",
        begin=("[TOOL_CALLS]",),
        named=("[TOOL_CALLS]",),
        written="[TOOL_CALLS]%name[ARGS]%arguments",
    ),
    "openai": CallFormat(
        head=r"(?:<\|start\|>assistant to=functions\.(?P<name>[\w\-]+)\s*<\|channel\|>(?:commentary|analysis)"
        r"|<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[\w\-]+))"
        r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>\s*(?=\{)",
        begin=(
            "<|start|>assistant to=functions.",
            "<|channel|>commentary to=functions.",
            "<|channel|>analysis to=functions.",
        ),
        around=(*_HARMONY, *_HARMONY_ENDS),
        named=("<|channel|>", "functions"),
        written="<|channel|>commentary to=functions.%name <|constrain|>json<|message|>%arguments",
    ),
    "granite": CallFormat(
        head=r"(?:<\|tool_call\|>|<tool_call>)\s*(?=[\[{])",
        begin=("<|tool_call|>", "<tool_call>"),
        end=(r"\s*</tool_call>",),
        named=("<|tool_call|>", "<|start_of_role|>"),
        written=_OBJECT,
        listed=("<|tool_call|>[", ", ", "]"),
    ),
    "llama4_pythonic": CallFormat(
        head=r"(?:<\|python_start\|>)?\s*(?=\[\s*[A-Za-z_][\w.]*\()",
        begin=("<|python_start|>",),
        bare=True,
        end=(r"\s*<\|python_end\|>",),
        python=True,
        named=("<|python_start|>",),
    ),
    "hermes": CallFormat(
        head=r"<tool_call>\s*(?=[\[{])",
        begin=_TOOL_CALL,
        end=(r"\s*</tool_call>",),
        named=_TOOL_CALL,
        written=f"<tool_call>\n{_OBJECT}\n</tool_call>",
    ),
    "llama3_json": CallFormat(
        head=r"(?:<\|python_tag\|>)?\s*(?=\{)",
        begin=("<|python_tag|>",),
        bare=True,
        named=("<|python_tag|>", '"parameters"'),
        written='{"name": "%name", "parameters": %arguments}',
        listed=("", "; ", ""),
    ),
    "phi4_mini_json": CallFormat(
        head=r"functools\s*(?=\[)", begin=("functools",), written=_OBJECT, listed=("functools[", ", ", "]")
    ),
    "pythonic": CallFormat(head=r"\s*(?=\[\s*[A-Za-z_][\w.]*\()", bare=True, python=True),
}
"""Formats of calls by name. The first one that a tokenizer names is chosen."""

_THINK: Final = ReasoningFormat("<think>", "</think>")
REASONING: Final[Mapping[str, ReasoningFormat]] = {
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|>", (*_HARMONY, *_HARMONY_ENDS), again=True
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "minimax_m2": _THINK,
    "qwen3": _THINK,
}
"""Formats of reasoning by name. The first one with marks that a tokenizer has is chosen."""


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats of a served model; ``None`` where it has none."""

    calls: CallFormat | None
    reasoning: ReasoningFormat | None

    @classmethod
    def of(cls, tokenizer: Any, calls: str | None, reasoning: str | None) -> Formats:  # noqa: ANN401  # transformers' tokenizers share no typed base
        """Return the formats with these names; for ``None`` those that the tokenizer names. ConfigError if unknown."""
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        told = "\n".join((str(getattr(tokenizer, "chat_template", None)), *map(str, added)))
        called = (one for one in CALLS.values() if one.named and all(text in told for text in one.named))
        marked = (one for one in REASONING.values() if one.start in told and one.end in told)
        return cls(
            next(called, None) if calls is None else _named("--tool-call-parser", calls, CALLS),
            next(marked, None) if reasoning is None else _named("--reasoning-parser", reasoning, REASONING),
        )


def _named(option: str, name: str, known: Mapping[str, Any]) -> Any:  # noqa: ANN401  # a format of either kind
    if name != NONE and name not in known:
        raise ConfigError(f"{option} must be one of {', '.join([*known, NONE])}, got {name!r}")
    return known.get(name)
