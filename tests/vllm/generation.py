"""Prompts in rounds, what two sides generated behind them, and how that is compared; all greedy.

    theirs  [ equal ......... | x | not compared ]
    ours    [ equal ......... | y | not compared ]
                                ^ a near-tie when plain transformers has both x and y close enough to its best logit

Behind a first difference the sides go on from other texts: nothing there says anything.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, Self, TypeAlias

import torch

from hybridkv.errors import ConfigError
from hybridkv.planner.plan import NATURAL, REFERENCE
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, LoadedModel, plan_for
from hybridkv.runner.check import forced_logits, generate_greedy

TOLERANCE = 2e-4
"""What float32 logits may differ by, as a share of their range (docs/models.md)."""
NEAR_TIE_GAP = 4 * TOLERANCE

Tokens: TypeAlias = tuple[int, ...]
Gap: TypeAlias = Callable[[Tokens, Tokens, int, int], float]
"""(prompt, output so far, two tokens) -> how far the lower of their logits is below the best, a share of the range."""
PRINTABLE = range(32, 127)
HEADS = (12, 85, 120, 150)
"""Tokens of the prefixes that prompts share: shorter than any block, and others that are a multiple of none."""
TAILS = (5, 60)
QUESTION = 20

Generate: TypeAlias = Callable[[Tokens], Tokens]
"""The output behind a prompt."""


@dataclass(frozen=True, slots=True)
class Round:
    """name: what is known of its prompts. prompts: token ids. parting: from heads that none has left before."""

    name: str
    prompts: tuple[Tokens, ...]
    parting: bool = False


def make_rounds(seed: int, generate: Generate) -> tuple[Round, ...]:
    """Five rounds, 28 prompts. generate: what the second turns take for the answers to the first.

    cold           [head | tail]                       nothing was seen
    head seen      [head | other tail]                 two for each head
    head again     [head | fourth tail]                by now it is known where prompts part
    same prompts   [head | tail]                       those of the first round
    second turn    [head | tail | answer | question]   of the first two tails
    """
    random = Random(seed)

    def tokens(count: int) -> Tokens:
        return tuple(random.choices(PRINTABLE, k=count))

    heads = [tokens(count) for count in HEADS]

    def with_tails() -> tuple[Tokens, ...]:
        return tuple(head + tokens(random.randint(*TAILS)) for head in heads)

    first, second, third, fourth = (with_tails() for _ in range(4))
    turns = tuple(prompt + generate(prompt) + tokens(QUESTION) for prompt in (*first, *second))
    return (
        Round("cold", first),
        Round("head seen", (*second, *third), parting=True),
        Round("head again", fourth),
        Round("same prompts", first),
        Round("second turn", turns),
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """To one prompt. tokens: the output. hit_tokens: tokens of the prompt that were found in the cache."""

    tokens: Tokens
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of an output that is not the same. prompt, at: indices. gap: as Gap has it."""

    prompt: int
    at: int
    theirs: int
    ours: int
    gap: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap < NEAR_TIE_GAP


@dataclass(frozen=True, slots=True)
class FewerHits:
    """A prompt of which we found less in the cache than they did."""

    prompt: int
    theirs: int
    ours: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of the answers to some prompts. tokens: compared. theirs, ours: hit tokens of all prompts."""

    prompts: int
    tokens: int
    theirs: int
    ours: int
    differences: tuple[Difference, ...]
    fewer: tuple[FewerHits, ...]

    @classmethod
    def of(cls, prompts: Sequence[Tokens], theirs: Sequence[Answer], ours: Sequence[Answer], gap: Gap) -> Self:
        """Compare the answers to ``prompts`` one by one. ConfigError unless both sides answered at the same length."""
        _require_same_lengths(prompts, theirs, ours)
        pairs = list(zip(theirs, ours, strict=True))
        firsts = [_first_difference(a.tokens, b.tokens) for a, b in pairs]
        differences = [
            Difference(i, at, a.tokens[at], b.tokens[at], gap(prompts[i], a.tokens[:at], a.tokens[at], b.tokens[at]))
            for i, ((a, b), at) in enumerate(zip(pairs, firsts, strict=True))
            if at is not None
        ]
        return cls(
            prompts=len(prompts),
            tokens=sum(len(a.tokens) if at is None else at + 1 for a, at in zip(theirs, firsts, strict=True)),
            theirs=sum(one.hit_tokens for one in theirs),
            ours=sum(one.hit_tokens for one in ours),
            differences=tuple(differences),
            fewer=tuple(
                FewerHits(i, a.hit_tokens, b.hit_tokens)
                for i, (a, b) in enumerate(pairs)
                if b.hit_tokens < a.hit_tokens
            ),
        )

    @property
    def near_ties(self) -> int:
        """Differences that rounding explains."""
        return sum(one.near_tie for one in self.differences)

    @property
    def faults(self) -> tuple[Difference | FewerHits, ...]:
        """What nothing explains."""
        return (*(one for one in self.differences if not one.near_tie), *self.fewer)


def _first_difference(theirs: Tokens, ours: Tokens) -> int | None:
    return next((at for at, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1]), None)


def _require_same_lengths(prompts: Sequence[Tokens], theirs: Sequence[Answer], ours: Sequence[Answer]) -> None:
    if not len(prompts) == len(theirs) == len(ours):
        raise ConfigError(
            f"{len(prompts)} prompts, {len(theirs)} answers of theirs, {len(ours)} of ours: give one of each"
        )
    lengths = {len(one.tokens) for one in chain(theirs, ours)}
    if len(lengths) > 1 or 0 in lengths:
        raise ConfigError(f"outputs of {sorted(lengths)} tokens: let every request generate as many, whatever they are")


OUTPUT = 24
"""Tokens of every output."""
MAX_MODEL_LEN = 512
VLLM_BLOCK_SIZE = 32
"""The smallest that vLLM's attention on CPUs takes."""
MEMORY = "64MiB"
"""Of our cache: like the GiB of vLLM's, so much that nothing is evicted."""
STOP_AFTER_S = 900.0
ENGINE = Path(__file__).with_name("vllm_engine.py")


