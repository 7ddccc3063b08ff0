"""Conversations that go on in another engine from a file: with the tokens of plain transformers, or a named error."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from runner_support import drained, generated, greedy, loaded_model, shared_prompts
from safetensors import safe_open
from safetensors.torch import save_file
from scripted import ScriptedDrafter

import warm
from hybridkv.cache.transfers import TransferLog
from hybridkv.errors import (
    CacheError,
    CapacityError,
    ConfigError,
    HybridKVError,
    SchemaError,
    SessionError,
    UnsupportedModelError,
)
from hybridkv.request import Request
from hybridkv.runner import Completion, Engine, EngineOptions, Stored, load, plan_for
from hybridkv.runner.identity import identity_of
from hybridkv.runner.sessions import SessionFiles
from hybridkv.stores import DiskFolder

MODELS = ("llama", "gemma3", "llama4", "deepseek_v3", "qwen3_next", "lfm2", "mamba", "falcon_h1")
"""Full attention, windows, chunks, latents; states beside attention, convolutions, states alone, both in a layer."""
TOKENS = 12
PROMPT = shared_prompts(1, 5, prefix=90, longest=10)[0][:92]
TAIL = [65, 66, 67, 68, 69]
KEY = b"a secret"


@contextmanager
def engine(
    name: str,
    *,
    block_size: int = 16,
    requests: int = 4,
    form: str | None = None,
    **given: Any,  # noqa: ANN401  # of Engine
) -> Iterator[Engine]:
    """An engine for some requests of 200 tokens."""
    loaded = given.pop("loaded", None) or loaded_model(name)
    options = EngineOptions(self_check=False, **given.pop("options", {}))
    drafter = given.get("speculate")
    drafts = 0 if drafter is None else drafter.num_speculative_tokens
    made = plan_for(
        loaded,
        [200] * requests,
        block_size=block_size,
        stored=Stored(form),
        num_speculative_tokens=drafts,
        memory=given.pop("memory", None),
    )
    with Engine(loaded, made, options, **given) as running:
        yield running


def first_turn(running: Engine, prompt: list[int] = PROMPT) -> Completion:
    (done,) = running.generate([prompt], greedy(TOKENS))
    return done


def exported(name: str, path: Path, *, key: bytes | None = None, **given: Any) -> Completion:  # noqa: ANN401
    with engine(name, **given) as running:
        done = first_turn(running)
        session = running.export(done, path, key=key)
        assert session.token_ids == done.prompt_token_ids + done.token_ids
        assert session.resume_tokens == len(session.token_ids) - 1
        assert session.num_bytes == path.stat().st_size
    return done


def second_turn(done: Completion) -> list[int]:
    return [*done.prompt_token_ids, *done.token_ids, *TAIL]


def state_of(running: Engine) -> tuple[Any, ...]:
    """What an import must not change if it fails."""
    running.cache.check()
    return running.cache.statistics(), running.runner.storage.arena.clone().numpy().tobytes(), running.cache.usage


# -- the same tokens


@pytest.mark.parametrize(("made", "taken"), [(16, 16), (8, 16), (16, 32)])
@pytest.mark.parametrize("name", MODELS)
def test_conversation_goes_on_as_if_it_had_never_stopped(name: str, made: int, taken: int, tmp_path: Path) -> None:
    done = exported(name, tmp_path / "a", block_size=made)
    turn = second_turn(done)
    with engine(name, block_size=taken) as running:
        session = running.import_(tmp_path / "a")
        assert running.cache.usage == 0
        (goes_on,) = running.generate([turn], greedy(TOKENS))
        assert goes_on.hit_tokens == session.resume_tokens == len(turn) - len(TAIL) - 1
        assert session.resume_tokens % made
        running.cache.check()
    assert goes_on.token_ids == generated(loaded_model(name), turn, TOKENS)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next"])
def test_quantized_pages_keep_every_bit(name: str, tmp_path: Path) -> None:
    form = "int8_per_token_head"
    with engine(name, form=form) as running:
        done = first_turn(running)
        running.export(done, tmp_path / "a")
        (expected,) = running.generate([second_turn(done)], greedy(TOKENS))
    with engine(name, form=form, block_size=32) as running:
        running.import_(tmp_path / "a")
        (goes_on,) = running.generate([second_turn(done)], greedy(TOKENS))
    assert goes_on.hit_tokens == expected.hit_tokens
    assert goes_on.token_ids == expected.token_ids


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "falcon_h1"])
def test_file_is_the_same_whatever_the_blocks(name: str, tmp_path: Path) -> None:
    contents = []
    for size in (8, 32):
        exported(name, tmp_path / "a", block_size=size)
        with safe_open(tmp_path / "a", framework="pt") as opened:
            contents.append({one: opened.get_tensor(one) for one in opened.keys()})  # noqa: SIM118  # no mapping
    assert contents[0].keys() == contents[1].keys()
    assert {one: tuple(of.shape) for one, of in contents[0].items()} == {
        one: tuple(of.shape) for one, of in contents[1].items()
    }
    for one, tensor in contents[0].items():
        torch.testing.assert_close(tensor, contents[1][one], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["gemma3", "llama4", "llama"])
def test_shorter_prompts_after_an_import_read_no_missing_token(name: str, tmp_path: Path) -> None:
    """Blocks that begin before the window are shared whole, so the file must have all their tokens."""
    done = exported(name, tmp_path / "a", block_size=8)
    tokens = second_turn(done)
    prompts = [[*tokens[:cut], 90] for cut in (100, 96, 90, 81, 70, 40)]
    with engine(name, block_size=32) as running:
        running.import_(tmp_path / "a")
        outputs = running.generate(prompts, greedy(4))
    assert outputs[0].hit_tokens > 0
    assert [one.token_ids for one in outputs] == [generated(loaded_model(name), one, 4) for one in prompts]


def test_another_process_goes_on(tmp_path: Path) -> None:
    done = exported("qwen3_next", tmp_path / "a", key=KEY)
    turn = second_turn(done)
    script = (
        "import sys, json\n"
        "from hybridkv.request import SamplingParams\n"
        "from hybridkv.runner import Engine, load\n"
        "turn = json.loads(sys.argv[2])\n"
        "with Engine(load('tiny:qwen3_next'), memory='8MiB') as engine:\n"
        "    engine.import_(sys.argv[1], key=b'a secret')\n"
        "    (done,) = engine.generate([turn], SamplingParams(max_tokens=12, ignore_eos=True))\n"
        "print(json.dumps([done.hit_tokens, list(done.token_ids)]))\n"
    )
    run = warm.run(["-c", script, tmp_path / "a", json.dumps(turn)])
    assert run.returncode == 0, run.stderr
    hit, tokens = json.loads(run.stdout.splitlines()[-1])
    assert hit == len(turn) - len(TAIL) - 1
    assert tuple(tokens) == generated(loaded_model("qwen3_next"), turn, TOKENS)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "qwen3_next", "lfm2"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_running_request_is_handed_to_another_engine(name: str, in_flight: int, tmp_path: Path) -> None:
    """A prefilled request goes on elsewhere, and also where it ran."""
    expected = generated(loaded_model(name), PROMPT, 20)
    with engine(name, options={"in_flight": in_flight}) as running:
        running.add(PROMPT, greedy(20), request_id="a")
        running.step()
        early = running.export("a", tmp_path / "early")
        for _ in range(5):
            running.step()
        late = running.export("a", tmp_path / "late")
        while not running.idle:
            for done in running.step():
                assert done.token_ids == expected
    assert len(PROMPT) <= early.resume_tokens < late.resume_tokens
    for session, file in ((early, "early"), (late, "late")):
        with engine(name) as other:
            assert other.import_(tmp_path / file) == session
            left = len(PROMPT) + 20 - len(session.token_ids)
            (goes_on,) = other.generate([session.token_ids], greedy(left))
        assert goes_on.hit_tokens == session.resume_tokens
        assert session.token_ids[len(PROMPT) :] + goes_on.token_ids == expected


def test_window_that_begins_inside_a_block_is_rejected(tmp_path: Path) -> None:
    """A running row has dropped the blocks before its window, which blocks of another size would need."""
    with engine("gemma3", block_size=8) as running:
        running.add(PROMPT, greedy(30), request_id="a")
        for _ in range(14):
            running.step()
        session = running.export("a", tmp_path / "a")
    with engine("gemma3", block_size=32) as running:
        before = state_of(running)
        with pytest.raises(SessionError, match="import it with blocks of a size that divides 80"):
            running.import_(tmp_path / "a")
        assert state_of(running) == before
    with engine("gemma3", block_size=16) as running:
        running.import_(tmp_path / "a")
        (goes_on,) = running.generate([session.token_ids], greedy(4))
    assert goes_on.hit_tokens == session.resume_tokens
    assert goes_on.token_ids == generated(loaded_model("gemma3"), session.token_ids, 4)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "lfm2"])
def test_running_request_with_drafts_is_handed_over(name: str, tmp_path: Path) -> None:
    """Some drafts are right, others are not: the state is that of the last accepted one."""
    with engine(name) as running:
        (done,) = running.generate([PROMPT], greedy(24))
    drafter = ScriptedDrafter(lambda _, asked: ((3, 4), (4, 4), (1, 4), (0, 4))[asked % 4])
    drafter.learn([(done, greedy(24))])
    for steps in (2, 3, 4, 5):
        with engine(name, speculate=drafter) as running:
            running.add(PROMPT, greedy(24), request_id="a")
            for _ in range(steps):
                running.step()
            session = running.export("a", tmp_path / "a")
            assert running.statistics().drafted_tokens > 0
        with engine(name, speculate=ScriptedDrafter(lambda *_: (0, 0))) as other:
            other.import_(tmp_path / "a")
            (goes_on,) = other.generate([session.token_ids], greedy(len(PROMPT) + 24 - len(session.token_ids)))
        assert session.token_ids[len(PROMPT) :] + goes_on.token_ids == done.token_ids


def test_salt_and_note_travel_with_the_file(tmp_path: Path) -> None:
    with engine("llama") as running:
        running.add(PROMPT, greedy(TOKENS), cache_salt="mine")
        while not (ended := running.step()):
            pass
        with pytest.raises(CacheError, match="generate its last turn again"):
            running.export(ended[0], tmp_path / "a")
        running.export(ended[0], tmp_path / "a", cache_salt="mine", note="a note")
    with engine("llama") as running:
        session = running.import_(tmp_path / "a")
        assert (session.cache_salt, session.note) == ("mine", "a note")
        turn = second_turn(ended[0])
        assert running.generate([turn], greedy(2))[0].hit_tokens == 0
        running.add(turn, greedy(2), cache_salt="mine")
        while not (done := running.step()):
            pass
        assert done[0].hit_tokens == session.resume_tokens


# -- conversations that have left the device


def evicted(running: Engine, done: Completion) -> None:
    """Run other prompts until only the tiers have a conversation."""
    ids = [*done.prompt_token_ids, *done.token_ids]
    others = iter(np.random.default_rng(4).integers(32, 127, (200, 150)).tolist())
    while running.cache.find_hit(Request("asks", ids, hasher=running.cache.hasher)).tokens == len(ids) - 1:
        running.generate([next(others)], greedy(2))
    running.settle_tiers()


@pytest.mark.parametrize(("name", "form"), [*((name, None) for name in MODELS), ("llama", "int8_per_token_head")])
def test_host_memory_gives_the_file_of_the_device(name: str, form: str | None, tmp_path: Path) -> None:
    with engine(name, form=form, host_memory="16MiB") as running:
        done = first_turn(running)
        running.settle_tiers()
        running.export(done, tmp_path / "a")
        assert running.cache.reset_prefix_cache()  # the host keeps what it has
        steps = running.statistics().steps
        session = running.export(done, tmp_path / "b")
        assert running.statistics().steps == steps
    assert session.resume_tokens == len(PROMPT) + TOKENS - 1
    with safe_open(tmp_path / "a", framework="pt") as first, safe_open(tmp_path / "b", framework="pt") as second:
        assert first.keys() == second.keys()
        for one in first.keys():  # noqa: SIM118  # no mapping
            whole, kept = first.get_tensor(one), second.get_tensor(one)
            rows = whole[len(whole) - len(kept) :]  # the device may have rows before a window, too
            assert torch.equal(rows.view(torch.uint8), kept.view(torch.uint8))
            assert len(kept) == len(whole) or "gemma3" in name


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "falcon_h1"])
def test_conversation_goes_on_from_host_memory_while_the_device_is_full(name: str, tmp_path: Path) -> None:
    with engine(name, requests=2, host_memory="16MiB") as running:
        done = first_turn(running)
        evicted(running, done)
        rows = shared_prompts(2, 9, prefix=170, longest=3)
        for row in rows:
            running.add(row, greedy(20))
        for _ in range(6):
            running.step()
        session = running.export(done, tmp_path / "a")
        ended = drained(running)
        running.scheduler.check()
    assert [one.token_ids for one in ended] == [generated(loaded_model(name), row, 20) for row in rows]
    turn = second_turn(done)
    with engine(name) as running:
        running.import_(tmp_path / "a")
        (goes_on,) = running.generate([turn], greedy(TOKENS))
    assert goes_on.hit_tokens == session.resume_tokens
    assert goes_on.token_ids == generated(loaded_model(name), turn, TOKENS)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "mamba", "qwen3_next"])
@pytest.mark.parametrize("known", [0, len(PROMPT)], ids=["nothing", "prompt"])
def test_conversation_goes_on_from_a_store(name: str, known: int, tmp_path: Path) -> None:
    """Another engine exports it: it has nothing of it, or all but a few tokens. A request runs meanwhile."""
    store = DiskFolder(tmp_path / "disk", "64MiB")
    with engine(name, host_memory="16MiB", store=store) as running:
        done = first_turn(running)
        running.settle_tiers()
    row = shared_prompts(1, 9, prefix=100, longest=3)[0]
    with engine(name, host_memory="16MiB", store=store, options={"in_flight": 2}) as running:
        if known:
            running.generate([PROMPT], greedy(1))
        running.add(row, greedy(30), request_id="row")
        running.step()
        session = running.export(done, tmp_path / "a")
        assert session.token_ids == done.prompt_token_ids + done.token_ids
        (other,) = drained(running)
        assert other.request_id == "row"
        running.scheduler.check()
    assert other.token_ids == generated(loaded_model(name), row, 30)
    turn = second_turn(done)
    with engine(name) as running:
        running.import_(tmp_path / "a")
        (goes_on,) = running.generate([turn], greedy(TOKENS))
    assert goes_on.hit_tokens == session.resume_tokens
    assert goes_on.token_ids == generated(loaded_model(name), turn, TOKENS)


def test_conversation_that_no_tier_has_is_named(tmp_path: Path) -> None:
    with engine("llama", host_memory="16MiB", store=DiskFolder(tmp_path / "disk", "64MiB")) as running:
        with pytest.raises(CacheError, match="generate its last turn again"):
            running.export([*PROMPT, 1, 2, 3], tmp_path / "a")
        assert running.idle
    assert not (tmp_path / "a").exists()


# -- room


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "falcon_h1", "mamba"])
@pytest.mark.parametrize("running_rows", [0, 1, 2])
def test_full_device_makes_room_and_others_go_on(name: str, running_rows: int, tmp_path: Path) -> None:
    """Cached prefixes fill the device; moves that make room do not disturb running rows."""
    done = exported(name, tmp_path / "a")
    turn = second_turn(done)
    others = shared_prompts(12, 8, prefix=3, longest=120)
    with engine(name, requests=4) as running:
        running.generate(others, greedy(8))
        before = running.cache.statistics()
        for number in range(running_rows):
            running.add(others[number][::-1], greedy(40), request_id=str(number))
        for _ in range(4 if running_rows else 0):
            running.step()
        session = running.import_(tmp_path / "a")
        running.add(turn, greedy(TOKENS), request_id="turn")
        ended = dict[str, Completion]()
        while not running.idle:
            ended |= {one.request_id: one for one in running.step()}
        running.cache.check()
        after = running.cache.statistics()
    assert ended["turn"].hit_tokens == session.resume_tokens
    assert ended["turn"].token_ids == generated(loaded_model(name), turn, TOKENS)
    for number in range(running_rows):
        assert ended[str(number)].token_ids == generated(loaded_model(name), others[number][::-1], 40)
    assert before != after


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_no_room_is_a_named_error_and_changes_nothing(name: str, tmp_path: Path) -> None:
    exported(name, tmp_path / "a")
    with engine(name, requests=1) as running:
        running.add(shared_prompts(1, 9, prefix=190)[0][:190], greedy(9), request_id="a")
        running.step()
        before = state_of(running)
        with pytest.raises(CapacityError, match="wait for running requests to end, or give the engine more memory"):
            running.import_(tmp_path / "a")
        assert state_of(running) == before
        while not (ended := running.step()):
            pass
        assert ended[0].token_ids == generated(loaded_model(name), list(ended[0].prompt_token_ids), 9)


def test_longer_conversation_than_requests_may_be_is_rejected(tmp_path: Path) -> None:
    exported("llama", tmp_path / "a")
    loaded = loaded_model("llama")
    with (
        Engine(loaded, memory="4MiB", max_model_len=50, options=EngineOptions(self_check=False)) as running,
        pytest.raises(CapacityError, match="at most 50: raise max_model_len"),
    ):
        running.import_(tmp_path / "a")


def test_import_of_what_is_cached_changes_nothing(tmp_path: Path) -> None:
    with engine("qwen3_next") as running:
        running.export(first_turn(running), tmp_path / "a")
        before = state_of(running)
        running.import_(tmp_path / "a")
        assert state_of(running) == before


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_import_beside_a_cached_prefix(name: str, tmp_path: Path) -> None:
    done = exported(name, tmp_path / "a")
    turn = second_turn(done)
    with engine(name) as running:
        running.generate([PROMPT[:70], [*PROMPT[:50], 40, 41]], greedy(5))
        session = running.import_(tmp_path / "a")
        running.cache.check()
        outputs = running.generate([turn, [*PROMPT[:70], 50]], greedy(TOKENS))
        running.cache.check()
    assert outputs[0].hit_tokens == session.resume_tokens
    for one in outputs:
        assert one.token_ids == generated(loaded_model(name), list(one.prompt_token_ids), TOKENS)


@pytest.mark.parametrize(("name", "seed"), [("bamba", 0), ("lfm2", 1)])
def test_moves_of_an_import_reach_running_rows(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of two sizes share slabs, so imports move blocks of running rows, which must not notice."""
    rng = np.random.default_rng(3)
    for number in range(6):
        with engine(name) as running:
            prompt = rng.integers(32, 127, int(rng.integers(20, 150))).tolist()
            running.export(first_turn(running, prompt), tmp_path / str(number))
    moves, take, rng = Counter[str](), TransferLog.take_transfers, np.random.default_rng(seed)

    def counted(log: TransferLog) -> Any:  # noqa: ANN401  # Transfers
        made = take(log)
        moves.update(one.kind for one in made.copies)
        return made

    ended = list[Completion]()
    with engine(name, requests=3) as running:
        for _ in range(16):
            if running.scheduler.num_waiting < 2:
                prompt = rng.integers(32, 127, int(rng.integers(10, 140))).tolist()
                running.add(prompt, greedy(int(rng.integers(5, 50))))
            for _ in range(3):
                ended += running.step()
            with monkeypatch.context() as patched, suppress(CapacityError):
                patched.setattr(TransferLog, "take_transfers", counted)
                running.import_(tmp_path / str(rng.integers(6)))
            running.cache.check()
        ended += drained(running)
    assert moves["move"] > 0
    assert len(ended) > 8
    for one in ended:
        assert one.token_ids == generated(loaded_model(name), one.prompt_token_ids, len(one.token_ids))


