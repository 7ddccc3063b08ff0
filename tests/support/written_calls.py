"""Calls as each family of models writes them, by hand from the families' chat templates."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

Given = tuple[str, dict[str, Any]]
"""Name and arguments of a call."""

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "ratio": {"type": "number"},
            "where": {"type": "object"},
            "tags": {"type": "array"},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
    },
    "look-up": {"type": "object", "properties": {"text": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
}
TEXTS = [
    "Oslo",
    "",
    "é ü 北京 🌧",
    'a "b" \\ c',
    "{not: json}",
    "line 1\nline 2",
    "[1, 2",
    "x < y && z > 0",
    "5",
    "it's",
]


def random_calls(rng: random.Random, most: int = 3) -> list[Given]:
    """Calls of TOOLS whose arguments fit their schemas."""
    made = []
    for _ in range(rng.randint(1, most)):
        name = rng.choice([*TOOLS])
        values: dict[str, Any] = {
            "city": rng.choice(TEXTS),
            "text": rng.choice(TEXTS),
            "days": rng.randint(-3, 10**6),
            "exact": rng.random() < 0.5,
            "ratio": rng.choice([0.5, -2.25, 3.0e-7]),
            "where": {"at": [rng.random(), {"deep": [None, rng.choice(TEXTS)]}], rng.choice(TEXTS): {}},
            "tags": [rng.choice(TEXTS) for _ in range(rng.randint(0, 3))],
            "maybe": rng.choice([None, 7]),
        }
        keys = [key for key in TOOLS[name]["properties"] if rng.random() < 0.7]
        made.append((name, {key: values[key] for key in keys}))
    return made


def _object(call: Given, arguments: str = "arguments") -> str:
    return json.dumps({"name": call[0], arguments: call[1]}, ensure_ascii=False)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _each(begin: str, of: Callable[[Given], str], end: str, between: str = "\n") -> Callable[[Sequence[Given]], str]:
    return lambda calls: begin + between.join(map(of, calls)) + end


def _functions(start: str, end: str) -> Callable[[Given], str]:
    def written(call: Given) -> str:
        parameters = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in call[1].items())
        return f"{start}\n<function={call[0]}>\n{parameters}</function>\n{end}"

    return written


def _glm(call: Given) -> str:
    keys = "".join(
        f"\n<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>" for key, value in call[1].items()
    )
    return f"<tool_call>{call[0]}{keys}\n</tool_call>"


def _minimax(call: Given) -> str:
    inner = "".join(f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in call[1].items())
    return f'<invoke name="{call[0]}">\n{inner}</invoke>'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _deepseek_v3(call: Given) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n```json\n{_json(call[1])}\n```<｜tool▁call▁end｜>"


def _kimi(calls: Sequence[Given]) -> str:
    each = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(given)}<|tool_call_end|>"
        for number, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>"


def _harmony(calls: Sequence[Given]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}<|call|>"
        for name, given in calls
    )


def _python(call: Given) -> str:
    return f"{call[0].replace('-', '_')}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


WRITTEN: dict[str, Callable[[Sequence[Given]], str]] = {
    "hermes": _each("", lambda call: f"<tool_call>\n{_object(call)}\n</tool_call>", ""),
    "qwen3_coder": _each("", _functions("<tool_call>", "</tool_call>"), ""),
    "seed_oss": _each("", _functions("<seed:tool_call>", "</seed:tool_call>"), ""),
    "glm45": _each("", _glm, ""),
    "minimax_m2": _each("<minimax:tool_call>\n", _minimax, "\n</minimax:tool_call>"),
    "kimi_k2": _kimi,
    "deepseek_v3": _each("<｜tool▁calls▁begin｜>", _deepseek_v3, "<｜tool▁calls▁end｜>"),
    "deepseek_v31": _each(
        "<｜tool▁calls▁begin｜>",
        lambda call: f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{_json(call[1])}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "",
    ),
    "mistral": _each("", lambda call: f"[TOOL_CALLS]{call[0]}[ARGS]{_json(call[1])}", "", ""),
    "openai": _harmony,
    "granite": lambda calls: f"<|tool_call|>[{', '.join(map(_object, calls))}]",
    "llama3_json": _each("", lambda call: _object(call, "parameters"), "", "; "),
    "phi4_mini_json": lambda calls: f"functools[{', '.join(map(_object, calls))}]",
    "pythonic": lambda calls: f"[{', '.join(map(_python, calls))}]",
    "llama4_pythonic": lambda calls: f"<|python_start|>[{', '.join(map(_python, calls))}]<|python_end|>",
}
"""Writes calls, by the name of the format."""
