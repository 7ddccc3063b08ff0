"""Completions are those of the engine alone, told in OpenAI's form."""

import json
from typing import Any

import pytest
from serve_support import LONGEST, PATH, Served

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine
from hybridkv.serve.bodies import CompletionBody
from hybridkv.serve.errors import ApiError

PROMPT = "one two three one two"
DRAWN: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 30,
    "min_p": 0.01,
    "seed": 7,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "max_tokens": 8,
    "logit_bias": {"65": 2.0},
    "min_tokens": 3,
    "ignore_eos": True,
}


def chunks(served: Served, path: str, **body: object) -> list[dict[str, Any]]:
    """Those of a stream, which ends as it should."""
    answer = served.client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(one) for one in lines[:-1]]


def test_an_output_is_that_of_the_engine_alone(llama: Served, alone: Engine) -> None:
    (expected,) = alone.generate([PROMPT], SamplingParams(**DRAWN))
    answer = llama.post(PATH, model="tiny:llama", prompt=PROMPT, **DRAWN)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, "length")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny:llama")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (len(PROMPT), 8, 29)


def test_every_field_of_sampling_is_asked_of_the_engine() -> None:
    others: dict[str, Any] = {**DRAWN, "stop": ["a", "b"], "stop_token_ids": [3]}
    del others["max_tokens"]  # as much of it as there is room for
    for name, value in others.items():
        body = CompletionBody.model_validate({"prompt": "a", "seed": 5, name: value})
        assert body.sampling(9, n=2) == SamplingParams(
            **{"temperature": 1.0, "seed": 5, "max_tokens": 9, "n": 2, name: value}
        )
    assert CompletionBody(prompt="a", top_k=-1).sampling(9).top_k == 0


def test_a_stop_string_ends_the_text_before_it(llama: Served) -> None:
    whole = llama.post(PATH, prompt=PROMPT, **DRAWN)["choices"][0]["text"]
    stop = whole[5:7]
    (choice,) = llama.post(PATH, prompt=PROMPT, **DRAWN, stop=["\0never", stop])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    told = chunks(llama, PATH, prompt=PROMPT, **DRAWN, stop=[stop])
    assert "".join(one["choices"][0]["text"] for one in told) == choice["text"]


def test_several_prompts_and_outputs_have_numbers_in_order(llama: Served, alone: Engine) -> None:
    prompts = ["first of all", "second", "and a third"]
    expected = alone.generate(prompts, SamplingParams(**DRAWN, n=2))
    answer = llama.post(PATH, prompt=prompts, n=2, **DRAWN)
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [one["text"] for one in answer["choices"]] == [one.text for one in expected]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 6 * 8
    told = chunks(llama, PATH, prompt=prompts, n=2, **DRAWN)
    texts = ["".join(one["choices"][0]["text"] for one in told if one["choices"][0]["index"] == at) for at in range(6)]
    assert texts == [one.text for one in expected]


def test_token_ids_are_prompts_too(llama: Served) -> None:
    text = llama.post(PATH, prompt=[PROMPT], **DRAWN)["choices"]
    ids = [*PROMPT.encode()]
    assert llama.post(PATH, prompt=ids, **DRAWN)["choices"] == text
    assert llama.post(PATH, prompt=[ids], **DRAWN)["choices"] == text


def test_a_stream_says_the_same_and_counts_at_its_end(llama: Served) -> None:
    whole = llama.post(PATH, prompt=PROMPT, **DRAWN, logprobs=2)
    told = chunks(llama, PATH, prompt=PROMPT, **DRAWN, logprobs=2, stream_options={"include_usage": True})
    *parts, last = told
    assert "".join(one["choices"][0]["text"] for one in parts) == whole["choices"][0]["text"]
    for name, values in whole["choices"][0]["logprobs"].items():
        assert [value for one in parts for value in one["choices"][0]["logprobs"][name]] == values
    assert [one["choices"][0]["finish_reason"] for one in parts[-2:]] == [None, "length"]
    assert {one["usage"] for one in parts} == {None}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 8
    assert len({one["id"] for one in told}) == 1


def test_counts_on_the_way_where_they_are_asked_for(llama: Served) -> None:
    told = chunks(llama, PATH, prompt=PROMPT, **DRAWN, stream_options={"continuous_usage_stats": True})
    counts = [one["usage"]["completion_tokens"] for one in told]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert len(told) > 3


def test_logprobs_and_echo_are_those_of_the_engine(llama: Served, alone: Engine) -> None:
    asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    (expected,) = alone.generate([PROMPT], asked)
    assert expected.logprobs is not None
    assert expected.prompt_logprobs is not None
    body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": 3}
    (choice,) = llama.post(PATH, **body, echo=True)["choices"]
    found = choice["logprobs"]
    assert choice["text"] == PROMPT + (expected.text or "")
    values = [None, *(one.logprob for one in expected.prompt_logprobs + expected.logprobs)]
    assert found["token_logprobs"] == pytest.approx(values, abs=1e-4)
    assert "".join(found["tokens"][: len(PROMPT)]) == PROMPT
    assert found["text_offset"][: len(PROMPT) + 1] == [*range(len(PROMPT) + 1)]
    assert all(len(one) in {3, 4} for one in found["top_logprobs"][1:])
    assert all(token in best for token, best in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True))
    parts = chunks(llama, PATH, **body, echo=True)
    assert "".join(one["choices"][0]["text"] for one in parts) == choice["text"]
    tokens = [value for one in parts for value in one["choices"][0]["logprobs"]["tokens"]]
    assert tokens == found["tokens"]