def test_import_that_fails_halfway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported("qwen3_next", tmp_path / "a")

    def fails(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with engine("qwen3_next") as running:
        before = running.cache.statistics()
        with monkeypatch.context() as patched:
            patched.setattr(SessionFiles, "_write", fails)
            with pytest.raises(RuntimeError, match="the device is gone"):
                running.import_(tmp_path / "a")
        running.cache.check()
        assert running.cache.statistics() == before
        running.import_(tmp_path / "a")
        assert running.cache.statistics() != before


# -- damage


@pytest.mark.parametrize("key", [None, KEY])
def test_every_flipped_bit_and_every_cut_is_rejected(key: bytes | None, tmp_path: Path) -> None:
    exported("lfm2", tmp_path / "a", key=key)
    whole = (tmp_path / "a").read_bytes()
    header = int.from_bytes(whole[:8], "little") + 8
    rng = np.random.default_rng(1)
    places = {*range(16), *rng.integers(0, header, 250).tolist(), *rng.integers(header, len(whole), 60).tolist()}
    with engine("lfm2") as running:
        before = state_of(running)
        for place in sorted(places):
            changed = bytearray(whole)
            changed[place] ^= 1 << int(rng.integers(8))
            (tmp_path / "b").write_bytes(changed)
            with pytest.raises((SessionError, SchemaError)):
                running.import_(tmp_path / "b", key=key)
        for length in (0, 7, 8, header - 1, header, len(whole) // 2, len(whole) - 1):
            (tmp_path / "b").write_bytes(whole[:length])
            with pytest.raises(SessionError, match="export the session again"):
                running.import_(tmp_path / "b", key=key)
        (tmp_path / "b").write_bytes(whole + b"\0")
        with pytest.raises(SessionError):
            running.import_(tmp_path / "b", key=key)
        assert state_of(running) == before
        running.import_(tmp_path / "a", key=key)
        assert state_of(running) != before


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]


def resigned(source: Path, target: Path, change: Change) -> None:
    """Write a file whose sums are right again after a change: only its meaning is wrong."""
    with safe_open(source, framework="pt") as opened:
        tensors = {one: opened.get_tensor(one) for one in opened.keys()}  # noqa: SIM118  # no mapping
        manifest = json.loads(opened.metadata()["hybridkv.session"])
    change(tensors, manifest)
    for name, tensor in tensors.items():
        made = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode() + tensor.numpy().tobytes())
        manifest["tensors"].setdefault(name, {"first_token": 0})["sha256"] = made.hexdigest()
    text = json.dumps(manifest)
    save_file(tensors, target, {"hybridkv.session": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def _half(tensors: dict[str, torch.Tensor], _: object) -> None:
    name = next(one for one in tensors if one.endswith(".keys"))
    tensors[name] = tensors[name][: len(tensors[name]) // 2].clone()


def _cast(tensors: dict[str, torch.Tensor], _: object) -> None:
    name = next(one for one in tensors if one.endswith(".state.0"))
    tensors[name] = tensors[name].double()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda _, manifest: manifest.update(format=2), SchemaError, "another format than 1"),
        (lambda _, manifest: manifest.update(model="Other"), SessionError, "another model, 'Other'"),
        (lambda _, manifest: manifest.update(dtype="bfloat16"), SessionError, "another dtype, 'bfloat16'"),
        (lambda _, manifest: manifest.update(quantization=["nvfp4"]), SessionError, "another quantization"),
        (lambda _, manifest: manifest.pop("weights"), SessionError, "another weights, None"),
        (lambda _, manifest: manifest.update(resume_tokens="3"), SessionError, "lacks a field"),
        (lambda _, manifest: manifest.update(resume_tokens=0), SessionError, "resumes after 0 of"),
        (lambda _, manifest: manifest.update(resume_tokens=102), SessionError, "needs torch.float32 of"),
        (lambda _, manifest: manifest.update(resume_tokens=50), SessionError, "needs torch.float32 of"),
        (lambda _, manifest: manifest.update(resume_tokens=10**6), SessionError, "resumes after 1000000 of"),
        (lambda _, manifest: manifest.update(cache_salt=3), SessionError, "lacks a field"),
        (lambda _, manifest: manifest.pop("note"), SessionError, "lacks a field"),
        (lambda tensors, _: tensors.pop("tokens"), SessionError, "no tensor 'tokens'"),
        (lambda tensors, _: tensors.update(other=torch.zeros(1)), SessionError, "no tensor 'other', or should not"),
        (lambda tensors, _: tensors["tokens"].__setitem__(3, 900), ConfigError, "outside the vocabulary"),
        (lambda tensors, _: tensors["tokens"].__setitem__(3, -1), ConfigError, "outside the vocabulary"),
        (_half, SessionError, "needs torch.float32 of"),
        (_cast, SessionError, "torch.float64 of"),
    ],
)
def test_file_with_another_meaning_is_rejected(
    change: Change, error: type[Exception], message: str, tmp_path: Path
) -> None:
    exported("qwen3_next", tmp_path / "a")
    resigned(tmp_path / "a", tmp_path / "b", change)
    with engine("qwen3_next") as running:
        before = state_of(running)
        with pytest.raises(error, match=message) as raised:
            running.import_(tmp_path / "b")
        assert isinstance(raised.value, HybridKVError)
        assert state_of(running) == before


