"""Measure what structured outputs cost: seconds of decoding steps with and without them, in turns, in one process.

    python structured_outputs.py [--model tiny:llama] [--rows 32] [--new-tokens 96] [--rounds 7]

Every row writes a list of objects that has no end, or ignores end tokens, so that both sides run equally many steps.
``masks`` is the time in which a thread makes the masks of a step; ``waited`` is the part of it that the forward did not
cover. Processor seconds count all threads, the masks' too, and other work on the machine hardly changes them.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import Future
from statistics import median

import torch
from larger_models import llama_100m

from hybridkv.request import SamplingParams, StructuredOutput
from hybridkv.runner import Engine, EngineOptions, load, wrap
from hybridkv.runner.sampling.structured import Masked, Masks
from hybridkv.runner.tiny import byte_tokenizer

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
FORM = StructuredOutput("json_schema", json.dumps({"type": "array", "items": ITEM, "minItems": 10000}))


class Watched(Future[Masks]):
    """Masks that note how long their reader waits for them."""

    def __init__(self, made: Future[Masks], waits: list[float]) -> None:
        super().__init__()
        self._made, self._waits = made, waits

    def result(self, timeout: float | None = None) -> Masks:
        """Wait for the masks."""
        begun = time.perf_counter()
        found = self._made.result(timeout)
        self._waits.append(time.perf_counter() - begun)
        return found


def watch(engine: Engine) -> tuple[list[float], list[float]]:
    """Note the seconds of each step's masks, and how long the step waited for them."""
    took, waited = list[float](), list[float]()
    grammars = engine.grammars
    begin, masks = grammars.begin, grammars.masks

    def timed(rows: list[Masked], draws: int, vocabulary: int) -> Masks:
        begun = time.perf_counter()
        made = masks(rows, draws, vocabulary)
        took.append(time.perf_counter() - begun)
        return made

    grammars.masks = timed  # type: ignore[method-assign,assignment]  # to time it
    grammars.begin = lambda *given: Watched(begin(*given), waited)  # type: ignore[method-assign]  # same
    return took, waited


def main() -> None:
    """Print the seconds of both sides, their ratio, and the times of the masks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny:llama", help="tiny:NAME, a folder, or llama-100m with byte tokens")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    loaded = wrap(llama_100m().model, byte_tokenizer()) if asked.model == "llama-100m" else load(asked.model)
    plain = SamplingParams(max_tokens=asked.new_tokens, ignore_eos=True, temperature=1.0)
    formed = SamplingParams(max_tokens=asked.new_tokens, temperature=1.0, structured=FORM)
    options = EngineOptions(asked.rows, token_budget=2048, self_check=False)
    prompts = [[at, 7, 9, 11] for at in range(asked.rows)]
    with Engine(loaded, options=options, memory="512MiB", max_model_len=256) as engine:
        took, waited = watch(engine)
        seconds: dict[str, list[float]] = {"plain": [], "structured": []}
        work: dict[str, list[float]] = {"plain": [], "structured": []}
        for number in range(asked.rounds + 1):
            for name, params in (("plain", plain), ("structured", formed)):
                begun, worked = time.perf_counter(), time.process_time()
                done = engine.generate(prompts, params)
                if any(len(one.token_ids) != asked.new_tokens for one in done):
                    raise SystemExit("an output ended early")
                if number:  # the first round warms up
                    seconds[name].append((time.perf_counter() - begun) / asked.new_tokens)
                    work[name].append((time.process_time() - worked) / asked.new_tokens)
    steps = {name: median(values) * 1e3 for name, values in seconds.items()}
    ratio, of_work = (
        median(one / other for one, other in zip(kind["structured"], kind["plain"], strict=True))
        for kind in (seconds, work)
    )
    print(
        f"{asked.model}, {asked.rows} rows, {loaded.vocab_size} tokens: {steps['plain']:.2f} ms a step, structured "
        f"{steps['structured']:.2f} ms, {ratio - 1:+.1%}, processor {of_work - 1:+.1%}; "
        f"masks {median(took) * 1e3:.2f} ms, waited {median(waited) * 1e3:.2f} ms"
    )


if __name__ == "__main__":
    main()
