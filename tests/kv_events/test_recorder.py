"""Recordings: what was published, from the first batch on, as lines; and what replays find of it."""

import json
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import msgspec
import pytest
import zmq
from events_support import asked, cache_of, publisher_of, run, settled
from recorded_traces import recorded

from hybridkv.cli import outcome
from hybridkv.errors import ConfigError
from hybridkv.kv_events import EventForm, KVEventPublisher, Recorded, record
from hybridkv.kv_events.recorder import line_of
from hybridkv.models import read_model
from hybridkv.simulator import TraceFile, Workload, describe, plan_for_trace, replay


@pytest.mark.parametrize(("name", "whole_hashes"), [("llama-3-8b", True), ("qwen3.5-35b-a3b", False)])
def test_recording_replays_like_its_requests(name: str, whole_hashes: bool, tmp_path: Path) -> None:
    source = Workload("agent", hours=0.004)
    plan = plan_for_trace(source.summary(), read_model(name), "4GiB")
    true = recorded(source, plan, tmp_path / "events.jsonl", whole_hashes=whole_hashes, as_arrays=whole_hashes)
    guessed = replay(TraceFile(tmp_path / "events.jsonl"), plan)
    assert guessed.requests == pytest.approx(true.requests, rel=0.02)
    assert guessed.prompt_tokens == pytest.approx(true.prompt_tokens, rel=0.02)
    assert guessed.output_tokens == pytest.approx(true.output_tokens, rel=0.05)
    assert guessed.hit_rate == pytest.approx(true.hit_rate, abs=0.03)
    assert (true.hit_rate or 0) > 0.5


def test_recording_holds_no_tokens(tmp_path: Path) -> None:
    source = Workload("chat", limit=3)
    plan = plan_for_trace(source.summary(), read_model("llama-3-8b"), "4GiB")
    recorded(source, plan, tmp_path / "events.jsonl")
    for line in (tmp_path / "events.jsonl").read_text("utf-8").splitlines():
        batch = json.loads(line)
        assert batch.keys() == {"seq", "ts", "events"}
        for event in batch["events"]:
            assert event.keys() == {
                *("type", "block_hashes", "parent_block_hash", "block_size", "medium", "group_idx"),
                "kv_cache_spec_kind",
            }


def test_recording_starts_at_the_first_batch(context: zmq.Context[Any], tmp_path: Path) -> None:
    random, (config, cache) = Random(7), cache_of()
    told: list[Recorded] = []
    with publisher_of(config) as publisher:
        for number in range(40):
            run(cache, random, number)
            publisher.publish(cache.take_events())
        settled(publisher, context)
        path = tmp_path / "events.jsonl"
        options = {"replay_endpoint": publisher.replay_endpoint, "seconds": 2.0, "on_batch": told.append}
        thread = Thread(target=record, args=(publisher.endpoint, path), kwargs=options)
        thread.start()
        while not told and thread.is_alive():
            thread.join(0.01)
        for number in range(40, 60):
            run(cache, random, number)
            publisher.publish(cache.take_events())
        thread.join()
        numbers = [number for number, _ in asked(context, publisher, 0)]
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [line["seq"] for line in lines] == numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len(numbers) > 40
    told_before, known = set[int](), list[int]()
    for line in lines:
        hashes = {key for event in line["events"] for key in event["block_hashes"]}
        if "known" in line:  # the first, and the one for the recorder's subscription
            known.append(len(hashes))
            assert hashes <= told_before
        told_before |= hashes
    assert (len(known), known[0], known[1] > 10) == (2, 0, True)
    blocks = sum(len(event["block_hashes"]) for line in lines for event in line["events"])
    assert told[-1] == Recorded(len(numbers), blocks, 0)
    assert describe(TraceFile(path)).requests > 10


