"""The format of /v1/embeddings: inputs to requests of one token, their pooled hidden states to vectors."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Literal

from starlette.requests import Request
from typing_extensions import TypedDict

from hybridkv.request import NO_HINTS
from hybridkv.runner.completion import Completion, Increment
from hybridkv.runner.pooling import Pooling, Vector
from hybridkv.serve.bodies import EmbeddingBody
from hybridkv.serve.forms import CachedTokens
from hybridkv.serve.front import Front
from hybridkv.serve.generation import Asked


class EmbeddingsUsage(TypedDict):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Embedding(TypedDict):
    """The vector of an input: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(TypedDict):
    """The answer of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingsUsage


async def ask_embeddings(front: Front, body: EmbeddingBody, request: Request) -> tuple[Asked, EmbeddingsForm]:
    """Return the requests for ``body``, and the form of its answer.

    Raises ApiError and ConfigError if it cannot be served, and ClientGoneError if the client of ``request``
    disconnects.
    """
    salt = front.salt(request, body)
    front.places.require(len(body.prompts))
    prompts = await front.tokens.ids(request, body.prompts)
    front.most_tokens(prompts, 1)
    pooling, lora = await front.service.pooling(), front.lora(body.model)
    asked = Asked(f"embd-{uuid.uuid4().hex}", prompts, pooling.sampling, salt, NO_HINTS, lora=lora, embeds=True)
    return asked, EmbeddingsForm(lora or front.name, body, asked, pooling)


class EmbeddingsForm:
    """The vectors of one answer, which is whole: it has no events. ``model``: the name for clients."""

    def __init__(self, model: str, body: EmbeddingBody, asked: Asked, pooling: Pooling) -> None:
        self._model, self._body, self._asked, self._pooling = model, body, asked, pooling

    def begin(self) -> Iterable[bytes]:
        """Return nothing."""
        return ()

    def part(self, _choice: int, _new: Increment) -> Iterable[bytes]:
        """Return nothing."""
        return ()

    def end(self) -> Iterable[bytes]:
        """Return nothing."""
        return ()

    def whole(self, done: Sequence[Completion]) -> EmbeddingsAnswer:
        """Return the vectors in the order of the inputs. Raises ConfigError for more dimensions than there are."""
        vectors = [self._pooling.vector(one.pooled, self._body.dimensions) for one in done]
        tokens = sum(map(len, self._asked.prompts))
        return {
            "id": self._asked.id,
            "object": "list",
            "created": int(time.time()),
            "model": self._model,
            "data": [
                {"object": "embedding", "index": index, "embedding": self._shown(one)}
                for index, one in enumerate(vectors)
            ],
            "usage": {
                "prompt_tokens": tokens,
                "total_tokens": tokens,
                "prompt_tokens_details": {"cached_tokens": sum(one.hit_tokens for one in done)},
            },
        }

    def _shown(self, vector: Vector) -> list[float] | str:
        if self._body.encoding_format == "float":
            found: list[float] = vector.tolist()
            return found
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
