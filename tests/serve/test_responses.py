"""The plain text form of /v1/responses, as OpenAI's own client reads it."""

from typing import Any

import pytest
from openai import OpenAI
from serve_support import Served

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine
from hybridkv.runner.chat import chat_ids

PATH = "/v1/responses"
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 7, "ignore_eos": True}


def expected(alone: Engine, *said: tuple[str, str]) -> str:
    ids = chat_ids(alone.loaded, [{"role": role, "content": content} for role, content in said])
    (done,) = alone.generate([ids], SamplingParams(max_tokens=7, ignore_eos=True))
    return done.text or ""


def test_a_response_is_the_next_turn(llama: Served, alone: Engine) -> None:
    with OpenAI(base_url=f"{llama.url}/v1", api_key="none") as client:
        first = client.responses.create(
            model="tiny:llama",
            input="Why?",
            instructions="Be short.",
            temperature=0,
            max_output_tokens=7,
            extra_body={"ignore_eos": True},
        )
        assert first.output_text == expected(alone, ("system", "Be short."), ("user", "Why?"))
        assert (first.status, first.incomplete_details and first.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        assert first.usage is not None
        assert first.usage.output_tokens == 7
        turns = [("user", "Why?"), ("assistant", first.output_text), ("user", "So?")]
        back = [{"role": "user", "content": "Why?"}, first.output[0].model_dump(), {"role": "user", "content": "So?"}]
        again = llama.post(PATH, input=back, **GREEDY)
        assert again["output"][0]["content"][0]["text"] == expected(alone, *turns)


def test_the_events_of_a_stream(llama: Served, alone: Engine) -> None:
    with OpenAI(base_url=f"{llama.url}/v1", api_key="none") as client:
        events = list(
            client.responses.create(
                model="tiny:llama",
                input="Why?",
                temperature=0,
                max_output_tokens=7,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )
    kinds = [one.type for one in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [one.sequence_number for one in events] == [*range(len(events))]
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert text == last.response.output_text == expected(alone, ("user", "Why?"))


def test_a_stop_completes_it(llama: Served, alone: Engine) -> None:
    whole = expected(alone, ("user", "Why?"))
    answer = llama.post(PATH, input="Why?", stop=whole[3], **GREEDY)
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert answer["output"][0]["content"][0]["text"] == whole[: whole.index(whole[3])]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not offered"),
        ({"store": True}, "store is not offered"),
        ({"tools": [{"type": "web_search"}]}, "tools is not offered"),
        ({"text": {"format": {"type": "json_object"}}}, "text is not offered"),
        ({"n": 2}, "n is not offered"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": ""}, "input"),
        ({"max_output_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(llama: Served, body: dict[str, Any], said: str) -> None:
    assert said in llama.refused(PATH, 400, **{"input": "a", **body})["message"]
