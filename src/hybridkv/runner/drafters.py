"""Drafters propose tokens that the target model verifies.

NgramDrafter takes them from a request's own text, DraftModel from a smaller model. AdaptiveDrafter wraps another
drafter and hands out only as many drafts as make decoding faster: a rejected draft costs a step nearly as much as a
token.
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
"""Most drafts of a request in one step. Later drafts are hardly ever accepted, and each needs a recurrent state."""


class Drafter(Protocol):
    """Proposes tokens for the requests of one engine. The engine closes it.

    Drafts change the speed of outputs, never their tokens.

    A drafter may also have a method ``took(tokens, seconds)``. After each step in which every row decoded, the engine
    calls it with the tokens that ran and the time that they took.
    """

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts of a request in one step; recurrent layers hold a state for each."""

    def require(self, target: LoadedModel) -> None:
        """Raise ConfigError if it cannot propose tokens for ``target``."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the drafts that follow the known tokens of each request, 0 to ``num_speculative_tokens``."""

    def close(self) -> None:
        """Release its resources; it is not used again."""


def checked_count(num_speculative_tokens: int) -> int:
    """Return ``num_speculative_tokens``. Raises ConfigError unless it is in 1 .. MOST_TOKENS."""
    num_speculative_tokens = integer("num_speculative_tokens", num_speculative_tokens)
    if not 1 <= num_speculative_tokens <= MOST_TOKENS:
        raise ConfigError(f"num_speculative_tokens must be in 1 .. {MOST_TOKENS}, got {num_speculative_tokens}")
    return num_speculative_tokens


@dataclass(frozen=True, slots=True)
class NgramDrafter:
    """Prompt lookup: its drafts are the tokens that followed an earlier copy of a request's newest tokens.

        tokens  [ . . a b c d e . . . a b c ]     the longest match of the newest tokens: a b c
                            ^ ^ drafts            the tokens after that match: d e

    The method is that of Saxena ("Prompt lookup decoding", 2023); transformers and vLLM have it, too.

    Args:
        num_speculative_tokens: drafts of a request in one step, 1 to MOST_TOKENS.
        max_ngram: most newest tokens to look for.
        min_ngram: fewest newest tokens that must match.

    Raises:
        ConfigError: a count is out of its range.
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
        """Accept any model."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the tokens after the longest match in each request; empty without a match. O(tokens) a request."""
        return [self._after_match(request.token_ids()) for request in each(one_of(Request))("requests", requests)]

    def close(self) -> None:
        """Do nothing: it holds no resources."""

    def _after_match(self, tokens: Int32) -> list[int]:
        """Return the tokens after the last longest match that has enough of them, else those after the first match."""
        ends = self._longest(tokens)
        if not len(ends):
            return []
        count = self.num_speculative_tokens
        full = ends[ends + count < len(tokens)]
        end = int(full[-1] if len(full) else ends[0])
        drafts: list[int] = tokens[end + 1 : end + 1 + count].tolist()
        return drafts

    def _longest(self, tokens: Int32) -> Int64:
        """Return the last index of each earlier copy of the newest tokens, ascending, for the longest match."""
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
    """A smaller model as a drafter.

        target's tokens   [ ..................... | a b ]      a b: new since the last step
        drafting request  [ found in the prefix cache ..| drafts ]

    Every step is a new request of the drafting engine, whose prefix cache finds all but the newest tokens. So nothing
    is rolled back, and a recurrent model can draft, too. Drafts are drawn with the sampling, the seed and the positions
    of the target's request. Both models draw with the same noise, so that they agree more often. A request that
    outgrows the ``max_model_len`` of the drafting engine gets no drafts.

    Args:
        engine: the drafting engine, with memory of its own. Nothing else may use or close it.
        num_speculative_tokens: drafts of a request in one step, 1 to MOST_TOKENS.

    Raises:
        ConfigError: the number is out of range, or the engine's model is an encoder-decoder.
    """

    def __init__(self, engine: Engine, num_speculative_tokens: int = 4) -> None:
        if instance("engine", engine, Engine).runner.cross is not None:
            raise ConfigError(
                f"{engine.loaded.name} is an encoder-decoder, and drafts have no encoder input: use a causal model"
            )
        self.num_speculative_tokens = checked_count(num_speculative_tokens)
        self.engine = engine

    def require(self, target: LoadedModel) -> None:
        """Raise ConfigError if ``target`` has another vocabulary, or is the drafting model itself."""
        instance("target", target, LoadedModel)
        mine = self.engine.loaded
        if mine.model is target.model:
            raise ConfigError(f"{target.name} cannot draft for itself: load the model a second time")
        if mine.vocab_size != target.vocab_size:
            raise ConfigError(
                f"{mine.name} has {mine.vocab_size} tokens, but {target.name} has {target.vocab_size}: use a draft "
                "model with the vocabulary of its target"
            )
        both = mine.tokenizer is not None and target.tokenizer is not None
        if both and mine.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise ConfigError(
                f"the tokenizer of {mine.name} has other tokens than that of {target.name}: use a draft model with the "
                "vocabulary of its target"
            )

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the tokens that the model draws after each request, up to a stop token of the request."""
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
                    if (place := asked.pop(done.request_id, None)) is not None:  # None: a request of a call that failed
                        drafts[place] = list(done.token_ids)
        finally:
            for request_id in asked:
                self.engine.abort(request_id)
        return drafts

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


def _drafting(request: Request, count: int) -> SamplingParams:
    """Return the sampling parameters for ``count`` drafts of ``request``. Its output is part of the prompt here.

    So edits that depend on the output must be carried over. Penalties on its tokens become biases. A repetition penalty
    then applies after these, and a presence penalty counts twice for a repeated draft. A bad word is only found within
    the drafts, and a structured output is left out. These differences only lead to more rejected drafts.
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
        logits_processors=tuple(_shifted(one, prompt) for one in own.logits_processors),
        ignore_eos=True,  # the drafting model's own end tokens do not count
        stop_token_ids=request.stop_ids,
        stop=(),
        n=1,
        logprobs=None,
        prompt_logprobs=None,
        structured=None,
    )


