"""A drafter that knows the next tokens. A script sets how many of its drafts are right."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from hybridkv.request import Request, SamplingParams
from hybridkv.runner import Completion, LoadedModel

Script = Callable[[Request, int], tuple[int, int]]
"""Of a request, and how often it was asked for before: how many drafts are right, and how many there are."""


class ScriptedDrafter:
    """Drafts for requests that ``learn`` was told of, by prompt and seed; none for others.

    asked: how often each request was. closed: whether somebody closed it.
    """

    def __init__(self, script: Script, num_speculative_tokens: int = 4) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.asked: Counter[str] = Counter()
        self.closed = False
        self._script = script
        self._outputs: dict[tuple[tuple[int, ...], int], Sequence[int]] = {}

    def learn(self, done: Iterable[tuple[Completion, SamplingParams]]) -> None:
        """What requests came to without drafts."""
        for completion, sampling in done:
            self._outputs[completion.prompt_token_ids, sampling.seed] = completion.token_ids

    def require(self, target: LoadedModel) -> None:
        """Any model will do."""

    def close(self) -> None:
        self.closed = True

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        return [self._drafts(request) for request in requests]

    def _drafts(self, request: Request) -> list[int]:
        prompt = request.num_prompt_tokens
        output = self._outputs.get((tuple(request.token_ids(0, prompt).tolist()), request.sampling.seed))
        if output is None:
            return []
        good, count = self._script(request, self.asked[request.request_id])
        self.asked[request.request_id] += 1
        known = request.num_output_tokens
        next_ones = list(output[known : known + count])
        next_ones += [65] * (count - len(next_ones))
        return [token if at < good else (token + 1) % 127 for at, token in enumerate(next_ones)]
