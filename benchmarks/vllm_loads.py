"""Models and loads of ``bench_vllm.py``: requests as vLLM's users send them, in the size of one core.

A conversation is a list of turns. The prompt of a turn is all text before it and the turn's own tokens:

    turn 1   [ tokens 1 ]                                  -> answer 1
    turn 2   [ tokens 1 | answer 1 | tokens 2 ]            -> answer 2

A client sends its next turn when the answer to the last one has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import Any, Final, NamedTuple

MIB: Final = 1 << 20
VOCABULARY: Final = 12_288
ENOUGH: Final = 256 * MIB
"""Memory in which no load evicts or preempts."""
_LAYERS: Final = {"hidden_size": 256, "vocab_size": VOCABULARY, "num_attention_heads": 8, "num_key_value_heads": 2}


class Turn(NamedTuple):
    """Attributes: ``tokens`` follow all text before the turn; ``output`` is the number of tokens of the answer."""

    tokens: tuple[int, ...]
    output: int


Conversation = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model with seeded weights.

    Attributes:
        family: name of a tiny model of hybridkv.runner.
        fields: fields of its config.
        options: options of vllm.LLM, the same in all variants.
        unit: a ``prefix_match_unit`` that vLLM accepts for the model; ``None`` where its blocks are already as small.
    """

    family: str
    fields: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    unit: int | None = None


SHAPES: Final[Mapping[str, Shape]] = {
    # 10 M parameters, three recurrent layers to one of attention as in Qwen3.5; a state of 1.6 MB
    "hybrid": Shape(
        "granite_hybrid",
        {
            **_LAYERS,
            "num_hidden_layers": 8,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 512,
            "attention_multiplier": 32**-0.5,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 64,
        },
        # a step of at most one block of states: vLLM's scan on CPUs fails when a state inside a chunk is saved
        {"max_num_batched_tokens": 512},
        unit=32,
    ),
    # 9 M parameters, four windows of 256 tokens to one layer of full attention, as in Gemma 3
    "windows": Shape(
        "gemma3",
        {
            **_LAYERS,
            "num_hidden_layers": 10,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
            "intermediate_size": 512,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 256,
        },
    ),
    # so small that an engine's time is mostly vLLM's own
    "tiny": Shape("llama", {"vocab_size": VOCABULARY, "head_dim": 32}),
    "dense": Shape("llama", {**_LAYERS, "num_hidden_layers": 10, "intermediate_size": 768, "head_dim": 32}),
}
"""Float32 weights, so that outputs of all variants can be compared token by token."""


@dataclass(frozen=True, slots=True)
class Load:
    """Conversations with one model.

    Attributes:
        name: name of the load.
        shape: name of the model in SHAPES.
        memory: bytes of the cache.
        conversations: the conversations in the order in which they start.
        at_once: the most conversations at once; the next one starts when one ends.
    """

    name: str
    shape: str
    memory: int
    conversations: tuple[Conversation, ...]
    at_once: int

    @property
    def is_pressed(self) -> bool:
        """Whether memory is little."""
        return self.memory < ENOUGH


@dataclass(frozen=True, slots=True)
class HttpLoad:
    """Requests that ``vllm bench serve`` sends to a server. Each begins with one of several prefixes, drawn evenly.

    Attributes:
        name: name of the load.
        shape: name of the model in SHAPES.
        memory: bytes of the cache.
        requests: number of requests.
        at_once: the most requests at once.
        prefixes: number of prefixes.
        prefix_tokens: tokens of each prefix.
        suffix_tokens: tokens of the prompt after the prefix.
        output_tokens: tokens of each answer.
    """

    name: str
    shape: str
    memory: int
    requests: int = 48
    at_once: int = 4
    prefixes: int = 8
    prefix_tokens: int = 900
    suffix_tokens: int = 60
    output_tokens: int = 24


def chats(count: int) -> tuple[Conversation, ...]:
    """Return ``count`` chats of five turns, all with the same system prompt."""
    random = Random(f"chats {count}")  # noqa: S311 - a load, drawn anew alike each time
    system = _tokens(random, 160, 160)
    return tuple(
        (
            Turn(system + _tokens(random, 100, 500), random.randint(12, 28)),
            *(Turn(_tokens(random, 40, 240), random.randint(12, 28)) for _ in range(4)),
        )
        for _ in range(count)
    )


