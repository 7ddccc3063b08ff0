"""Hints in bodies: what clients know of when a prefix is wanted again reaches the cache, and harms nobody else."""

import json
import random
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from serve_support import Served, serving

from hybridkv.cache import KVCacheManager
from hybridkv.eviction import EVERYBODY, Share, TenantShares
from hybridkv.request import NO_HINTS, Hints, Request
from hybridkv.runner import Engine, EngineOptions, load, plan_for
from hybridkv.serve.bodies import HintsBody

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
}


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Hints]:
    """Those of every request that is looked up."""
    found: list[Hints] = []
    look_up = KVCacheManager.look_up

    def listening(self: KVCacheManager, request: Request, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
        found.append(request.hints)
        return look_up(self, request, *args, **kwargs)

    monkeypatch.setattr(KVCacheManager, "look_up", listening)
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_hints_in_a_body_reach_the_cache(llama: Served, heard: list[Hints], path: str, stream: bool) -> None:
    wanted = Hints(within_s=30, shared_tokens=1)
    llama.client.post(path, json={**PATHS[path], "stream": stream, "hints": {"within_s": 30, "shared_tokens": 1}})
    llama.client.post(path, json={**PATHS[path], "stream": stream})
    assert set(heard) == {wanted, NO_HINTS}


@pytest.mark.parametrize("path", PATHS)
def test_prompt_cache_options_of_openai_reach_the_cache(llama: Served, heard: list[Hints], path: str) -> None:
    """A minimum lifetime, as OpenAI's clients ask for it."""
    for options, ttl_s in (({"ttl": "30m"}, 1800.0), ({"mode": "implicit", "ttl": "2h"}, 7200.0), ({}, None)):
        heard.clear()
        llama.post(path, **PATHS[path], prompt_cache_options=options, hints={"goes_on": True})
        assert set(heard) == {Hints(goes_on=True, ttl_s=ttl_s)}
    with OpenAI(base_url=f"{llama.url}/v1", api_key="none") as client:
        heard.clear()
        said: list[Any] = [{"role": "user", "content": "a"}]
        client.chat.completions.create(
            model="tiny:llama", messages=said, max_tokens=1, prompt_cache_options={"ttl": "30m"}
        )
        assert set(heard) == {Hints(ttl_s=1800.0)}


def test_prompt_cache_options_that_are_invalid_are_rejected(llama: Served) -> None:
    for options, param, message in (
        ({"ttl": "30"}, "prompt_cache_options.ttl", "should match pattern"),
        ({"mode": "explicit"}, "prompt_cache_options.mode", "should be 'implicit'"),
        ({"key": "a"}, "prompt_cache_options.key", "is not offered: leave it out"),
    ):
        error = llama.refused("/v1/completions", 400, prompt="a", prompt_cache_options=options)
        assert (error["param"], message in error["message"]) == (param, True)
    both = {"hints": {"ttl_s": 3}, "prompt_cache_options": {"ttl": "5s"}}
    assert "say the same: leave one" in llama.refused("/v1/completions", 400, prompt="a", **both)["message"]
    late = {"hints": {"over": True}, "prompt_cache_options": {"ttl": "5s"}}
    assert "hints say ttl_s of what is over" in llama.refused("/v1/completions", 400, prompt="a", **late)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_prompt_cache_key_and_retention_of_openai_reach_the_cache(
    llama: Served, heard: list[Hints], path: str, stream: bool
) -> None:
    """A day is a promise to come back, which a client's own hints replace; a key changes nothing."""
    day = {"prompt_cache_retention": "24h"}
    for fields, hints in (
        ({"prompt_cache_key": "k" * 64}, NO_HINTS),
        (day | {"prompt_cache_key": "a"}, Hints(within_s=86400.0)),
        (day | {"hints": {"within_s": 5}}, Hints(within_s=5)),
        (day | {"hints": {"over": True}}, Hints(over=True)),
        (day | {"prompt_cache_options": {"ttl": "1h"}}, Hints(within_s=86400.0, ttl_s=3600.0)),
        ({"prompt_cache_retention": "in_memory", "hints": {"goes_on": True}}, Hints(goes_on=True, in_memory=True)),
        ({"prompt_cache_retention": None, "prompt_cache_key": None}, NO_HINTS),
    ):
        heard.clear()
        answer = llama.client.post(path, json={**PATHS[path], **fields, "stream": stream})
        assert (answer.status_code, set(heard)) == (200, {hints})


def test_prompt_cache_key_and_retention_are_in_a_response(llama: Served) -> None:
    with OpenAI(base_url=f"{llama.url}/v1", api_key="none") as client:
        asked: dict[str, Any] = {"model": "tiny:llama", "input": "a", "max_output_tokens": 1}
        made = client.responses.create(**asked, prompt_cache_key="chat-7", prompt_cache_retention="24h")
        assert (made.prompt_cache_key, made.prompt_cache_retention) == ("chat-7", "24h")
        made = client.responses.create(**asked)
        assert (made.prompt_cache_key, made.prompt_cache_retention) == (None, None)


def test_prompt_cache_key_neither_parts_nor_joins_what_is_shared(llama: Served) -> None:
    def cached(prompt: str, **fields: str) -> int:
        usage = llama.post("/v1/completions", prompt=prompt, max_tokens=1, **fields)["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    text = "a key says which requests begin alike, and no more than that"
    assert cached(text, prompt_cache_key="a", cache_salt="one") == 0
    assert cached(text, prompt_cache_key="b", cache_salt="one") == len(text) - 1
    assert cached(text, prompt_cache_key="b", cache_salt="other") == 0


@pytest.mark.parametrize("path", [*PATHS, "/v1/completions/render", "/v1/chat/completions/render"])
@pytest.mark.parametrize(
    ("field", "wrong", "said"),
    [
        ("prompt_cache_key", "k" * 65, "at most 64 characters"),
        ("prompt_cache_key", "", "at least 1 character"),
        ("prompt_cache_key", 7, "valid string"),
        ("prompt_cache_retention", "48h", "'in_memory' or '24h'"),
    ],
)
def test_prompt_cache_key_or_retention_that_is_invalid_is_rejected(
    llama: Served, path: str, field: str, wrong: object, said: str
) -> None:
    error = llama.refused(path, 400, **PATHS[path.removesuffix("/render")], **{field: wrong})
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert said in error["message"]


def completed(served: Served, prompt: list[int], salt: str, **fields: object) -> tuple[int, list[int]]:
    """Cached tokens of a prompt, and its answer of four tokens, at once or as a stream."""
    body = {"prompt": prompt, "cache_salt": salt, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    lines = served.client.post("/v1/completions", json=body | fields).text.split("data: ")
    parts = [json.loads(line) for line in lines if line.startswith("{")]
    answer = [token for part in parts for one in part["choices"] for token in one["token_ids"]]
    return parts[-1]["usage"]["prompt_tokens_details"]["cached_tokens"], answer


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_session_that_pauses_for_a_tool_resumes_at_its_end_if_its_hint_or_share_says_so(kind: str) -> None:
    """While the tool runs, another tenant fills the device with prompts."""
    draw, loaded = random.Random(11), load(f"tiny:{kind}")
    turn, *others = ([draw.randrange(3, 200) for _ in range(tokens)] for tokens in (40, *[60] * 24))
    plan, shares = plan_for(loaded, [64] * 4, max_model_len=65), TenantShares((Share("a", 0.4), Share("b", 0.4)))
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    returns, day = {"hints": {"within_s": 1000}}, {"prompt_cache_retention": "24h"}
    hits = []
    for mine, theirs, shared in (({}, day, EVERYBODY), ({}, day, shares), (returns, stream, EVERYBODY)):
        options = EngineOptions(shares=shared, self_check=False)
        with serving(Engine(loaded, plan, options)) as served:
            _, answer = completed(served, turn, "a", **mine)
            for prompt in others:
                completed(served, prompt, "b", **theirs)
            hits.append(completed(served, [*turn, *answer, *[7] * 10], "a", **stream)[0])
    end = len(turn) + len(answer) - 1
    assert hits[0] < end == hits[1] == hits[2]


@pytest.mark.parametrize("stream", [False, True])
def test_prefetch_in_a_body_brings_a_prompt_up_and_answers_nothing(stream: bool) -> None:
    target = Engine(load("tiny:llama"), memory="168KiB", max_model_len=200, host_memory="8MiB")
    assert target.tier is not None
    with serving(target) as served:

        def cached(chat: str, **hints: object) -> tuple[str, str | None, int]:
            """Text, reason of its end, and cached tokens."""
            with OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
                asked: dict[str, Any] = {"model": "tiny:llama", "prompt": chat * 180, "max_tokens": 3}
                asked |= {"temperature": 0, "extra_body": {"hints": hints, "ignore_eos": True}}
                if not stream:
                    done = client.completions.create(**asked)
                    parts, usage = [done], done.usage
                else:
                    parts = list(
                        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
                    )
                    usage = parts[-1].usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            choices = [one for part in parts for one in part.choices]
            text, found = "".join(one.text for one in choices), usage.prompt_tokens_details.cached_tokens or 0
            assert usage.completion_tokens == len(text)
            return text, choices[-1].finish_reason, found

        first = {chat: cached(chat)[0] for chat in "abc"}
        assert cached("a", prefetch=True) == ("", "length", 179)
        loads = target.tier.statistics().loads
        assert loads > 0
        assert cached("a") == (first["a"], "length", 179)
        assert target.tier.statistics().loads == loads
        assert len(first["a"]) == 3


def test_hints_in_a_body_apply_to_every_prompt(llama: Served, heard: list[Hints]) -> None:
    llama.post("/v1/completions", prompt=["first", "second"], max_tokens=1, hints={"over": True})
    assert heard == [Hints(over=True)] * 2


@pytest.mark.parametrize("path", [*PATHS, "/v1/completions/render", "/v1/chat/completions/render"])
@pytest.mark.parametrize(
    ("hints", "param", "said"),
    [
        ({"over": True, "within_s": 3}, "hints", "hints say that a session goes on, and that it is over: leave one"),
        ({"within_s": -1}, "hints", "within_s must lie in 0"),
        ({"shared_tokens": -1}, "hints", "shared_tokens must not be negative"),
        ({"open": True}, "hints.open", "hints.open is not offered: leave it out"),
        ({"over": 1}, "hints.over", "valid boolean"),
        (["over"], "hints", "valid dictionary"),
    ],
)
def test_hints_in_a_body_that_are_invalid_are_rejected(
    llama: Served, path: str, hints: object, param: str, said: str
) -> None:
    error = llama.refused(path, 400, **PATHS[path.removesuffix("/render")], hints=hints)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert said in error["message"]


def test_hints_are_in_the_openapi_document(llama: Served) -> None:
    schemas = llama.client.get("/openapi.json").json()["components"]["schemas"]
    described = schemas["HintsBody"]
    assert set(described["properties"]) == set(Hints.__dataclass_fields__)
    assert "within_s" in described["description"]
    assert described["additionalProperties"] is False
    for body in ("CompletionBody", "ChatBody", "ResponseBody"):
        assert schemas[body]["properties"]["hints"]["anyOf"][0]["$ref"].endswith("/HintsBody")
    assert HintsBody().said() == NO_HINTS


def test_hint_of_secret_prompt_prevents_hits(llama: Served) -> None:
    """As the client of OpenAI's sends them."""
    with OpenAI(base_url=f"{llama.url}/v1", api_key="none") as client:

        def cached(**hints: object) -> int:
            done = client.completions.create(
                model="tiny:llama",
                prompt="nobody else may find what is said here, whoever asks",
                max_tokens=1,
                extra_body={"hints": hints},
            )
            assert done.usage is not None
            assert done.usage.prompt_tokens_details is not None
            return done.usage.prompt_tokens_details.cached_tokens or 0

        assert (cached(secret=True), cached(), cached(secret=True) > 32) == (0, 0, True)
        with pytest.raises(BadRequestError, match="leave one of them out"):
            cached(secret=True, goes_on=True)
