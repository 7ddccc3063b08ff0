"""Recurrent mixers resume from given states: in segments, token by token and in batches. Also their self-check."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hybridkv.errors import UnsupportedModelError, WorkerError
from hybridkv.runner import tiny_model
from hybridkv.runner.probe import probe
from hybridkv.runner.states.continuation import continuation, of_each_kind
from hybridkv.runner.states.passing import States
from hybridkv.runner.states.recurrent import (
    SCAN,
    Continuation,
    MixerState,
    RecurrentMixer,
    StateKind,
    functions_of,
    run_decode,
    run_segment,
)

torch.set_num_threads(1)

TOLERANCE = 2e-4
TOKENS = 80
"""More than a chunk of any kernel."""

SUPERPOSED = ("mamba", "falcon_mamba", "jamba", "zamba")
NATIVE = (
    *("mamba2", "bamba", "falcon_h1", "zamba2", "granite_hybrid", "nemotron_h"),
    *("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "lfm2"),
)
EXPECTED = dict.fromkeys(SUPERPOSED, Continuation.SUPERPOSITION) | dict.fromkeys(NATIVE, Continuation.NATIVE)
WAYS = [(name, how) for name, best in EXPECTED.items() for how in dict.fromkeys((best, Continuation.TOKEN))]


@cache
def mixers_of(name: str) -> tuple[RecurrentMixer, ...]:
    return probe(tiny_model(name)).mixers


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_states(mixer: RecurrentMixer, rows: int = 1, seed: int = 1) -> States:
    return tuple(noise(rows, *part.shape, seed=seed + at) for at, part in enumerate(mixer.parts))


def apart(ours: torch.Tensor, reference: torch.Tensor) -> float:
    assert ours.shape == reference.shape
    return float((ours - reference).abs().max() / reference.abs().max())


@cache
def token_by_token(name: str, *, begins: bool) -> tuple[torch.Tensor, list[States]]:
    """Outputs of the last mixer on TOKENS tokens of noise, and the states before each of them and at the end.

    begins: from zeros, else from random states.
    """
    mixer = mixers_of(name)[-1]
    states = mixer.initial() if begins else random_states(mixer)
    hidden, outputs, seen = noise(1, TOKENS, mixer.width), [], [states]
    with torch.inference_mode():
        for at in range(TOKENS):
            out, states = run_decode(mixer, hidden[:, at : at + 1], tuple(state.clone() for state in states))
            outputs.append(out)
            seen.append(states)
    return torch.cat(outputs, dim=1), seen


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(("name", "how"), WAYS)
def test_mixer_in_segments_equals_token_by_token(name: str, how: Continuation, begins: bool) -> None:
    mixer = mixers_of(name)[-1]
    hidden = noise(1, TOKENS, mixer.width)
    outputs, seen = token_by_token(name, begins=begins)

    @given(st.sets(st.integers(1, TOKENS - 1), max_size=4))
    @settings(max_examples=2 if how is Continuation.TOKEN else 7)
    def holds(cuts: set[int]) -> None:
        states: States | None = None if begins else seen[0]
        with torch.inference_mode():
            for start, stop in pairwise([0, *sorted(cuts), TOKENS]):
                out, states = run_segment(mixer, hidden[:, start:stop], states, how)
                assert apart(out, outputs[:, start:stop]) <= TOLERANCE
                assert all(apart(*pair) <= TOLERANCE for pair in zip(states, seen[stop], strict=True))

    holds()


@pytest.mark.parametrize("name", EXPECTED)
def test_mixer_batch_of_single_tokens_equals_one_by_one(name: str) -> None:
    mixer, rows = mixers_of(name)[0], 5
    hidden = noise(rows, 1, mixer.width)
    states = random_states(mixer, rows)
    for state in states:
        state[2] = 0  # a request that begins
    alone = []
    with torch.inference_mode():
        for row in range(rows):
            before = None if row == 2 else tuple(state[row : row + 1] for state in states)
            alone.append(run_segment(mixer, hidden[row : row + 1], before, Continuation.NATIVE))
        out, after = run_decode(mixer, hidden, states)
    assert apart(out, torch.cat([one for one, _ in alone])) <= TOLERANCE
    for part, state in enumerate(after):
        assert apart(state, torch.cat([one[part] for _, one in alone])) <= TOLERANCE


@pytest.mark.parametrize("name", EXPECTED)
def test_mixer_on_own_states_equals_transformers_cache_bitwise(name: str) -> None:
    """A prompt, then two single tokens. The last mixer is used, because OlmoHybrid asks the cache for its state."""
    model = tiny_model(name)
    mixer = probe(model).mixers[-1]
    hidden, own = noise(1, 23, mixer.width), DynamicCache(config=model.config)
    states: States | None = None
    with torch.inference_mode():
        for start, stop in ((0, 21), (21, 22), (22, 23)):
            expected = mixer.module(hidden[:, start:stop], **{mixer.cache_parameter: own})
            out, states = run_segment(mixer, hidden[:, start:stop], states, Continuation.NATIVE)
            assert torch.equal(out, expected)
            layer = own.layers[mixer.layer_index]
            for part, state in zip(mixer.parts, states, strict=True):
                assert torch.equal(state, getattr(layer, f"{part.kind}_states")[part.index])


def test_mixer_does_not_change_its_input_states() -> None:
    for name, how in WAYS:
        mixer = mixers_of(name)[0]
        states = random_states(mixer)
        before = tuple(state.clone() for state in states)
        for tokens in (1, 7):
            with torch.inference_mode():
                _, after = run_segment(mixer, noise(1, tokens, mixer.width), states, how)
            assert all(torch.equal(a, b) for a, b in zip(states, before, strict=True))
            assert not any(torch.equal(a, b) for a, b in zip(states, after, strict=True))


@pytest.mark.parametrize("name", SUPERPOSED)
def test_superposition_in_half_precision_matches_token_by_token(name: str) -> None:
    model = tiny_model(name).to(torch.bfloat16)
    mixer = probe(model).mixers[0]
    assert continuation(mixer) is Continuation.SUPERPOSITION
    hidden = noise(1, 20, mixer.width).bfloat16()
    states = tuple(state.to(part.dtype) for part, state in zip(mixer.parts, random_states(mixer), strict=True))
    with torch.inference_mode():
        out, after = run_segment(mixer, hidden, states, Continuation.SUPERPOSITION)
        reference, wanted = run_segment(mixer, hidden, states, Continuation.TOKEN)
    assert (out.dtype, [one.dtype for one in after]) == (torch.bfloat16, [part.dtype for part in mixer.parts])
    assert apart(out.float(), reference.float()) < 0.05
    assert apart(after[1], wanted[1]) < 0.05


class Asking(torch.nn.Module):
    """Notes whether there is a state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.answers: list[bool] = []

    def forward(self, hidden: torch.Tensor, cached: Cache) -> torch.Tensor:
        self.answers.append(cached.has_previous_state(5))
        state: torch.Tensor = cached.update_recurrent_state(hidden.mean(dim=1), 5)
        return hidden + state[:, None]


