"""Compare the split of answers into reasoning, content and calls with vLLM's own parsers, on random answers.

Each answer is written by tests/support/written_calls.py: calls with nested arguments, quotes and unicode, with text
before and after, with reasoning or without. vLLM reads it whole; ours reads it in random pieces. Names, arguments as
JSON values, content and reasoning must be equal. White space next to marks may differ, and vLLM may drop what follows
the calls: ours has it as content.

    make test-vllm-answers VLLM_PYTHON=/path/to/python        # a Python that has vllm 0.33 and hybridkv
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections import Counter
from typing import Any

from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from hybridkv.runner.tiny import byte_tokenizer
from hybridkv.serve.answers import AnswerParser
from hybridkv.serve.formats import CALLS, REASONING
from written_calls import TOOLS, WRITTEN, random_calls

FORMATS = [name for name in WRITTEN if name not in {"openai", "llama4_pythonic", "phi4_mini_json"}]
"""Without gpt-oss, whose vocabulary vLLM loads from the network, and Phi-4: vLLM's pattern ends at any bracket."""
THOUGHTS = {"mistral": "mistral", "seed_oss": "seed_oss", "glm45": "glm45"}
TEXT = ["", "Let me see.\n", "One. Two.\n\n", "é 北京 < & >"]
Split = tuple[str, str, list[tuple[str | None, Any]]]


def tokenizer() -> PreTrainedTokenizerFast:
    """One with every mark as a token."""
    made = byte_tokenizer()
    marks = {mark for one in CALLS.values() for mark in one.begin + one.around if mark[-1] in ">]"}
    marks |= {mark for one in REASONING.values() for mark in (one.start, one.end) if mark[0] != "H"}
    more = {"</tool_call>", "[ARGS]", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|tool_call_end|>"}
    made.add_tokens(sorted(marks | more | {"<|tool_call_argument_begin|>", "</seed:tool_call>"}))
    return made


def theirs(known: PreTrainedTokenizerFast, name: str, text: str, reasoning: str | None) -> Split:
    tools = [{"type": "function", "function": {"name": one, "parameters": given}} for one, given in TOOLS.items()]
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "a"}], tools=tools)
    thought, content = None, text
    if reasoning is not None:
        reader = ReasoningParserManager.get_reasoning_parser(reasoning)(known)
        thought, content = reader.extract_reasoning(text, request)
    reader = ToolParserManager.get_tool_parser(name)(known, request.tools)
    found = reader.extract_tool_calls((content or "").lstrip("\n"), request)
    made = [(one.function.name, json.loads(one.function.arguments)) for one in found.tool_calls]
    return found.content or "", (thought or "").strip(), made


def ours(name: str, text: str, reasoning: str | None, rng: random.Random) -> Split:
    parser = AnswerParser(CALLS[name], None if reasoning is None else REASONING[reasoning], TOOLS)
    content, thought, made = "", "", list[tuple[str | None, str]]()
    ends = [*sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 9))), len(text)]
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        part = parser.feed(text[begin:end], ended=number == len(ends) - 1)
        content, thought = content + part.content, thought + part.reasoning
        for one in part.calls:
            if one.name is not None:
                made.append((one.name, ""))
            made[-1] = (made[-1][0], made[-1][1] + one.arguments)
    return content, thought, [(one, json.loads(arguments)) for one, arguments in made]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=2000, help="random answers of each format")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    known, wrong = tokenizer(), Counter[str]()
    for name in asked.formats:
        for number in range(asked.answers):
            rng = random.Random(f"{name}{number}")
            calls = random_calls(rng) if rng.random() < 0.9 else []
            calls = [(one.replace("-", "_"), given) for one, given in calls] if CALLS[name].python else calls
            bare = CALLS[name].bare and calls
            before, after = ("" if bare else rng.choice(TEXT)), ("" if bare else rng.choice(["", "\n", " Done."]))
            reasoning = rng.choice([None, THOUGHTS.get(name, "deepseek_r1")])
            text = before + (WRITTEN[name](calls) if calls else "") + after
            if reasoning is not None:
                marks = REASONING[reasoning]
                text = f"{marks.start}\nHm, {rng.choice(TEXT)}\n{marks.end}\n\n{text}"
            wanted, found = theirs(known, name, text, reasoning), ours(name, text, reasoning, rng)
            same = found[0].split() in (wanted[0].split(), wanted[0].split() + after.split())
            if not same or found[1:] != wanted[1:]:
                wrong[name] += 1
                if wrong[name] <= 3:
                    print(f"{name}: {text!r}\n  vLLM {wanted}\n  ours {found}", flush=True)  # noqa: T201
        print(f"{name}: {asked.answers} answers, {wrong[name]} differ", flush=True)  # noqa: T201
    return 1 if wrong.total() else 0


if __name__ == "__main__":
    raise SystemExit(main())
