"""Clients choose an adapter as a model of its name."""

import sys
from collections.abc import Iterator

import numpy as np
import pytest
from openai import NotFoundError, OpenAI
from serve_support import LONGEST, Served, serving
from test_fronts import fronted

from hybridkv.cli import main
from hybridkv.errors import ConfigError
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, load
from hybridkv.runner.chat import chat_ids
from hybridkv.runner.lora import Adapters
from hybridkv.serve import ServeOptions, Server, create_app
from lora_folders import save_adapter

PROMPT = "the sea and the ships go on"
NAMES = ["tiny:llama", "few", "all"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {one: str(save_adapter("llama", folder, one)) for one in NAMES[1:]}


def engine_with(folders: dict[str, str]) -> Engine:
    return Engine(load("tiny:llama"), memory="4MiB", max_model_len=LONGEST, options=EngineOptions(lora_modules=folders))


@pytest.fixture(scope="module", params=["one process", "a front"])
def served(folders: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Served]:
    if request.param == "a front":
        with fronted(engine_with(folders)) as other:
            yield other.fronts[0]
    else:
        with serving(engine_with(folders)) as one:
            yield one


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def alone(folders: dict[str, str]) -> Iterator[Engine]:
    with engine_with(folders) as engine:
        yield engine


def text_of(engine: Engine, name: str, prompt: str | list[int]) -> str:
    stream = engine.stream(prompt, SamplingParams(max_tokens=9), lora=None if name == NAMES[0] else name)
    return "".join(one.text or "" for one in stream)


def test_models_route_lists_adapters_with_their_parent(served: Served, client: OpenAI) -> None:
    found = served.client.get("/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in found] == [(NAMES[0], None), ("few", NAMES[0]), ("all", NAMES[0])]
    assert [served.client.get(f"/v1/models/{one}").json() for one in NAMES] == found
    assert [one.id for one in client.models.list()] == NAMES


def test_clients_choose_an_adapter_by_its_name(served: Served, client: OpenAI, alone: Engine) -> None:
    texts = set()
    for name in NAMES:
        expected = text_of(alone, name, PROMPT)
        answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=9, temperature=0)
        assert (answer.model, answer.choices[0].text) == (name, expected)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert not answer.usage.prompt_tokens_details.cached_tokens
        parts = list(client.completions.create(model=name, prompt=PROMPT, max_tokens=9, temperature=0, stream=True))
        assert {one.model for one in parts} == {name}
        assert "".join(one.choices[0].text for one in parts) == expected
        asked = chat_ids(alone.loaded, [{"role": "user", "content": PROMPT}])
        chat = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": PROMPT}], max_tokens=9, temperature=0
        )
        assert (chat.model, chat.choices[0].message.content) == (name, text_of(alone, name, asked))
        said = client.responses.create(model=name, input=PROMPT, max_output_tokens=9, temperature=0)
        assert (said.model, said.output_text) == (name, text_of(alone, name, asked))
        (rendered,) = served.client.post("/v1/completions/render", json={"model": name, "prompt": PROMPT}).json()
        assert rendered["model"] == name
        texts.add(expected)
    assert len(texts) == 3
    assert served.post("/v1/completions", prompt=PROMPT, max_tokens=9, temperature=0)["model"] == NAMES[0]
    with pytest.raises(NotFoundError, match="'sql' is not served here: ask for 'tiny:llama' or 'few' or 'all'"):
        client.completions.create(model="sql", prompt=PROMPT)


def test_embeddings_of_adapters_differ(client: OpenAI) -> None:
    answers = [client.embeddings.create(model=name, input=PROMPT, encoding_format="float") for name in NAMES]
    assert [one.model for one in answers] == NAMES
    vectors = np.array([one.data[0].embedding for one in answers])
    assert (vectors @ vectors.T - np.eye(3)).max() < 0.999


def test_adapter_called_like_the_model_is_rejected(folders: dict[str, str]) -> None:
    engine = engine_with(folders)
    with engine, pytest.raises(ConfigError, match="the model and an adapter are both called 'few'"):
        create_app(engine, ServeOptions("few"))


COMMAND = ["hybridkv", "serve", "--model", "tiny:llama", "--memory", "4MiB", "--port", "0"]


def test_serve_command_takes_adapters_as_vllm_does(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    named, found = [f"{name}={folder}" for name, folder in folders.items()], list[tuple[str, ...]]()
    loading = Adapters.load.__func__  # type: ignore[attr-defined]  # of a class method

    def load_and_note(*given: object) -> Adapters:
        made: Adapters = loading(Adapters, *given)
        found.append(made.names)
        return made

    monkeypatch.setattr(Adapters, "load", load_and_note)
    monkeypatch.setattr(Server, "run", lambda _, sockets: sockets[0].close())
    for words in (["--lora-modules", *named], [word for one in named for word in ("--lora-modules", one)]):
        monkeypatch.setattr(sys, "argv", [*COMMAND, "--enable-lora", *words])
        with pytest.raises(SystemExit, match="0"):
            main()
    assert found == [("few", "all")] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lora-modules", "few"], "--lora-modules must be NAME=FOLDER, each NAME once, got 'few'"),
        (["--lora-modules", "a=b", "a=c"], "each NAME once, got 'a=c'"),
        (["--enable-lora"], "--enable-lora loads no adapter: give --lora-modules NAME=FOLDER too"),
        (["tiny:llama"], "serve has no argument 'tiny:llama'"),
        (["--lora-modules", "a=/none", "--tensor-parallel-size", "2"], "do not run with tensor parallel ranks"),
    ],
)
def test_serve_command_rejects_adapters_by_name(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*COMMAND, *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said in " ".join(capsys.readouterr().err.split())
