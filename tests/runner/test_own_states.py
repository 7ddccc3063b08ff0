"""Models that keep their states without a cache of transformers: in an argument, or in attributes of their modules."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from csv_table import DATA, read
from every_model import LONGEST, MEMORY
from measured_models import config_of
from runner_support import TOLERANCE, greedy
from shrunk_models import small_model
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hybridkv.errors import UnsupportedModelError, WorkerError
from hybridkv.runner import Engine
from hybridkv.runner.load import wrap
from hybridkv.runner.model_call import ModelCall
from hybridkv.runner.probe import planner_model, probe, state_layout
from hybridkv.runner.states import passing
from hybridkv.runner.states.continuation import continuation, decodes_together, difference
from hybridkv.runner.states.passing import StateArgument, StateAttributes
from hybridkv.runner.states.recurrent import Continuation, RecurrentMixer, run_decode, run_segment
from hybridkv.runner.step_context import EmptyCache

PASSED = {
    "recurrent_gemma": StateAttributes((("", "conv1d_state"), ("rg_lru", "recurrent_states"))),
    "rwkv": StateArgument("state", 1, 4),
    "xlstm": StateArgument("state", 1, None),
}
"""How each passes its states."""


def mixers_of(model: PreTrainedModel) -> list[RecurrentMixer]:
    planned = planner_model(model, block_size=16)
    return [mixer for mine in state_layout(planned, probe(model)).values() for mixer in mine]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("model_type", PASSED)
def test_probe_finds_how_states_are_passed_and_restores_the_modules(model_type: str) -> None:
    model = small_model(model_type)
    before = [dict(vars(module)) for module in model.modules()]
    mixers = mixers_of(model)
    assert {mixer.passing for mixer in mixers} == {PASSED[model_type]}
    assert [vars(module).keys() for module in model.modules()] == [one.keys() for one in before]
    tensors = [value for module in model.modules() for value in vars(module).values()]
    assert not any(isinstance(value, torch.Tensor) for value in tensors)


def test_layers_of_one_model_pass_states_of_their_own() -> None:
    mixers = mixers_of(small_model("rwkv"))
    assert [mixer.layer_index for mixer in mixers] == [0, 1, 2, 3]
    assert [part.initial for part in mixers[2].parts] == [0, 0, 0, 0, pytest.approx(-1e30)]
    assert mixers[2].outputs == ((64,), None, None)


@pytest.mark.parametrize("model_type", PASSED)
def test_states_are_those_that_the_model_itself_keeps(model_type: str) -> None:
    """The mixer in two parts, with the model's own states as the oracle."""
    model = small_model(model_type)
    mixer = mixers_of(model)[0]
    hidden, positions = noise(1, 9, mixer.width), torch.arange(9)[None]
    with torch.inference_mode():
        _, states = run_segment(mixer, hidden[:, :6], None, Continuation.NATIVE, positions[:, :6])
        out, _ = run_segment(mixer, hidden[:, 6:], states, Continuation.TOKEN, positions[:, 6:])
        whole = own_forward(mixer, hidden, positions)
        lost, _ = run_segment(mixer, hidden[:, 6:], mixer.initial(), Continuation.TOKEN, positions[:, 6:])
    assert difference(out, whole[:, 6:]) <= TOLERANCE
    assert difference(out, lost) > 10 * TOLERANCE


