"""What clients may ask for, field by field. A field that is not here is refused by its name.

Some fields of OpenAI's ask for nothing at some value, and clients send them: those are taken at that value alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hybridkv.errors import ConfigError
from hybridkv.request import NO_HINTS, Hints, SamplingParams

MOST_LOGPROBS: Final = 20
MOST_MESSAGES: Final = 1 << 13
_MOST_STOPS: Final = 16
_MOST_STOP_CHARACTERS: Final = 256
_MOST_STOP_IDS: Final = 1024
_MOST_SEED: Final = 1 << 62

StopString = Annotated[str, Field(min_length=1, max_length=_MOST_STOP_CHARACTERS)]
Text = Annotated[str, Field(min_length=1)]
_FIRST: Final = Field(fail_fast=True)
"""Of a list: one wrong value is enough. To collect an error for each of 262,144 takes seconds."""
_SOME: Final = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
_MOST_BIASED: Final = 1 << 12

Ids = Annotated[list[int], _FIRST]


def _few_biases(given: Any) -> Any:  # noqa: ANN401  # whatever JSON says
    """Refuse many before each is looked at."""
    if isinstance(given, dict) and len(given) > _MOST_BIASED:
        raise ValueError(f"at most {_MOST_BIASED} tokens may have a bias")
    return given


class Body(BaseModel):
    """A body of named fields, each of its own type: no number is taken for text, or text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    says_nothing: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Of a field that is not offered: the values at which it asks for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_says_nothing(cls, given: Any) -> Any:  # noqa: ANN401  # whatever JSON says
        if not isinstance(given, dict):
            return given
        said = {name: value for name, value in given.items() if not cls._says_nothing(name, value)}
        unknown = [name for name in said if name not in cls.model_fields]
        for name in unknown[1:]:  # one is enough to refuse the body
            del said[name]
        return said

    @classmethod
    def _says_nothing(cls, name: object, value: object) -> bool:
        neutral = cls.says_nothing.get(name) if isinstance(name, str) else None
        return neutral is not None and (
            value is None or any(type(one) is type(value) and one == value for one in neutral)
        )


class StreamOptions(Body):
    """include_usage: a last chunk with the counts. continuous_usage_stats: counts so far with every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    says_nothing = {"include_obfuscation": (False,)}


class HintsBody(Body):
    """When a prompt is wanted again, as far as the client knows: what is kept may depend on it, no answer does.

    over: nobody goes on from here. goes_on: its session does. within_s: so many seconds from now, which says that it
    goes on. shared_tokens: with so many of the prompt's first tokens many prompts begin. scratch: nothing of it, but
    for those, is worth keeping. secret: nothing of it is kept for reuse.
    """

    over: bool = False
    goes_on: bool = False
    within_s: float | None = None
    shared_tokens: int = 0
    scratch: bool = False
    secret: bool = False

    def said(self) -> Hints:
        """As a request has them. ConfigError for values that cannot be, and hints that contradict each other."""
        return Hints(**self.model_dump())

    @model_validator(mode="after")
    def _can_be(self) -> HintsBody:
        self.said()
        return self


class SamplingBody(Body):
    """What all bodies that generate share: how tokens are drawn, and what is said of the prompt's future.

    top_k: 0 and -1 are off. cache_salt: requests of other salts share nothing with this one.
    """

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few_biases)] | None = None
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=_MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=_MOST_STOP_IDS)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    cache_salt: Text | None = None
    hints: HintsBody | None = None
    stream: bool | None = None

    @property
    def said_hints(self) -> Hints:
        """Of the prompt, or of each."""
        return NO_HINTS if self.hints is None else self.hints.said()

    def sampling(self, max_tokens: int, **more: int | None) -> SamplingParams:
        """Return what the engine is asked; without a seed, a random one. ConfigError for values that cannot be."""
        said = {name: getattr(self, name) for name in _SAMPLING} | more | {"max_tokens": max_tokens}
        if self.temperature is None:
            said["temperature"] = 1.0
        if self.top_k == -1:
            said["top_k"] = 0
        if self.seed is None:
            said["seed"] = secrets.randbelow(_MOST_SEED)
        return SamplingParams(**{name: value for name, value in said.items() if value is not None})


_SAMPLING: Final = [name for name in SamplingBody.model_fields if name in SamplingParams.__dataclass_fields__]
"""Fields of a body that an engine has, too."""


class ChoicesBody(SamplingBody):
    """Of bodies that are answered with choices.

    return_token_ids: the ids of prompt and output beside their text. return_tokens_as_token_ids: tokens of log
    probabilities are named by their ids.
    """

    n: int | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> ChoicesBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams: leave them out, or ask for stream")
        return self


class CompletionBody(ChoicesBody):
    """Of /v1/completions. prompt: a text, token ids, or a list of either.

    logprobs: so many of the most probable tokens, with each token's own. echo: the prompt in front of the output;
    with max_tokens 0 the prompt alone.
    """

    says_nothing = {
        "best_of": (1,),
        "suffix": (),
        "user": (),
        "response_format": ({"type": "text"},),
        "add_special_tokens": (True,),
        "skip_special_tokens": (True,),
    }

    prompt: str | Ids | Annotated[list[str], _FIRST] | Annotated[list[Ids], _FIRST]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | Ids]:
        """One by one. ConfigError for none."""
        given = self.prompt
        if not given:
            raise ConfigError("prompt is empty: give it at least one token")
        if isinstance(given, str):
            return [given]
        return [given] if isinstance(given[0], int) else cast("list[str | Ids]", given)


class TextPart(Body):
    """A piece of a message."""

    says_nothing = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["text", "input_text", "output_text"]
    text: str


class FunctionCall(Body):
    """arguments: JSON, as text."""

    name: Text
    arguments: str


class ToolCall(Body):
    """What an assistant called."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One turn. content: text, or pieces of it; none where an assistant only called tools."""

    says_nothing = {"refusal": (), "audio": (), "annotations": ([],), "function_call": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], _FIRST] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], _FIRST] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message without tool_calls needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are an assistant's")
        return self


