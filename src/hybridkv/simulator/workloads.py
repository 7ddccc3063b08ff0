"""Seeded generators of request streams: chat, agent, api, documents, mix, think.

    chat    1,700 conversations an hour with 40 assistants (Zipf 1.0): system prompt, then turns; a turn's prompt is
            all that was said before, outputs included, and a new user text
    think   the same, but what the model wrote comes back as other tokens (its reasoning is stripped), so that a turn
            shares the previous prompt only
    agent   650 tasks an hour for 12 agents: system and tools, then steps of observation and output; 15% of the tasks
            fork into 2 to 4 that go on apart
    api     6,000 calls an hour of 80 templates (Zipf 0.8), each with an input of its own
    documents  2,000 readers an hour ask 3 questions on average about a document of 10,000 to 60,000 tokens, each behind
            all that was said before; the calls of api between them
    mix     chat, agent and api together

Conversations, tasks and calls arrive as Poisson processes during ``hours``; what follows them may end later.
Lengths are log-normal around the median, cut at both ends; those of system prompts are log-uniform. ``rate``
multiplies the arrivals. The generator of random numbers is handed in: equal seeds give equal streams. Every prompt
begins with the piece that others begin with, too (system prompt, tools, template); ``marks`` marks its end.

UniformWorkload has equal conversations, and a closed form of its hit rate in an endless cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Final

import numpy as np

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.tokens import PROMPT_SEGMENT, Piece, Pieces
from hybridkv.simulator.trace import TraceSummary, summarise

_HOUR_S: Final = 3600.0
MOST_HOURS: Final = 100.0
"""Of arrivals at rate 1: up to 1.9 million requests of 1 KB each."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts (or seconds): median, sigma of the logarithm, and where they are cut."""

    median: float
    sigma: float
    least: int
    most: int
    _log_median: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_log_median", float(np.log(self.median)))

    def draw(self, rng: np.random.Generator) -> int:
        """Draw one count."""
        return min(max(round(rng.lognormal(self._log_median, self.sigma)), self.least), self.most)


_USER: Final = Lengths(45, 1.0, 4, 2000)
_ANSWER: Final = Lengths(180, 0.8, 8, 2000)
_THINKING_S: Final = Lengths(40, 0.75, 2, 900)
_OBSERVATION: Final = Lengths(220, 1.1, 20, 4000)
_ACTION: Final = Lengths(70, 0.7, 8, 800)
_STEPS: Final = Lengths(7.5, 0.62, 1, 40)
_INPUT: Final = Lengths(120, 0.8, 8, 4000)
_REPLY: Final = Lengths(15, 0.85, 1, 400)
_MEAN_TURNS: Final = 3.5
_MOST_TURNS: Final = 20
_MEAN_QUESTIONS: Final = 3.0
_FORKING: Final = 0.15


@dataclass(frozen=True, slots=True)
class _Stream:
    """The state of a generator. segments: numbers that are not used yet."""

    rng: np.random.Generator
    hours: float
    rate: float
    segments: Iterator[int]

    def piece(self, tokens: int) -> Piece:
        """Return new tokens, which no earlier piece has."""
        return (next(self.segments), 0, tokens)

    def arrivals_s(self, per_hour: float) -> list[float]:
        """Yield the times of a Poisson process in order, in seconds."""
        count = self.rng.poisson(per_hour * self.rate * self.hours)
        times: list[float] = np.sort(self.rng.uniform(0, self.hours * _HOUR_S, count)).tolist()
        return times

    def shared(self, count: int, least: int, most: int) -> list[Piece]:
        """Return ``count`` prefixes of log-uniform length."""
        lengths = np.exp(self.rng.uniform(np.log(least), np.log(most), count))
        return [self.piece(round(tokens)) for tokens in lengths.tolist()]

    def zipf(self, prefixes: list[Piece], exponent: float, draws: int) -> list[Piece]:
        """Yield one of ``prefixes`` per draw, the k-th with a weight of k ** -exponent."""
        weights = np.arange(1, len(prefixes) + 1) ** -exponent
        chosen = self.rng.choice(len(prefixes), draws, p=weights / weights.sum())
        return [prefixes[at] for at in chosen.tolist()]


def _request(time_s: float, prompt: list[Piece], output: Piece) -> TraceRequest:
    """Return a request; times are whole milliseconds, as in a file."""
    return TraceRequest(
        round(time_s * 1000) / 1000, Pieces(PROMPT_SEGMENT, tuple(prompt)), Pieces(PROMPT_SEGMENT, (output,))
    )


