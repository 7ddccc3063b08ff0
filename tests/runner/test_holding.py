"""One engine at a time holds a model, and restores the model when it closes."""

import copy
import functools
import pickle

import pytest
import torch
from runner_support import generated, greedy, loaded_model, shared_prompts
from transformers import PreTrainedModel

from hybridkv.errors import ConfigError, UnsupportedModelError, WorkerError
from hybridkv.runner import Completion, Engine, EngineOptions, byte_tokenizer, tiny_model
from hybridkv.runner.probe import probe
from hybridkv.runner.states.recurrent import RecurrentMixer

PROMPTS = shared_prompts(2, 3)
OUTPUT = 6
HYBRID = "qwen3_next"


def engine_of(model: PreTrainedModel) -> Engine:
    return Engine(model, tokenizer=byte_tokenizer(), memory="2MiB", max_model_len=128)


def is_right(name: str, done: list[Completion]) -> bool:
    return [one.token_ids for one in done] == [generated(loaded_model(name), one, OUTPUT) for one in PROMPTS]


@pytest.mark.parametrize("name", ["llama", HYBRID])
def test_second_engine_of_a_model_is_rejected_until_the_first_closes(name: str) -> None:
    model = tiny_model(name)
    plain = model(torch.tensor([PROMPTS[0]])).logits
    first = engine_of(model)
    with pytest.raises(ConfigError, match=r"another engine holds this \w+: close it first"):
        engine_of(model)
    assert is_right(name, first.generate(PROMPTS, greedy(OUTPUT)))
    first.close()
    second = engine_of(model)
    first.close()
    first.runner.detach()
    assert is_right(name, second.generate(PROMPTS, greedy(OUTPUT)))
    second.close()
    assert model.config._attn_implementation == "eager"
    assert not any({"forward", "hybridkv_context"} & set(vars(module)) for module in model.modules())
    assert torch.equal(model(torch.tensor([PROMPTS[0]])).logits, plain)


def test_failed_engine_construction_releases_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise TypeError("no mask")

    model = tiny_model(HYBRID)
    with monkeypatch.context() as patched:
        patched.setattr("hybridkv.runner.runner.forms_of", fails)
        with pytest.raises(TypeError, match="no mask"):
            Engine(model, memory="2MiB", max_model_len=128, options=EngineOptions(self_check=False))
    assert model.config._attn_implementation == "eager"
    assert not any({"forward", "hybridkv_context"} & set(vars(module)) for module in model.modules())


def test_detached_runner_rejects_steps() -> None:
    engine = engine_of(tiny_model("llama"))
    engine.add(PROMPTS[0], greedy(2))
    step = engine.scheduler.schedule()
    engine.runner.detach()
    with pytest.raises(WorkerError, match="gave its model back"):
        engine.runner.execute(step)
    engine.close()


def test_held_model_rejects_calls_and_copies() -> None:
    model = tiny_model(HYBRID)
    with engine_of(model) as engine:
        with pytest.raises(WorkerError, match=r"an engine holds this model.*close it first"):
            model(torch.tensor([PROMPTS[0]]))
        for copied in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(ConfigError, match="close the engine before the model is copied"):
                copied(model if copied is not copy.copy else engine.runner._context)
        assert is_right(HYBRID, engine.generate(PROMPTS, greedy(OUTPUT)))
    copy.deepcopy(model)(torch.tensor([PROMPTS[0]]))


def first_mixer(model: PreTrainedModel) -> RecurrentMixer:
    return probe(model).mixers[0]


def test_patched_mixer_is_rejected_and_keeps_its_forward() -> None:
    model = tiny_model(HYBRID)
    module = first_mixer(model).module
    own = module.forward
    calls = []

    def patch(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(1)
        out: torch.Tensor = own(*args, **kwargs)
        return out

    for patched in (patch, functools.wraps(own)(patch)):
        module.forward = patched
        with pytest.raises(UnsupportedModelError, match="a Qwen3NextGatedDeltaNet has a forward of its own"):
            engine_of(model)
        assert vars(module)["forward"] is patched
        calls.clear()
        model(torch.tensor([PROMPTS[0]]))
        assert calls
    del module.forward
    with engine_of(model) as engine:
        assert is_right(HYBRID, engine.generate(PROMPTS, greedy(OUTPUT)))
        module.forward = patch  # put there while the engine runs: it is not the engine's to remove
    assert vars(module)["forward"] is patch
