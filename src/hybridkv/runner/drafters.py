"""Drafters: a request's own text (NgramDrafter) or a smaller model (DraftModel) proposes tokens that a step verifies.

AdaptiveDrafter hands out as many of another drafter's drafts as make decoding faster: a rejected one costs a step
nearly what a token does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.arguments import check_fields, each, instance, integer, one_of, real
from hybridkv.errors import ConfigError
from hybridkv.request import MOST_BIAS, LogitsProcessor, Request, SamplingParams, takes_prompt
from hybridkv.runner.engine import Engine
from hybridkv.runner.inputs import require_drafter
from hybridkv.runner.load import LoadedModel
from hybridkv.units import MOST_COUNT

__all__ = ["MOST_TOKENS", "AdaptiveDrafter", "DraftModel", "Drafter", "NgramDrafter"]

Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

MOST_TOKENS: Final = 8
"""Drafts of a request in one step: behind so many, hardly any is accepted, and each holds a state."""


class Drafter(Protocol):
    """Proposes tokens for requests of one engine, which closes it. Drafts change how fast outputs come, never which.

    One with a method ``took(tokens, seconds)`` is told of each step in which every row decoded how long it took.
    num_speculative_tokens: most drafts of a request in one step; recurrent layers hold a state for each.
    """

    @property
    def num_speculative_tokens(self) -> int:
        """See the class."""

    def require(self, target: LoadedModel) -> None:
        """Raise ConfigError where it cannot propose tokens for ``target``."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Drafts behind the known tokens of each of ``requests``: at most ``num_speculative_tokens``, maybe none."""

    def close(self) -> None:
        """Give back what it holds; it is done."""


def checked_count(num_speculative_tokens: int) -> int:
    """``num_speculative_tokens``. ConfigError unless it lies in 1 .. MOST_TOKENS."""
    num_speculative_tokens = integer("num_speculative_tokens", num_speculative_tokens)
    if not 1 <= num_speculative_tokens <= MOST_TOKENS:
        raise ConfigError(f"num_speculative_tokens must lie in 1 .. {MOST_TOKENS}, got {num_speculative_tokens}")
    return num_speculative_tokens


