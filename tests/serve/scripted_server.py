"""A server whose model writes a given text, as far as the form of its output allows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from serve_support import Served, engine_of, serving

from hybridkv.request import SamplingParams
from hybridkv.serve import ServeOptions
from hybridkv.serve.bodies import SamplingBody

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for one in messages %}{{ one.role }}: {{ one.content }}"
    "{% if one.reasoning_content %}({{ one.reasoning_content }}/{{ one.reasoning }}){% endif %}; {% endfor %}"
    "{% if enable_thinking %}<think>\n{% endif %}{# </think> <tool_call> #}"
)
END = 256


class Script:
    """What the model of a server writes."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, output: Any, logits: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  # ids in any form
        tokens = [*self.text.encode(), END]
        forced = torch.full_like(logits, -1e9)
        forced[..., tokens[min(len(output), len(tokens) - 1)]] = 0.0
        return forced


@contextmanager
def scripted(script: Script, template: str = TEMPLATE, options: ServeOptions | None = None) -> Iterator[Served]:
    """A server whose model writes ``script``."""
    engine = engine_of("llama")
    engine.loaded.tokenizer.chat_template = template
    sampling = SamplingBody.sampling

    def forced(body: SamplingBody, most: int, **more: Any) -> SamplingParams:  # noqa: ANN401  # as the original
        return replace(sampling(body, most, **more), logits_processors=(script,))

    with pytest.MonkeyPatch.context() as patch, serving(engine, options) as served:
        patch.setattr(SamplingBody, "sampling", forced)
        yield served
