"""Continuous batching with prefix caching for a loaded transformers model.

    python examples/continuous_batching.py

The model is a tiny random Qwen3-Next: attention and recurrent layers. You can use any causal language model with layers
that hybridkv runs, and its own tokenizer: ``AutoModelForCausalLM.from_pretrained(...)``. With random weights the text
means nothing, but it equals the text of ``model.generate``.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridkv import Engine, SamplingParams
from hybridkv.runner import Completion, byte_tokenizer, tiny_model

BEGINNING = "You are a helpful assistant. Answer in one short sentence.\n\n"
QUESTIONS = ("What is a KV cache?", "What is a block table?", "Who frees a block?", "Why do prefixes repeat?")
SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)
MEMORY = "16MiB"


def three_lines(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[Completion]:
    """All there is to it. Behind the ``with`` the model has its own attention back."""
    with Engine(model, tokenizer=tokenizer, memory=MEMORY) as engine:
        engine.generate([BEGINNING], SamplingParams(max_tokens=1))  # what all of them begin with runs once
        return engine.generate(prompts, SAMPLING)


def as_they_grow(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[str]:
    """Read the same requests as streams, in turns; each step of the engine runs all of them."""
    texts = [""] * len(prompts)
    with Engine(model, tokenizer=tokenizer, memory=MEMORY) as engine:
        streams = [engine.stream(prompt, SAMPLING) for prompt in prompts]
        while not all(one.ended for one in streams):
            for number, one in enumerate(streams):
                if (new := next(one, None)) is not None:
                    texts[number] += new.text or ""
    return texts


def main() -> None:
    """Run both and print what came."""
    model, tokenizer = tiny_model("qwen3_next"), byte_tokenizer()
    prompts = [BEGINNING + question for question in QUESTIONS]
    for one in three_lines(model, tokenizer, prompts):
        print(f"request {one.request_id}: {one.hit_tokens} of {len(one.prompt_token_ids)} hit, {one.text!r}")
    for number, text in enumerate(as_they_grow(model, tokenizer, prompts)):
        print(f"stream {number}: {text!r}")


if __name__ == "__main__":
    main()