@dataclass(frozen=True, slots=True)
class NgramDrafter:
    """Prompt lookup: drafts are what followed when a request's newest tokens stood in its own text before.

    tokens  [ . . a b c d e . . . a b c ]     the longest match of the last tokens: a b c
                        ^ ^ drafts            what stood behind it: d e

    The method of Saxena ("Prompt lookup decoding", 2023), which transformers and vLLM have, too.
    max_ngram, min_ngram: the most and the fewest newest tokens that must have stood there before.
    Raises ConfigError for counts that cannot be.
    """

    num_speculative_tokens: int = 4
    max_ngram: int = 4
    min_ngram: int = 2

    def __post_init__(self) -> None:
        check_fields(self, integer, "num_speculative_tokens", "max_ngram", "min_ngram")
        checked_count(self.num_speculative_tokens)
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(f"n-grams need 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")

    def require(self, target: LoadedModel) -> None:
        """Any model will do."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """What stood behind the longest match; none where nothing matches. O(tokens) a request."""
        return [self._behind(request.token_ids()) for request in each(one_of(Request))("requests", requests)]

    def close(self) -> None:
        """Nothing is held."""

    def _behind(self, tokens: Int32) -> list[int]:
        """Of the longest matches the last one with all drafts behind it, else the first: it has the most."""
        ends = self._longest(tokens)
        if not len(ends):
            return []
        count = self.num_speculative_tokens
        full = ends[ends + count < len(tokens)]
        end = int(full[-1] if len(full) else ends[0])
        drafts: list[int] = tokens[end + 1 : end + 1 + count].tolist()
        return drafts

    def _longest(self, tokens: Int32) -> Int64:
        """Where earlier copies of the newest tokens end, ascending: those of the longest match."""
        found, ends = np.empty(0, np.int64), np.flatnonzero(tokens[:-1] == tokens[-1])
        for length in range(1, self.max_ngram + 1):
            if not len(ends):
                break
            if length >= self.min_ngram:
                found = ends
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[-1 - length]]
        return found


class DraftModel:
    """A smaller model as a drafter: ``engine`` has its own memory, and nothing else uses or closes it.

    target's tokens   [ ..................... | a b ]      a b: new since the last step
    drafting request  [ found in the prefix cache ..| drafts ]

    Every step is a new request of the drafting engine, whose prefix cache finds all but the newest tokens; so nothing
    is rolled back there, and a recurrent model drafts as well as any. Tokens are drawn by the sampling, the seed and
    the positions of the target's request: both draw with the same noise, so a draft agrees more often.
    Requests that outgrow the max_model_len of its plan get no drafts.
    Raises ConfigError for a number of drafts that cannot be, and for the engine of an encoder-decoder.
    """

    def __init__(self, engine: Engine, num_speculative_tokens: int = 4) -> None:
        if instance("engine", engine, Engine).runner.cross is not None:
            raise ConfigError(
                f"{engine.loaded.name} reads an encoder's input, which drafts have none of: draft with a causal model"
            )
        self.num_speculative_tokens = checked_count(num_speculative_tokens)
        self.engine = engine

    def require(self, target: LoadedModel) -> None:
        """Raise ConfigError for another vocabulary, and where the target is the very model that drafts."""
        instance("target", target, LoadedModel)
        mine = self.engine.loaded
        if mine.model is target.model:
            raise ConfigError(f"{target.name} cannot draft for itself: load the model a second time")
        if mine.vocab_size != target.vocab_size:
            raise ConfigError(
                f"{mine.name} has {mine.vocab_size} tokens, {target.name} {target.vocab_size}: a draft model needs "
                "the vocabulary of its target"
            )
        both = mine.tokenizer is not None and target.tokenizer is not None
        if both and mine.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise ConfigError(
                f"the tokenizer of {mine.name} is not that of {target.name}: a draft model needs the vocabulary of "
                "its target"
            )

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """What the model draws behind each; up to a stop token of the request, where its output would end."""
        requests = each(one_of(Request))("requests", requests)
        drafts: list[list[int]] = [[] for _ in requests]
        asked = {}
        try:
            for at, request in enumerate(requests):
                count = min(self.num_speculative_tokens, self.engine.plan.max_model_len - request.num_tokens)
                if count > 0:
                    tokens, sampling = request.token_ids().tolist(), _drafting(request, count)
                    asked[self.engine.add(tokens, sampling, cache_salt=request.cache_salt)] = at
            while not self.engine.idle:
                for done in self.engine.step():
                    if (place := asked.pop(done.request_id, None)) is not None:  # else of a call that failed
                        drafts[place] = list(done.token_ids)
        finally:
            for request_id in asked:
                self.engine.abort(request_id)
        return drafts

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


def _drafting(request: Request, count: int) -> SamplingParams:
    """How ``count`` drafts of ``request`` are drawn: its output is prompt here.

    So what depends on the output goes on from there: penalties on its tokens as biases, which a repetition penalty then
    sees as well, and a presence penalty twice where a draft comes again; a word that must not come is known only within
    the drafts. A draft that the request itself would not draw is refused, and costs nothing else.
    """
    own, prompt = request.sampling, request.num_prompt_tokens
    biases, outputs = dict(own.biases), request.num_output_tokens
    if own.presence_penalty or own.frequency_penalty:
        for token, times in Counter(request.output_token_ids).items():
            taken = own.frequency_penalty * times + own.presence_penalty
            biases[token] = min(max(biases.get(token, 0.0) - taken, -MOST_BIAS), MOST_BIAS)
    return replace(
        own,
        max_tokens=count,
        min_tokens=min(max(own.min_tokens - outputs, 0), count),
        logit_bias=biases,
        logits_processors=tuple(_behind(one, prompt) for one in own.logits_processors),
        ignore_eos=True,  # of the drafting model
        stop_token_ids=request.stop_ids,
        stop=(),
        n=1,
        logprobs=None,
        prompt_logprobs=None,
    )


def _behind(function: LogitsProcessor, num_prompt: int) -> LogitsProcessor:
    """``function`` for a request of whose prompt all but ``num_prompt`` tokens are the target's output.

    Where it fails, the logits stay as they are: the target says so, if it comes there.
    """
    whole = takes_prompt(function)

    def edited(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        given = (prompt[num_prompt:] + output, logits.clone())
        try:
            made = function(prompt[:num_prompt], *given) if whole else function(*given)
            fits = made.shape == logits.shape and bool(made.max().isfinite())
        except Exception:  # noqa: BLE001  # the caller's; it must not end the drafter
            return logits
        return made if fits else logits

    return edited


_FADING: Final = 0.97
"""What a step counts behind the next one: half of it is gone after 23."""
_LEAST_SPREAD: Final = 0.02
"""Of the number of tokens, its standard deviation over its mean: with less the slope is not to be seen."""


class StepSeconds:
    """A line through the seconds of steps, by least squares, the newest first: a + b * tokens."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, tokens, seconds, tokens squared, tokens * seconds
        self._slope: float | None = None

    @property
    def known(self) -> bool:
        """Whether steps of different numbers of tokens were seen."""
        return self._slope is not None

    def took(self, tokens: int, seconds: float) -> None:
        """A step did."""
        self._sums = self._sums * _FADING + (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        count, tokens_, seconds_, squares, products = self._sums
        mean = tokens_ / count
        variance = squares / count - mean * mean
        if count > 1 and variance > (_LEAST_SPREAD * mean) ** 2:
            self._slope = max(0.0, float((products / count - mean * seconds_ / count) / variance))

    def of(self, tokens: Int64) -> Float64:
        """Seconds of steps of ``tokens``, above 0; where ``known``."""
        count, tokens_, seconds, *_ = self._sums
        slope = self._slope or 0.0
        line: Float64 = seconds / count + slope * (tokens - tokens_ / count)
        return np.maximum(line, 1e-9)


_LONGEST_RUN: Final = 8
"""Right drafts in a row before the next: from here on as one class."""
_REMEMBERED: Final = 500.0
"""Drafts of a class: older ones count less."""
_UNKNOWN: Final = (1.0, 2.0)
"""Right ones, and all, before any was seen."""
_LEAST_GAIN: Final = 1.05
"""Times as fast: less is not known so well, and not had where rows end together, for the slowest of them says when."""
_KEPT: Final = 4096
"""Requests of which is known what was proposed; more are forgotten, but for those that decode now."""


@dataclass(slots=True)
class _Proposed:
    """What was proposed for ``request`` behind ``known`` tokens; ``run`` of the drafts before these were right."""

    request: Request
    known: int
    drafts: list[int]
    run: int


class AdaptiveDrafter:
    """Those drafts of ``drafter`` that are worth their place in a step; for drafters that cost next to nothing.

    a step of 32 rows    [ 32 tokens: a + 32 b seconds ]
    with two drafts      [ 32 tokens | draft, right 9 times in 10 | draft, right every other time ]
                           32 tokens in a + 32 b       32.9 in a + 33 b            33.4 in a + 34 b

    The number of drafts is that of the most tokens a second, from what steps took and how often drafts were right
    (goodput: Liu et al., "Optimizing Speculative Decoding for Large Language Models Serving Using Goodput", 2024).
    Alone, a row runs all of them; next to many others only what is all but sure.

    It learns from what it did not hand out, too: what a request had instead shows whether it was right. How often that
    is depends on how many drafts before it were right. Until steps of more and of fewer tokens were seen, it hands out
    all. Which drafts there are depends on the clock, the tokens of requests do not.
    Raises ConfigError for what is no drafter.
    """

    def __init__(self, drafter: Drafter) -> None:
        require_drafter("drafter", drafter)
        self._drafter = drafter
        self._seconds = StepSeconds()
        self._right, self._tried = (np.full(_LONGEST_RUN + 1, one) for one in _UNKNOWN)
        self._proposed: dict[str, _Proposed] = {}

    @property
    def num_speculative_tokens(self) -> int:
        """Of ``drafter``."""
        return self._drafter.num_speculative_tokens

    def require(self, target: LoadedModel) -> None:
        """As ``drafter``."""
        self._drafter.require(target)

    def close(self) -> None:
        """As ``drafter``."""
        self._drafter.close()

    def took(self, tokens: int, seconds: float) -> None:
        """A step of rows that all decode, ``tokens`` with their drafts, took so long. ConfigError for other numbers."""
        self._seconds.took(integer("tokens", tokens, 1, MOST_COUNT), real("seconds", seconds))

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """The first drafts of each of ``requests``, maybe none. O(log) of all drafts beside ``drafter``."""
        requests = each(one_of(Request))("requests", requests)
        proposed = self._drafter.propose(requests)
        if len(self._proposed) > _KEPT:
            mine = {one.request_id for one in requests}
            self._proposed = {name: one for name, one in self._proposed.items() if name in mine}
        runs = [self._follow(request, drafts) for request, drafts in zip(requests, proposed, strict=True)]
        counts = self._worthwhile(runs, [len(one) for one in proposed])
        return [drafts[:count] for drafts, count in zip(proposed, counts, strict=True)]

    def _follow(self, request: Request, drafts: list[int]) -> int:
        """``drafts`` are proposed for ``request`` now; how many right ones lead to them."""
        known = request.num_tokens
        before, run = self._proposed.get(request.request_id), 0
        if before is not None and before.request is request and before.known <= known:
            run = self._learn(before, request.token_ids(before.known).tolist())
        self._proposed[request.request_id] = _Proposed(request, known, list(drafts), run)
        return run

    def _learn(self, before: _Proposed, came: list[int]) -> int:
        """``came`` behind what was proposed; how many right drafts lead to the next token."""
        run = before.run
        for draft, token in zip(before.drafts, came, strict=False):
            place = min(run, _LONGEST_RUN)
            if self._tried[place] > _REMEMBERED:
                self._right[place] /= 2
                self._tried[place] /= 2
            self._tried[place] += 1
            if draft != token:
                return 0
            self._right[place] += 1
            run += 1
        return run if len(came) <= len(before.drafts) else 0

    def _worthwhile(self, runs: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """How many drafts of each request to hand out, of ``lengths``."""
        most = max(lengths, default=0)
        cost = self._seconds
        if not most or not cost.known:
            return list(lengths)
        places = np.minimum(np.array(runs)[:, None] + np.arange(most), _LONGEST_RUN)
        accepted = np.cumprod((self._right / self._tried)[places], axis=1)
        accepted[np.arange(most) >= np.array(lengths)[:, None]] = 0
        # best first: the drafts of a request stand in their order, for each is less sure than the one before it
        order = np.argsort(-accepted, axis=None, kind="stable")[: sum(lengths)]
        tokens = len(runs) + np.arange(1, len(order) + 1)
        speed = (len(runs) + np.cumsum(accepted.reshape(-1)[order])) / cost.of(tokens)
        best = int(np.argmax(speed))
        if speed[best] < _LEAST_GAIN * len(runs) / float(cost.of(np.array(len(runs)))):
            return [0] * len(runs)
        counts: list[int] = np.bincount(order[: best + 1] // most, minlength=len(runs)).tolist()
        return counts
