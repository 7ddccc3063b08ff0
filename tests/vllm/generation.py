"""Prompts in rounds, what two sides generated behind them, and how that is compared.

    theirs  [ equal ......... | x | not compared ]
    ours    [ equal ......... | y | not compared ]
                                ^ a near-tie when plain transformers has both x and y close enough to its best logit

Behind a first difference the sides go on from other texts: nothing there says anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import Self, TypeAlias

from hybridkv.errors import ConfigError

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
