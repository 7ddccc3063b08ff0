"""A smaller model as a drafter: an engine of its own, asked for a few tokens behind those of each request.

    target's tokens   [ ..................... | a b ]      a b: new since the last step
    drafting request  [ found in the prefix cache ..| drafts ]

Every step is a new request of the drafting engine, whose prefix cache finds all but the newest tokens; so nothing is
rolled back there, and a recurrent model drafts as well as any. Tokens are drawn by the sampling, the seed and the
positions of the target's request: both draw with the same noise, so a draft agrees more often than one drawn apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hybridkv.arguments import each, instance, one_of
from hybridkv.errors import ConfigError
from hybridkv.request import MOST_BIAS, LogitsProcessor, Request, takes_prompt
from hybridkv.runner.drafters.drafter import checked_count
from hybridkv.runner.engine import Engine
from hybridkv.runner.load import LoadedModel

if TYPE_CHECKING:
    from hybridkv.request import SamplingParams


class DraftModel:
    """Drafts from the model of ``engine``, which has its own memory and nobody else uses or closes.

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
        if mine.tokenizer is None or target.tokenizer is None:
            return
        if mine.tokenizer.get_vocab() != target.tokenizer.get_vocab():
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
