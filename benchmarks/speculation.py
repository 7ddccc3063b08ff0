"""Compare steps and processor time with and without drafts, for an oracle, prompt lookup and a draft model.

    python speculation.py [--rounds 3] [--new-tokens 64] [--tiny]

1. A llama and a qwen3_next of about 100M parameters with random weights, then tiny ones, 1 and 8 requests that decode,
   and a drafter that knows the output: the most that K drafts per step can save, and the cost of verifying them.
2. The same drafter, but each draft is wrong with probability 0.3, because the best K depends on that.
3. tiny:llama and tiny:qwen3_next on text that repeats itself, prompt lookup.
4. tiny:qwen3_next with itself as the draft model: everything is accepted, and the draft costs as much as the target.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from larger_models import llama_100m, qwen3_next_100m

from hybridkv.request import Request, SamplingParams
from hybridkv.runner import Completion, Engine, LoadedModel, load, plan_for
from hybridkv.runner.drafters import Drafter, DraftModel, NgramDrafter

PROMPT = 64
TINY = ("tiny:llama", "tiny:qwen3_next")


class KnownOutput:
    """Drafts what the requests of earlier runs came to, each token right with probability ``right``."""

    def __init__(self, num_speculative_tokens: int, right: float = 1.0) -> None:
        self.num_speculative_tokens, self._right = num_speculative_tokens, right
        self._rng = np.random.default_rng(0)
        self._outputs: dict[bytes, tuple[int, ...]] = {}

    def learn(self, done: Sequence[Completion]) -> None:
        """Set the outputs of the next prompts."""
        self._outputs = {np.array(one.prompt_token_ids, np.int32).tobytes(): one.token_ids for one in done}

    def require(self, target: LoadedModel) -> None:
        """Any model will do."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Propose the next tokens, some of them wrong."""
        return [self._next(one) for one in requests]

    def close(self) -> None:
        """Nothing is held."""

    def _next(self, request: Request) -> list[int]:
        known = request.num_output_tokens
        output = self._outputs[request.token_ids(0, request.num_prompt_tokens).tobytes()]
        tokens = output[known : known + self.num_speculative_tokens]
        return [one if self._rng.random() < self._right else one ^ 1 for one in tokens]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: of the steps behind the prompts, how many there were, and seconds of the processor that they took."""

    done: tuple[Completion, ...]
    steps: int
    seconds: float
    drafted: int
    accepted: int

    def line(self, name: str, plain: Measured) -> str:
        """Beside a run without drafts."""
        rate = f"{self.accepted / self.drafted:6.1%} of {self.drafted:5}" if self.drafted else "             -"
        same = "" if [one.token_ids for one in self.done] == [one.token_ids for one in plain.done] else "  OTHER TOKENS"
        return (
            f"    {name:<22} {self.steps:5} steps {self.seconds:7.2f} s {plain.seconds / self.seconds:5.2f}x  "
            f"accepted {rate}{same}"
        )


def measure(
    loaded: LoadedModel,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    rounds: int,
    drafter: Drafter | None = None,
) -> Measured:
    """Return the fastest of ``rounds``, each with an empty prefix cache."""
    found: list[Measured] = []
    lengths = [len(one) + sampling.max_tokens for one in prompts]
    for _ in range(rounds):
        drafts = 0 if drafter is None else drafter.num_speculative_tokens
        plan = plan_for(loaded, lengths * 2, num_speculative_tokens=drafts)
        engine = Engine(loaded, plan, speculate=drafter)
        for prompt in prompts:
            engine.add(prompt, sampling)
        done = list(engine.step())  # the prompts
        begun, before = time.process_time(), engine.statistics().steps
        while not engine.idle:
            done += engine.step()
        seconds, stats = time.process_time() - begun, engine.statistics()
        engine.runner.detach()  # the drafter goes on
        done.sort(key=lambda one: int(one.request_id))
        counts = stats.drafted_tokens, stats.accepted_tokens
        found.append(Measured(tuple(done), stats.steps - before, seconds, *counts))
    return min(found, key=lambda one: one.seconds)


def random_prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Of PROMPT tokens each."""
    rng = np.random.default_rng(count)
    return [rng.integers(32, vocabulary, PROMPT).tolist() for _ in range(count)]


def known_outputs(rounds: int, new_tokens: int, models: Iterable[LoadedModel]) -> None:
    """Print the first two measurements."""
    greedy = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    for loaded in models:
        for count in (1, 8):
            prompts = random_prompts(count, min(32_000, loaded.vocab_size - 2))  # a wrong token is one, too
            plain = measure(loaded, prompts, greedy, rounds)
            print(f"  {loaded.name}, {count} requests, {new_tokens} new tokens each")
            print(plain.line("no drafts", plain))
            for drafts, right in ((1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0), (2, 0.7), (4, 0.7), (8, 0.7)):
                drafter = KnownOutput(drafts, right)
                drafter.learn(plain.done)
                print(measure(loaded, prompts, greedy, rounds, drafter).line(f"K = {drafts}, right {right:.0%}", plain))


def real_drafters(rounds: int, new_tokens: int) -> None:
    """Print the other two measurements."""
    repeats = SamplingParams(max_tokens=new_tokens, ignore_eos=True, repetition_penalty=0.2)
    for name in TINY:
        loaded = load(name)
        prompts = [[65 + number, 66, 67, 68] * 16 for number in range(8)]
        plain = measure(loaded, prompts, repeats, rounds)
        print(f"  {name}, 8 requests on text that repeats itself")
        print(plain.line("no drafts", plain))
        print(measure(loaded, prompts, repeats, rounds, NgramDrafter(4)).line("prompt lookup, K = 4", plain))
    greedy, prompts = SamplingParams(max_tokens=new_tokens, ignore_eos=True), random_prompts(8, 127)
    plain = measure(loaded, prompts, greedy, rounds)
    print(f"  {loaded.name} drafts for itself, 8 requests")
    print(plain.line("no drafts", plain))
    drafter = DraftModel(Engine(load(loaded.name), memory="256MiB", max_model_len=PROMPT + new_tokens), 4)
    print(measure(loaded, prompts, greedy, 1, drafter).line("draft model, K = 4", plain))
    drafter.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="tiny models only")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, {asked.threads} threads"
    )
    large = () if asked.tiny else (llama_100m(), qwen3_next_100m())
    known_outputs(asked.rounds, asked.new_tokens, (*large, *map(load, TINY)))
    real_drafters(asked.rounds, asked.new_tokens)


if __name__ == "__main__":
    main()