def test_unchanged_file_is_accepted_when_signed_anew(tmp_path: Path) -> None:
    exported("qwen3_next", tmp_path / "a")
    resigned(tmp_path / "a", tmp_path / "b", lambda *_: None)
    with engine("qwen3_next") as running:
        assert running.import_(tmp_path / "b").resume_tokens == len(PROMPT) + TOKENS - 1


def test_saved_model_has_the_identity_that_it_had(tmp_path: Path) -> None:
    loaded = load("tiny:llama", seed=2)
    before = identity_of(loaded.model, Stored())
    loaded.model.save_pretrained(tmp_path / "saved")
    saved = type(loaded.model).from_pretrained(tmp_path / "saved", dtype=loaded.model.dtype)
    assert before == identity_of(loaded.model, Stored()) == identity_of(saved, Stored())


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("llama", {"loaded": lambda: load("tiny:llama", seed=1)}, "another weights"),
        ("qwen2", {}, "another model"),
        ("llama", {"form": "int8_per_token_head"}, "another quantization"),
    ],
)
def test_other_engine_is_rejected(name: str, given: dict[str, Any], message: str, tmp_path: Path) -> None:
    exported("llama", tmp_path / "a")
    made = {one: of() if callable(of) else of for one, of in given.items()}
    with engine(name, **made) as running, pytest.raises(SessionError, match=message):
        running.import_(tmp_path / "a")


