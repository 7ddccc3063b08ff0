"""StructuredOutput: the values that it takes, and how it keeps them."""

from dataclasses import asdict
from typing import Any

import pytest

from hybridkv.errors import ConfigError
from hybridkv.request import SamplingParams, StructuredOutput


def test_structured_output_has_the_choices_of_its_text() -> None:
    assert StructuredOutput("choice", '["yes", "no"]').choices == ["yes", "no"]
    assert StructuredOutput("json_object").text == ""
    assert StructuredOutput("json_schema", "{}") != StructuredOutput("regex", "{}")


def test_sampling_takes_a_structured_output_or_its_fields() -> None:
    regex = StructuredOutput("regex", "[a-z]+", frame='start: "a" @form')
    assert SamplingParams(structured=regex).structured is regex
    assert SamplingParams(**asdict(SamplingParams(structured=regex))) == SamplingParams(structured=regex)
    assert SamplingParams(structured=asdict(regex)).structured == regex  # type: ignore[arg-type]  # also a mapping
    assert SamplingParams().structured is None


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ("a" * ((1 << 17) + 1), "frame may have 131,072 characters, got 131,073"),
        (3, "frame must be text"),
        ("\ud800", "UTF-8"),
    ],
)
def test_frame_that_cannot_be_is_rejected(frame: Any, message: str) -> None:  # noqa: ANN401  # any values
    with pytest.raises(ConfigError, match=message):
        StructuredOutput("json_object", frame=frame)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("yaml", "", "kind of a structured output must be one of json_object"),
        ("json_object", "{}", "json_object takes no text"),
        ("json_schema", "", "text of json_schema must be text, and not empty"),
        ("json_schema", "{", "text of json_schema is not JSON"),
        ("json_schema", "[1]", "text of json_schema must be a JSON object"),
        ("json_schema", {}, "text of json_schema must be text, and not empty"),
        ("json_schema", "[" * 100_000, "text of json_schema is not JSON"),
        ("regex", "", "text of regex must be text, and not empty"),
        ("regex", 3, "text of regex must be text, and not empty"),
        ("regex", "a" * ((1 << 17) + 1), "may have 131,072 characters, got 131,073"),
        ("grammar", "\ud800", "text that UTF-8 can hold"),
        ("choice", "yes", "text of choice is not JSON"),
        ("choice", "[]", "choice must be a list of texts that are not empty"),
        ("choice", '["a", ""]', "choice must be a list of texts that are not empty"),
        ("choice", '["a", 1]', "choice must be a list of texts that are not empty"),
    ],
)
def test_structured_output_that_cannot_be_is_rejected(kind: Any, text: Any, message: str) -> None:  # noqa: ANN401  # any values
    with pytest.raises(ConfigError, match=message):
        StructuredOutput(kind, text)


@pytest.mark.parametrize("given", ["json_object", {"text": "a"}, {"kind": "regex", "text": "a", "more": 1}, {}])
def test_sampling_rejects_what_is_no_structured_output(given: Any) -> None:  # noqa: ANN401  # any value
    with pytest.raises(ConfigError, match="structured must be a StructuredOutput, its kind and text, or None"):
        SamplingParams(structured=given)