def test_previous_state_is_missing_for_new_requests_only() -> None:
    module = Asking()
    mixer = RecurrentMixer(module, 5, "cached", 4, (MixerState(StateKind.RECURRENT, 0, (4,), torch.float32),))
    with torch.inference_mode():
        _, states = run_segment(mixer, noise(1, 3, 4), None, Continuation.TOKEN)
        run_segment(mixer, noise(1, 3, 4), states, Continuation.NATIVE)
        run_segment(mixer, noise(1, 2, 4), states, Continuation.TOKEN)
        run_decode(mixer, noise(2, 1, 4), mixer.initial(2))
    assert module.answers == [False, True, True, True, True]


# -- the self-check


@pytest.mark.parametrize("name", EXPECTED)
def test_continuation_of_each_architecture_is_the_expected_kind(name: str) -> None:
    found = of_each_kind(dict(enumerate(mixers_of(name))), continuation)
    assert set(found.values()) == {EXPECTED[name]}


def test_continuation_check_does_not_change_the_mixer() -> None:
    model = tiny_model("mamba2").to(torch.bfloat16)
    mixer = probe(model).mixers[0]
    before = {name: parameter.clone() for name, parameter in mixer.module.named_parameters()}
    assert continuation(mixer) is Continuation.NATIVE
    after = dict(mixer.module.named_parameters())
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == torch.bfloat16 for name in before)


