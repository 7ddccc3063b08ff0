"""Decode-only steps in CUDA graphs. On a CPU, a recorder that runs the step again stands for the graph."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hybridkv.errors import ConfigError
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, decode_graphs
from hybridkv.runner.check import generate_greedy
from hybridkv.runner.decode_graphs import Run
from hybridkv.runner.tiny import tiny_model
from hybridkv.step import Step

OUTPUT = 3
SAMPLING = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)


def again(run: Run) -> Run:
    """Captured by a first run."""
    run()
    return run


@pytest.fixture(autouse=True)
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gpu" not in request.keywords:
        monkeypatch.setattr(decode_graphs, "RECORDERS", {"cpu": again})


def prompts(model: PreTrainedModel, lengths: Sequence[int]) -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(1, model.config.vocab_size, (n,), generator=draw).tolist() for n in lengths]


def alone(model: PreTrainedModel, asked: Sequence[list[int]]) -> list[tuple[int, ...]]:
    with torch.inference_mode():
        return [tuple(generate_greedy(model, one, OUTPUT)) for one in asked]


def engine(model: PreTrainedModel, **kept: Any) -> Engine:  # noqa: ANN401 - options
    options = EngineOptions(**{"attention": "triton", "compile": "decode", "self_check": False, **kept})
    return Engine(model, options=options, memory="8MiB", max_model_len=64)


def sizes(made: Engine) -> list[int]:
    assert made.runner.decode_graphs is not None
    return sorted(made.runner.decode_graphs._graphs)


def test_decode_of_three_rows_is_padded_to_four_without_writes() -> None:
    """The fourth row has no slot, so the null block keeps its zeros."""
    model = tiny_model("llama", 0, fields={"num_hidden_layers": 2})
    asked = prompts(model, (5, 3, 4))
    wanted = alone(model, asked)
    with engine(model) as made:
        assert [one.token_ids for one in made.generate(asked, SAMPLING)] == wanted
        assert sizes(made) == [4]
        assert not any(pages.keys[0].any() or pages.values[0].any() for pages in made.runner._pages.values())
        assert all(pages.keys[1:].any() for pages in made.runner._pages.values())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "llama4", "gemma2"])
def test_decode_graphs_reused_for_other_rows_give_tokens_of_plain_model(name: str) -> None:
    """Windows, sinks, chunks and caps; graphs of one to four rows, used again for other requests and lengths."""
    model = tiny_model(name, 0)
    asked = prompts(model, (33, 3, 20, 9, 14))
    wanted = alone(model, asked)
    with engine(model, max_running=4, token_budget=21) as made:
        for _ in ("cold", "warm"):
            assert [one.token_ids for one in made.generate(asked, SAMPLING)] == wanted
        assert set(sizes(made)) <= {1, 2, 4}
        assert len(sizes(made)) > 1


FAULTS = ["lengths of before", "table of before", "slots of before", "positions of before"]


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=[] if one == FAULTS[0] else pytest.mark.thorough) for one in FAULTS]
)
def test_decode_graph_with_stale_inputs_gives_other_tokens(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two rounds has other blocks, so values of the first round are wrong."""
    model = tiny_model("llama", 0, fields={"num_hidden_layers": 2})
    first, *asked = prompts(model, (3, 7, 5))
    wanted = alone(model, asked)
    fill = decode_graphs._Graph.fill
    done = set[object]()

    def faulty(graph: Any, step: Step, tokens: Any, positions: Any) -> None:  # noqa: ANN401 - as it is
        before = graph._numbers.clone()
        held = [(made.lengths.clone(), made.table.clone()) for made in graph._batches.values()]
        fill(graph, step, tokens, positions)
        if graph in done:
            if fault in ("slots of before", "positions of before"):
                at = 1 if "positions" in fault else 2
                graph._numbers[at] = before[at]
            for made, (lengths, table) in zip(graph._batches.values(), held, strict=True):
                if fault == "lengths of before":
                    made.lengths.copy_(lengths)
                if fault == "table of before":
                    made.table.copy_(table)
        done.add(graph)

    monkeypatch.setattr(decode_graphs._Graph, "fill", faulty)
    with engine(model) as made:
        made.generate([first, first[:2]], SamplingParams(max_tokens=2, ignore_eos=True))
        assert [one.token_ids for one in made.generate(asked, SAMPLING)] != wanted


