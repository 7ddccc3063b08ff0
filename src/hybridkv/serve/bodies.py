"""The fields of request bodies. A field that is not here is rejected with an error that names it.

Some fields of OpenAI's are not supported, but clients send them at a neutral value: that value alone is accepted.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hybridkv.errors import ConfigError
from hybridkv.request import NO_HINTS, Hints, SamplingParams, StructuredKind, StructuredOutput

MOST_LOGPROBS: Final = 20
MOST_MESSAGES: Final = 1 << 13
_MOST_STOPS: Final = 16
_MOST_STOP_CHARACTERS: Final = 256
_MOST_STOP_IDS: Final = 1024
_MOST_SEED: Final = 1 << 62
_MOST_KEY_CHARACTERS: Final = 64
"""The limit of OpenAI's API for ``prompt_cache_key``."""
_DAY_S: Final = 86400.0

StopString = Annotated[str, Field(min_length=1, max_length=_MOST_STOP_CHARACTERS)]
Text = Annotated[str, Field(min_length=1)]
FAIL_FAST: Final = Field(fail_fast=True)
"""Stop at the first invalid value of a list: collecting an error for each of 262,144 values takes seconds."""
AT_LEAST_ONE: Final = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
_MOST_BIASED: Final = 1 << 12

_OF_ROUTERS: Final = {"no_stop_trim": (False,), "return_hidden_states": (False,)}
"""Neutral values that vllm-router adds to every body that it sends on."""

Ids = Annotated[list[int], FAIL_FAST]
Prompts = str | Ids | Annotated[list[str], FAIL_FAST] | Annotated[list[Ids], FAIL_FAST]
Schema = dict[str, Any]
_ALIASES: Final = ("json", "schema")
"""Names of fields whose attributes have other names, because those are methods of pydantic's."""


def _few_biases(given: Any) -> Any:  # noqa: ANN401  # whatever JSON says
    """Refuse too many biases before each is checked."""
    if isinstance(given, dict) and len(given) > _MOST_BIASED:
        raise ValueError(f"{len(given)} tokens have a bias: give at most {_MOST_BIASED}")
    return given


class Body(BaseModel):
    """A body of named fields with strict types: a number is not accepted as text, nor text as a number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """For each unsupported field, the neutral values that are accepted and ignored."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, given: Any) -> Any:  # noqa: ANN401  # whatever JSON says
        if not isinstance(given, dict):
            return given
        said = {name: value for name, value in given.items() if not cls._is_neutral(name, value)}
        unknown = [name for name in said if name not in cls.model_fields and name not in _ALIASES]
        for name in unknown[1:]:  # one is enough to refuse the body
            del said[name]
        return said

    @classmethod
    def _is_neutral(cls, name: object, value: object) -> bool:
        neutral = cls.neutral_values.get(name) if isinstance(name, str) else None
        return neutral is not None and (
            value is None or any(type(one) is type(value) and one == value for one in neutral)
        )


