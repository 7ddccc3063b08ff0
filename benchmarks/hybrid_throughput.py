"""Compare a hybrid model in the engine with sequential ``generate``, and measure the engine's share of a step.

    python hybrid_throughput.py [--rounds 5]

1. tiny:qwen3_next, 16 prompts of 64-128 tokens, 64 new tokens each: `Engine.generate` of all of them, compared with one
   `model.generate` after the other, same threads, best of the rounds.
2. A qwen3_next of about 100M parameters, 16 requests that decode: the share of a step outside of the model's own
   modules: scheduling, tables, gathering and scattering of keys and states, sampling.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from larger_models import qwen3_next_100m
from transformers import AttentionInterface

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, LoadedModel, load, plan_for
from hybridkv.runner.attention import gather
from hybridkv.runner.attention.caches import StepCache
from hybridkv.runner.attention.formulas import dense_attention
from hybridkv.runner.check import generate_greedy
from hybridkv.runner.probe import attention_implementation
from hybridkv.runner.states import recurrent
from hybridkv.runner.states.state_batch import PagedMixer

PROMPTS, NEW_TOKENS = 16, 64


def prompts(seed: int, vocabulary: int) -> list[list[int]]:
    """16 of 64-128 random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(32, vocabulary, int(rng.integers(64, 129))).tolist() for _ in range(PROMPTS)]


def engine_for(loaded: LoadedModel, asked: Sequence[Sequence[int]], new_tokens: int) -> Engine:
    """With room for all of them."""
    return Engine(loaded, plan_for(loaded, [len(one) + new_tokens for one in asked]))


def best(rounds: int, work: Callable[[int], object]) -> float:
    """Return the shortest of ``rounds`` in seconds; each has its own number, so that it hits nothing."""
    seconds = []
    for number in range(rounds):
        begun = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def beside_generate(rounds: int) -> None:
    """Print the first measurement."""
    loaded = load("tiny:qwen3_next")
    greedy = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)

    def sequential(number: int) -> None:
        for one in prompts(number, 127):
            generate_greedy(loaded.model, one, NEW_TOKENS)

    with attention_implementation(loaded.model, "eager"), torch.inference_mode():
        generate_greedy(loaded.model, prompts(0, 127)[0], 4)
        alone = best(rounds, sequential)
    engine = engine_for(loaded, [[0] * 128] * PROMPTS * 2, NEW_TOKENS)
    together = best(rounds, lambda number: engine.generate(prompts(number + 100, 127), greedy))
    hits = engine.statistics().hit_tokens
    engine.close()
    tokens = PROMPTS * NEW_TOKENS
    print(f"tiny:qwen3_next, {PROMPTS} prompts, {NEW_TOKENS} new tokens each, {hits} hit tokens")
    print(f"  sequential generate {alone:7.2f} s, {tokens / alone:7.0f} tokens a second")
    print(f"  engine              {together:7.2f} s, {tokens / together:7.0f} tokens a second: {alone / together:.1f}x")


class Clock:
    """Seconds inside of some calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, timed."""

        def timed(*args: object, **kwargs: object) -> object:
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun

        return timed


def share_outside(steps: int) -> None:
    """Print the second measurement."""
    loaded = qwen3_next_100m()
    parameters = sum(one.numel() for one in loaded.model.parameters())
    asked = prompts(1, 32_000)
    engine = engine_for(loaded, asked, steps + 16)
    for one in asked:
        engine.add(one, SamplingParams(max_tokens=steps + 16, ignore_eos=True))
    while (
        engine.scheduler.num_waiting or engine.scheduler.statistics().computed_tokens < sum(map(len, asked)) + PROMPTS
    ):
        engine.step()
    forward, update, attend, dense, mixers, own = (Clock() for _ in range(6))
    with (
        patch.object(engine.runner.model, "forward", forward.around(engine.runner.model.forward)),
        patch.object(StepCache, "update", update.around(StepCache.update)),
        patch.object(gather, "dense_attention", dense.around(dense_attention)),
        patch.object(PagedMixer, "__call__", mixers.around(PagedMixer.__call__)),
        patch.object(recurrent, "_call", own.around(recurrent._call)),
    ):
        AttentionInterface.register(gather.NAME, attend.around(gather.attend))
        begun = time.perf_counter()
        for _ in range(steps):
            engine.step()
        whole = time.perf_counter() - begun
    AttentionInterface.register(gather.NAME, gather.attend)
    engine.close()
    parts = {
        "scheduling, tables, batches, sampling": whole - forward.seconds,
        "keys and values written and gathered": update.seconds,
        "attention split and joined": attend.seconds - dense.seconds,
        "states gathered and written": mixers.seconds - own.seconds,
    }
    print(f"{loaded.name}: {parameters / 1e6:.0f}M parameters, {PROMPTS} requests decode, {steps} steps")
    print(
        f"  a step {1000 * whole / steps:.1f} ms, outside of the model's own modules {sum(parts.values()) / whole:.1%}"
    )
    for name, seconds in parts.items():
        print(f"    {name:<40} {1000 * seconds / steps:6.2f} ms {seconds / whole:6.1%}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, {asked.threads} threads"
    )
    beside_generate(asked.rounds)
    share_outside(8 * asked.rounds)


if __name__ == "__main__":
    main()
