"""A prefill engine in another process hands its requests to a decode engine: the tokens are those of one engine."""

import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from image_models import Size, image_model, prompt_of
from runner_support import drained, generated, greedy, loaded_model, shared_prompts

import warm
from hybridkv.errors import ConfigError, SessionError, UnsupportedModelError
from hybridkv.request import Hints, SamplingParams
from hybridkv.runner import Completion, Engine, EngineOptions, plan_for
from hybridkv.runner.drafters import Drafter, DraftModel, NgramDrafter
from hybridkv.runner.session_file import read_session, write_session
from hybridkv.stores import DiskFolder

EXAMPLE = Path(__file__).parents[2] / "examples" / "prefill_and_decode.py"
MODELS = ("llama", "gemma3", "deepseek_v3", "mamba", "qwen3_next", "falcon_h1")
"""Full attention, windows, latents; states alone, gated delta rules beside attention, both in a layer."""
DRAFTS = 3
PROMPT = shared_prompts(1, 7, prefix=60, longest=10)[0]
SAMPLING = SamplingParams(
    max_tokens=20,
    temperature=0.9,
    top_k=40,
    seed=11,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    min_tokens=4,
    logit_bias={70: 1.0},
    bad_words=((71, 72),),
    stop=("never comes",),
    ignore_eos=True,
    logprobs=2,
)
"""Draws that depend on the prompt, on the output, and on where one ends and the other begins."""
FEW = replace(SAMPLING, presence_penalty=0.0, repetition_penalty=1.0, max_tokens=40, logit_bias={65: 8, 66: 8, 67: 8})
"""Draws among three tokens above all, which prompt lookup guesses now and then."""


@contextmanager
def engine(name: str, drafter: Drafter | None = None, **given: Any) -> Iterator[Engine]:  # noqa: ANN401  # of Engine
    """An engine for three requests of 110 tokens."""
    loaded, options = loaded_model(name), EngineOptions(self_check=False, **given.pop("options", {}))
    drafts = 0 if drafter is None else drafter.num_speculative_tokens
    plan = plan_for(loaded, [120] * 3, num_speculative_tokens=drafts)
    with Engine(loaded, plan, options, speculate=drafter, **given) as running:
        yield running


def alone(name: str, sampling: SamplingParams = SAMPLING) -> Completion:
    """The completion of one engine that does both."""
    with engine(name) as running:
        (done,) = running.generate([PROMPT], sampling)
    return done


def same(done: Completion, expected: Completion) -> None:
    assert done.prompt_token_ids == expected.prompt_token_ids
    assert done.token_ids == expected.token_ids
    assert (done.text, done.finish_reason) == (expected.text, expected.finish_reason)
    assert done.logprobs is not None
    assert expected.logprobs is not None
    assert [one.token_id for one in done.logprobs] == [one.token_id for one in expected.logprobs]
    assert [one.logprob for one in done.logprobs] == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-3)


BEGIN = """
import sys, time
from pathlib import Path
sys.path[:0] = {path!r}
import test_handover
from test_handover import DRAFTS, PROMPT, FEW, SAMPLING, engine
from hybridkv.runner import session_file
from hybridkv.runner.drafters import NgramDrafter
from hybridkv.regular_files import written_whole

folder = Path({folder!r})

def prefill(name, file, sampling=SAMPLING, tokens=1, **given):
    with engine(name, **given) as running:
        with running.stream(PROMPT, sampling, request_id="a", hints=test_handover.HINTS, tenant="t") as stream:
            known = 0
            while known < tokens:
                known += len(next(stream).token_ids)
            running.export("a", folder / file, key=b"a secret")
            print(running.statistics().accepted_tokens)
"""
HINTS = Hints(within_s=9)