class StreamOptions(Body):
    """Options of a stream.

    Attributes:
        include_usage: end with a chunk that has the token counts.
        continuous_usage_stats: add the token counts so far to every chunk.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    neutral_values = {"include_obfuscation": (False,)}


class HintsBody(Body):
    """When a prompt is expected to be used again. Hints change which blocks stay cached, never an answer.

    Attributes:
        over: the session ends; the prompt will not be continued.
        goes_on: the session will continue.
        within_s: the session will continue within this many seconds.
        shared_tokens: many prompts begin with this many of the prompt's first tokens.
        scratch: tokens after ``shared_tokens`` are not worth keeping.
        secret: no block of the prompt is kept for reuse.
        ttl_s: what is kept of the prompt and its answer is evicted after everything else of the tenant, for this many
            seconds.
        demote: what is kept leaves the device once host memory has it.
        prefetch: bring up from host memory what is kept of the prompt, and compute nothing.
        in_memory: nothing that is kept is written to a disk or another store.
    """

    over: bool = False
    goes_on: bool = False
    within_s: float | None = None
    shared_tokens: int = 0
    scratch: bool = False
    secret: bool = False
    ttl_s: float | None = None
    demote: bool = False
    prefetch: bool = False
    in_memory: bool = False

    def said(self) -> Hints:
        """Return the hints as a request has them. ConfigError for invalid or contradictory values."""
        return Hints(**self.model_dump())

    @model_validator(mode="after")
    def _check_hints(self) -> HintsBody:
        self.said()
        return self


class PromptCacheOptions(Body):
    """OpenAI's options of the prompt cache.

    Attributes:
        mode: ``implicit``: the server chooses what it keeps.
        ttl: how long everything that is kept lives at least, such as 30m; seconds (s), minutes (m) or hours (h).
    """

    mode: Literal["implicit"] | None = None
    ttl: Annotated[str, Field(pattern="^[0-9]{1,6}[smh]$")] | None = None

    @property
    def ttl_s(self) -> float | None:
        """The same in seconds."""
        return None if self.ttl is None else float(self.ttl[:-1]) * {"s": 1, "m": 60, "h": 3600}[self.ttl[-1]]


class StructuredBody(Body):
    """The form of an output in vLLM's names, exactly one of them.

    Attributes:
        schema_: a JSON schema, also as text; its name in bodies is ``json``.
        regex: a regular expression, which the whole output must match.
        choice: the outputs to choose from.
        grammar: a grammar, in the syntax of Lark or of llama.cpp's GBNF.
        json_object: true for any JSON object.
    """

    neutral_values = {
        "json_object": (False,),
        "disable_fallback": (False, True),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
    }

    schema_: Annotated[Schema | Text | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Annotated[list[Text], AT_LEAST_ONE] | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    def said(self) -> StructuredOutput:
        """Return the form. ConfigError for none, several, or an invalid one."""
        schema, choice = self.schema_, self.choice
        forms: list[tuple[StructuredKind, str | None]] = [
            ("json_schema", schema if isinstance(schema, str | None) else json.dumps(schema)),
            ("regex", self.regex),
            ("choice", None if choice is None else json.dumps(choice)),
            ("grammar", self.grammar),
            ("json_object", "" if self.json_object else None),
        ]
        given = [StructuredOutput(kind, text) for kind, text in forms if text is not None]
        if len(given) != 1:
            raise ConfigError("structured_outputs needs exactly one of json, regex, choice, grammar and json_object")
        return given[0]


class NamedSchema(Body):
    """A JSON schema in OpenAI's form. Name and description are for readers; every output obeys, ``strict`` or not."""

    name: Text | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextFormat(NamedSchema):
    """The form of a response's text."""

    type: Literal["text", "json_object", "json_schema"]


class TextBody(Body):
    """What the text of a response must be."""

    neutral_values = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ResponseFormat(Body):
    """The form of the outputs of a completion or a chat."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


def form_of(given: ResponseFormat | TextFormat | None) -> StructuredOutput | None:
    """Return the form that OpenAI's fields name; None for text. ConfigError for a missing or superfluous schema."""
    if given is None:
        return None
    named = given.json_schema if isinstance(given, ResponseFormat) else given
    schema = None if named is None else named.schema_
    if (given.type == "json_schema") != (schema is not None):
        raise ConfigError("a format has a schema if its type is json_schema: add the schema, or change the type")
    if given.type == "json_schema":
        return StructuredOutput("json_schema", json.dumps(schema))
    return None if given.type == "text" else StructuredOutput("json_object")