def own_forward(mixer: RecurrentMixer, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The module over all tokens, without any state."""
    given: dict[str, Any] = {}
    if isinstance(mixer.passing, StateAttributes):
        given = {"use_cache": False, "position_ids": positions, "attention_mask": None}
    out: torch.Tensor = mixer.module(hidden, **given)[0]
    return out


def test_rows_that_a_module_mixes_run_alone() -> None:
    """RWKV of transformers adds every row's last input to all rows when it decodes."""
    kinds = {name: mixers_of(small_model(name))[0] for name in ("minimax", "recurrent_gemma", "rwkv", "xlstm", "zaya")}
    assert {name: decodes_together(mixer) for name, mixer in kinds.items()} == {name: name != "rwkv" for name in kinds}
    model = small_model("rwkv")
    with Engine(model, memory=MEMORY, max_model_len=LONGEST) as engine:
        batches = engine.runner._by_row
        assert batches == set(engine.runner._state_groups)


def test_module_that_forgets_its_convolution_continues_by_token() -> None:
    assert continuation(mixers_of(small_model("recurrent_gemma"))[0]) is Continuation.TOKEN
    assert continuation(mixers_of(small_model("minimax"))[1]) is Continuation.NATIVE


def test_outputs_of_tokens_are_told_from_states() -> None:
    """MiniMax returns its state beside the output, ZAYA queries, keys and values."""
    assert mixers_of(small_model("minimax"))[0].outputs == ((64,), None)
    zaya = mixers_of(small_model("zaya"))[0]
    assert zaya.outputs == ((4, 16), (2, 16), (2, 16))
    assert zaya.out_width == 128
    out = noise(1, 3, 128)
    parted = zaya.parted(out)
    assert isinstance(parted, tuple)
    assert torch.equal(zaya.joined(parted), out)


def test_several_modules_of_one_layer_share_its_page() -> None:
    model = small_model("inkling_text")
    mixers = state_layout(planner_model(model, block_size=16), probe(model))["model.layers.0.conv"]
    assert [part.index for mixer in mixers for part in mixer.parts] == [0, 1, 2, 3]


def test_cache_poses_as_the_class_of_a_model_only() -> None:
    """MiniMax takes its own class of caches alone."""
    model = small_model("minimax")
    cache = EmptyCache()
    ModelCall(model).arguments(cache, None)
    assert isinstance(cache, DynamicCache)
    assert type(cache).__name__ == "EmptyCache"
    other = EmptyCache()
    ModelCall(small_model("gpt2")).arguments(other, None)
    assert not isinstance(other, DynamicCache)


def test_states_that_the_plan_lacks_are_left_to_the_module() -> None:
    """Modules may keep any tensor; only layers with planned states take them from pages."""
    model = small_model("recurrent_gemma")
    planned, probed = planner_model(model, block_size=16), probe(model)
    windows = replace(planned, layers=tuple(one for one in planned.layers if one.index == 2))
    assert state_layout(windows, probed) == {}
    assert len(probed.own) == 3


def test_step_that_a_model_cuts_is_rejected_with_the_fix() -> None:
    model = small_model("xlstm")
    model.config.max_inference_chunksize = 8
    with (
        pytest.raises(WorkerError, match=r"reached xLSTMBlock as \(1, 8, 128\), .*: lower max_batched_tokens"),
        Engine(model, memory=MEMORY, max_model_len=LONGEST) as engine,
    ):
        engine.generate([list(range(30))], greedy(2))


def test_model_of_several_codebooks_is_rejected() -> None:
    decoder = config_of("musicgen").decoder
    decoder.num_hidden_layers = 1
    model = AutoModelForCausalLM._model_mapping[type(config_of("musicgen"))]._from_config(decoder)
    with pytest.raises(UnsupportedModelError, match="MusicgenForCausalLM reads 4 tokens at once, one of each codebook"):
        wrap(model, None, "musicgen").vocab_size  # noqa: B018  # the property raises


def test_lost_stacked_state_is_noticed_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault: the layers' states are given as zeros."""
    run = passing._InArgument.run

    def forgets(self: Any, call: Any) -> Any:  # noqa: ANN401
        self.states = tuple(torch.zeros_like(one) for one in self.states)
        return run(self, call)

    monkeypatch.setattr(passing._InArgument, "run", forgets)
    with pytest.raises(UnsupportedModelError, match="does not continue from its own state"):
        Engine(small_model("xlstm"), memory=MEMORY, max_model_len=LONGEST)


def test_run_decode_of_rows_in_argument_states_equals_each_alone() -> None:
    mixer = mixers_of(small_model("xlstm"))[0]
    hidden = noise(3, 1, mixer.width)
    with torch.inference_mode():
        _, states = run_segment(mixer, noise(1, 5, mixer.width), None, Continuation.NATIVE)
        many = tuple(torch.cat((one, one.roll(1, 1), one.flip(1))) for one in states)
        out, after = run_decode(mixer, hidden, tuple(one.clone() for one in many))
        for row in range(3):
            mine = tuple(one[row : row + 1] for one in many)
            alone, end = run_segment(mixer, hidden[row : row + 1], mine, Continuation.NATIVE)
            assert difference(out[row : row + 1], alone) <= TOLERANCE
            assert all(difference(a[row : row + 1], b) <= TOLERANCE for a, b in zip(after, end, strict=True))


def test_documented_types_with_own_states_run() -> None:
    assert PASSED.keys() <= {row["model type"] for row in read(DATA / "models-run.csv")}