def _conversations(stream: _Stream, *, outputs_return: bool) -> list[TraceRequest]:
    rng = stream.rng
    systems = stream.shared(40, 200, 1500)
    starts_s = stream.arrivals_s(1700)
    requests = []
    for start_s, system in zip(starts_s, stream.zipf(systems, 1.0, len(starts_s)), strict=True):
        turns = min(int(rng.geometric(1 / _MEAN_TURNS)), _MOST_TURNS)
        time_s, said, heard_tokens = start_s, [system], 0
        for _ in range(turns):
            user = stream.piece(_USER.draw(rng) + heard_tokens)
            answer = stream.piece(_ANSWER.draw(rng))
            requests.append(_request(time_s, [*said, user], answer))
            said = [*said, user, answer] if outputs_return else [*said, user]
            # a stripped answer comes back as new tokens, of the same number
            heard_tokens = 0 if outputs_return else answer[2]
            time_s += _THINKING_S.draw(rng)
    return requests


chat: Final = partial(_conversations, outputs_return=True)
think: Final = partial(_conversations, outputs_return=False)


def agent(stream: _Stream) -> list[TraceRequest]:
    """Generate tasks of agents that act and observe."""
    rng = stream.rng
    starts_s = stream.arrivals_s(650)
    agents = stream.zipf(stream.shared(12, 600, 1500), 1.0, len(starts_s))
    requests: list[TraceRequest] = []
    for start_s, system in zip(starts_s, agents, strict=True):
        steps = _STEPS.draw(rng)
        fork_after = int(rng.integers(1, steps)) if steps > 1 and rng.random() < _FORKING else steps
        time_s, prompt = _act(stream, requests, (start_s, [system]), fork_after)
        if fork_after < steps:
            for _ in range(int(rng.integers(2, 5))):
                _act(stream, requests, (time_s + rng.uniform(2, 8), prompt), steps - fork_after)
    return requests


def _act(
    stream: _Stream, requests: list[TraceRequest], begin: tuple[float, list[Piece]], steps: int
) -> tuple[float, list[Piece]]:
    """Add ``steps`` steps to ``requests``; return the time of the last and the whole conversation at that time."""
    time_s, said = begin
    for step in range(steps):
        if step:
            time_s += stream.rng.uniform(2, 8)
        said = [*said, stream.piece(_OBSERVATION.draw(stream.rng))]
        action = stream.piece(_ACTION.draw(stream.rng))
        requests.append(_request(time_s, said, action))
        said = [*said, action]
    return time_s, said


def api(stream: _Stream) -> list[TraceRequest]:
    """Generate single calls of templates."""
    times_s = stream.arrivals_s(6000)
    templates = stream.zipf(stream.shared(80, 300, 1500), 0.8, len(times_s))
    return [
        _request(time_s, [template, stream.piece(_INPUT.draw(stream.rng))], stream.piece(_REPLY.draw(stream.rng)))
        for time_s, template in zip(times_s, templates, strict=True)
    ]


def mix(stream: _Stream) -> list[TraceRequest]:
    """Generate chat, agents and calls together."""
    return chat(stream) + agent(stream) + api(stream)


def documents(stream: _Stream) -> list[TraceRequest]:
    """Generate readers who ask about long documents, and single calls between them."""
    rng = stream.rng
    requests: list[TraceRequest] = []
    for start_s in stream.arrivals_s(2000):
        (document,) = stream.shared(1, 10_000, 60_000)
        time_s, said = start_s, [document]
        for _ in range(min(int(rng.geometric(1 / _MEAN_QUESTIONS)), _MOST_TURNS)):
            question, answer = stream.piece(_USER.draw(rng)), stream.piece(_ANSWER.draw(rng))
            requests.append(_request(time_s, [*said, question], answer))
            said = [*said, question, answer]
            time_s += _THINKING_S.draw(rng)
    return requests + api(stream)


def _shared_end(request: TraceRequest) -> tuple[int]:
    """Return the tokens of the first piece, which every generator takes from ``shared``."""
    return (request.prompt.pieces[0][2],)


WORKLOADS: Final[Mapping[str, Callable[[_Stream], list[TraceRequest]]]] = MappingProxyType(
    {"agent": agent, "api": api, "chat": chat, "documents": documents, "mix": mix, "think": think}
)


