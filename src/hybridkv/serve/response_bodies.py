"""The body of /v1/responses: a conversation as items, which become the messages of a chat template.

An assistant's reasoning, message and calls, as far as they follow each other, are one message.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Tag, field_validator

from hybridkv.errors import ConfigError
from hybridkv.request import StructuredOutput
from hybridkv.serve.bodies import (
    AT_LEAST_ONE,
    FAIL_FAST,
    Body,
    ChatMessage,
    FunctionTool,
    NamedChoice,
    NamedFunction,
    SamplingBody,
    TemplateBody,
    Text,
    TextBody,
    TextPart,
    Tool,
    form_of,
)

_ENDED: Final = ("completed", "incomplete")
Content = str | Annotated[list[TextPart], FAIL_FAST]
Fields = dict[str, Any]
"""Fields of a message, or of its part."""


class InputMessage(Body):
    """One message: from a client, or copied from an earlier answer. Its id is ignored."""

    neutral_values: ClassVar = {"status": _ENDED, "phase": ()}

    id: str | None = None
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def fields(self) -> Fields:
        """Return the fields of its message."""
        return {"role": self.role, "content": self.content}


class ReasoningPart(Body):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Body):
    """The reasoning of an earlier answer."""

    neutral_values: ClassVar = {"status": _ENDED, "encrypted_content": (), "summary": ([],)}

    id: str | None = None
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], FAIL_FAST] | None = None

    def fields(self) -> Fields:
        """Return the fields of its message."""
        return {"role": "assistant", "reasoning": "\n".join(part.text for part in self.content or ()) or None}


class InputCall(Body):
    """A call of an earlier answer; ``arguments`` is JSON, as text."""

    neutral_values: ClassVar = {"status": _ENDED, "async": (False,), "async_": (), "caller": (), "namespace": ()}

    id: str | None = None
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: str

    def fields(self) -> Fields:
        """Return the fields of its message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "tool_calls": [{"id": self.call_id, "function": function}]}


class InputCallOutput(Body):
    """The result of a call."""

    neutral_values: ClassVar = {"status": _ENDED, "caller": (), "name": (), "namespace": ()}

    id: str | None = None
    type: Literal["function_call_output"]
    call_id: Text
    output: Content

    def fields(self) -> Fields:
        """Return the fields of its message."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


def _kind(given: object) -> str:
    kind = given.get("type", "message") if isinstance(given, Mapping) else getattr(given, "type", "message")
    return str(kind)


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


class ResponseTool(FunctionTool):
    """A function that may be called."""

    neutral_values: ClassVar = {
        "allowed_callers": (),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }

    type: Literal["function"]


class ResponseChoice(Body):
    """The function that is called."""

    type: Literal["function"]
    name: Text


class ResponseBody(SamplingBody):
    """The body of /v1/responses with text input and output. ``instructions`` is a system message before ``input``.

    Attributes:
        tools: functions that may be called.
        tool_choice: "auto" lets the model choose, "required" or the name of a function force a call.
        parallel_tool_calls: false for at most one call; further ones are left out.
    """

    neutral_values: ClassVar = {
        "background": (False,),
        "conversation": (),
        "include": ([],),
        "metadata": ({},),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "user": (),
    }

    input: Annotated[
        Annotated[Text, Tag("text")] | Annotated[list[Item], AT_LEAST_ONE, Tag("items")],
        Discriminator(lambda given: "text" if isinstance(given, str) else "items"),
    ]
    instructions: Text | None = None
    text: TextBody | None = None
    max_output_tokens: int | None = None
    tools: Annotated[list[ResponseTool], FAIL_FAST] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponseChoice | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def _functions(cls, given: Any) -> Any:  # noqa: ANN401  # whatever JSON says
        for one in given if isinstance(given, list) else ():
            kind = one.get("type", "function") if isinstance(one, Mapping) else "function"
            if kind != "function":
                raise ValueError(f"{str(kind)[:40]!r} is not offered: leave it out, only functions can be called")
        return given

    @cached_property
    def template(self) -> TemplateBody:
        """The inputs of the chat template besides messages."""
        choice, tools = self.tool_choice, [Tool(type="function", function=one) for one in self.tools or ()]
        if not isinstance(choice, ResponseChoice):
            return TemplateBody(tools=tools or None, tool_choice=choice)
        named = NamedChoice(type="function", function=NamedFunction(name=choice.name))
        return TemplateBody(tools=tools or None, tool_choice=named)

    @property
    def format_(self) -> StructuredOutput | None:
        """The form of calls that are forced, or the form of the output. ConfigError if there is no such function."""
        forced = self.template.forced(parallel=self.parallel_tool_calls is not False)
        return forced or (None if self.text is None else form_of(self.text.format))

    @property
    def messages(self) -> list[ChatMessage]:
        """The conversation. ConfigError if there is none."""
        made: list[Fields] = []
        for one in [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            new, last = one.fields(), made[-1] if made else {}
            begins = new["role"] != "assistant" or last.get("role") != "assistant" or "reasoning" in new
            if begins or ("content" in new and "content" in last):
                made.append(new)
            else:
                last |= {**new, "tool_calls": last.get("tool_calls", []) + new.get("tool_calls", [])}
        said = [ChatMessage(**one) for one in made if one.get("content") is not None or one.get("tool_calls")]
        if not said:
            raise ConfigError("input has no message: add one")
        first = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        return [*first, *said]