def _shifted(function: LogitsProcessor, num_prompt: int) -> LogitsProcessor:
    """Return ``function`` for a prompt that has the target's output after its first ``num_prompt`` tokens.

    If the function fails, the logits stay unchanged: the target's own request reports the error when it gets there.
    """
    whole = takes_prompt(function)

    def edited(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        given = (prompt[num_prompt:] + output, logits.clone())
        try:
            made = function(prompt[:num_prompt], *given) if whole else function(*given)
            fits = made.shape == logits.shape and bool(made.max().isfinite())
        except Exception:  # noqa: BLE001  # an error of the caller's function must not end the drafter
            return logits
        return made if fits else logits

    return edited


_FADING: Final = 0.97
"""Weight of a step compared with the next one, chosen by hand: it halves in 23 steps."""
_LEAST_SPREAD: Final = 0.02
"""Least coefficient of variation of the token counts; with less, the slope is mostly noise."""


class StepSeconds:
    """The line ``a + b * tokens`` through the seconds of steps, by least squares; newer steps weigh more."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, tokens, seconds, tokens squared, tokens * seconds
        self._slope: float | None = None

    @property
    def known(self) -> bool:
        """Whether steps of different numbers of tokens were seen."""
        return self._slope is not None

    def took(self, tokens: int, seconds: float) -> None:
        """Add the measurement of one step."""
        self._sums = self._sums * _FADING + (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        count, tokens_, seconds_, squares, products = self._sums
        mean = tokens_ / count
        variance = squares / count - mean * mean
        if count > 1 and variance > (_LEAST_SPREAD * mean) ** 2:
            self._slope = max(0.0, float((products / count - mean * seconds_ / count) / variance))

    def of(self, tokens: Int64) -> Float64:
        """Return the predicted seconds, above 0, of steps with ``tokens``. Call it only if ``known``."""
        count, tokens_, seconds, *_ = self._sums
        slope = self._slope or 0.0
        line: Float64 = seconds / count + slope * (tokens - tokens_ / count)
        return np.maximum(line, 1e-9)


_LONGEST_RUN: Final = 8
"""Drafts after at least this many accepted ones in a row are one class."""
_REMEMBERED: Final = 500.0
"""Drafts of a class that are counted; from here on, the counts are halved."""
_UNKNOWN: Final = (1.0, 2.0)
"""Accepted and proposed drafts of a class before any was seen."""
_LEAST_GAIN: Final = 1.05
"""Least predicted speed-up. With 1.01, 32 chats that end together were 4 to 9 % slower (design record 0028)."""
_KEPT: Final = 4096
"""Requests whose last proposal is remembered; with more, only those that decode are."""


@dataclass(slots=True)
class _Proposed:
    """The drafts proposed for ``request`` after ``known`` tokens; ``run`` accepted drafts in a row came before them."""

    request: Request
    known: int
    drafts: list[int]
    run: int


class AdaptiveDrafter:
    """Returns only as many drafts of ``drafter`` as make a step faster.

    Use it with drafters that cost almost nothing.

        a step of 32 rows    [ 32 tokens: a + 32 b seconds ]
        with two drafts      [ 32 tokens | draft, right 9 times in 10 | draft, right every other time ]
                               32 tokens in a + 32 b       32.9 in a + 33 b            33.4 in a + 34 b

    The number of drafts is the one with the most tokens a second, predicted from the times of earlier steps and from
    how often drafts were accepted (goodput: Liu et al., "Optimizing Speculative Decoding for Large Language Models
    Serving Using Goodput", 2024). A row that runs alone gets all its drafts; among many rows only nearly certain drafts
    are used.

    It also learns from drafts that it did not return: the tokens drawn in their place show whether they were right. The
    rate depends on how many drafts in a row were right before. Until it has seen steps of different sizes, it returns
    all drafts. The number of drafts depends on the clock; the tokens of requests do not.

    Args:
        drafter: the drafter that proposes.

    Raises:
        ConfigError: ``drafter`` is not a Drafter.
    """

    def __init__(self, drafter: Drafter) -> None:
        require_drafter("drafter", drafter)
        self._drafter = drafter
        self._seconds = StepSeconds()
        self._right, self._tried = (np.full(_LONGEST_RUN + 1, one) for one in _UNKNOWN)
        self._proposed: dict[str, _Proposed] = {}

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts of a request in one step, as in ``drafter``."""
        return self._drafter.num_speculative_tokens

    def require(self, target: LoadedModel) -> None:
        """Raise ConfigError if ``drafter`` cannot propose tokens for ``target``."""
        self._drafter.require(target)

    def close(self) -> None:
        """Close ``drafter``."""
        self._drafter.close()

    def took(self, tokens: int, seconds: float) -> None:
        """Record the time of a step in which all rows decode.

        Args:
            tokens: tokens that ran, including drafts.
            seconds: time that they took.

        Raises:
            ConfigError: a value is invalid.
        """
        self._seconds.took(integer("tokens", tokens, 1, MOST_COUNT), real("seconds", seconds))

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the first drafts of each request, 0 or more. O(n log n) for n drafts, without ``drafter``."""
        requests = each(one_of(Request))("requests", requests)
        proposed = self._drafter.propose(requests)
        if len(self._proposed) > _KEPT:
            mine = {one.request_id for one in requests}
            self._proposed = {name: one for name, one in self._proposed.items() if name in mine}
        runs = [self._follow(request, drafts) for request, drafts in zip(requests, proposed, strict=True)]
        counts = self._worthwhile(runs, [len(one) for one in proposed])
        return [drafts[:count] for drafts, count in zip(proposed, counts, strict=True)]

    def _follow(self, request: Request, drafts: list[int]) -> int:
        """Record that ``drafts`` are proposed for ``request``; return how many right drafts in a row lead to them."""
        known = request.num_tokens
        before, run = self._proposed.get(request.request_id), 0
        if before is not None and before.request is request and before.known <= known:
            run = self._learn(before, request.token_ids(before.known).tolist())
        self._proposed[request.request_id] = _Proposed(request, known, list(drafts), run)
        return run

    def _learn(self, before: _Proposed, came: list[int]) -> int:
        """Compare the tokens that ``came`` with the drafts ``before``. Return the number of right drafts in a row."""
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
        """Return how many drafts of each request are worthwhile, at most its ``lengths``."""
        most = max(lengths, default=0)
        cost = self._seconds
        if not most or not cost.known:
            return list(lengths)
        places = np.minimum(np.array(runs)[:, None] + np.arange(most), _LONGEST_RUN)
        accepted = np.cumprod((self._right / self._tried)[places], axis=1)
        accepted[np.arange(most) >= np.array(lengths)[:, None]] = 0
        # best first; a request's drafts keep their order, because each is less certain than the one before it
        order = np.argsort(-accepted, axis=None, kind="stable")[: sum(lengths)]
        tokens = len(runs) + np.arange(1, len(order) + 1)
        speed = (len(runs) + np.cumsum(accepted.reshape(-1)[order])) / cost.of(tokens)
        best = int(np.argmax(speed))
        if speed[best] < _LEAST_GAIN * len(runs) / float(cost.of(np.array(len(runs)))):
            return [0] * len(runs)
        counts: list[int] = np.bincount(order[: best + 1] // most, minlength=len(runs)).tolist()
        return counts