@dataclass(frozen=True)
class Workload:
    """One generated stream. kind: a name in WORKLOADS. rate: multiplies the arrivals. limit: requests kept.

    marks: mark where the shared beginning of each prompt ends; the tokens are the same with and without.
    Raises ConfigError for an unknown kind and for sizes that cannot work.
    """

    kind: str
    seed: int = 0
    hours: float = 1.0
    rate: float = 1.0
    limit: int | None = None
    marks: bool = False
    name: str = field(init=False)

    def __post_init__(self) -> None:
        if self.kind not in WORKLOADS:
            raise ConfigError(f"unknown workload {self.kind!r}: use one of {', '.join(WORKLOADS)}")
        if self.seed < 0:
            raise ConfigError(f"the seed must be 0 or more, got {self.seed}")
        for what, value in (("hours", self.hours), ("rate", self.rate)):
            if not 0 < value <= 1000:
                raise ConfigError(f"{what} must be above 0 and at most 1000, got {value}")
        if self.hours * self.rate > MOST_HOURS:
            raise ConfigError(
                f"hours times rate must be at most {MOST_HOURS:g}, got {self.hours * self.rate:g}: all requests are "
                "drawn before the first arrives"
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"the limit must be at least 1 request, got {self.limit}")
        object.__setattr__(self, "name", f"workload:{self.kind}")

    @cached_property
    def _requests(self) -> list[TraceRequest]:
        """Return all requests by time; those of one time in the order in which they were drawn."""
        stream = _Stream(np.random.default_rng(self.seed), self.hours, self.rate, itertools.count())
        drawn = sorted(WORKLOADS[self.kind](stream), key=lambda request: request.timestamp_s)[: self.limit]
        return [
            replace(request, marks=_shared_end(request) if self.marks else (), origin=f"request {at}")
            for at, request in enumerate(drawn)
        ]

    def summary(self) -> TraceSummary:
        """Return counts. Raises TraceError if chance and a low rate made no request."""
        return summarise(self._requests, self.name)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Iterate over requests in the order of their timestamps."""
        return iter(self._requests)


@dataclass(frozen=True, slots=True)
class UniformWorkload:
    """``conversations`` conversations, dealt out to ``templates`` system prompts in turn, of ``turns`` turns.

        prompt of turn t   system | user 0 | answer 0 | ... | user t      S + U + t * (A + U) tokens

    Every conversation takes its turn t before any takes turn t + 1, one request every ``gap_s`` seconds.
    When an answer is done before the next turn arrives, and nothing is evicted, at a block size b:

    * turn 0 hits ``S // b * b`` tokens, but for the first conversation of each template: 0;
    * turn t > 0 hits ``known // b * b`` of known = P(t - 1) + A - 1 tokens: the last token of an answer is sampled
      but never run.

    That a prompt's last token always runs costs nothing here: it is never part of what was said before.
    """

    templates: int = 3
    conversations: int = 10
    turns: int = 4
    system_tokens: int = 150
    user_tokens: int = 37
    answer_tokens: int = 21
    gap_s: float = 10.0
    name: str = "workload:uniform"

    def __post_init__(self) -> None:
        for what in ("templates", "conversations", "turns", "system_tokens", "user_tokens", "answer_tokens"):
            integer(what, getattr(self, what), 1)

    def prompt_tokens(self, turn: int) -> int:
        """Return the tokens of a prompt.

        Args:
            turn: the turn of the conversation, from 0.
        """
        return self.system_tokens + self.user_tokens + turn * (self.answer_tokens + self.user_tokens)

    def hit_tokens(self, block_size: int, *, exact: bool = False) -> int:
        """Return the prompt tokens of the whole workload that an endless cache holds, by the formulas above.

        Args:
            block_size: tokens of a block.
            exact: whether the end of a turn is hit to the token (natural layout); where prompts part, the block
                boundary before counts in both cases.
        """
        warm = max(self.conversations - self.templates, 0)
        tokens = warm * (self.system_tokens // block_size * block_size)
        for turn in range(1, self.turns):
            known = self.prompt_tokens(turn - 1) + self.answer_tokens - 1
            tokens += self.conversations * (known if exact else known // block_size * block_size)
        return tokens

    def summary(self) -> TraceSummary:
        """Return counts. O(requests)."""
        return summarise(self, self.name)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Iterate over requests in the order of their timestamps."""
        for turn in range(self.turns):
            for conversation in range(self.conversations):
                at = turn * self.conversations + conversation
                prompt = [(conversation % self.templates, 0, self.system_tokens)]
                for earlier in range(turn):
                    prompt += [self._user(conversation, earlier), self._answer(conversation, earlier)]
                prompt.append(self._user(conversation, turn))
                answer = (self._answer(conversation, turn),)
                yield TraceRequest(
                    at * self.gap_s,
                    Pieces(PROMPT_SEGMENT, tuple(prompt)),
                    Pieces(PROMPT_SEGMENT, answer),
                    origin=f"request {at}",
                )

    def _user(self, conversation: int, turn: int) -> Piece:
        return (self.templates + 2 * (conversation * self.turns + turn), 0, self.user_tokens)

    def _answer(self, conversation: int, turn: int) -> Piece:
        return (self.templates + 2 * (conversation * self.turns + turn) + 1, 0, self.answer_tokens)
