"""A server publishes what its cache stores and forgets, as its requests run."""

from typing import Any

import msgspec
import pytest
import zmq
from serve_support import LONGEST, WAIT, engine_of, serving

from hybridkv.errors import ConfigError
from hybridkv.kv_events import KVEventPublisher
from hybridkv.runner import AsyncEngine, Engine, EngineOptions, load

PROMPT = "a prompt of three blocks, each of sixteen tokens"


@pytest.mark.parametrize(("model", "exact"), [("tiny:llama", False), ("tiny:qwen3_next", True)])
def test_a_server_publishes_what_it_stores_and_forgets(model: str, exact: bool) -> None:
    options = EngineOptions(kv_events=True, end_events=exact)
    engine = Engine(load(model), memory="4MiB", max_model_len=LONGEST, options=options)
    anywhere = "tcp://127.0.0.1:0"
    with (
        KVEventPublisher(engine.plan.config, anywhere, anywhere, exact=exact) as publisher,
        serving(engine, events=publisher) as served,
    ):
        served.post("/v1/completions", prompt=PROMPT, max_tokens=2, cache_salt="mine")
        assert served.client.post("/reset_prefix_cache").status_code == 200
        assert publisher.replay_endpoint is not None
        told_until_cleared(publisher.replay_endpoint)


def told_until_cleared(replay_endpoint: str) -> None:
    """The prompt's three blocks, and that they are gone."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(replay_endpoint)
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] != "AllBlocksCleared":
            socket.send_multipart((b"", (0).to_bytes(8, "big")))
            events = []
            while True:
                assert socket.poll(int(WAIT * 1000))
                _, _, number, batch = socket.recv_multipart()
                if int.from_bytes(number, "big", signed=True) < 0:
                    break
                events += msgspec.msgpack.decode(batch)[1]
    stored = [one for one in events if one["type"] == "BlockStored" and one["group_idx"] == events[0]["group_idx"]]
    assert [token for one in stored for token in one["token_ids"]] == [*PROMPT.encode()]
    assert {one["cache_salt"] for one in stored} == {"mine"}
    assert stored[0]["block_size"] == 16


def test_an_engine_without_events_has_none_to_tell() -> None:
    class Nobody:
        def publish(self, events: object) -> None:
            raise NotImplementedError

    with engine_of("llama") as engine, pytest.raises(ConfigError, match="kv_events=True"):
        AsyncEngine(engine, events=Nobody())