def test_failed_graph_capture_is_logged_and_step_runs_without_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_run: Run) -> Run:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(decode_graphs, "RECORDERS", {"cpu": refused})
    model = tiny_model("llama", 0)
    asked = prompts(model, (3, 4))
    wanted = [one[:2] for one in alone(model, asked)]
    with caplog.at_level(logging.WARNING, "hybridkv"), engine(model) as made:
        done = made.generate(asked, SamplingParams(max_tokens=2, ignore_eos=True))
        assert [one.token_ids for one in done] == wanted
    said = "LlamaForCausalLM: its steps run without CUDA graphs, because capturing failed: "
    assert said in caplog.text


def test_error_of_a_graph_replay_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an error during capture is handled."""

    def once(run: Run) -> Run:
        run()

        def replay() -> torch.Tensor:
            raise RuntimeError("the device is gone")

        return replay

    monkeypatch.setattr(decode_graphs, "RECORDERS", {"cpu": once})
    model = tiny_model("llama", 0)
    with engine(model) as made, pytest.raises(RuntimeError, match="the device is gone"):
        made.generate(prompts(model, (3,)), SAMPLING)


def test_graph_captured_in_inference_mode_runs_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(run: Run) -> Run:
        out = torch.zeros_like(run())
        return lambda: out

    monkeypatch.setattr(decode_graphs, "RECORDERS", {"cpu": nothing})
    model = tiny_model("llama", 0)
    with engine(model) as made:
        with torch.inference_mode():
            inside = made.generate(prompts(model, (3,)), SAMPLING)
        outside = made.generate(prompts(model, (4,)), SAMPLING)
    assert [one.token_ids[1:] for one in (*inside, *outside)] == [(0, 0)] * 2


@pytest.mark.parametrize(
    ("name", "kept", "why"),
    [
        ("llama", {"attention": "gather"}, "attention=gather makes tensors of different shapes in every step"),
        ("qwen3_next", {}, "recurrent layers read states from blocks that the host looks up"),
        ("deepseek_v3", {}, "the contexts of layer 0 are gathered"),
    ],
)
def test_decode_graphs_for_unsupported_models_are_off_with_a_warning(
    name: str, kept: Mapping[str, str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hybridkv"), engine(tiny_model(name, 0), **kept) as made:
        assert made.runner.decode_graphs is None
    assert f"steps that only decode run as they are: {why}" in caplog.text


def test_decode_graphs_on_a_cpu_are_off_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING, "hybridkv"), engine(tiny_model("llama", 0)) as made:
        assert made.runner.decode_graphs is None
    assert "graphs are captured on CUDA devices, but the model is on cpu" in caplog.text


def test_unknown_compile_option_is_rejected() -> None:
    with pytest.raises(ConfigError, match="compile must be 'decode', or None for no compilation, got 'all'"):
        EngineOptions(compile="all")
    assert EngineOptions().compile is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "llama4", "gemma2"])
def test_decode_graphs_on_a_gpu_give_tokens_of_plain_model(name: str) -> None:
    model = tiny_model(name, 0).to("cuda")
    if name == "gpt_oss":  # grouped products of float32 wait for the device, so they cannot be captured
        model.set_experts_implementation("batched_mm")
    asked = prompts(model, (33, 3, 20, 9, 14))
    wanted = alone(model, asked)
    with engine(model, max_running=4) as made:
        for _ in ("cold", "warm"):
            assert [one.token_ids for one in made.generate(asked, SAMPLING)] == wanted
        assert sizes(made)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_decode_graphs_on_a_gpu_capture_experts_in_bfloat16() -> None:
    model = tiny_model("gpt_oss", 0).to("cuda", torch.bfloat16)
    with engine(model, max_running=4) as made:
        made.generate(prompts(model, (33, 3, 20)), SAMPLING)
        assert sizes(made)
