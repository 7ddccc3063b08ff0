"""Conversations as token ids, by the chat template of a tokenizer.

[{"role": "system", "content": ...}, {"role": "user", "content": ...}, ...]  ->  text of the template  ->  ids
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hybridkv.arguments import instance, text
from hybridkv.errors import ConfigError
from hybridkv.runner.inputs import encode
from hybridkv.runner.load import LoadedModel
from hybridkv.units import shown

Message = dict[str, str]
"""role and content, both text."""

SYSTEM: Final = "system"
USER: Final = "user"
ASSISTANT: Final = "assistant"


def checked_messages(given: object, system: str | None = None) -> list[Message]:
    """``given`` as messages, behind one of the ``system`` where there is one and it begins with none.

    Raises ConfigError for what is no list of messages, for an empty one, and for one that the assistant ends.
    """
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
        raise ConfigError(f"messages must be a list of role and content, and not empty, got {shown(given)}")
    messages = [_checked(one) for one in given]
    if system is not None and messages[0]["role"] != SYSTEM:
        messages.insert(0, {"role": SYSTEM, "content": text("system", system)})
    if messages[-1]["role"] == ASSISTANT:
        raise ConfigError("messages end with one of the assistant: there is nothing to answer; end with the user's")
    return messages


def _checked(given: object) -> Message:
    if not isinstance(given, Mapping) or set(given) != {"role", "content"}:
        raise ConfigError(f'a message must have "role" and "content" and nothing else, got {shown(given)}')
    role, content = given["role"], given["content"]
    if not isinstance(content, str):
        raise ConfigError(f"content of a message must be text, got {shown(content)}")
    return {"role": text("role of a message", role), "content": text("content", content) if content else ""}


def require_chat(loaded: LoadedModel) -> None:
    """Raise ConfigError without a tokenizer or a chat template."""
    tokenizer = instance("the loaded model", loaded, LoadedModel).tokenizer
    if tokenizer is None:
        raise ConfigError("messages need a tokenizer: load the model with one, or give token ids")
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(f"the tokenizer of {loaded.name} has no chat template: use a chat model, or give prompts")


def chat_ids(loaded: LoadedModel, messages: Sequence[Message]) -> list[int]:
    """Token ids of ``messages`` and of what the assistant's answer begins with. O(characters).

    Raises ConfigError as require_chat, and for messages that the template refuses.
    """
    require_chat(loaded)
    try:
        ids = loaded.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    except Exception as error:  # whatever a template raises is what it says of the messages
        raise ConfigError(f"the chat template of {loaded.name} refuses the messages: {error}") from error
    return encode(loaded, ids, what="conversation")