class SamplingBody(Body):
    """The fields of all bodies that generate: sampling, and hints about the prompt's future.

    ``top_k`` 0 and -1 are off. Requests share cached blocks only with requests of the same ``cache_salt``.

    Attributes:
        prompt_cache_key: names requests that begin alike, for routers. The cache finds prefixes by their tokens.
        prompt_cache_retention: ``24h``: the prompt is used again within a day, unless hints say more. ``in_memory``: as
            the hint of that name.
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
    skip_special_tokens: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredBody | None = None
    cache_salt: Text | None = None
    hints: HintsBody | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=_MOST_KEY_CHARACTERS)] | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    stream: bool | None = None

    @property
    def said_hints(self) -> Hints:
        """The hints for each prompt. ConfigError if hints and prompt_cache_options contradict each other."""
        hints = NO_HINTS if self.hints is None else self.hints.said()
        if self.prompt_cache_retention == "in_memory":
            hints = replace(hints, in_memory=True)
        elif self.prompt_cache_retention and not (hints.goes_on or hints.over or hints.scratch or hints.secret):
            hints = replace(hints, within_s=_DAY_S)
        ttl_s = None if self.prompt_cache_options is None else self.prompt_cache_options.ttl_s
        if ttl_s is None:
            return hints
        if hints.ttl_s is not None:
            raise ConfigError("hints.ttl_s and prompt_cache_options.ttl say the same: leave one of them out")
        return replace(hints, ttl_s=ttl_s)

    @property
    def format_(self) -> StructuredOutput | None:
        """The form of the output in OpenAI's names."""
        return None

    @property
    def structured(self) -> StructuredOutput | None:
        """The form of the output. ConfigError if it is invalid or given twice."""
        form, other = self.format_, None if self.structured_outputs is None else self.structured_outputs.said()
        if form is not None and other is not None:
            raise ConfigError("structured_outputs and a format both say what the output must be: leave one of them out")
        return other if form is None else form

    @model_validator(mode="after")
    def _check_hints_and_format(self) -> SamplingBody:
        _ = self.said_hints, self.structured
        return self

    def sampling(self, max_tokens: int, **more: int | StructuredOutput | None) -> SamplingParams:
        """Return the sampling for the engine; without a seed, a random one. ConfigError for invalid values."""
        own = {name: getattr(self, name) for name in _SAMPLING} | {"structured": self.structured}
        said = own | more | {"max_tokens": max_tokens}
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
    """The fields of bodies that are answered with choices.

    Attributes:
        return_token_ids: add the token ids of prompt and output to the answer.
        return_tokens_as_token_ids: name the tokens of log probabilities by their ids.
    """

    n: int | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def format_(self) -> StructuredOutput | None:
        """The form of the output in OpenAI's names."""
        return form_of(self.response_format)

    @model_validator(mode="after")
    def _check_stream_options(self) -> ChoicesBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: remove them, or set stream to true")
        return self


class CompletionBody(ChoicesBody):
    """The body of /v1/completions.

    Attributes:
        prompt: a text, token ids, or a list of either.
        logprobs: how many of the most probable tokens to return, with each output token's own.
        echo: begin the output with the prompt; with max_tokens 0, return the prompt alone.
    """

    neutral_values = {"best_of": (1,), "suffix": (), "user": (), "add_special_tokens": (True,), **_OF_ROUTERS}

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | Ids]:
        """The prompts as a list. ConfigError if there are none."""
        return _as_list("prompt", self.prompt)


class EmbeddingBody(Body):
    """The body of /v1/embeddings.

    Attributes:
        input: a text, token ids, or a list of either.
        dimensions: first elements of each vector to return.
    """

    neutral_values = {"user": (), "truncate_prompt_tokens": (), "add_special_tokens": (True,), "normalize": ()}

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    cache_salt: Text | None = None

    @property
    def prompts(self) -> list[str | Ids]:
        """The inputs as a list. ConfigError if there are none."""
        return _as_list("input", self.input)


def _as_list(name: str, given: Prompts) -> list[str | Ids]:
    """Return a text, token ids, or a list of either as a list. Raises ConfigError if it is empty."""
    if not given:
        raise ConfigError(f"{name} is empty: give it at least one token")
    if isinstance(given, str):
        return [given]
    return [given] if isinstance(given[0], int) else cast("list[str | Ids]", given)


class TextPart(Body):
    """A piece of a message."""

    neutral_values = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["text", "input_text", "output_text"]
    text: str


class FunctionCall(Body):
    """A call of a function; ``arguments`` is JSON, as text."""

    name: Text
    arguments: str


