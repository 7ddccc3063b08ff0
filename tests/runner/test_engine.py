"""The engine: stops, aborts, failed forwards, counts, and rejected prompts, plans and steps."""

from dataclasses import replace

import pytest
import torch
from runner_support import MODELS, EngineFactory, EveryLogit, failing, generated, greedy, loaded_model, shared_prompts

from hybridkv.errors import CapacityError, ConfigError, WorkerError
from hybridkv.models import read_model
from hybridkv.planner import plan
from hybridkv.request import SamplingParams
from hybridkv.runner import Completion, Engine, EngineOptions, plan_for
from hybridkv.schedule import FinishReason
from hybridkv.step import Copy, Csr, Step

ENGINE_SETTINGS = [{"in_flight": 1}, {"in_flight": 2}]


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_in_flight_use_tokens_sampled_by_the_worker(name: str, make_engine: EngineFactory) -> None:
    loaded, prompts, observer = loaded_model(name), shared_prompts(4, 1), EveryLogit()
    done = make_engine(loaded, prompts, 20, in_flight=2, observer=observer).generate(prompts, greedy(20))
    assert sum(int((step.token_ids.values == -1).sum()) for step in observer.steps) >= 4 * 18
    assert [one.token_ids for one in done] == [generated(loaded, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("options", ENGINE_SETTINGS)
def test_stop_token_ends_the_output_and_is_part_of_it(options: dict[str, int], make_engine: EngineFactory) -> None:
    loaded, prompt = loaded_model("llama"), shared_prompts(1, 2)[0]
    whole = generated(loaded, prompt, 30)
    stop = whole[12]
    first = whole.index(stop)
    engine = make_engine(loaded, [prompt], 30, **options)  # type: ignore[arg-type]  # ints by name
    done = engine.generate([prompt], replace(greedy(30), stop_token_ids=(stop,)))[0]
    assert (done.token_ids, done.finish_reason) == (whole[: first + 1], FinishReason.STOP)
    # the model's own end token, and ignoring it
    engine.close()
    ending = replace(loaded, eos_token_ids=(stop,))
    engine = make_engine(ending, [prompt], 30, **options)  # type: ignore[arg-type]  # ints by name
    by_eos, ignored = engine.generate([prompt] * 2, [SamplingParams(max_tokens=30), greedy(30)])
    assert (by_eos.token_ids, by_eos.finish_reason) == (whole[: first + 1], FinishReason.STOP)
    assert (ignored.token_ids, ignored.finish_reason) == (whole, FinishReason.LENGTH)


@pytest.mark.parametrize("options", ENGINE_SETTINGS)
def test_stop_string_cuts_the_text(options: dict[str, int], make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(3, 2)
    plain = make_engine(loaded, prompts, 30).generate(prompts, greedy(30))
    text = plain[1].text
    assert text is not None
    assert len(text) == 30  # printable bytes: a character a token
    stop = text[10:13]
    at = text.index(stop)
    engine = make_engine(loaded, prompts, 30, **options)  # type: ignore[arg-type]  # ints by name
    sampling = [greedy(30), replace(greedy(30), stop=("never there", stop)), greedy(30)]
    done = engine.generate(prompts, sampling)
    assert (done[1].text, done[1].finish_reason) == (text[:at], FinishReason.STOP)
    assert done[1].token_ids == plain[1].token_ids[: at + 3]
    assert [one.token_ids for one in (done[0], done[2])] == [one.token_ids for one in (plain[0], plain[2])]
    assert engine.idle
    engine.scheduler.check()
    assert engine.cache.usage == 0


@pytest.mark.parametrize("options", ENGINE_SETTINGS)
@pytest.mark.parametrize("at_call", [0, 3, 7])
def test_failed_forward_fails_its_steps_and_outputs_are_complete(
    options: dict[str, int], at_call: int, make_engine: EngineFactory
) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(5, 6)
    sampling = [
        greedy(20),
        *[SamplingParams(temperature=1.0, seed=i, max_tokens=20, ignore_eos=True) for i in range(4)],
    ]
    expected = make_engine(loaded, prompts, 20).generate(prompts, sampling)
    engine = make_engine(loaded, prompts, 20, token_budget=40, **options)  # type: ignore[arg-type]  # ints by name
    # the second layer: pages of the first are written by then
    with failing(loaded.model.model.layers[1], (at_call + 1).__eq__):
        ids = [engine.add(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
        done: dict[str, Completion] = {}
        failures = 0
        while not engine.idle:
            try:
                done.update((one.request_id, one) for one in engine.step())
            except RuntimeError as error:
                assert str(error) == "the device is gone"  # noqa: PT017  # the loop must go on behind it
                failures += 1
                engine.scheduler.check()
    assert failures == 1
    assert engine.statistics().failed_steps == options["in_flight"]
    assert [done[one].token_ids for one in ids] == [one.token_ids for one in expected]


def test_completion_counts_computed_and_hit_tokens(make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(4, 1)
    engine = make_engine(loaded, prompts, 10)
    cold = engine.generate(prompts, greedy(10))
    warm = engine.generate(prompts, greedy(10))
    for one, again in zip(cold, warm, strict=True):
        ran = len(one.prompt_token_ids) + 9
        assert one.computed_tokens == ran - one.hit_tokens
        assert again.computed_tokens == ran - again.hit_tokens
        assert again.hit_tokens == len(one.prompt_token_ids) - 1
        assert one.text == loaded.tokenizer.decode(list(one.token_ids))
    stats = engine.statistics()
    assert stats.computed_tokens == sum(one.computed_tokens for one in cold + warm)
    assert stats.hit_tokens == sum(one.hit_tokens for one in cold + warm)


def test_aborted_request_ends_and_cache_salt_prevents_hits(make_engine: EngineFactory) -> None:
    loaded, prompt = loaded_model("llama"), shared_prompts(1, 1)[0]
    engine = make_engine(loaded, [prompt] * 3, 20)
    engine.generate([prompt], greedy(2))
    salted = engine.add(prompt, greedy(20), cache_salt="tenant-a", request_id="salted")
    doomed = engine.add(prompt, greedy(20))
    done: dict[str, Completion] = {}
    while not engine.idle:
        done.update((one.request_id, one) for one in engine.step())
        engine.abort(doomed)
    assert done[salted].hit_tokens == 0
    assert done[doomed].finish_reason is FinishReason.ABORT
    assert 0 < len(done[doomed].token_ids) < 20
    assert engine.abort("nobody") is False
    early = engine.add(prompt, greedy(20))
    assert engine.abort(early)
    (ended,) = engine.step()
    assert (ended.request_id, ended.finish_reason, ended.token_ids) == (early, FinishReason.ABORT, ())
    assert engine.idle
    assert engine.step() == []


def test_closed_engine_restores_the_attention_of_the_model(make_engine: EngineFactory) -> None:
    loaded, prompt = loaded_model("qwen2"), shared_prompts(1, 1)[0]
    engine = make_engine(loaded, [prompt], 4)
    assert loaded.model.config._attn_implementation == "hybridkv_gather"
    engine.close()
    assert loaded.model.config._attn_implementation == "eager"
    with torch.inference_mode():
        assert loaded.model(torch.tensor([prompt])).logits.isfinite().all()


def test_invalid_prompts_are_rejected(make_engine: EngineFactory) -> None:
    loaded = loaded_model("llama")
    engine = make_engine(loaded, [[65] * 40], 8)
    with pytest.raises(ConfigError, match="empty"):
        engine.add("")
    with pytest.raises(ConfigError, match=r"token id 257 is outside the vocabulary of tiny:llama: ids are 0 \.\. 256"):
        engine.add([1, 257])
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        engine.add([-1])
    with pytest.raises(ConfigError):
        engine.add([65] * 48)
    with pytest.raises(ConfigError, match="2 sampling parameters for 1 prompts"):
        engine.generate([[65]], [SamplingParams()] * 2)
    engine.close()
    bare = replace(loaded, tokenizer=None)
    engine = make_engine(bare, [[65] * 40], 8)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        engine.add("text")
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        engine.add([65], SamplingParams(stop=("x",)))
    assert engine.generate([[65]], greedy(3))[0].text is None


def test_plan_of_another_model_or_too_little_memory_is_rejected() -> None:
    llama = loaded_model("llama")
    with pytest.raises(ConfigError, match="plan is not of tiny:qwen2"):
        Engine(loaded_model("qwen2"), plan_for(loaded_model("deepseek_v3"), [32]))
    half = read_model(llama.model.config.to_dict(), dtype="bfloat16", backend="transformers")
    with pytest.raises(ConfigError, match="keeps 128 bytes a token in the plan, 256 bytes a token in the model"):
        Engine(llama, plan(half, "1MiB", max_model_len=32))
    with pytest.raises(CapacityError, match=r"request of 100 tokens.* needs 96 KiB \(98304 bytes: 8 slabs"):
        plan_for(llama, [20, 100], memory="50KiB")
    assert plan_for(llama, [20, 100], memory=98304).config.num_blocks == 8
    with pytest.raises(ConfigError, match="exceeds the limit of tiny:llama, 4096"):
        plan_for(llama, [5000])
    with pytest.raises(ConfigError, match="no prompts"):
        plan_for(llama, [])
    with pytest.raises(ConfigError, match="in_flight must be at most 2"):
        EngineOptions(in_flight=3)


def test_invalid_steps_are_rejected_and_change_nothing(make_engine: EngineFactory) -> None:
    prompt = shared_prompts(1, 1)[0]
    engine = make_engine(loaded_model("falcon_h1"), [prompt], 8)
    engine.add(prompt, greedy(8))
    step: Step = engine.scheduler.schedule()
    wrong = [
        (replace(step, drafts=Csr.from_lists([[1]])), "drafts"),
        (replace(step, token_ids=Csr(step.token_ids.indptr, step.token_ids.values + 300)), "token ids must lie"),
        (replace(step, token_ids=Csr(step.token_ids.indptr, step.token_ids.values * 0 - 1)), "sampled none"),
        (replace(step, num_computed=step.num_computed + 16), "needs blocks for"),
        (replace(step, num_scheduled=step.num_scheduled * 0), "without tokens"),
        (replace(step, schema_version=99), "schema version"),
        (replace(step, after=4), "follows Step 4"),
        (replace(step, copies=(Copy("before", 9, 1, 2, "block"),)), "group 9 does not exist"),
        (replace(step, state_read=step.state_read * 0), "has no state in group"),
        (replace(step, state_writes=step.state_writes[:0]), "after the last certain token"),
    ]
    for one, message in wrong:
        with pytest.raises(WorkerError, match=message):
            engine.runner.execute(one)
        assert engine.runner.tables.last_step_id == -1
    engine.runner.execute(step)


def test_n_outputs_equal_n_requests_with_consecutive_seeds(make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(2, 1)
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True, n=3)
    together = make_engine(loaded, prompts * 3, 8).generate(prompts, drawn)
    apart = make_engine(loaded, prompts * 3, 8).generate(
        [prompt for prompt in prompts for _ in range(3)], [drawn.of_branch(k) for _ in prompts for k in range(3)]
    )
    assert [one.token_ids for one in together] == [one.token_ids for one in apart]
    assert len({one.token_ids for one in together}) == 6
    assert [one.request_id for one in together] == ["0", "0#1", "0#2", "1", "1#1", "1#2"]
    assert [one.hit_tokens for one in together[1:3]] == [len(prompts[0]) - 1] * 2