@pytest.mark.parametrize(
    ("signed", "given", "message"),
    [(KEY, b"other", "another key"), (KEY, None, "is signed: give its key"), (None, KEY, "not signed: leave the key")],
)
def test_wrong_key_is_rejected(signed: bytes | None, given: bytes | None, message: str, tmp_path: Path) -> None:
    exported("llama", tmp_path / "a", key=signed)
    with engine("llama") as running, pytest.raises(SessionError, match=message):
        running.import_(tmp_path / "a", key=given)


def test_invalid_arguments_are_rejected_by_name(tmp_path: Path) -> None:
    path, text = tmp_path / "a", cast("bytes", "text")
    with engine("llama") as running:
        done = first_turn(running)
        calls: list[tuple[Callable[[], object], type[Exception], str]] = [
            (lambda: running.export("nobody", path), ConfigError, "no request 'nobody' runs"),
            (lambda: running.export(done, path, key=b""), ConfigError, "key must not be empty"),
            (lambda: running.export(done, path, key=text), ConfigError, "key must be"),
            (lambda: running.export(done, path, note=cast("str", 3)), ConfigError, "note must be"),
            (lambda: running.export([900], path), ConfigError, "outside the vocabulary"),
            (lambda: running.export([*PROMPT, 1, 2, 3], path), CacheError, "generate its last turn again"),
            (lambda: running.export(done, tmp_path / "no" / "a"), OSError, "No such file"),
            (lambda: running.import_(tmp_path / "none"), OSError, "No such file"),
            (lambda: running.import_(tmp_path), OSError, "not a regular file|directory"),
        ]
        for call, error, message in calls:
            with pytest.raises(error, match=message):
                call()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CacheError, match="closed"):
        running.import_(path)


