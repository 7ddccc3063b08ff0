"""Prompts as token ids, without running them: /tokenize, /detokenize, and what a body would ask of the engine."""

from __future__ import annotations

from functools import partial
from typing import Final, NotRequired

from starlette.requests import Request
from typing_extensions import TypedDict

from hybridkv.runner.inputs import encode
from hybridkv.serve.bodies import DetokenizeBody, TokenizeBody
from hybridkv.serve.front import Front
from hybridkv.serve.generation import Asked
from hybridkv.serve.tokens import TokenTexts
from hybridkv.serve.turns import Piece

_PIECE: Final = 1 << 10  # tokens whose texts are made at once: some 20 ms


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


async def tokenized(front: Front, body: TokenizeBody, request: Request) -> Tokenized:
    """Return the tokens of a prompt or a conversation.

    Raises ApiError and ConfigError as completions.ask, and ClientGoneError if the client of ``request`` leaves.
    """
    front.require_model(body.model)
    front.require_text()
    if body.messages is not None:
        ids = await front.tokens.conversation(request, body.messages, body)
    else:
        (ids,) = await front.tokens.ids(request, [body.prompt or ""])
    made: Tokenized = {"count": len(ids), "max_model_len": front.max_model_len, "tokens": ids}
    if body.return_token_strs:
        pieces = [Piece(len(ids), partial(_texts, front, ids, begin)) for begin in range(0, len(ids), _PIECE)]
        made["token_strs"] = [one for texts in await front.tokens.run(request, pieces) for one in texts]
    return made


def _texts(front: Front, ids: list[int], begin: int) -> list[str]:
    """Of _PIECE of ``ids``, from ``begin`` on."""
    texts, befores = TokenTexts(front.loaded.tokenizer), [None, *ids]
    return [texts.text(ids[at], befores[at]) for at in range(begin, min(begin + _PIECE, len(ids)))]


async def detokenized(front: Front, body: DetokenizeBody, request: Request) -> Detokenized:
    """Return the text of tokens.

    Raises ApiError and ConfigError for more tokens than the model has room for, and for unknown ones, and
    ClientGoneError if the client of ``request`` leaves.
    """
    front.require_model(body.model)
    front.require_text()
    front.tokens.require_room(body.tokens)
    (text,) = await front.tokens.run(request, [Piece(len(body.tokens), partial(_decoded, front, body.tokens))])
    return {"prompt": text}


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
