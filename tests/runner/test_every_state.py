"""Drafts of several rows in one call of a mixer give the states of token by token after every token."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hand_steps import HandRows
from runner_support import TOLERANCE, generated, greedy, loaded_model, shared_prompts
from test_continuation import NATIVE, SUPERPOSED, apart, mixers_of, noise, random_states

from hybridkv.errors import WorkerError
from hybridkv.runner import tiny_model
from hybridkv.runner.probe import probe
from hybridkv.runner.states.continuation import recurrence
from hybridkv.runner.states.recurrent import (
    Continuation,
    Recurrence,
    RecurrentMixer,
    recurrence_of,
    run_decode,
    run_every,
    run_segment,
)

SINGLE = [(name, torch.float32, TOLERANCE) for name in (*NATIVE, *SUPERPOSED)]
HALF = [(name, torch.bfloat16, 0.05) for name in ("qwen3_next", "mamba", "mamba2")]


@pytest.mark.parametrize(("name", "dtype", "tolerance"), [*SINGLE, *HALF])
def test_states_of_a_batched_call_equal_token_by_token(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Rows and tokens differ in number from the inspected call. One row starts from zeros. Two mixers are compared."""
    mixers = probe(tiny_model(name).to(dtype)).mixers
    for mixer in (mixers[0], mixers[-1]):
        found = recurrence(mixer)
        assert found is not None
        rows, tokens = 3, 4
        hidden = noise(rows, tokens, mixer.width).to(dtype)
        states = tuple(state.to(one.dtype) for one, state in zip(mixer.parts, random_states(mixer, rows), strict=True))
        for state in states:
            state[1] = 0
        before = [state.clone() for state in states]
        with torch.inference_mode():
            out, behind = run_every(mixer, hidden, states, found)
            assert all(torch.equal(*pair) for pair in zip(states, before, strict=True))
            for token in range(tokens):
                wanted, states = run_decode(mixer, hidden[:, token : token + 1], tuple(one.clone() for one in states))
                assert apart(out[:, token : token + 1], wanted) <= tolerance
                assert all(apart(*pair) <= tolerance for pair in zip(behind[token], states, strict=True))
                assert [one.dtype for one in behind[token]] == [part.dtype for part in mixer.parts]


def test_drafts_of_a_bounded_mixer_run_as_in_decoding() -> None:
    """NemotronH bounds the step size in calls of several tokens only. An accepted draft is a decoded token."""
    model = tiny_model("nemotron_h")
    mixer = probe(model).mixers[0]
    vars(mixer.module)["time_step_limit"] = (0.05, 0.1)
    with torch.inference_mode():
        states, hidden = random_states(mixer), noise(1, 3, mixer.width)
        one_call, _ = run_segment(mixer, hidden, states, Continuation.NATIVE)
        by_token, _ = run_segment(mixer, hidden, states, Continuation.TOKEN)
        assert apart(one_call, by_token) > TOLERANCE
        found = recurrence(mixer)
        assert found is not None
        assert apart(run_every(mixer, hidden, states, found)[0], by_token) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "projection", "calls"),
    [
        *(("qwen3_next", "in_proj_qkvz", 3), ("lfm2", "in_proj", 3), ("mamba2", "in_proj", 3)),
        *(("mamba", "in_proj", 3), ("zamba", "in_proj", 3)),
        ("mamba", "in_proj", 5),
    ],
)
def test_mixer_is_called_once_per_row_length_or_per_token(
    name: str, projection: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 3, 1, 5 and 3 tokens take 3 calls with a known recurrence, and 5 calls without."""
    if calls == 5:
        monkeypatch.setattr("hybridkv.runner.states.continuation.recurrence_of", lambda _: None)
    loaded = loaded_model(name)
    prompts = shared_prompts(4, 2)
    outputs = [generated(loaded, prompt, 12) for prompt in prompts]
    rows = HandRows(loaded, prompts, [greedy(12)] * 4, max_tokens=128, most_drafts=4)
    seen: list[tuple[int, ...]] = []
    mixer = next(module for module in loaded.model.modules() if hasattr(module, projection))
    hook = getattr(mixer, projection).register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape)))
    try:
        rows.step()
        seen.clear()
        rows.step([[*outputs[0][1:2], 1], [], list(outputs[2][1:5]), list(outputs[3][1:3])])
        assert len(seen) == calls
        assert sum(shape[0] * shape[1] for shape in seen) == 3 + 1 + 5 + 3
        for _ in range(3):
            rows.step()  # from the accepted states
    finally:
        hook.remove()
        rows.runner.detach()
    for prompt, tokens, output in zip(prompts, rows.tokens, outputs, strict=True):
        assert tuple(tokens[len(prompt) :]) == output[: len(tokens) - len(prompt)]
    assert [len(tokens) - len(prompt) for prompt, tokens in zip(prompts, rows.tokens, strict=True)] == [6, 5, 9, 7]


# -- detected recurrences and their check


def changed(name: str, make: Callable[[type[torch.nn.Module]], type[torch.nn.Module]]) -> RecurrentMixer:
    """The first mixer of a tiny model, of a class made of its own."""
    mixer = probe(tiny_model(name)).mixers[0]
    mixer.module.__class__ = make(type(mixer.module))
    return mixer


def test_wrapped_forward_verifies_drafts_token_by_token(caplog: pytest.LogCaptureFixture) -> None:
    def wrapped(own: type[torch.nn.Module]) -> type[torch.nn.Module]:
        class Wrapped(own):  # type: ignore[misc, valid-type]  # made on the spot
            def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
                out: torch.Tensor = own.forward(self, *args, **kwargs)
                return out

        return Wrapped

    mixer = changed("qwen3_next", wrapped)
    assert recurrence_of(mixer) is None
    with caplog.at_level(logging.INFO, logger="hybridkv"):
        assert recurrence(mixer) is None
    assert "Wrapped verifies drafts token by token" in caplog.text


def test_recurrence_that_differs_from_token_by_token_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """One recurrence has its tokens in another order, others raise an error."""
    mixer = mixers_of("qwen3_next")[0]
    found = recurrence(mixer)
    assert found is not None
    for wrong in (
        replace(found, sliced=found.sliced - {"beta"}),
        replace(found, step="l2norm"),
        Recurrence("l2norm", "l2norm"),
    ):
        monkeypatch.setattr("hybridkv.runner.states.continuation.recurrence_of", lambda _, wrong=wrong: wrong)
        assert recurrence(mixer) is None


def test_forward_without_the_expected_recurrence_is_rejected() -> None:
    mixer = mixers_of("qwen3_next")[0]
    states = random_states(mixer, 2)
    with torch.inference_mode(), pytest.raises(WorkerError, match="did not run its recurrence once"):
        run_every(mixer, noise(2, 3, mixer.width), states, Recurrence())
    zamba = mixers_of("zamba")[0]
    found, (conv, heads) = recurrence(zamba), random_states(zamba, 2)
    assert found is not None
    with torch.inference_mode(), pytest.raises(WorkerError, match="did not run its recurrence once"):
        run_every(zamba, noise(2, 3, zamba.width), (conv, torch.cat((heads, heads), dim=1)), found)
    lfm2 = mixers_of("lfm2")[0]
    with torch.inference_mode(), pytest.raises(WorkerError, match="did not pass its inputs to the cache"):
        run_every(lfm2, noise(2, 1, lfm2.width), random_states(lfm2, 2), Recurrence())