def broken(name: str, damage: Callable[[Cache, int], None]) -> RecurrentMixer:
    """The first mixer of a tiny model, of a class that damages its cache before its forward."""
    mixer = probe(tiny_model(name)).mixers[0]
    own = type(mixer.module)

    class Broken(own):  # type: ignore[misc, valid-type]  # made on the spot
        def forward(self, hidden_states: torch.Tensor, **kwargs: Cache) -> torch.Tensor:
            damage(kwargs[mixer.cache_parameter], hidden_states.shape[1])
            out: torch.Tensor = own.forward(self, hidden_states, **kwargs)
            return out

    mixer.module.__class__ = Broken
    return mixer


def zeroed(kinds: Sequence[str], least: int) -> Callable[[Cache, int], None]:
    """Zeros for the states of ``kinds`` in calls of at least ``least`` tokens."""

    def damage(cached: Cache, tokens: int) -> None:
        if tokens >= least:
            for state in (one for kind in kinds for one in getattr(cached.layers[0], f"{kind}_states").values()):
                state.zero_()

    return damage


@pytest.mark.parametrize("kinds", [("conv",), ("recurrent",), ("conv", "recurrent")])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next", "kimi_linear"])
def test_mixer_that_drops_state_in_segments_runs_token_by_token(name: str, kinds: Sequence[str]) -> None:
    assert continuation(broken(name, zeroed(kinds, least=2))) is Continuation.TOKEN


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("mamba2", ("recurrent",)), ("mamba", ("conv",)), ("lfm2", ("conv",)), ("olmo_hybrid", ("conv", "recurrent"))],
)
def test_mixer_that_always_drops_its_state_is_rejected(name: str, kinds: Sequence[str]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"Broken does not continue from its own state: .*token \d.\de"):
        continuation(broken(name, zeroed(kinds, least=1)))


def test_mixer_that_drops_a_weak_state_runs_token_by_token() -> None:
    """A call of several tokens leaves right states, but computes its output from zero states. All values are tiny."""
    mixer = probe(tiny_model("mamba2")).mixers[0]
    own = type(mixer.module)

    class Forgetful(own):  # type: ignore[misc, valid-type]  # made on the spot
        def forward(self, hidden_states: torch.Tensor, **given: Cache) -> torch.Tensor:
            layer = given[mixer.cache_parameter].layers[0]
            kept = layer.conv_states[0], layer.recurrent_states[0]
            before = [state.clone() for state in kept]
            out: torch.Tensor = own.forward(self, hidden_states, **given)
            if hidden_states.shape[1] > 1:
                after = [state.clone() for state in kept]
                kept[0].copy_(before[0])
                kept[1].zero_()
                out = own.forward(self, hidden_states, **given)
                for state, right in zip(kept, after, strict=True):
                    state.copy_(right)
            return out

    mixer.module.__class__ = Forgetful
    with torch.no_grad():
        for name in ("conv1d.weight", "conv1d.bias"):
            mixer.module.get_parameter(name).mul_(1e-3)
    assert continuation(mixer) is Continuation.TOKEN


def test_mixer_with_wrong_final_state_runs_token_by_token() -> None:
    mixer = probe(tiny_model("qwen3_5")).mixers[0]
    own = type(mixer.module)

    class Careless(own):  # type: ignore[misc, valid-type]  # made on the spot
        def forward(self, hidden_states: torch.Tensor, **given: Cache) -> torch.Tensor:
            cache = given[mixer.cache_parameter]
            continues = cache.has_previous_state(0)
            out: torch.Tensor = own.forward(self, hidden_states, **given)
            if continues and hidden_states.shape[1] > 1:
                cache.layers[0].recurrent_states[0].mul_(1.01)
            return out

    mixer.module.__class__ = Careless
    assert continuation(mixer) is Continuation.TOKEN


def test_mixer_with_nan_output_is_rejected() -> None:
    mixer = probe(tiny_model("mamba2")).mixers[0]
    with torch.no_grad():
        mixer.module.get_parameter("out_proj.weight").fill_(torch.nan)
    with pytest.raises(UnsupportedModelError, match=r"\(native inf, token inf of the largest value, "):
        continuation(mixer)