class ToolCall(Body):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One message. ``content`` is text or a list of parts, and may be missing if an assistant only called tools.

    ``reasoning`` and ``reasoning_content`` are two names of the same; the chat template gets both.
    """

    neutral_values = {"refusal": (), "audio": (), "annotations": ([],), "function_call": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FAIL_FAST] | None = None
    name: Text | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], FAIL_FAST] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message without tool_calls needs content: add content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"role {self.role!r} cannot have tool_calls: leave them out, only assistant can have them")
        return self


class FunctionTool(Body):
    """A function that may be called; ``parameters`` is a JSON schema. The chat template receives all but ``strict``.

    Attributes:
        strict: whether arguments must obey the schema also if the model chooses what it calls.
    """

    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool | None, Field(exclude=True)] = None


class Tool(Body):
    """A tool that may be called."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    """The name of a function."""

    name: Text


class NamedChoice(Body):
    """The function that is called."""

    type: Literal["function"]
    function: NamedFunction


class TemplateBody(Body):
    """The inputs of the tokenizer's chat template besides messages.

    Attributes:
        tools: passed to the template, unless tool_choice is "none".
        tool_choice: "auto" lets the model choose, "required" or the name of a function force a call.
        chat_template_kwargs: variables of the template, such as enable_thinking.
    """

    tools: Annotated[list[Tool], FAIL_FAST] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None

    @property
    def may_call(self) -> bool:
        """Whether the model chooses if it calls tools."""
        return bool(self.tools) and self.tool_choice in (None, "auto")

    @property
    def called(self) -> str | None:
        """The function that tool_choice names."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """The JSON schema of each function's parameters, by name."""
        return {one.function.name: one.function.parameters or {} for one in self.tools or ()}

    def forced(self, *, parallel: bool) -> StructuredOutput | None:
        """Return the form of calls that are forced, ``parallel`` or one. ConfigError if there is no such function."""
        if self.called is None and self.tool_choice != "required":
            return None
        offered = {one.function.name: arguments_schema(one.function) for one in self.tools or ()}
        if not offered or self.called not in (None, *offered):
            raise ConfigError(
                f"tool_choice forces a call of {self.called or 'a function'}, which is not in tools: add it"
            )
        schema = offered[self.called] if self.called else _calls_schema(offered, parallel=parallel)
        return StructuredOutput("json_schema", json.dumps(schema))


class ChatBody(ChoicesBody, TemplateBody):
    """The body of /v1/chat/completions.

    Attributes:
        parallel_tool_calls: false for at most one call; further ones are left out.
        include_reasoning: false to leave reasoning out of the answer.
        logprobs: return the log probability of each output token.
        top_logprobs: how many of the most probable tokens to return with it.
    """

    neutral_values = {
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "user": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "echo": (False,),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
        **_OF_ROUTERS,
    }

    messages: Annotated[list[ChatMessage], AT_LEAST_ONE]
    max_completion_tokens: int | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def template(self) -> TemplateBody:
        """The inputs of the chat template."""
        return self

    @property
    def format_(self) -> StructuredOutput | None:
        """The form of calls that are forced, or the form of the output. ConfigError if there is no such function."""
        return self.forced(parallel=self.parallel_tool_calls is not False) or super().format_

    @property
    def most_tokens(self) -> int | None:
        """The most output tokens. ConfigError if the two fields for it differ."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise ConfigError(f"max_tokens {old} and max_completion_tokens {new} differ: give one of them")
        return old if new is None else new

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(
                f"top_logprobs need logprobs: set it to true, or leave out top_logprobs {self.top_logprobs}"
            )
        return self


def arguments_schema(function: FunctionTool) -> dict[str, Any]:
    """Return the schema of a function's arguments. A function without parameters takes no arguments."""
    given = function.parameters
    return {**({"additionalProperties": False} if given is None else given), "type": "object"}


def _calls_schema(offered: Mapping[str, dict[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of calls. Definitions move to its top, where references look for them.

    Raises ConfigError for two definitions of one name.
    """
    shared: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    calls = []
    for name, arguments in offered.items():
        for place, known in shared.items():
            found = arguments.pop(place, {})
            for defined in found if isinstance(found, dict) else ():
                if known.setdefault(defined, found[defined]) != found[defined]:
                    raise ConfigError(f"two tools define {defined!r} in their {place}: rename one of them")
        fields = {"name": {"enum": [name]}, "arguments": arguments}
        calls.append({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, **shared}


class TokenizeBody(TemplateBody):
    """The body of /tokenize: a prompt or messages. ``return_token_strs`` adds the text of each token."""

    neutral_values = {"add_special_tokens": (True,), "add_generation_prompt": (True,)}

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], AT_LEAST_ONE] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_prompt_or_messages(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("the body needs either prompt or messages: give one of them")
        return self


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Ids
