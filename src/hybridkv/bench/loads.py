"""Requests of a load. Equal arguments give equal requests, for a server and for an engine in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Final

import numpy as np
from msgspec import DecodeError, Struct, json

from hybridkv.errors import ConfigError
from hybridkv.regular_files import open_regular

Encode = Callable[[str], Sequence[int]]
"""Returns the token ids of a text."""

_PAIRS: Final = " ".join(map("".join, product(ascii_lowercase, repeat=2)))
_SHORTEST: Final = 4
_MOST_PROMPT: Final = 1024
_MOST_TOKENS: Final = 2048
"""Conversations of fewer and more tokens are left out, by the rule of vLLM's benchmark."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request of a load.

    Attributes:
        token_ids: the prompt.
        output_tokens: limit of output tokens.
        text: the prompt as text, if it came as text.
    """

    token_ids: tuple[int, ...]
    output_tokens: int
    text: str | None = None


class _Prompt(Struct):
    prompt: str
    output_tokens: int | None = None


class _Message(Struct):
    value: str


class _Conversation(Struct):
    conversations: list[_Message] = []


def ordinary_tokens(encode: Encode) -> list[int]:
    """Return ids of ordinary tokens, ascending: those of all pairs of two letters, so that no vocabulary is needed.

    Args:
        encode: returns the token ids of a text; a first and a last special token are left out.
    """
    return sorted(set(encode(_PAIRS)[1:-1]))


def random_load(
    tokens: Sequence[int],
    count: int,
    *,
    input_len: int,
    output_len: int,
    prefix_len: int = 0,
    range_ratio: float = 0.0,
    seed: int = 0,
) -> list[LoadRequest]:
    """Return requests with random prompts after one common prefix.

    Args:
        tokens: ids to draw from.
        count: number of requests.
        input_len: tokens of a prompt after the prefix, on average.
        output_len: output tokens, on average.
        prefix_len: tokens of the common prefix.
        range_ratio: lengths are drawn from 1 - R to 1 + R times the average; at least 0, below 1.
        seed: seed of the draws.
    """
    draw = np.random.default_rng(seed)
    prefix = draw.choice(tokens, prefix_len).tolist()
    inputs, outputs = (_lengths(draw, one, range_ratio, count) for one in (input_len, output_len))
    return [
        LoadRequest((*prefix, *draw.choice(tokens, asked).tolist()), made)
        for asked, made in zip(inputs, outputs, strict=True)
    ]


def _lengths(draw: np.random.Generator, average: int, ratio: float, count: int) -> list[int]:
    least, most = math.floor(average * (1 - ratio)), math.ceil(average * (1 + ratio))
    return [int(one) for one in draw.integers(max(1, least), max(1, most), count, endpoint=True)]


def repeated_prefixes(
    tokens: Sequence[int],
    count: int,
    *,
    prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    seed: int = 0,
) -> list[LoadRequest]:
    """Return requests that begin with one of several prefixes each, in random order.

    Args:
        tokens: ids to draw from.
        count: number of requests; each prefix has ``count // prefixes`` of them.
        prefixes: number of prefixes.
        prefix_len: tokens of a prefix.
        suffix_len: tokens of a prompt after its prefix.
        output_len: output tokens.
        seed: seed of the draws.

    Raises:
        ConfigError: there are more prefixes than requests.
    """
    if count < prefixes:
        raise ConfigError(f"{count} requests cannot have {prefixes} prefixes: raise --num-prompts")
    draw = np.random.default_rng(seed)
    made = list[LoadRequest]()
    for _ in range(prefixes):
        prefix = draw.choice(tokens, prefix_len).tolist()
        suffixes = draw.choice(tokens, (count // prefixes, suffix_len)).tolist()
        made += [LoadRequest((*prefix, *suffix), output_len) for suffix in suffixes]
    return [made[at] for at in draw.permutation(len(made))]


def custom(path: Path, encode: Encode, count: int, *, output_len: int, seed: int = 0) -> list[LoadRequest]:
    """Return requests from JSON lines ``{"prompt": text, "output_tokens": n}``, in random order.

    Args:
        path: the file. If it has fewer prompts than ``count``, they are repeated.
        encode: returns the token ids of a text.
        count: number of requests.
        output_len: output tokens; -1: those of each line.
        seed: seed of the order.

    Raises:
        ConfigError: the file cannot be read, or a line lacks a field.
    """

    def requests(data: bytes) -> Iterator[LoadRequest]:
        lines = json.Decoder(_Prompt).decode_lines(data)
        for at in np.random.default_rng(seed).permutation(len(lines)):
            length = lines[at].output_tokens if output_len < 0 else output_len
            if length is None:
                raise ConfigError(f"{path} has prompts without output_tokens: give --custom-output-len")
            yield LoadRequest(tuple(encode(lines[at].prompt)), length, lines[at].prompt)

    return _of_file(path, requests, count)


def sharegpt(
    path: Path, encode: Encode, count: int, *, output_len: int | None = None, seed: int = 0
) -> list[LoadRequest]:
    """Return the first message of conversations in ShareGPT's form, in random order.

    Args:
        path: a JSON list of ``{"conversations": [{"value": text}, ...]}``. If it has fewer than ``count``, they are
            repeated.
        encode: returns the token ids of a text.
        count: number of requests.
        output_len: output tokens; None: those of the second message.
        seed: seed of the order.

    Raises:
        ConfigError: the file cannot be read, or has no conversation of 4 to 1,024 prompt tokens and at most 2,048 in
            total.
    """

    def requests(data: bytes) -> Iterator[LoadRequest]:
        held = json.decode(data, type=list[_Conversation])
        talks = [one.conversations for one in held if len(one.conversations) > 1]
        for at in np.random.default_rng(seed).permutation(len(talks)):
            asked, answer = (one.value for one in talks[at][:2])
            ids = tuple(encode(asked))
            length = len(encode(answer)) if output_len is None else output_len
            fits = len(ids) <= _MOST_PROMPT and len(ids) + length <= _MOST_TOKENS
            if fits and len(ids) >= _SHORTEST and (output_len is not None or length >= _SHORTEST):
                yield LoadRequest(ids, length, asked)

    return _of_file(path, requests, count)


def _of_file(path: Path, requests: Callable[[bytes], Iterator[LoadRequest]], count: int) -> list[LoadRequest]:
    """Return ``count`` of the requests in the file ``path``, from its beginning again after the last."""
    try:
        with open_regular(path) as file:
            found = list(islice(requests(file.read()), count))
    except OSError as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error.strerror or error}") from error
    except DecodeError as error:
        raise ConfigError(f"--dataset-path {path} is not such a data set: {error}") from error
    if not found:
        raise ConfigError(f"--dataset-path {path} has no request that fits: name another file")
    return list(islice(cycle(found), count))