def test_mixer_whose_decoding_differs_continues_natively_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """NemotronH bounds the step size over several tokens only: its prompts are right in one call."""
    model = tiny_model("nemotron_h")
    fields = {**model.config.to_dict(), "time_step_min": 0.05}
    fields.pop("model_type")
    clamped: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model("nemotron_h", **fields)).eval()
    clamped.load_state_dict(model.state_dict())
    with caplog.at_level(logging.WARNING, logger="hybridkv"):
        assert continuation(probe(model).mixers[0]) is Continuation.NATIVE
        assert not [record for record in caplog.records if record.name.startswith("hybridkv")]
        assert continuation(probe(clamped).mixers[0]) is Continuation.NATIVE
    assert "NemotronHMamba2Mixer: a prompt in one call and token by token differ by" in caplog.text


def test_continuation_is_checked_once_per_class_and_layout() -> None:
    asked: list[RecurrentMixer] = []

    def counted(mixer: RecurrentMixer) -> Continuation:
        asked.append(mixer)
        return Continuation.TOKEN

    mixers = (*mixers_of("mamba2"), *mixers_of("lfm2"), replace(mixers_of("lfm2")[0], parts=()))
    assert of_each_kind(dict(enumerate(mixers)), counted) == dict.fromkeys(range(7), Continuation.TOKEN)
    assert asked == [mixers[0], mixers[3], mixers[6]]


# -- bad input


def test_mixer_inputs_of_wrong_shape_are_rejected() -> None:
    mixer = mixers_of("mamba2")[0]
    states, native = random_states(mixer), Continuation.NATIVE
    with pytest.raises(WorkerError, match=r"a segment must be \[1, tokens, width\] of one request, got \(2, 3, 64\)"):
        run_segment(mixer, noise(2, 3, 64), None, native)
    with pytest.raises(WorkerError, match=r"at least one token of width 64, got \(1, 0, 64\)"):
        run_segment(mixer, noise(1, 0, 64), states, native)
    with pytest.raises(WorkerError, match=r"width 64, got \(1, 3, 32\)"):
        run_segment(mixer, noise(1, 3, 32), states, native)
    with pytest.raises(WorkerError, match=r"a decode batch must be \[rows, 1, width\], got \(2, 3, 64\)"):
        run_decode(mixer, noise(2, 3, 64), states)
    with pytest.raises(
        WorkerError, match=r"Mamba2Mixer needs states of shapes and dtypes \[\(\(2, 192, 4\), torch.float32\)"
    ):
        run_decode(mixer, noise(2, 1, 64), states)
    for wrong in (states[:1], (states[0], states[1].double()), (states[0], states[1][:, :4])):
        before = [state.clone() for state in wrong]
        with pytest.raises(WorkerError, match="needs states of shapes and dtypes"):
            run_segment(mixer, noise(1, 3, 64), wrong, native)
        assert all(torch.equal(a, b) for a, b in zip(wrong, before, strict=True))


def test_superposition_of_unsupported_mixers_is_rejected() -> None:
    mamba2, zamba = mixers_of("mamba2")[0], mixers_of("zamba")[0]
    assert SCAN not in functions_of(mamba2.module)
    with pytest.raises(WorkerError, match="Mamba2Mixer runs no mamba_selective_scan"):
        run_segment(mamba2, noise(1, 3, 64), random_states(mamba2), Continuation.SUPERPOSITION)
    lfm2 = mixers_of("lfm2")[0]
    with pytest.raises(WorkerError, match="Lfm2ShortConv keeps 0 recurrent states"):
        run_segment(lfm2, noise(1, 3, 64), random_states(lfm2), Continuation.SUPERPOSITION)
    conv, recurrent = zamba.parts
    for heads, wrong in ((1, "more"), (3, "less")):
        other = replace(zamba, parts=(conv, replace(recurrent, shape=(heads, *recurrent.shape[1:]))))
        with pytest.raises(WorkerError, match=f"scans {wrong} often than it has heads"), torch.inference_mode():
            run_segment(other, noise(1, 3, 64), random_states(other), Continuation.SUPERPOSITION)
