"""Seeded generators of request streams: chat, agent, api, documents, mix, think.

    chat       1,700 conversations per hour with 40 assistants (Zipf 1.0). A prompt is a system prompt, all earlier
               turns with their outputs, and a new user text
    think      as chat, but an earlier output comes back as other tokens, because the client strips its reasoning. A
               turn shares only the previous prompt
    agent      650 tasks per hour for 12 agents: system prompt and tools, then steps of observation and output. 15% of
               the tasks fork into 2 to 4 tasks that continue independently
    api        6,000 calls per hour of 80 templates (Zipf 0.8), each with its own input
    documents  2,000 readers per hour, each with a document of 10,000 to 60,000 tokens and 3 questions on average. A
               prompt has the earlier questions and answers. The calls of api come in between
    mix        chat, agent and api together

Conversations, tasks and calls begin as Poisson processes during ``hours``; their later turns and steps may come after
that. ``rate`` multiplies the number of arrivals. Lengths are log-normal with two limits; lengths of system prompts are
log-uniform. Equal seeds give equal streams. Every prompt begins with a piece that other prompts share (system prompt,
tools, template); with ``marks``, the end of this piece is a resume mark. The numbers were chosen by hand.

UniformWorkload has equal conversations, and a closed formula for the hit tokens of an unlimited cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Final

import numpy as np

from hybridkv.arguments import at_least, check_fields
from hybridkv.errors import ConfigError
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.tokens import PROMPT_SEGMENT, Piece, Pieces
from hybridkv.simulator.trace import TraceSummary, summarise

_HOUR_S: Final = 3600.0
MOST_HOURS: Final = 100.0
"""Limit of ``hours`` times ``rate``: it gives up to 1.9 million requests of 1 KB each."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of token counts or seconds, with two limits.

    Attributes:
        median: median of the distribution.
        sigma: standard deviation of the logarithm.
        least: lower limit.
        most: upper limit.
    """

    median: float
    sigma: float
    least: int
    most: int
    _log_median: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_log_median", float(np.log(self.median)))

    def draw(self, rng: np.random.Generator) -> int:
        """Draw one number.

        Args:
            rng: source of random numbers.
        """
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
    """The state of a generator: random numbers, hours and rate of arrivals as in Workload, numbers of new segments."""

    rng: np.random.Generator
    hours: float
    rate: float
    segments: Iterator[int]

    def piece(self, tokens: int) -> Piece:
        """Return a piece of new tokens, which no earlier piece has."""
        return (next(self.segments), 0, tokens)

    def arrivals_s(self, per_hour: float) -> list[float]:
        """Return the times of a Poisson process, ascending, in seconds."""
        count = self.rng.poisson(per_hour * self.rate * self.hours)
        times: list[float] = np.sort(self.rng.uniform(0, self.hours * _HOUR_S, count)).tolist()
        return times

    def shared(self, count: int, least: int, most: int) -> list[Piece]:
        """Return ``count`` new prefixes of log-uniform length, ``least`` to ``most`` tokens."""
        lengths = np.exp(self.rng.uniform(np.log(least), np.log(most), count))
        return [self.piece(round(tokens)) for tokens in lengths.tolist()]

    def zipf(self, prefixes: list[Piece], exponent: float, draws: int) -> list[Piece]:
        """Return one of ``prefixes`` for each draw, the k-th with a weight of k ** -exponent."""
        weights = np.arange(1, len(prefixes) + 1) ** -exponent
        chosen = self.rng.choice(len(prefixes), draws, p=weights / weights.sum())
        return [prefixes[at] for at in chosen.tolist()]


def _request(time_s: float, prompt: list[Piece], output: Piece) -> TraceRequest:
    """Return a request. Its time is rounded to milliseconds, as in a trace file."""
    return TraceRequest(
        round(time_s * 1000) / 1000, Pieces(PROMPT_SEGMENT, tuple(prompt)), Pieces(PROMPT_SEGMENT, (output,))
    )


def _conversations(stream: _Stream, *, outputs_return: bool) -> list[TraceRequest]:
    """Generate conversations; ``outputs_return`` tells whether later prompts have the same tokens as the outputs."""
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
            # a stripped answer comes back as the same number of new tokens
            heard_tokens = 0 if outputs_return else answer[2]
            time_s += _THINKING_S.draw(rng)
    return requests


chat: Final = partial(_conversations, outputs_return=True)
think: Final = partial(_conversations, outputs_return=False)


def agent(stream: _Stream) -> list[TraceRequest]:
    """Generate tasks of agents, steps of observation and output."""
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
    """Add ``steps`` steps to ``requests``; return the time of the last one, and the conversation with its output."""
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
    """Generate calls of templates."""
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


WORKLOADS: Final[Mapping[str, Callable[[_Stream], list[TraceRequest]]]] = MappingProxyType(
    {"agent": agent, "api": api, "chat": chat, "documents": documents, "mix": mix, "think": think}
)


@dataclass(frozen=True)
class Workload:
    """A generated stream of requests.

    Attributes:
        kind: a name in WORKLOADS.
        seed: seed of the random numbers, at least 0.
        hours: hours of arrivals; ``hours`` times ``rate`` is at most MOST_HOURS.
        rate: factor of the arrivals.
        limit: number of requests to keep, the first ones by time; ``None``: all.
        marks: whether the end of each prompt's shared piece is a resume mark. The tokens do not depend on it.
        name: name in reports and messages.

    Raises:
        ConfigError: for an unknown kind, and for values out of range.
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
            raise ConfigError(f"the seed (--seed) must be at least 0, got {self.seed}")
        for name, value in (("hours", self.hours), ("rate", self.rate)):
            if not 0 < value <= 1000:
                raise ConfigError(f"{name} must be above 0 and at most 1000, got {value}")
        if self.hours * self.rate > MOST_HOURS:
            raise ConfigError(
                f"hours times rate must be at most {MOST_HOURS:g}, got {self.hours * self.rate:g}: lower --hours or "
                "--rate, because all requests are generated in advance"
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"the limit (--limit) must be at least 1 request, got {self.limit}")
        object.__setattr__(self, "name", f"workload:{self.kind}")

    @cached_property
    def _requests(self) -> list[TraceRequest]:
        """All requests by time; requests with equal times keep the order in which they were generated."""
        stream = _Stream(np.random.default_rng(self.seed), self.hours, self.rate, itertools.count())
        drawn = sorted(WORKLOADS[self.kind](stream), key=lambda request: request.timestamp_s)[: self.limit]
        return [  # other prompts share the first piece
            replace(request, marks=(request.prompt.pieces[0][2],) if self.marks else (), origin=f"request {at}")
            for at, request in enumerate(drawn)
        ]

    def summary(self) -> TraceSummary:
        """Return counts. O(requests).

        Raises:
            TraceError: if a low rate gave no request.
        """
        return summarise(self._requests, self.name)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Iterate over requests in the order of their timestamps."""
        return iter(self._requests)


@dataclass(frozen=True, slots=True)
class UniformWorkload:
    """Conversations of equal lengths, with a closed formula for their hit tokens.

        prompt of turn t   system | user 0 | answer 0 | ... | user t      P(t) = S + U + t * (A + U) tokens

    All conversations take turn t before any takes turn t + 1. A request arrives every ``gap_s`` seconds. The formula
    holds if each answer ends before the next turn arrives, and if nothing is evicted. With blocks of b tokens:

    * turn 0 has ``S // b * b`` hit tokens, but none for the first conversation of each template;
    * turn t > 0 has ``known // b * b`` hit tokens, with known = P(t - 1) + A - 1. The last token of an answer is
      sampled, but not computed.

    The last token of a prompt always runs. This changes nothing here, because it belongs to the new user text.

    Attributes:
        templates: number of system prompts; conversation c uses number c modulo ``templates``.
        conversations: number of conversations.
        turns: turns of each conversation.
        system_tokens: tokens of a system prompt, S.
        user_tokens: tokens of a user text, U.
        answer_tokens: tokens of an output, A.
        gap_s: seconds between two arrivals.
        name: name in reports and messages.

    Raises:
        ConfigError: for values out of range.
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
        counts = ("templates", "conversations", "turns", "system_tokens", "user_tokens", "answer_tokens")
        check_fields(self, at_least(1), *counts)

    def prompt_tokens(self, turn: int) -> int:
        """Return the length of a prompt in tokens.

        Args:
            turn: the turn of the conversation, from 0.
        """
        return self.system_tokens + self.user_tokens + turn * (self.answer_tokens + self.user_tokens)

    def hit_tokens(self, block_size: int, *, exact: bool = False) -> int:
        """Return the hit tokens of all requests in an unlimited cache, by the formulas above. O(turns).

        Args:
            block_size: tokens of a block.
            exact: whether a turn hits the previous one up to its last token, as in the natural layout. Turn 0 always
                hits up to a block boundary.
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
