"""Hand-over: a request that ran in one engine goes on in another.

    prefill engine   prompt -> first token --export--> session file --resume--> decode engine: all other tokens

Seed, position and known tokens decide every later draw (``sampling``). So the file needs no state of a generator: its
tokens, the length of the prompt among them, and the sampling parameters are all that the other engine must know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from hybridkv.arguments import instance, integer, or_none, text
from hybridkv.errors import ConfigError, SessionError
from hybridkv.request import Hints, Request, SamplingParams, checked_marks
from hybridkv.runner.completion import Progress
from hybridkv.runner.sampling.draws import TokenLogprob
from hybridkv.units import shown


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A request that was exported while it ran.

    Attributes:
        prompt_tokens: leading tokens of the session that are its prompt.
        sampling: how its tokens are sampled.
        tenant, marks, hints: as in hybridkv.request.Request.
        logprobs: of its output so far, if requested.
    """

    prompt_tokens: int
    sampling: SamplingParams
    tenant: str | None
    marks: tuple[int, ...]
    hints: Hints
    logprobs: tuple[TokenLogprob, ...]

    @classmethod
    def of(cls, request: Request, logprobs: Sequence[TokenLogprob]) -> Self | None:
        """Return how a request goes on; None if its logits_processors, which are functions, keep it here.

        Args:
            request: the request.
            logprobs: of its output so far.
        """
        if request.sampling.logits_processors:
            return None
        sampling, marks = replace(request.sampling, n=1), tuple(request.marks)
        return cls(request.num_prompt_tokens, sampling, request.tenant, marks, request.hints, tuple(logprobs))

    @classmethod
    def parse(cls, given: object, tokens: int) -> Self | None:
        """Return the request of a manifest; None if it has none.

        Args:
            given: what ``fields`` made, read from JSON.
            tokens: tokens of the session.

        Raises:
            SessionError: a field is missing or has an invalid value.
        """
        if given is None:
            return None
        try:
            known: dict[str, Any] = dict(given)  # type: ignore[call-overload]  # an error below if it is no mapping
            found = cls(
                integer("prompt_tokens", known.pop("prompt_tokens"), 1, tokens),
                SamplingParams(**known.pop("sampling")),
                or_none(text)("tenant", known.pop("tenant")),
                checked_marks(known.pop("marks"), "marks"),
                Hints.parse(known.pop("hints")),
                tuple(_logprob(**one) for one in known.pop("logprobs")),
            )
        except (ConfigError, TypeError, ValueError, KeyError) as error:
            raise SessionError(f"the request of the session cannot be read: export it again ({error!r})") from error
        if known:
            raise SessionError(f"the request of the session has an unknown field {min(known)!r}: export it again")
        known_tokens, sampling = tokens - found.prompt_tokens, found.sampling
        if sampling.n != 1 or known_tokens >= sampling.max_tokens:
            raise SessionError(
                f"the request of the session has {known_tokens} tokens of {sampling.max_tokens}, and {sampling.n} "
                "outputs, so it did not run: export it again"
            )
        return found

    def fields(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        made = asdict(self)
        del made["sampling"]["logits_processors"]
        return made

    def request(self, request_id: str, tokens: Sequence[int], **given: Any) -> Request:  # noqa: ANN401  # of Request
        """Return the request with all its known tokens. O(tokens).

        Args:
            request_id: its id.
            tokens: the tokens of the session.
            given: other arguments of Request.
        """
        made = Request(
            request_id,
            tokens[: self.prompt_tokens],
            self.sampling,
            tenant=self.tenant,
            marks=self.marks,
            hints=self.hints,
            **given,
        )
        for token in tokens[self.prompt_tokens :]:
            made.append(token)
        return made


def live_of(live: Mapping[str, Progress], request_id: str) -> Progress:
    """Return the ``live`` request of an id. Raises ConfigError if there is none."""
    found = live.get(instance("request_id", request_id, str))
    if found is None:
        raise ConfigError(f"no request {shown(request_id)} runs or waits: give the id of one that does")
    return found


def _logprob(token_id: int, logprob: float, rank: int, best: Sequence[Sequence[Any]]) -> TokenLogprob:
    return TokenLogprob(token_id, logprob, rank, tuple((token, value) for token, value in best))