def child(code: str, folder: Path) -> warm.Warm:
    """A process that prefills, with ``folder`` for its files."""
    script = folder.parent / f"{folder.name}.py"
    script.write_text(BEGIN.format(path=sys.path, folder=str(folder)) + code)
    return warm.Warm([script], environment={"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def prefilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of another process: MODEL after the first token, MODEL.drafts after some steps with drafts."""
    folder = tmp_path_factory.mktemp("prefilled")
    code = f"""
for name in {MODELS!r}:
    prefill(name, name)
    prefill(name, name + ".drafts", FEW, 20, drafter=NgramDrafter(DRAFTS, min_ngram=1))
"""
    with child(code, folder) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    accepted = [int(line) for line in out.splitlines()]
    assert min(accepted[1::2]) > 0
    return folder


def ended(running: Engine, path: Path) -> Completion:
    assert running.resume(path, request_id="mine", key=b"a secret") == "mine"
    (done,) = drained(running)
    assert done.request_id == "mine"
    running.cache.check()
    return done


@pytest.mark.parametrize("name", MODELS)
def test_decode_engine_draws_the_tokens_of_one_engine(name: str, prefilled: Path) -> None:
    expected = alone(name)
    with engine(name) as running:
        done = ended(running, prefilled / name)
    same(done, expected)
    assert done.hit_tokens == len(PROMPT)
    assert done.computed_tokens == SAMPLING.max_tokens - 1  # the first token came with the prompt


@pytest.mark.parametrize("name", MODELS)
def test_both_engines_may_draft(name: str, prefilled: Path) -> None:
    """The prefill engine has run steps with drafts; the decode engine drafts by prompt lookup."""
    with engine(name, NgramDrafter(DRAFTS, min_ngram=1)) as running:
        done = ended(running, prefilled / f"{name}.drafts")
    same(done, alone(name, FEW))
    assert done.hit_tokens == len(PROMPT)
    assert done.accepted_tokens > 0
    assert done.drafted_tokens > done.accepted_tokens


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_decode_engine_drafts_with_a_model_of_its_own(name: str, prefilled: Path) -> None:
    """The draft model has seen nothing of the prompt: only the target's cache comes with the file."""
    other = "mamba" if name == "llama" else "llama"
    with (
        Engine(
            loaded_model(other, 1), memory="8MiB", max_model_len=120, options=EngineOptions(self_check=False)
        ) as own,
        engine(name, DraftModel(own, DRAFTS)) as running,
    ):
        done = ended(running, prefilled / name)
    same(done, alone(name))
    assert done.drafted_tokens > SAMPLING.max_tokens


def test_handed_over_requests_run_beside_others(prefilled: Path) -> None:
    """Two of them and a third one of the engine's own, one by one and at once."""
    expected = alone("qwen3_next")
    with engine("qwen3_next", options={"in_flight": 2}) as running:
        own = running.add([*PROMPT[:30], 5], greedy(20))
        running.step()
        names = [running.resume(prefilled / "qwen3_next", key=b"a secret") for _ in range(2)]
        done = {one.request_id: one for one in drained(running)}
    assert len({own, *names}) == 3
    for name in names:
        same(done[name], expected)
    assert done[own].token_ids == generated(loaded_model("qwen3_next"), [*PROMPT[:30], 5], 20)


def test_stop_string_may_begin_before_the_hand_over(tmp_path: Path) -> None:
    whole = alone("llama").text
    assert whole is not None
    sampling = replace(SAMPLING, stop=(whole[:5],), min_tokens=0)
    expected = alone("llama", sampling)
    with engine("llama") as running, running.stream(PROMPT, sampling, request_id="a") as stream:
        next(stream)
        running.export("a", tmp_path / "a", key=b"a secret")
    with engine("llama") as running:
        same(ended(running, tmp_path / "a"), expected)


def test_request_travels_with_tenant_hints_and_salt(prefilled: Path, tmp_path: Path) -> None:
    with engine("llama") as running:
        session = running.import_(prefilled / "llama", key=b"a secret")
        assert session.request is not None
        assert session.request.sampling == SAMPLING
        assert (session.request.tenant, session.request.hints) == ("t", HINTS)
        running.add(PROMPT, SAMPLING, request_id="a", cache_salt="mine")
        running.step()
        running.export("a", tmp_path / "a", key=b"a secret")
    with engine("llama") as running:
        assert ended(running, tmp_path / "a").hit_tokens == len(PROMPT)
        assert running.generate([PROMPT], greedy(2))[0].hit_tokens == 0  # another salt


def test_half_a_prompt_is_handed_over(tmp_path: Path) -> None:
    with engine("qwen3_next", options={"token_budget": 16}) as running:
        running.add(PROMPT, SAMPLING, request_id="a")
        running.step()
        assert running.export("a", tmp_path / "a", key=b"a secret").resume_tokens == 16
    with engine("qwen3_next", options={"remembered_losses": 1 << 10}) as running:
        done = ended(running, tmp_path / "a")
        assert sum(running.statistics().misses.values()) == len(PROMPT) - 16
    same(done, alone("qwen3_next"))
    assert done.hit_tokens == 16


# -- a producer that dies


AT_A_STEP = """
with engine({name!r}, options={{"token_budget": 16}}) as running:
    running.add(PROMPT, SAMPLING, request_id="a")
    running.step()
    running.step()
    print("halfway", flush=True)
    time.sleep(300)
"""
IN_THE_FILE = """
def half(path, content):
    with written_whole(path) as file:
        file.write(content[: len(content) // 2])
        file.flush()
        print("halfway", flush=True)
        time.sleep(300)

session_file.write_whole = half
prefill({name!r}, "a")
"""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("moment", [AT_A_STEP, IN_THE_FILE], ids=["step", "file"])
def test_killed_producer_leaves_nothing_and_the_consumer_computes(name: str, moment: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    with child(moment.format(name=name), folder) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "halfway"
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
    left = list(folder.iterdir())
    assert [one.stat().st_size > 0 for one in left] == [True] * (moment is IN_THE_FILE)
    with engine(name) as running:
        before = running.cache.statistics(), running.runner.storage.arena.clone().numpy().tobytes()
        with pytest.raises(OSError, match="No such file"):
            running.resume(folder / "a", key=b"a secret")
        for one in left:  # half a file is rejected, too, if somebody gives it
            with pytest.raises(SessionError, match="no whole safetensors file"):
                running.resume(one, key=b"a secret")
        assert (running.cache.statistics(), running.runner.storage.arena.numpy().tobytes()) == before
        assert running.idle
        running.add(PROMPT, SAMPLING)
        (done,) = drained(running)
    same(done, alone(name))
    assert done.hit_tokens == 0


# -- through a store


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_store_hands_over_prompts(name: str, tmp_path: Path) -> None:
    """The prefill engine computes the prompt; the decode engine gets the same request, and finds all but its end."""
    code = f"""
from hybridkv.stores import DiskFolder
with engine({name!r}, host_memory="8MiB", store=DiskFolder(folder, "64MiB")) as running:
    running.generate([PROMPT], SAMPLING.__class__(max_tokens=1))
"""
    store = tmp_path / "store"
    store.mkdir()
    with child(code, store) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    with engine(name, host_memory="8MiB", store=DiskFolder(store, "64MiB")) as running:
        (done,) = running.generate([PROMPT], SAMPLING)
    same(done, alone(name))
    assert done.hit_tokens == len(PROMPT) - 1


# -- what cannot be handed over


def test_only_requests_can_be_resumed(tmp_path: Path) -> None:
    with engine("llama") as running:
        running.export(running.generate([PROMPT], greedy(3))[0], tmp_path / "a")
        with pytest.raises(SessionError, match="holds a conversation, or a request with logits_processors"):
            running.resume(tmp_path / "a")
        running.add(PROMPT, replace(greedy(9), logits_processors=(lambda _, logits: logits,)), request_id="b")
        running.step()
        running.export("b", tmp_path / "b")
        with pytest.raises(SessionError, match="logits_processors"):
            running.resume(tmp_path / "b")
        drained(running)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": 0}, "cannot be read"),
        ({"prompt_tokens": 10**6}, "cannot be read"),
        ({"prompt_tokens": True}, "cannot be read"),
        ({"sampling": {"temperature": -1}}, "cannot be read"),
        ({"sampling": {"unknown": 1}}, "cannot be read"),
        ({"sampling": None}, "cannot be read"),
        ({"tenant": 3}, "cannot be read"),
        ({"marks": ["a"]}, "cannot be read"),
        ({"hints": {"unknown": 1}}, "cannot be read"),
        ({"logprobs": [3]}, "cannot be read"),
        ({"other": 3}, "unknown field 'other'"),
        ({"sampling": {"max_tokens": 20, "n": 2}}, "2 outputs, so it did not run"),
        ({"sampling": {"max_tokens": 1}}, "has 1 tokens of 1"),
    ],
)
def test_wrong_request_is_rejected(change: dict[str, Any], message: str, prefilled: Path, tmp_path: Path) -> None:
    """Signed with the right key, but of another meaning."""
    manifest, tensors, _ = read_session(prefilled / "llama", b"a secret", lambda _: None)
    described = manifest.pop("tensors")
    manifest["request"] |= change
    write_session(tmp_path / "a", manifest, tensors, described, b"a secret")
    with engine("llama") as running:
        before = running.cache.statistics()
        with pytest.raises(SessionError, match=message):
            running.resume(tmp_path / "a", key=b"a secret")
        assert running.cache.statistics() == before
        assert running.idle


def test_id_in_use_is_rejected(prefilled: Path) -> None:
    with engine("llama") as running:
        running.resume(prefilled / "llama", request_id="a", key=b"a secret")
        with pytest.raises(ConfigError, match="'a'"):
            running.resume(prefilled / "llama", request_id="a", key=b"a secret")
        assert len(drained(running)) == 1


def test_images_stay_where_they_are(tmp_path: Path) -> None:
    """Their tokens alone would be found by other prompts."""
    loaded = image_model("qwen2_vl")
    prompt = prompt_of("qwen2_vl", [[5, 6, 7], (Size(2, 2), 1), [8, 9]])
    with Engine(loaded, memory="8MiB", max_model_len=100, options=EngineOptions(self_check=False)) as running:
        running.add(prompt.ids, greedy(5), images=prompt.images, request_id="a")
        running.step()
        with pytest.raises(UnsupportedModelError, match="cannot hold images"):
            running.export("a", tmp_path / "a")


# -- the example


def test_example_prints_the_texts_of_plain_engines() -> None:
    done = warm.run([EXAMPLE], environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    names = runpy.run_path(str(EXAMPLE))  # its constants; nothing runs
    with Engine(loaded_model("qwen3_next"), memory="8MiB", options=EngineOptions(self_check=False)) as running:
        asked = [replace(names["SAMPLING"], seed=number) for number in range(3)]
        texts = [running.generate([one], how)[0].text for one, how in zip(names["QUESTIONS"], asked, strict=True)]
    sizes = [len(question) for question in names["QUESTIONS"]]
    assert done.stdout.splitlines() == [
        f"request {number}: {size if number < 2 else 0} of {size} prompt tokens came from the other engine, {text!r}"
        for number, (size, text) in enumerate(zip(sizes, texts, strict=True))
    ]
