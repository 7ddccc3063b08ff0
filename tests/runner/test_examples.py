"""The examples of the engine as a library print the outputs of plain transformers."""

import re
import runpy
from pathlib import Path

from runner_support import generated

import warm
from hybridkv.runner import byte_tokenizer, tiny_model, wrap

EXAMPLE = Path(__file__).parents[2] / "examples" / "continuous_batching.py"
HIT = re.compile(r"request (\d): (\d+) of (\d+) hit, (.*)")


def test_library_example_prints_outputs_of_plain_model() -> None:
    done = warm.run([EXAMPLE], environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    names = runpy.run_path(str(EXAMPLE))  # its constants; nothing runs
    loaded = wrap(tiny_model("qwen3_next"), byte_tokenizer())
    prompts = [list((names["BEGINNING"] + question).encode()) for question in names["QUESTIONS"]]
    texts = [repr(bytes(generated(loaded, prompt, names["SAMPLING"].max_tokens)).decode()) for prompt in prompts]
    found = [HIT.fullmatch(line) for line in done.stdout.splitlines()[: len(prompts)]]
    answers = [(int(one[2]), int(one[3]), one[4]) for one in found if one is not None]
    hit = len(names["BEGINNING"])  # a state was kept where the first request ended
    assert answers == [(hit, len(prompt), text) for prompt, text in zip(prompts, texts, strict=True)]
    assert done.stdout.splitlines()[len(prompts) :] == [f"stream {i}: {text}" for i, text in enumerate(texts)]
