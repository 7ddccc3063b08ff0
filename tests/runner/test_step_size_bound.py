"""NemotronH and Zamba2 with the lower bound of their step size: outputs depend on how a prompt is cut into calls.

transformers raises the step size of their scan to ``time_step_min`` in calls of several tokens, not in calls of one. So
a token has another state in a prompt than in decoding, in plain transformers as well. An engine equals plain
transformers where both make the same calls.
"""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from runner_support import (
    TOLERANCE,
    EngineFactory,
    EveryLogit,
    greedy,
    reference_logits,
    relative_difference,
    shared_prompts,
)
from transformers import DynamicCache

from hybridkv.runner import Completion, LoadedModel, byte_tokenizer, tiny_model, wrap
from hybridkv.runner.probe import attention_implementation

OUTPUT = 12
BOUND = 0.1
"""Above most step sizes of the tiny models, which have it switched off."""
DIFFERS = 5 * TOLERANCE


def in_calls(loaded: LoadedModel, done: Completion, ends: Sequence[int]) -> torch.Tensor:
    """float32[OUTPUT, vocabulary] of plain transformers: the prompt in calls up to ``ends``, then token by token."""
    tokens, prompt = torch.tensor([[*done.prompt_token_ids, *done.token_ids]]), len(done.prompt_token_ids)
    cuts = [0, *ends, *range(prompt, prompt + OUTPUT)]
    cache, last = DynamicCache(config=loaded.model.config), []
    with attention_implementation(loaded.model, "eager"), torch.inference_mode():
        for start, end in pairwise(cuts):
            out = loaded.model(input_ids=tokens[:, start:end], past_key_values=cache, use_cache=True)
            last.append(out.logits[0, -1].float())
    return torch.stack(last[-OUTPUT:])


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_bounded_step_size_outputs_equal_transformers_with_equal_calls(name: str, make_engine: EngineFactory) -> None:
    loaded = wrap(tiny_model(name, fields={"time_step_min": BOUND}), byte_tokenizer(), name)
    (prompt,) = shared_prompts(1, 3)

    def run(placement: str) -> tuple[Completion, torch.Tensor]:
        observer = EveryLogit()
        engine = make_engine(loaded, [prompt], OUTPUT, placement=placement, observer=observer)
        (done,) = engine.generate([prompt], greedy(OUTPUT))
        return done, observer.of(done)

    def furthest(ours: torch.Tensor, reference: torch.Tensor) -> float:
        return float(relative_difference(ours, reference).max())

    # no state kept: the prompt in one call, as generate has it; kept at its end: its last token in a call of its own
    (whole, of_whole), (cut, of_cut) = run("none"), run("ends")
    as_generate = in_calls(loaded, whole, [])
    assert furthest(of_whole, as_generate) <= TOLERANCE
    assert furthest(of_cut, in_calls(loaded, cut, [len(prompt) - 1])) <= TOLERANCE
    # the bound is at work: plain transformers, too, has another answer for other calls
    assert furthest(as_generate, reference_logits(loaded, whole)) > DIFFERS
    assert furthest(as_generate, in_calls(loaded, whole, [len(prompt) - 1])) > DIFFERS