def test_the_prompt_alone_is_echoed_with_its_logprobs(llama: Served) -> None:
    answer = llama.post(PATH, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == 0
    assert "echo" in llama.refused(PATH, 400, prompt=PROMPT, max_tokens=0)["message"]


def test_tokens_of_one_text_are_told_apart_by_their_ids(llama: Served) -> None:
    body: dict[str, Any] = {"prompt": [195, 169, 200], "max_tokens": 1, "temperature": 0, "logprobs": 5, "echo": True}
    columns = llama.post(PATH, **body, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert columns["tokens"][:3] == ["token_id:195", "token_id:169", "token_id:200"]
    assert len(columns["top_logprobs"][-1]) == 5


def test_without_a_seed_outputs_differ(llama: Served) -> None:
    found = {llama.post(PATH, prompt=PROMPT, max_tokens=12)["choices"][0]["text"] for _ in range(3)}
    assert len(found) > 1


def test_what_is_cached_is_counted(llama: Served) -> None:
    prompt = "what is asked twice is found the second time, but for its last tokens"
    first = llama.post(PATH, prompt=prompt, max_tokens=1, temperature=0, n=2)["usage"]
    second = llama.post(PATH, prompt=prompt, max_tokens=1, temperature=0, n=2)["usage"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 16
    assert second["prompt_tokens"] == len(prompt)


def test_salts_share_nothing(llama: Served) -> None:
    def cached(**salt: str) -> int:
        prompt = "nobody tells by the clock what another one asked"
        usage = llama.post(PATH, prompt=prompt, max_tokens=1, **salt)["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="two") == 0
    assert cached() == 0
    assert cached(cache_salt="two") >= 32


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({}, "prompt is missing", "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix is not offered", "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of is not offered", "best_of"),
        ({"prompt": "a", "n": True}, "valid integer", "n"),
        ({"prompt": "a", "n": 0}, "n must be at least 1", None),
        ({"prompt": "a", "temperature": -1}, "temperature must be 0", None),
        ({"prompt": "a", "temperature": "hot"}, "valid number", "temperature"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens must be at least 1", None),
        ({"prompt": "a", "logprobs": 21}, "less than or equal to 20", "logprobs"),
        ({"prompt": "a", "stream_options": {}}, "stream_options are for streams", None),
        ({"prompt": "a", "stream_options": {"x": 1}, "stream": True}, "not offered", "stream_options.x"),
        ({"prompt": ""}, "empty", None),
        ({"prompt": []}, "empty", None),
        ({"prompt": ["a", ""]}, "empty", None),
        ({"prompt": [1, "a"]}, "", None),
        ({"prompt": [300]}, "outside the vocabulary", None),
        ({"prompt": "\ud800"}, "", None),
        ({"prompt": "a", "cache_salt": ""}, "at least 1 character", "cache_salt"),
        ({"prompt": "a", "\ud800": ""}, "unicode", None),
    ],
)
def test_what_cannot_be_is_refused_by_name(llama: Served, body: dict[str, Any], said: str, param: str | None) -> None:
    answer = llama.client.post(PATH, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]
    assert param is None or error["param"] == param


def test_what_does_not_fit_is_refused(llama: Served) -> None:
    for body in ({"prompt": "a" * LONGEST}, {"prompt": "a", "max_tokens": LONGEST}):
        error = llama.refused(PATH, 400, **body)
        assert error["code"] == "context_length_exceeded"
    last = llama.post(PATH, prompt="a" * (LONGEST - 1), temperature=0)
    assert last["usage"]["completion_tokens"] == 1  # the default of 16 gives way


def test_another_model_is_not_here(llama: Served) -> None:
    assert llama.refused(PATH, 404, prompt="a", model="gpt-5")["code"] == "model_not_found"


def test_fields_that_ask_for_nothing_are_taken(llama: Served) -> None:
    llama.post(PATH, prompt="a", max_tokens=1, best_of=1, suffix=None, user=None, logprobs=None, stop=None, top_k=-1)


def test_an_error_tells_what_no_json_can() -> None:
    assert ApiError(400, "a \ud800 b").response().body == (
        rb'{"error":{"message":"a \\ud800 b","type":"invalid_request_error","param":null,"code":null}}'
    )


def test_ids_wait_for_no_tokenizer(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.front.tokens, "run", None)
    assert llama.post(PATH, prompt=[[1, 2], [3]], max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 4
