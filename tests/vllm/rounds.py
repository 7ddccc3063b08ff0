"""Prompts in rounds, such that more and more of them was seen before. A round's prompts run side by side."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from generation import Tokens

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
