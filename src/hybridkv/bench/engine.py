"""A load's requests to an AsyncEngine in this process."""

from __future__ import annotations

import time
from dataclasses import replace

from hybridkv.bench.driving import Answer
from hybridkv.bench.loads import LoadRequest
from hybridkv.errors import HybridKVError
from hybridkv.request import SamplingParams
from hybridkv.runner import AsyncEngine


async def ask_engine(front: AsyncEngine, asked: LoadRequest, sampling: SamplingParams) -> Answer:
    """Run a request to its end. A request that the engine rejects is an Answer with an error.

    Args:
        front: the engine.
        asked: the request.
        sampling: how tokens are drawn; the limit of output tokens is the request's.
    """
    begun, times, done = time.perf_counter(), list[float](), None
    try:
        async for part in front.stream(asked.token_ids, replace(sampling, max_tokens=asked.output_tokens)):
            if part.token_ids:
                times.append(time.perf_counter())
            done = part.completion
    except HybridKVError as error:
        return Answer(begun, error=str(error))
    if done is None:
        return Answer(begun, error="the stream ended without a completion")
    return Answer(begun, tuple(times), len(asked.token_ids), len(done.token_ids), done.hit_tokens)
