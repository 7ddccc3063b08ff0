"""/v1/embeddings answers OpenAI's client with the vectors of plain transformers."""

from base64 import b64decode
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from openai import OpenAI
from serve_support import LONG, LONGEST, Served, engine_of, serving, until

from hybridkv.runner import load

TEXTS = ["the sea and the ships", "the sea and the oil", "x" * 300]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(engine_of("llama")) as one:
        yield one


@pytest.fixture(scope="module")
def right() -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    model, found = load("tiny:llama").model, []
    for text in TEXTS:
        with torch.no_grad():
            ids = torch.tensor([list(text.encode())])
            last = model(ids, output_hidden_states=True).hidden_states[-1][0, -1].numpy()
        found.append(last / np.sqrt((last**2).sum()))
    return np.stack(found)


def test_embeddings_answer_openai_clients(
    served: Served, right: np.ndarray[tuple[int, int], np.dtype[np.float32]]
) -> None:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        for form in ("float", "base64"):
            for _ in range(2):  # the second finds its prompts in the cache
                answer = client.embeddings.create(model="tiny:llama", input=TEXTS, encoding_format=form)
                if form == "float":
                    got = np.array([one.embedding for one in answer.data])
                    np.testing.assert_allclose(got, right, atol=1e-4)
                assert [one.index for one in answer.data] == [0, 1, 2]
                assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS))
        default = client.embeddings.create(model="tiny:llama", input=list(TEXTS[0].encode()), dimensions=8)
    short = np.array(default.data[0].embedding)
    np.testing.assert_allclose(short, right[0, :8] / np.linalg.norm(right[0, :8]), atol=1e-4)
    hits = served.post("/v1/embeddings", input=TEXTS)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert hits >= 300
    ids = served.post("/v1/embeddings", input=[[1, 2], [3]], encoding_format="base64")["data"]
    vectors = [np.frombuffer(b64decode(one["embedding"]), "<f4") for one in ids]
    assert [len(one) for one in vectors] == [64, 64]
    assert all(np.linalg.norm(one) == pytest.approx(1, abs=1e-5) for one in vectors)


def test_embeddings_that_cannot_be_made_are_rejected(served: Served) -> None:
    for body, said in (
        ({"input": []}, "input is empty"),
        ({"input": "a", "dimensions": 65}, "dimensions must be 1 to 64, got 65"),
        ({"input": [0] * LONGEST}, f"a prompt of {LONGEST} tokens and 1 more do not fit"),
        ({"input": "a", "stream": True}, "stream"),
    ):
        assert said in served.refused("/v1/embeddings", 400, **body)["message"]
    assert "model" in served.refused("/v1/embeddings", 404, input="a", model="other")["message"]


def test_embeddings_of_an_encoder_decoder_are_rejected() -> None:
    with serving(engine_of("t5")) as one:
        assert "embeddings need a decoder" in one.refused("/v1/embeddings", 400, input="a")["message"]


def test_embeddings_run_beside_streams_and_leave_nothing(served: Served) -> None:
    with served.streaming(**LONG) as lines:
        answer = served.post("/v1/embeddings", input=TEXTS[0])
        assert next(line for line in lines if line).startswith("data: ")
    assert len(answer["data"]) == 1
    until(lambda: served.service.places.taken == 0)
    embedder = served.service._embedder
    assert embedder is not None
    until(lambda: not embedder._wanted)