def test_layers_that_files_cannot_hold_are_named(tmp_path: Path) -> None:
    with engine("deepseek_v4") as running, pytest.raises(UnsupportedModelError, match="files cannot hold layer"):
        running.export(first_turn(running), tmp_path / "a")
    with (
        engine("llama", options={"prefix_caching": False}) as running,
        pytest.raises(ConfigError, match="need the natural layout and prefix caching"),
    ):
        running.import_(tmp_path / "a")


def test_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported("llama", tmp_path / "a")
    before = (tmp_path / "a").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        exported("llama", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


# -- faults that these tests must find


_READ: Any = SessionFiles._read
_WRITE: Any = SessionFiles._write


def _faded_state(files: SessionFiles, layer: Any, *given: Any) -> torch.Tensor:  # noqa: ANN401  # as _read
    made: torch.Tensor = _READ(files, layer, *given)
    return made * 0.9 if layer.is_state else made


def _swapped_heads(files: SessionFiles, layer: Any, *given: Any) -> torch.Tensor:  # noqa: ANN401  # as _read
    made: torch.Tensor = _READ(files, layer, *given)
    return made if layer.is_state else made.flip(1)


def _half_written(files: SessionFiles, layer: Any, *given: Any) -> None:  # noqa: ANN401  # as _write
    *where, rows = given
    kept = torch.cat((rows[: len(rows) // 2], torch.zeros_like(rows[len(rows) // 2 :])))
    _WRITE(files, layer, *where, rows if layer.is_state else kept)


def _no_state(files: SessionFiles, layer: Any, *given: Any) -> None:  # noqa: ANN401  # as _write
    if not layer.is_state:
        _WRITE(files, layer, *given)


@pytest.mark.parametrize(
    ("method", "fault"),
    [("_read", _faded_state), ("_read", _swapped_heads), ("_write", _half_written), ("_write", _no_state)],
)
def test_faults_change_the_tokens(method: str, fault: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these faults passes all checks of a file, and shows in the tokens that the tests above compare."""
    monkeypatch.setattr(SessionFiles, method, fault)
    done = exported("qwen3_next", tmp_path / "a")
    turn = second_turn(done)
    with engine("qwen3_next") as running:
        running.import_(tmp_path / "a")
        (goes_on,) = running.generate([turn], greedy(TOKENS))
    assert goes_on.token_ids != generated(loaded_model("qwen3_next"), turn, TOKENS)
