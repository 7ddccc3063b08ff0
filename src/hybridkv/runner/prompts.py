"""Files of prompts: JSON lines with sampling parameters, or plain text with one prompt a line.

    {"prompt": "Once upon a time", "sampling": {"temperature": 0.8, "seed": 7, "max_tokens": 32}}
    {"prompt": [72, 101, 108, 108, 111], "marks": [4]}
    {"prompt": "In sum,", "tenant": "team-a", "hints": {"over": true}}

- marks: token counts, in prompt or output, where later requests are likely to resume; recurrent states are kept there
(natural layout).
- tenant: the tenant to which the cached blocks are charged.
- hints: when the prefix is needed again (hybridkv.request.Hints).
- encoder: for an encoder-decoder, the input of its encoder. The prompt is then the decoder's and may be left out. A
plain line is an encoder input, too:

    {"encoder": "translate English to German: That is good."}
    {"encoder": "features.npy", "prompt": [50258, 50259, 50359, 50363]}

Conversations are JSON lines as well, with messages instead of a prompt, or with a list of messages alone:

    {"messages": [{"role": "user", "content": "Who was Ada Lovelace?"}], "sampling": {"max_tokens": 64}}
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who was Ada Lovelace?"}]

A content may be a list of parts (hybridkv.runner.chat). The files of its pictures are next to the conversations:

    [{"role": "user", "content": [{"type": "image", "path": "ada.png"}, {"type": "text", "text": "Who was she?"}]}]

A file of prompts is read as JSON lines if its name ends in .jsonl or .json, or if its first non-blank line begins with
``{``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from hybridkv.arguments import text
from hybridkv.errors import ConfigError, TraceError
from hybridkv.regular_files import open_regular
from hybridkv.request import NO_HINTS, Hints, SamplingParams, checked_marks
from hybridkv.runner.chat import Message, chat_prompt, checked_messages, require_chat
from hybridkv.runner.images import Images
from hybridkv.runner.inputs import EncoderFeed
from hybridkv.runner.load import LoadedModel
from hybridkv.units import shown

Encode = Callable[[str | Sequence[int]], list[int]]
ReadEncoder = Callable[[str | Sequence[int]], EncoderFeed]
"""Converts the ``encoder`` value of a line to an encoder input."""

_SHARED_KEYS: Final = ("sampling", "marks", "tenant", "hints")
_KEYS: Final = ("prompt", *_SHARED_KEYS)
_ENCODER: Final = "encoder"
_CHAT_KEYS: Final = ("messages", *_SHARED_KEYS)
_SAMPLING_KEYS: Final = tuple(field.name for field in fields(SamplingParams) if field.name != "logits_processors")

_STORY: Final = (
    "The archive kept every letter the lighthouse keepers had written: the weather, the ships that passed, the oil "
    "that was left, and what the sea had thrown on the rocks. "
)
BUILT_IN: Final = (
    _STORY + "The first letter of the year began with",
    _STORY + "The last letter of the year ended with",
    _STORY + "One page was missing; it must have said that",
    "What is a prefix cache good for?",
)
"""Prompts for a first try. Three of them share their beginning, so that the cache has something to find."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One encoded prompt.

    Attributes:
        token_ids: its tokens.
        sampling: its sampling parameters.
        marks, tenant, hints: as in hybridkv.request.Request.
        encoder: the encoder input, for an encoder-decoder.
        messages: the conversation that was encoded, if it was one.
        images: the processor's output for the conversation's pictures.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    marks: tuple[int, ...] = ()
    encoder: EncoderFeed | None = None
    messages: tuple[Message, ...] | None = None
    images: Images | None = None
    tenant: str | None = None
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a file, the number of lines left out, and the error in the first of these."""

    prompts: tuple[Prompt, ...]
    bad_lines: int = 0
    first_bad: str | None = None


def plain_prompts(
    texts: Sequence[str], encode: Encode, defaults: SamplingParams, read_encoder: ReadEncoder | None = None
) -> Prompts:
    """Return ``texts``, all with the sampling ``defaults``. ``read_encoder`` makes them encoder inputs instead."""
    return Prompts(tuple(_plain(text, encode, defaults, read_encoder) for text in texts))


def read_prompts(
    path: str | Path,
    encode: Encode,
    defaults: SamplingParams,
    *,
    vocab_size: int,
    skip_bad_lines: bool = False,
    read_encoder: ReadEncoder | None = None,
) -> Prompts:
    """Read the prompts in the file ``path``.

    Args:
        path: JSON lines or plain text.
        encode: converts text or token ids to checked token ids. For an encoder-decoder it must take an empty prompt.
        defaults: sampling parameters that a line does not set.
        vocab_size: token ids in a line's sampling must be below it.
        skip_bad_lines: count malformed lines instead of raising.
        read_encoder: for an encoder-decoder, converts a line's ``encoder`` value.

    Raises:
        TraceError: a line is malformed, has unknown keys, or has token ids outside the vocabulary; or the file has no
            prompt. The message names file and line.
        ConfigError: the file cannot be read.
    """
    lines = _lines(path)
    as_json = Path(path).suffix in (".jsonl", ".json") or next((x for x in lines if x.strip()), b"").startswith(b"{")

    def prompt(line: str) -> Prompt:
        return (
            _parse(line, encode, defaults, vocab_size, read_encoder)
            if as_json
            else _plain(line, encode, defaults, read_encoder)
        )

    return _read(path, lines, prompt, skip_bad_lines=skip_bad_lines)


def read_conversations(
    path: str | Path,
    loaded: LoadedModel,
    defaults: SamplingParams,
    *,
    system: str | None = None,
    skip_bad_lines: bool = False,
) -> Prompts:
    """Read the conversations in the file ``path`` with the chat template of ``loaded``.

    Pictures are read from the folder of the file. Their processed form is kept, once for each conversation.

    Args:
        path: JSON lines.
        loaded: a model with a chat template.
        defaults: as in ``read_prompts``.
        skip_bad_lines: as in ``read_prompts``.
        system: text of a system message for conversations without one.

    Raises:
        TraceError: as ``read_prompts``.
        ConfigError: the file cannot be read, or the model has no chat template.
    """
    require_chat(loaded)

    def conversation(line: str) -> Prompt:
        record = _json(line)
        if isinstance(record, list):
            record = {"messages": record}
        if not isinstance(record, dict):
            raise ConfigError('a line must be an object like {"messages": [...]}, or a list of messages')
        _refuse_unknown(record, _CHAT_KEYS, "key")
        messages = checked_messages(record.get("messages"), system)
        said = _shared_fields(record, defaults, loaded.vocab_size)
        ids, images = chat_prompt(loaded, messages, Path(path).parent)
        return replace(said, token_ids=tuple(ids), messages=tuple(messages), images=images)

    return _read(path, _lines(path), conversation, skip_bad_lines=skip_bad_lines)


def _lines(path: str | Path) -> list[bytes]:
    try:
        with open_regular(path) as file:
            return file.read().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read the prompts in {path}: {error.strerror or error}") from error


def _read(
    path: str | Path, lines: Sequence[bytes], prompt: Callable[[str], Prompt], *, skip_bad_lines: bool
) -> Prompts:
    """Read the lines that are not blank with ``prompt``."""
    found: list[Prompt] = []
    bad: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(prompt(line.decode("utf-8").rstrip("\r")))
        except (ConfigError, UnicodeDecodeError) as error:
            message = f"{path}, line {number}: {error}"
            if not skip_bad_lines:
                raise TraceError(message) from None
            bad.append(message)
    if not found:
        because = f": {len(bad)} bad lines, the first: {bad[0]}" if bad else ": the file is empty"
        raise TraceError(f"{path} holds no prompt{because}")
    return Prompts(tuple(found), len(bad), bad[0] if bad else None)


def _plain(text: str, encode: Encode, defaults: SamplingParams, read_encoder: ReadEncoder | None) -> Prompt:
    if read_encoder is None:
        return Prompt(tuple(encode(text)), defaults)
    return Prompt(tuple(encode("")), defaults, encoder=read_encoder(text))


def _parse(
    text: str, encode: Encode, defaults: SamplingParams, vocab_size: int, read_encoder: ReadEncoder | None
) -> Prompt:
    """Read one JSON line. Raises ConfigError for an invalid line."""
    record = _json(text)
    if not isinstance(record, dict):
        raise ConfigError('a line must be an object like {"prompt": "text"}')
    _refuse_unknown(record, _KEYS if read_encoder is None else (*_KEYS, _ENCODER), "key")
    encoder = None if read_encoder is None else read_encoder(_text_or_ids(record.get(_ENCODER), _ENCODER))
    prompt = _text_or_ids(record.get("prompt", None if read_encoder is None else ""), "prompt")
    said = _shared_fields(record, defaults, vocab_size)
    return replace(said, token_ids=tuple(encode(prompt)), encoder=encoder)


def _shared_fields(record: dict[str, object], defaults: SamplingParams, vocab_size: int) -> Prompt:
    """Return the sampling, marks, tenant and hints of a line, as a Prompt without tokens."""
    tenant, hints = record.get("tenant"), record.get("hints")
    return Prompt(
        (),
        _sampling(record.get("sampling"), defaults, vocab_size),
        checked_marks(record.get("marks", ())),
        tenant=None if tenant is None else text("tenant", tenant),
        hints=NO_HINTS if hints is None else Hints.parse(hints),
    )


def _json(text: str) -> object:
    try:
        made: object = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested thousands deep
        raise ConfigError(f"not JSON: {error}") from None
    return made


def _text_or_ids(given: object, name: str) -> str | list[int]:
    """Return a line's value of ``name``. Raises ConfigError if it is missing, or neither text nor token ids."""
    if isinstance(given, str):
        return given
    if not given and not isinstance(given, list):
        raise ConfigError(f"{name} is missing: give text or a list of token ids")
    if not isinstance(given, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in given):
        raise ConfigError(f"{name} must be a string or a list of integer token ids")
    return given


def _sampling(given: object, defaults: SamplingParams, vocab_size: int) -> SamplingParams:
    if given is None:
        return defaults
    if not isinstance(given, dict):
        raise ConfigError(f"sampling must be an object, got {shown(given)}")
    _refuse_unknown(given, _SAMPLING_KEYS, "sampling key")
    made = replace(defaults, **given)
    for what, ids in (("stop token id", made.stop_token_ids), ("token of logit_bias or bad_words", made.named_tokens)):
        if (most := max(ids, default=0)) >= vocab_size:
            raise ConfigError(f"{what} {most} is outside the vocabulary: ids are 0 .. {vocab_size - 1}")
    return made


def _refuse_unknown(record: dict[str, object], known: Sequence[str], what: str) -> None:
    unknown = sorted(set(record) - set(known))
    if unknown:
        raise ConfigError(f"unknown {what} {unknown[0]!r}: known are {', '.join(known)}")