@dataclass(frozen=True, slots=True)
class Way:
    """How Engine keeps the cache. placement: of states, None for the default of ``layout``."""

    name: str
    layout: str
    block_size: int
    placement: str | None = None


REFERENCE_WAY = Way("reference", REFERENCE, VLLM_BLOCK_SIZE)
NATURAL_WAY = Way("natural", NATURAL, 16)
GRID_WAY = Way("natural, interval:64", NATURAL, 16, "interval:64")


class VllmError(Exception):
    """vLLM did not answer. The message is its own."""


class Plain:
    """Plain transformers."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model

    def generate(self, prompt: Tokens) -> Tokens:
        with torch.inference_mode():
            return tuple(generate_greedy(self._model, prompt, OUTPUT))

    def gap(self, prompt: Tokens, output: Tokens, theirs: int, ours: int) -> float:
        """As generation.Gap has it."""
        with torch.inference_mode():
            logits = forced_logits(self._model, prompt, (*output, theirs))
        last = logits[-1]
        return float((last.max() - last[[theirs, ours]].min()) / (logits.max() - logits.min()))


def our_answers(loaded: LoadedModel, rounds: Sequence[Round], way: Way) -> list[list[Answer]]:
    """Of Engine, round by round."""
    plan = plan_for(
        loaded, [MAX_MODEL_LEN], memory=MEMORY, layout=way.layout, block_size=way.block_size, placement=way.placement
    )
    greedy = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    with Engine(loaded, plan) as engine:
        return [
            [Answer(done.token_ids, done.hit_tokens) for done in engine.generate(one.prompts, greedy)] for one in rounds
        ]


def their_answers(
    model: Path, rounds: Sequence[Round], options: Mapping[str, Any], script: Path | None = None
) -> tuple[str, list[list[Answer]]]:
    """vLLM's version and its answers, round by round. Files are left beside the folder ``model``.

    options: of vllm.LLM, beside those that every run has. script: what runs vLLM, None for vllm_engine.py.
    Raises VllmError as ``answers_of`` does.
    """
    size = {"max_model_len": MAX_MODEL_LEN, "block_size": VLLM_BLOCK_SIZE, "enable_prefix_caching": True}
    found = answers_of(job_of(model, rounds, {**size, **options}), model.parent, script)
    return found["version"], [
        [Answer(tuple(one["tokens"]), one["hit_tokens"]) for one in answered] for answered in found["rounds"]
    ]


def job_of(model: Path, rounds: Sequence[Round], options: Mapping[str, Any], **more: object) -> dict[str, Any]:
    """As vllm_engine.py reads it."""
    prompts = [one.prompts for one in rounds]
    return {"model": str(model), "rounds": prompts, "output": OUTPUT, "options": dict(options), **more}


def answers_of(asked: Mapping[str, Any], folder: Path, script: Path | None = None) -> Any:  # noqa: ANN401 - JSON
    """What ``script``, which runs vLLM in a process of its own, makes of ``asked``. Files are left in ``folder``.

    Raises VllmError, with the last error of its log, when it fails or takes longer than STOP_AFTER_S.
    """
    job, answers, log = (folder / name for name in ("job.json", "answers.json", "log.txt"))
    job.write_text(json.dumps(asked), "utf-8")
    with log.open("w", encoding="utf-8") as out:
        try:
            subprocess.run(  # noqa: S603  # this very Python, and a script of these tests
                [sys.executable, str(script or ENGINE), str(job), str(answers)],
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=STOP_AFTER_S,
                check=True,
            )
        except subprocess.CalledProcessError:
            raise VllmError(last_error(log.read_text("utf-8"))) from None
        except subprocess.TimeoutExpired:
            raise VllmError(f"no answers within {STOP_AFTER_S:.0f} s") from None
    return json.loads(answers.read_text("utf-8"))


def last_error(log: str) -> str:
    """The last error of the process that computes, whose cause the others do not know; else of any.

    vLLM's lines are "(Worker pid=7) ERROR date [file:line] IndexError: ...".
    """
    lines = [line for line in log.splitlines() if "Error: " in line]
    named = [line for line in lines if line.startswith("(Worker")] or lines or ["its log names no error"]
    return named[-1].partition("] ")[2].strip() or named[-1].strip()
