"""Prompts from a file: JSON lines with sampling parameters, or plain text, one prompt a line.

    {"prompt": "Once upon a time", "sampling": {"temperature": 0.8, "seed": 7, "max_tokens": 32}}
    {"prompt": [72, 101, 108, 108, 111], "marks": [4]}
    {"prompt": "In sum,", "tenant": "team-a", "hints": {"over": true}}

marks: token counts, in prompt or output, where the prefix should be resumable: a hit may end there, and states are kept
there (natural layout). tenant: on whose share of what is kept it counts. hints: when its prefix is wanted again
(hybridkv.request.Hints). encoder: of an encoder-decoder, what its encoder reads, and a plain line is that as well; the
prompt is then the decoder's, and may be left out:

    {"encoder": "translate English to German: That is good."}
    {"encoder": "features.npy", "prompt": [50258, 50259, 50359, 50363]}

Conversations are JSON lines, too: messages in place of the prompt, or nothing but a list of them:

    {"messages": [{"role": "user", "content": "Who was Ada Lovelace?"}], "sampling": {"max_tokens": 64}}
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who was Ada Lovelace?"}]

whose content may be a list of parts, pictures among them (hybridkv.runner.chat), of files beside the conversations:

    [{"role": "user", "content": [{"type": "image", "path": "ada.png"}, {"type": "text", "text": "Who was she?"}]}]

A file of prompts is JSON lines when its name ends in .jsonl or .json, or its first line that is not blank
begins with ``{``.
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

Encode = Callable[[str | Sequence[int]], list[int]]
Hear = Callable[[str | Sequence[int]], EncoderFeed]
"""From a line's ``encoder`` to what an encoder reads."""

_SAID: Final = ("sampling", "marks", "tenant", "hints")
_KEYS: Final = ("prompt", *_SAID)
_HEARD: Final = "encoder"
_CHAT_KEYS: Final = ("messages", *_SAID)
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
"""Prompts for a first try; three share their beginning."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, encoded. marks, tenant, hints: as hybridkv.request.Request has them; marks ascending.

    encoder: of an encoder-decoder, what its encoder reads. messages: that it was made of; None for none. images: of
    these, what the model's processor made of them.
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
    """The prompts of a file. bad_lines: how many were left out; first_bad: what was wrong with the first."""

    prompts: tuple[Prompt, ...]
    bad_lines: int = 0
    first_bad: str | None = None


def built_in_prompts(encode: Encode, defaults: SamplingParams, hear: Hear | None = None) -> Prompts:
    """BUILT_IN, all with ``defaults``; for an encoder's ears where there is one (``hear``)."""
    return Prompts(tuple(_plain(text, encode, defaults, hear) for text in BUILT_IN))


def read_prompts(
    path: str | Path,
    encode: Encode,
    defaults: SamplingParams,
    *,
    vocab_size: int,
    skip_bad_lines: bool = False,
    hear: Hear | None = None,
) -> Prompts:
    """The prompts in ``path``. defaults: what a line's sampling does not say. encode: text or ids -> checked ids.

    hear: of an encoder-decoder, what a line's ``encoder`` is; its encode takes an empty prompt, too.
    Raises TraceError, naming file and line, for a line that is malformed, has unknown keys or token ids outside the
    vocabulary; with ``skip_bad_lines`` such lines are counted. ConfigError when the file cannot be read,
    TraceError when it holds no prompt.
    """
    lines = _lines(path)
    as_json = Path(path).suffix in (".jsonl", ".json") or next((x for x in lines if x.strip()), b"").startswith(b"{")

    def prompt(line: str) -> Prompt:
        return _parse(line, encode, defaults, vocab_size, hear) if as_json else _plain(line, encode, defaults, hear)

    return _read(path, lines, prompt, skip_bad_lines=skip_bad_lines)


def read_conversations(
    path: str | Path,
    loaded: LoadedModel,
    defaults: SamplingParams,
    *,
    system: str | None = None,
    skip_bad_lines: bool = False,
) -> Prompts:
    """The conversations in ``path``, by the chat template of ``loaded``. system: put in front of those without one.

    Pictures are read here, from where the file is; what is made of them is kept, once for each conversation.
    defaults, skip_bad_lines: as read_prompts has them. Raises as it does, and ConfigError for a model without a chat
    template.
    """
    require_chat(loaded)

    def conversation(line: str) -> Prompt:
        record = _json(line)
        if isinstance(record, list):
            record = {"messages": record}
        if not isinstance(record, dict):
            raise ConfigError('a line must be an object such as {"messages": [...]}, or a list of messages')
        _refuse_unknown(record, _CHAT_KEYS, "key")
        messages = checked_messages(record.get("messages"), system)
        said = _said(record, defaults, loaded.vocab_size)
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
    """What ``prompt`` makes of the lines that are not blank."""
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


def _plain(text: str, encode: Encode, defaults: SamplingParams, hear: Hear | None) -> Prompt:
    if hear is None:
        return Prompt(tuple(encode(text)), defaults)
    return Prompt(tuple(encode("")), defaults, encoder=hear(text))


def _parse(text: str, encode: Encode, defaults: SamplingParams, vocab_size: int, hear: Hear | None) -> Prompt:
    """One JSON line. Raises ConfigError saying what is wrong."""
    record = _json(text)
    if not isinstance(record, dict):
        raise ConfigError('a line must be an object such as {"prompt": "text"}')
    _refuse_unknown(record, _KEYS if hear is None else (*_KEYS, _HEARD), "key")
    heard = None if hear is None else hear(_text_or_ids(record.get(_HEARD), _HEARD))
    prompt = _text_or_ids(record.get("prompt", None if hear is None else ""), "prompt")
    said = _said(record, defaults, vocab_size)
    return replace(said, token_ids=tuple(encode(prompt)), encoder=heard)


def _said(record: dict[str, object], defaults: SamplingParams, vocab_size: int) -> Prompt:
    """What a line says besides its prompt."""
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
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested as deep
        raise ConfigError(f"not JSON: {error}") from None
    return made


def _text_or_ids(given: object, name: str) -> str | list[int]:
    """What a line says of ``name``. Raises ConfigError where it is missing or something else."""
    if isinstance(given, str):
        return given
    if not given and not isinstance(given, list):
        raise ConfigError(f"{name} is missing")
    if not isinstance(given, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in given):
        raise ConfigError(f"{name} must be a string or a list of integer token ids")
    return given


def _sampling(given: object, defaults: SamplingParams, vocab_size: int) -> SamplingParams:
    if given is None:
        return defaults
    if not isinstance(given, dict):
        raise ConfigError("sampling must be an object")
    _refuse_unknown(given, _SAMPLING_KEYS, "sampling key")
    made = replace(defaults, **given)
    for what, ids in (("stop token id", made.stop_token_ids), ("token of logit_bias or bad_words", made.named_tokens)):
        if (most := max(ids, default=0)) >= vocab_size:
            raise ConfigError(f"{what} {most} lies outside the vocabulary: ids are 0 .. {vocab_size - 1}")
    return made


def _refuse_unknown(record: dict[str, object], known: Sequence[str], what: str) -> None:
    unknown = sorted(set(record) - set(known))
    if unknown:
        raise ConfigError(f"unknown {what} {unknown[0]!r}: known are {', '.join(known)}")
