"""Tiny models with real weights, prompts that share prefixes, and an observer that keeps every logit."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hybridkv.planner import Plan
from hybridkv.planner.plan import DEFAULT_LAYOUT
from hybridkv.request import SamplingParams
from hybridkv.runner import TINY_COMPRESSED, TINY_MODELS, Completion, Engine, EngineOptions, LoadedModel, load, plan_for
from hybridkv.runner.check import forced_logits, generate_greedy
from hybridkv.runner.drafters import Drafter
from hybridkv.runner.probe import attention_implementation
from hybridkv.runner.sampling.draws import Draws
from hybridkv.step import Step

T = TypeVar("T")

torch.set_num_threads(1)

TOLERANCE = 2e-4
"""Of the logit range: what different chunk plans may differ by in float32 (docs/models.md)."""

MODELS = ("llama", "qwen2", "deepseek_v3")
"""Where any model does."""

REPRESENTATIVE = (
    *("llama", "gemma3", "gpt_oss", "llama4", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
    *("mamba", "qwen3_next", "falcon_h1", "zamba2"),
)
"""Every kind of layer: full, window, chunk, MLA, indexers, compressors, ways to go on from a state, two in a layer."""

ALL_TINY = (*TINY_MODELS, *TINY_COMPRESSED)
ALL_MODELS = [
    pytest.param(name, marks=() if name in REPRESENTATIVE else pytest.mark.thorough, id=name) for name in ALL_TINY
]
"""CI runs the representative third, `make test-all` all of them."""

BEGIN = "<s>"
PIECES = ("\u2581a", "b", "\u2581", "\u6771", "\ufffd", "\u00e9!")
"""What the tokenizer with byte fallback has beside bytes."""


_PLANS: WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], Plan]] = WeakKeyDictionary()
"""By model and what was asked for: a plan of the natural layout looks through thousands of packings."""


@cache
def loaded_model(name: str, seed: int = 0) -> LoadedModel:
    return load(f"tiny:{name}", seed=seed)


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2, Mistral and Gemma decode: 256 byte tokens, a special one, and PIECES."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), BEGIN, *PIECES]
    tokenizer = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN)


def shared_prompts(count: int, seed: int, prefix: int = 40, longest: int = 60) -> list[list[int]]:
    """``count`` prompts with one prefix and tails of 1 .. longest tokens."""
    rng = np.random.default_rng(seed)
    head = rng.integers(32, 127, prefix).tolist()
    return [head + rng.integers(32, 127, int(rng.integers(1, longest + 1))).tolist() for _ in range(count)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def drawn(count: int, tokens: int = 20) -> list[SamplingParams]:
    """The first is greedy, the others are drawn by seeds of their own: not even equal prompts go on alike."""
    return [replace(greedy(tokens), temperature=float(seed > 0), seed=seed) for seed in range(count)]


def drained(engine: Engine) -> list[Completion]:
    """Who finished, step by step, until nobody is left."""
    done: list[Completion] = []
    while not engine.idle:
        done += engine.step()
    return done


def run(work: Callable[[], Awaitable[T]]) -> T:
    """``work`` on a loop of its own; a test that hangs fails."""

    async def limited() -> T:
        async with asyncio.timeout(60):
            return await work()

    return asyncio.run(limited())


@contextmanager
def failing(module: torch.nn.Module, fails: Callable[[int], bool] = lambda _: True) -> Iterator[list[int]]:
    """``module`` raises at its calls for which ``fails`` says so, counted from 1, and what is before it has run.

    Yields the numbers of all calls so far.
    """
    calls: list[int] = []

    def fail(*_: object) -> None:
        calls.append(len(calls) + 1)
        if fails(calls[-1]):
            raise RuntimeError("the device is gone")

    hook = module.register_forward_pre_hook(fail)
    try:
        yield calls
    finally:
        hook.remove()


class EveryLogit:
    """Observer: (request id, position of the token to draw) -> float32[vocabulary]."""

    def __init__(self) -> None:
        self._owner: dict[int, str] = {}
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
        self.steps: list[Step] = []

    def __call__(self, step: Step, logits: torch.Tensor) -> None:
        self.steps.append(step)
        for new in step.new_rows:
            self._owner[new.row] = new.request_id
        draws = Draws.of(step)
        for row, position, one in zip(step.rows[draws.row].tolist(), draws.position.tolist(), logits, strict=True):
            self.logits[self._owner[row], position] = one.clone()

    def of(self, done: Completion) -> torch.Tensor:
        """float32[output, vocabulary]: the logits that each output token was chosen from."""
        start = len(done.prompt_token_ids)
        return torch.stack([self.logits[done.request_id, start + i] for i in range(len(done.token_ids))])


def reference_logits(loaded: LoadedModel, done: Completion) -> torch.Tensor:
    """The same from one plain forward over prompt and output."""
    with attention_implementation(loaded.model, "eager"), torch.inference_mode():
        return forced_logits(loaded.model, done.prompt_token_ids, done.token_ids)


def generated(loaded: LoadedModel, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """What transformers' own generate says."""
    with attention_implementation(loaded.model, "eager"), torch.inference_mode():
        return tuple(generate_greedy(loaded.model, prompt, count))


def relative_difference(ours: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Per position, the largest difference as a share of the range of all reference logits."""
    return (ours - reference).abs().amax(dim=-1) / (reference.max() - reference.min())


class EngineFactory:
    """Makes engines and closes them."""

    def __init__(self) -> None:
        self._made: list[Engine] = []

    def __call__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[Sequence[int]],
        output: int,
        *,
        memory_blocks: int | None = None,
        room_for: int | None = None,
        layout: str = DEFAULT_LAYOUT,
        placement: str | None = None,
        block_size: int = 16,
        observer: EveryLogit | None = None,
        speculate: Drafter | None = None,
        **options: int | bool | Mapping[str, str],
    ) -> Engine:
        """An engine with room for all prompts, for ``room_for`` requests, or ``memory_blocks`` blocks beside null."""
        lengths = [len(prompt) + output for prompt in prompts]
        if room_for is not None:
            lengths = [max(lengths)] * room_for

        drafts = 0 if speculate is None else speculate.num_speculative_tokens
        known = _PLANS.setdefault(loaded.model, {})

        def planned(memory: int | None = None) -> Plan:
            key = (*lengths, memory, layout, placement, block_size, drafts)
            if key not in known:
                known[key] = plan_for(
                    loaded,
                    lengths,
                    memory=memory,
                    layout=layout,
                    placement=placement,
                    block_size=block_size,
                    num_speculative_tokens=drafts,
                )
            return known[key]

        plan = planned()
        if memory_blocks is not None:
            plan = planned((memory_blocks + 1) * plan.capacity.block_bytes)
        self.close()  # one model, one attention at a time
        asked = EngineOptions(**options)  # type: ignore[arg-type]  # of one type by name
        engine = Engine(loaded, plan, asked, observer=observer, speculate=speculate)
        self._made.append(engine)
        return engine

    def close(self) -> None:
        while self._made:
            self._made.pop().close()