class FunctionTool(Body):
    """A function that may be called. parameters: a JSON schema; all of it is for the chat template."""

    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    says_nothing = {"strict": (False,)}


class Tool(Body):
    """What may be called."""

    type: Literal["function"]
    function: FunctionTool


class TemplateBody(Body):
    """What the tokenizer's chat template reads beside messages.

    tools: handed to the template, unless tool_choice is "none"; a call in the answer is text of the answer.
    chat_template_kwargs: names of the template's own, such as enable_thinking.
    """

    tools: Annotated[list[Tool], _FIRST] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None


class ChatBody(ChoicesBody, TemplateBody):
    """Of /v1/chat/completions. logprobs: with each token its own; top_logprobs: and so many of the most probable."""

    says_nothing = {
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "user": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "echo": (False,),
        "skip_special_tokens": (True,),
    }

    messages: Annotated[list[ChatMessage], _SOME]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def most_tokens(self) -> int | None:
        """Of the output. ConfigError where the two names of it say different things."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise ConfigError(f"max_tokens {old} and max_completion_tokens {new} differ: give one of them")
        return old if new is None else new

    @model_validator(mode="after")
    def _top_logprobs_with_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: true")
        return self


class TokenizeBody(TemplateBody):
    """Of /tokenize: a prompt, or messages. return_token_strs: the text of each token, too."""

    says_nothing = {"add_special_tokens": (True,), "add_generation_prompt": (True,)}

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], _SOME] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give a prompt or messages, and not both")
        return self


class DetokenizeBody(Body):
    """Of /detokenize."""

    model: str | None = None
    tokens: Ids


class InputMessage(Body):
    """One turn of /v1/responses: a client's, or one that came out of it before, whose id nobody knows any more."""

    says_nothing = {"status": ("completed", "incomplete"), "phase": ()}

    id: str | None = None
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], _FIRST]


class ResponseBody(SamplingBody):
    """Of /v1/responses, in its plain text form. instructions: a system's turn in front of ``input``."""

    says_nothing = {
        "background": (False,),
        "conversation": (),
        "include": ([],),
        "metadata": ({},),
        "parallel_tool_calls": (True,),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "text": ({"format": {"type": "text"}},),
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "user": (),
    }

    input: Text | Annotated[list[InputMessage], _SOME]
    instructions: Text | None = None
    max_output_tokens: int | None = None

    @property
    def messages(self) -> list[ChatMessage]:
        """The conversation."""
        said = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        made = [ChatMessage(role=one.role, content=one.content) for one in said]
        first = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        return [*first, *made]