def test_recording_of_a_snapshot_adds_no_request(
    context: zmq.Context[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridkv.kv_events.publisher._SNAPSHOT_BLOCKS", 5)
    random, (config, cache) = Random(7), cache_of()
    with publisher_of(config, EventForm(as_arrays=True), kept_batches=2) as publisher:
        for number in range(40):
            run(cache, random, number)
            publisher.publish(cache.take_events())
        settled(publisher, context)
        path = tmp_path / "events.jsonl"
        record(publisher.endpoint, path, replay_endpoint=publisher.replay_endpoint, seconds=0.3)
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len(lines) > 1
    assert all(line["known"] for line in lines)


def test_recording_counts_lost_batches(context: zmq.Context[Any], tmp_path: Path) -> None:
    config, cache = cache_of()
    random = Random(7)
    with publisher_of(config) as publisher:
        for at in range(4):
            run(cache, random, at, [at] * 12)
            publisher._lost += 4 if at == 3 else 0  # as batches that are dropped
            publisher.publish(cache.take_events())
        settled(publisher, context)
        done = record(
            publisher.endpoint, tmp_path / "events.jsonl", replay_endpoint=publisher.replay_endpoint, seconds=0.0
        )
    assert (done.batches, done.lost) == (5, 4)


def test_restarted_publisher_is_recorded_without_lost_batches(tmp_path: Path) -> None:
    random, told, path = Random(7), list[Recorded](), tmp_path / "events.jsonl"
    config, cache = cache_of()
    with publisher_of(config) as first:
        thread = Thread(target=record, args=(first.endpoint, path), kwargs={"seconds": 5.0, "on_batch": told.append})
        thread.start()
        endpoint = first.endpoint
        while not told:  # its subscription is answered
            thread.join(0.01)
        run(cache, random, 0)
        first.publish(cache.take_events())
    with KVEventPublisher(config, endpoint, exact=False):
        thread.join()
    numbers = [json.loads(line)["seq"] for line in path.read_text("utf-8").splitlines()]
    assert numbers[-1] - numbers[0] > 1_000_000
    assert told[-1].lost == 0


def test_recording_to_existing_file_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    with pytest.raises(ConfigError, match="cannot listen to nowhere"):
        record("nowhere", path, seconds=0)
    assert not path.exists()
    monkeypatch.setattr("hybridkv.kv_events.recorder._ANSWER_MS", 50)
    with pytest.raises(ConfigError, match="no answer from"):
        record("tcp://127.0.0.1:1", path, replay_endpoint="tcp://127.0.0.1:1", seconds=0)
    assert not path.exists()
    path.write_text("mine", "utf-8")
    with pytest.raises(FileExistsError):
        record("tcp://127.0.0.1:1", path, seconds=0)
    assert path.read_text("utf-8") == "mine"


def test_record_command_writes_a_trace(
    context: zmq.Context[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, cache = cache_of()
    path = tmp_path / "events.jsonl"
    with publisher_of(config) as publisher:
        for at in range(2):
            run(cache, Random(7), at, [at] * 13)
            publisher.publish(cache.take_events())
        settled(publisher, context)
        command = ["hybridkv", "trace", "record", publisher.endpoint, str(path)]
        monkeypatch.setattr("sys.argv", [*command, "--replay", str(publisher.replay_endpoint), "--seconds", "0"])
        assert outcome.run() == 0
        assert "3 batches, 6 blocks, written to " in capsys.readouterr().out
        assert outcome.run() == 2
        assert "File exists" in capsys.readouterr().err
    assert [one.num_prompt_tokens for one in TraceFile(path)] == [12, 12]


@pytest.mark.parametrize(
    "batch",
    [
        b"\xc1",
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([None, []]),
        msgspec.msgpack.encode([float("nan"), []]),
        msgspec.msgpack.encode([1.0, [7]]),
        *(
            msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": hashes, "block_size": size}]])
            for hashes, size in (("abc", 4), ([], 4), ([1], None), ([1], 0))
        ),
    ],
)
def test_recording_of_invalid_batch_is_rejected_and_leaves_no_file(
    batch: bytes, context: zmq.Context[Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="batch 3 is not in vLLM's schema"):
        line_of(3, batch, known=False)
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        asker, *_ = router.recv_multipart()
        for number, told in ((0, batch), (-1, b"")):
            router.send_multipart((asker, b"", number.to_bytes(8, "big", signed=True), told))

    thread = Thread(target=answer)
    thread.start()
    address, path = f"tcp://127.0.0.1:{port}", tmp_path / "events.jsonl"
    with pytest.raises(ConfigError, match="batch 0 is not in vLLM's schema"):
        record(address, path, replay_endpoint=address, seconds=0)
    thread.join()
    router.close(linger=0)
    assert not path.exists()


def test_record_command_interrupted_reports_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, on_batch: Any, **__: object) -> None:  # noqa: ANN401 - what is called
        on_batch(Recorded(2, 6, 4))
        raise KeyboardInterrupt

    monkeypatch.setattr("hybridkv.kv_events.record", interrupted)
    monkeypatch.setattr("sys.argv", ["hybridkv", "trace", "record", "tcp://127.0.0.1:1", str(tmp_path / "x")])
    assert outcome.run() == 130
    assert "2 batches, 6 blocks, 4 batches lost, written to " in capsys.readouterr().out
