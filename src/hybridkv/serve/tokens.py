"""Text and tokens of requests, in a thread beside the event loop; and the text of single tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from hybridkv.errors import ConfigError
from hybridkv.runner.chat import chat_ids
from hybridkv.runner.inputs import encode
from hybridkv.runner.load import LoadedModel
from hybridkv.serve.bodies import ChatMessage, TemplateBody

T = TypeVar("T")

MOST_IDS: Final = 4096
"""Of prompts that are ids already: fewer are checked where they are, which takes less than a way to a thread."""
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class TokenThread:
    """One thread for what takes long in a tokenizer: tokenizers are not made for several, nor loops for waiting."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hybridkv-tokens")

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401  # those of the work
        """``work(*arguments)``, there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def ids(self, loaded: LoadedModel, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of each of ``prompts``. ConfigError as encode."""
        if sum(MOST_IDS if isinstance(one, str) else len(one) for one in prompts) < MOST_IDS:
            return _ids(loaded, prompts)
        return await self.run(_ids, loaded, prompts)

    def close(self) -> None:
        """When what runs is done."""
        self._thread.shutdown(cancel_futures=True)


def conversation_ids(loaded: LoadedModel, messages: Sequence[ChatMessage], reads: TemplateBody) -> list[int]:
    """Those of a conversation. ConfigError as chat_ids, and for tool calls whose arguments are no JSON object."""
    tools = None if reads.tools is None or reads.tool_choice == "none" else [one.model_dump() for one in reads.tools]
    said = [_message(one) for one in messages]
    return chat_ids(loaded, said, tools=tools, names=reads.chat_template_kwargs)


def _message(given: ChatMessage) -> dict[str, Any]:
    """As chat templates know it: content as one text, a developer as the system, arguments of calls as objects."""
    made: dict[str, Any] = {"role": "system" if given.role == "developer" else given.role}
    content = given.content
    made["content"] = "\n".join(one.text for one in content) if isinstance(content, list) else content or ""
    if given.name is not None:
        made["name"] = given.name
    if given.tool_call_id is not None:
        made["tool_call_id"] = given.tool_call_id
    if given.tool_calls:
        made["tool_calls"] = [one.model_dump() for one in given.tool_calls]
        for call in made["tool_calls"]:
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return made


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"arguments of a tool call are no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("arguments of a tool call must be a JSON object")
    return found


def _ids(loaded: LoadedModel, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    return [encode(loaded, one) for one in prompts]


class TokenTexts:
    """What single tokens are called. tokenizer: None for ids alone; as_ids: ``token_id:7``, whatever there is."""

    def __init__(self, tokenizer: Any, *, as_ids: bool = False) -> None:  # noqa: ANN401  # transformers' tokenizers share no typed base
        self._tokenizer: Any = None if as_ids else tokenizer

    def text(self, token: int, before: int | None) -> str:
        """``token`` as text behind the token ``before``: a space in front of a word is the word's."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        if before is not None:
            shown = self._decode([before])
            together = self._decode([before, token])
            if together.startswith(shown) and not shown.endswith(_REPLACEMENT):
                return together[len(shown) :]
        return self._decode([token])

    @staticmethod
    def utf8(text: str) -> list[int] | None:
        """The bytes of a token's text; None for one that is a part of a character."""
        return None if _REPLACEMENT in text else list(text.encode())

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