def documents(asks: int) -> tuple[Conversation, ...]:
    """Return ``asks`` questions on long documents, each at the end of its document.

    The document of rank r is asked about with a probability in proportion to 1/r. Some are asked about once. Of few
    questions, most are the first on their document, and hits depend on the seed.
    """
    random = Random(f"documents {asks}")  # noqa: S311 - as above
    texts = [_tokens(random, 500, 1700) for _ in range(16)]
    weights = [1 / rank for rank in range(1, 1 + len(texts))]
    asked = random.choices(texts, weights, k=asks)
    return tuple((Turn(text + _tokens(random, 20, 80), random.randint(8, 24)),) for text in asked)


def short_answers(count: int) -> tuple[Conversation, ...]:
    """Return ``count`` requests with short prompts and answers. Each begins with one of four prefixes."""
    random = Random(f"short answers {count}")  # noqa: S311 - as above
    prefixes = [_tokens(random, 128, 128) for _ in range(4)]
    return tuple(
        (Turn(random.choice(prefixes) + _tokens(random, 48, 48), random.randint(12, 36)),) for _ in range(count)
    )


def agents(count: int) -> tuple[Conversation, ...]:
    """Return ``count`` agents that call tools eight times. Agents with the same tools have the same preamble."""
    random = Random(f"agents {count}")  # noqa: S311 - as above
    preambles = [_tokens(random, 500, 700) for _ in range(3)]
    return tuple(
        (
            Turn(random.choice(preambles) + _tokens(random, 30, 120), random.randint(8, 24)),
            *(Turn(_tokens(random, 20, 160), random.randint(8, 24)) for _ in range(7)),
        )
        for _ in range(count)
    )


def _tokens(random: Random, least: int, most: int) -> tuple[int, ...]:
    # the first ids are special tokens of some families
    return tuple(random.choices(range(8, VOCABULARY), k=random.randint(least, most)))


def _loads() -> Iterator[Load]:
    yield Load("16 chats", "hybrid", ENOUGH, chats(16), 16)
    yield Load("32 chats", "hybrid", ENOUGH, chats(32), 32)
    yield Load("16 chats", "hybrid", 20 * MIB, chats(16), 16)
    yield Load("documents", "hybrid", ENOUGH, documents(160), 4)
    yield Load("documents", "hybrid", 40 * MIB, documents(160), 4)
    yield Load("documents", "hybrid", 20 * MIB, documents(160), 4)
    yield Load("agents", "hybrid", ENOUGH, agents(8), 4)
    yield Load("agents", "hybrid", 20 * MIB, agents(8), 4)
    yield Load("16 chats", "windows", ENOUGH, chats(16), 16)
    yield Load("16 chats", "windows", 24 * MIB, chats(16), 16)
    yield Load("documents", "windows", 24 * MIB, documents(160), 4)
    yield Load("16 chats", "dense", ENOUGH, chats(16), 16)
    yield Load("16 chats", "dense", 48 * MIB, chats(16), 16)
    yield Load("documents", "dense", ENOUGH, documents(160), 4)
    yield Load("documents", "dense", 48 * MIB, documents(160), 4)
    yield Load("agents", "dense", 48 * MIB, agents(8), 4)
    yield Load("short answers", "tiny", ENOUGH, short_answers(256), 16)


LOADS: Final = tuple(_loads())
HTTP_LOADS: Final = (
    HttpLoad("prefixes over HTTP", "hybrid", 20 * MIB),
    HttpLoad("short answers over HTTP", "tiny", ENOUGH, 256, 16, prefixes=4, prefix_tokens=128, suffix_tokens=48),
)


def prompt_of(conversation: Conversation, answers: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the prompt of the turn after ``answers``, one answer for each turn before it."""
    before = chain.from_iterable(turn.tokens + answer for turn, answer in zip(conversation, answers, strict=False))
    return (*before, *conversation[len(answers)].tokens)
