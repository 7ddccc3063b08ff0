"""Conversations as token ids, made by a chat template: the tokenizer's, or the processor's if there are pictures.

[{"role": "system", "content": ...}, {"role": "user", "content": ...}, ...]  ->  text of the template  ->  ids

A content is text, or a list of parts in the form of OpenAI's chat API or of transformers:

    {"type": "text", "text": "What is this?"}
    {"type": "image_url", "image_url": {"url": "sunset.png"}}
    {"type": "image", "path": "sunset.png"}                       or "url", or "image", which may be a decoded picture
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Final

from hybridkv.arguments import instance, text
from hybridkv.errors import ConfigError
from hybridkv.runner.images import ImageCall, Images, require_processor
from hybridkv.runner.inputs import encode
from hybridkv.runner.load import LoadedModel, TextModel
from hybridkv.runner.picture_files import is_picture, open_picture, require_pillow
from hybridkv.units import shown

Message = dict[str, Any]
"""role: text. content: text, or a list of parts: {"type": "text", "text": ...}, {"type": "image", "image": ...}."""

SYSTEM: Final = "system"
ASSISTANT: Final = "assistant"

_IMAGE_KEYS: Final = ("path", "url", "image")


def checked_messages(given: object, system: str | None = None) -> list[Message]:
    """Return ``given`` as messages, and insert a ``system`` message at the beginning if there is none.

    A content without pictures becomes text, its parts joined by line breaks. Pictures are not opened. Raises
    ConfigError if this is not a list of messages, is empty, or ends with a message of the assistant.
    """
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
        raise ConfigError(f"messages must be a list with at least one role and content, got {shown(given)}")
    messages = [_checked(one) for one in given]
    if system is not None and messages[0]["role"] != SYSTEM:
        messages.insert(0, {"role": SYSTEM, "content": text("system", system)})
    if messages[-1]["role"] == ASSISTANT:
        raise ConfigError(
            "the last message is by the assistant, so there is nothing to answer: end with a user message"
        )
    return messages


def _checked(given: object) -> Message:
    if not isinstance(given, Mapping) or set(given) != {"role", "content"}:
        raise ConfigError(f'a message must have "role" and "content" and nothing else, got {shown(given)}')
    role, content = text("role of a message", given["role"]), given["content"]
    if isinstance(content, list | tuple) and content:
        parts = [_part(one) for one in content]
        pictures = any(one["type"] == "image" for one in parts)
        return {"role": role, "content": parts if pictures else "\n".join(one["text"] for one in parts)}
    if not isinstance(content, str):
        raise ConfigError(f"content of a message must be text or a list of parts, got {shown(content)}")
    return {"role": role, "content": _maybe_empty("content", content)}


def _part(given: object) -> dict[str, Any]:
    """Return one part of a content.

    Raises ConfigError for an unknown type, and for an image without a name or a picture.
    """
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or kind not in {"text", "image", "image_url"}:
        raise ConfigError(f'a part of a message must be of type "text", "image" or "image_url", got {shown(given)}')
    if kind == "text":
        return {"type": "text", "text": _maybe_empty("text of a part", given.get("text"))}
    if kind == "image_url":
        said = given.get("image_url")
        named = said.get("url") if isinstance(said, Mapping) else said
    else:
        named = next((given[key] for key in _IMAGE_KEYS if key in given), None)
    if isinstance(named, str):
        text("name of an image", named)
    elif not is_picture(named):  # a processor would open a list of names itself, without the checks of open_picture
        raise ConfigError(
            f'a part must name its image, as {{"type": "image", "path": "a.png"}} does, got {shown(given)}'
        )
    return {"type": "image", "image": named}


def _maybe_empty(name: str, given: object) -> str:
    """Return ``given``, a text that may be empty."""
    return "" if given == "" else text(name, given)


def require_chat(loaded: LoadedModel | TextModel) -> None:
    """Raise ConfigError if ``loaded`` has no tokenizer or its tokenizer has no chat template."""
    if not isinstance(loaded, TextModel):
        instance("the loaded model", loaded, LoadedModel)
    if loaded.tokenizer is None:
        raise ConfigError("messages need a tokenizer: load the model with one, or give token ids")
    if getattr(loaded.tokenizer, "chat_template", None) is None:
        raise ConfigError(f"the tokenizer of {loaded.name} has no chat template: use a chat model, or give prompts")


def require_pictures(loaded: LoadedModel) -> None:
    """Raise ConfigError if messages to ``loaded`` cannot have pictures.

    Its model must take images, and it needs a processor and pillow.
    """
    ImageCall.of(instance("the loaded model", loaded, LoadedModel).model)
    require_pillow()
    require_processor(loaded)


def chat_ids(
    loaded: LoadedModel | TextModel,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    names: Mapping[str, Any] | None = None,
    check: Callable[[str], None] | None = None,
) -> list[int]:
    """Return the token ids of ``messages`` and of the beginning of the assistant's answer. O(characters).

    Args:
        loaded: a model with a tokenizer that has a chat template.
        messages: messages without pictures.
        tools: functions that the template may offer to the model, as JSON schemas.
        names: values for other variables that the template reads.
        check: called with the template's text before it is tokenized; it may raise. The tokenizer must treat this text
            like any other text (serve.text_bound.TextBound.of tests that).

    Raises:
        ConfigError: as ``require_chat``; the template rejects the messages; there are pictures in them; or the template
            does not read one of ``names``.
        Exception: an error of ``check``.
    """
    if any(_has_pictures(one) for one in messages):
        raise ConfigError("these messages have pictures, which token ids alone cannot hold: use chat_prompt")
    require_chat(loaded)
    read = {**(names or {}), **({} if tools is None else {"tools": list(tools)})}
    _refuse_unread(loaded, read, names or {})
    try:
        said = loaded.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=check is None, return_dict=False, **read
        )
    except Exception as error:  # a template may raise any error, and its text is the reason
        raise ConfigError(f"the chat template of {loaded.name} rejects the messages: {error}") from error
    if check is None:
        return encode(loaded, said, what="conversation")
    check(text("the conversation", said))
    return encode(loaded, loaded.tokenizer.encode(said, add_special_tokens=False), what="conversation")


def _refuse_unread(loaded: LoadedModel | TextModel, read: Iterable[str], names: Iterable[str]) -> None:
    """Raise ConfigError for a variable that the template never reads, or a name that the tokenizer itself uses."""
    own = {"messages", *signature(loaded.tokenizer.apply_chat_template).parameters}
    if taken := sorted(own.intersection(names)):
        raise ConfigError(f"the tokenizer sets the template variable {taken[0]!r} itself: leave it out")
    words = set(re.findall(r"\w+", str(loaded.tokenizer.chat_template)))
    if unread := sorted(set(read) - words):
        raise ConfigError(f"the chat template of {loaded.name} does not read {unread[0]!r}: leave it out")


def chat_prompt(
    loaded: LoadedModel, messages: Sequence[Message], folder: Path | None = None
) -> tuple[list[int], Images | None]:
    """Return the token ids of ``messages``, and their images as ``Engine.add`` takes them; None without images.

    The images include the processor's kind of each token, which plain transformers needs. O(characters + pixels).

    Args:
        loaded: a model with a chat template, and with a processor if there are pictures.
        messages: the conversation; its pictures may be named or decoded.
        folder: where relative paths of pictures begin; None if no file may be read.

    Raises:
        ConfigError: as ``chat_ids``, ``require_pictures`` and ``open_picture``.
    """
    if not any(_has_pictures(one) for one in messages):
        return chat_ids(loaded, messages), None
    require_pictures(loaded)
    opened = [{**one, "content": _opened(one["content"], folder)} for one in messages]
    processor = loaded.processor
    template = getattr(processor, "chat_template", None) or getattr(loaded.tokenizer, "chat_template", None)
    try:
        made = processor.apply_chat_template(
            opened,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    except Exception as error:  # a processor may raise any error, and its text is the reason
        raise ConfigError(f"the processor of {loaded.name} rejects the messages: {error}") from error
    images = dict(made)
    return encode(loaded, images.pop("input_ids")[0], what="conversation"), images


def _has_pictures(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(one.get("type") == "image" for one in content)


def _opened(content: str | list[dict[str, Any]], folder: Path | None) -> list[dict[str, Any]]:
    """Return ``content`` as a list of parts, with every picture decoded. Every processor's template takes this form."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    named = [one["type"] == "image" and isinstance(one["image"], str) for one in content]
    return [
        {**one, "image": open_picture(one["image"], folder)} if has_name else one
        for one, has_name in zip(content, named, strict=True)
    ]
