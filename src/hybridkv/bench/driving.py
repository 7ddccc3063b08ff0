"""Send requests at a rate, each in a task of its own, and collect what came back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Asked = TypeVar("Asked")
Advance = Callable[[], None]
"""Called after each answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The times and counts of one request. Times are seconds of ``time.perf_counter``.

    Attributes:
        begun: when the request was sent.
        times: when each piece of output arrived, at least one if there is no error.
        prompt_tokens: tokens of the prompt.
        output_tokens: tokens of the output, which may be more than pieces.
        cached_tokens: hit tokens of the prompt; None if unknown.
        error: why the request failed; "" if it did not.
    """

    begun: float
    times: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.times[0] - self.begun

    @property
    def e2el(self) -> float:
        """Seconds to the last piece."""
        return self.times[-1] - self.begun

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 for a single token."""
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def itl(self) -> NDArray[np.float64]:
        """Seconds between pieces, float64[pieces - 1]."""
        return np.diff(self.times)


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> NDArray[np.float64]:
    """Return the seconds after which each request is sent, ascending; the last after exactly ``count / rate``.

    Gaps are drawn from a gamma distribution with the shape ``burstiness``; 1 is a Poisson process. All are 0 for an
    infinite rate, and equal for an infinite burstiness.

    Args:
        count: number of requests.
        rate: requests per second.
        burstiness: above 0; below 1, requests come in bursts.
        seed: seed of the draws.
    """
    if np.isinf(rate):
        return np.zeros(count)
    draw = np.random.default_rng(seed)
    gaps = np.ones(count) if np.isinf(burstiness) else draw.gamma(burstiness, size=count)
    at: NDArray[np.float64] = gaps.cumsum()
    at *= count / rate / at[-1]
    return at


async def drive(
    requests: Sequence[Asked],
    ask: Callable[[Asked], Awaitable[Answer]],
    delays: NDArray[np.float64],
    *,
    at_once: int | None = None,
    advance: Advance = lambda: None,
) -> tuple[list[Answer], float]:
    """Send each request after its delay.

    Args:
        requests: the requests.
        ask: sends one of them and waits for its answer.
        delays: seconds after the start, as ``arrivals`` returns them.
        at_once: limit of requests at once; later ones wait before they are sent. None: no limit.
        advance: called after each answer.

    Returns:
        The answers in the order of the requests, and the seconds that all took.
    """
    room: Any = nullcontext() if at_once is None else asyncio.Semaphore(at_once)

    async def one(asked: Asked) -> Answer:
        async with room:
            answer = await ask(asked)
        advance()
        return answer

    begun, tasks = time.perf_counter(), list[asyncio.Task[Answer]]()
    for asked, delay in zip(requests, delays.tolist(), strict=True):
        if (wait := begun + delay - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(asked)))
    answers = await asyncio.gather(*tasks)
    return answers, time.perf_counter() - begun
