"""Hints in bodies: what clients know of when a prefix is wanted again reaches the cache, and harms nobody else."""

from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from serve_support import Served, serving

from hybridkv.cache import KVCacheManager
from hybridkv.request import NO_HINTS, Hints, Request
from hybridkv.runner import Engine, load
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
