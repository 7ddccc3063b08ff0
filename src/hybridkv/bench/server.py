"""A load's requests over HTTP: completions or chats of an OpenAI API, as streams of server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import httpx2
import msgspec
import numpy as np
from numpy.typing import NDArray

from hybridkv.bench.driving import Advance, Answer, drive
from hybridkv.bench.loads import LoadRequest
from hybridkv.errors import ConfigError

CHAT: Final = "/chat/completions"
_SHOWN: Final = 300
_WAIT_S: Final = 60.0


@contextmanager
def connected(
    address: str, endpoint: str, model: str | None, api_key: str | None, fields: dict[str, Any]
) -> Iterator[Server]:
    """Give a server that takes a load.

    Args:
        address: http://HOST:PORT.
        endpoint: path of completions or of chats.
        model: name of the model; None: the first one that the server lists.
        api_key: the server's key; None: none.
        fields: more fields of each request.

    Raises:
        ConfigError: the server does not answer, or lists no model.
    """
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    with httpx2.Client(base_url=address, headers=headers, timeout=_WAIT_S) as client:
        if model is None:
            listed = _asked(client, "GET", "/v1/models").get("data")
            if not listed:
                raise ConfigError(f"the server at {address} lists no model: give --model")
            model = listed[0]["id"]
        yield Server(client, endpoint, {"model": model, **fields})


class Server:
    """An OpenAI API that takes a load.

    Args:
        client: calls the server; its address and headers are used for the load, too.
        endpoint: path of completions or of chats.
        fields: fields of each request, with ``model``.
    """

    def __init__(self, client: httpx2.Client, endpoint: str, fields: dict[str, Any]) -> None:
        self._client, self._endpoint = client, endpoint
        self._fields = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        self.model: str = fields["model"]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text`` from the server's /tokenize. Raises ConfigError if it has none."""
        ids: list[int] = _asked(self._client, "POST", "/tokenize", model=self.model, prompt=text)["tokens"]
        return ids

    def body(self, asked: LoadRequest) -> dict[str, Any]:
        """Return the body of a request: token ids for completions, text for chats."""
        if not self._endpoint.endswith(CHAT):
            return {"prompt": asked.token_ids, "max_tokens": asked.output_tokens, **self._fields}
        text = asked.text
        if text is None:
            text = _asked(self._client, "POST", "/detokenize", model=self.model, tokens=asked.token_ids)["prompt"]
        said = [{"role": "user", "content": text}]
        return {"messages": said, "max_completion_tokens": asked.output_tokens, **self._fields}

    async def drive(
        self, bodies: Sequence[dict[str, Any]], delays: NDArray[np.float64], at_once: int | None, advance: Advance
    ) -> tuple[list[Answer], float]:
        """Send ``bodies`` as ``hybridkv.bench.drive`` does, each over a connection of its own if need be."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        address, headers = self._client.base_url, self._client.headers
        async with httpx2.AsyncClient(base_url=address, headers=headers, limits=limits, timeout=None) as client:
            return await drive(bodies, partial(self._ask, client), delays, at_once=at_once, advance=advance)

    async def _ask(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> Answer:
        """Send a request, and read its stream to the end. A failure is an Answer with an error."""
        times, usage, error = list[float](), dict[str, Any](), ""
        asked = client.build_request(
            "POST", self._endpoint, content=msgspec.json.encode(body), headers={"Content-Type": "application/json"}
        )
        begun = time.perf_counter()
        try:
            answer = await client.send(asked, stream=True)
            try:
                if answer.status_code != httpx2.codes.OK:
                    error = f"status {answer.status_code}: {(await answer.aread())[:_SHOWN].decode(errors='replace')}"
                else:
                    async for event in _events(answer):
                        if any(map(_has_output, event.get("choices") or ())):
                            times.append(time.perf_counter())
                        usage = event.get("usage") or usage
                        error = str(event.get("error") or error)
            finally:
                await answer.aclose()
        except (httpx2.HTTPError, msgspec.DecodeError) as failed:
            error = f"{type(failed).__name__}: {failed}"
        if not error and not times:
            error = "the stream ended without a token"
        return Answer(
            begun,
            tuple(times),
            usage.get("prompt_tokens", 0),
            usage.get("completion_tokens", len(times)),
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            error,
        )


def _asked(client: httpx2.Client, method: str, path: str, **body: object) -> dict[str, Any]:
    """Return the server's answer to a request. Raises ConfigError without one."""
    try:
        answer = client.request(method, path, json=body or None)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
    except (httpx2.HTTPError, ValueError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{str(client.base_url).rstrip('/')}{path} gives no answer: {said}: correct --host, --port"
        ) from error
    return found


async def _events(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each event of a stream; comments and the end mark are left out."""
    rest = b""
    async for piece in answer.aiter_raw():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            name, _, said = line.partition(b":")
            if name == b"data" and said.strip() != b"[DONE]":
                yield msgspec.json.decode(said)


def _has_output(choice: dict[str, Any]) -> bool:
    """Whether a choice of an event has output: any of a completion, or text, calls or reasoning of a chat."""
    delta = choice.get("delta")
    return delta is None or "role" not in delta or any(value for name, value in delta.items() if name != "role")
