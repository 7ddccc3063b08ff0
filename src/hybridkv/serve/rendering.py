"""Prompts as token ids, without running them: /tokenize, /detokenize, and what a body would ask of the engine."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from hybridkv.runner.inputs import encode
from hybridkv.serve.bodies import DetokenizeBody, TokenizeBody
from hybridkv.serve.front import Front
from hybridkv.serve.generation import Asked
from hybridkv.serve.tokens import TokenTexts, conversation_ids


class Tokenized(TypedDict):
    """Of a prompt. token_strs: where return_token_strs asks."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    """Text of tokens, special ones among it."""

    prompt: str


class Rendered(TypedDict):
    """A prompt as the engine would be asked. max_tokens: of its output."""

    request_id: str
    model: str
    token_ids: list[int]
    max_tokens: int
    cache_salt: str | None


async def tokenized(front: Front, body: TokenizeBody) -> Tokenized:
    """The tokens of a prompt or a conversation. ApiError and ConfigError for what cannot be."""
    front.require_model(body.model)
    front.require_text()
    if body.messages is not None:
        ids = await front.tokens.run(conversation_ids, front.loaded, body.messages, body)
    else:
        (ids,) = await front.tokens.ids(front.loaded, [body.prompt or ""])
    made: Tokenized = {"count": len(ids), "max_model_len": front.max_model_len, "tokens": ids}
    if body.return_token_strs:
        made["token_strs"] = await front.tokens.run(_texts, front, ids)
    return made


def _texts(front: Front, ids: list[int]) -> list[str]:
    texts = TokenTexts(front.loaded.tokenizer)
    return [texts.text(token, before) for before, token in zip([None, *ids], ids, strict=False)]


async def detokenized(front: Front, body: DetokenizeBody) -> Detokenized:
    """The text of tokens. ApiError and ConfigError for what cannot be."""
    front.require_model(body.model)
    front.require_text()
    return {"prompt": await front.tokens.run(_decoded, front, body.tokens)}


def _decoded(front: Front, ids: list[int]) -> str:
    checked = encode(front.loaded, ids) if ids else []
    return str(front.loaded.tokenizer.decode(checked, skip_special_tokens=False))


def rendered(front: Front, asked: Asked) -> list[Rendered]:
    """Each prompt of ``asked``."""
    return [
        {
            "request_id": asked.request_id(number),
            "model": front.name,
            "token_ids": list(ids),
            "max_tokens": asked.sampling.max_tokens,
            "cache_salt": asked.salt,
        }
        for number, ids in enumerate(asked.prompts)
    ]
