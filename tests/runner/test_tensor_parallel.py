"""Models that transformers' plan cuts over processes generate the tokens of the whole model, and miss no failure."""

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_support import generated, greedy, loaded_model, shared_prompts

from hybridkv.errors import ConfigError, UnsupportedModelError, WorkerError
from hybridkv.request import SamplingParams, StructuredOutput
from hybridkv.runner import EngineOptions
from hybridkv.runner.drafters import NgramDrafter
from hybridkv.runner.tensor_parallel import Ranks

TOKENS = 8
PROMPTS = [*shared_prompts(3, 6, prefix=40, longest=20), [7, 8, 9] * 12]
SIZES: dict[str, Any] = {"memory": "8MiB", "max_model_len": 128}


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    "name",
    ["llama", "qwen3_next", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("gemma3", "olmo_hybrid"))],
)
def test_ranks_generate_the_tokens_of_the_whole_model(name: str) -> None:
    """Attention is cut unless keys are gathered, recurrent layers are whole; prefixes are found, on the host too."""
    whole = loaded_model(name)
    expected = [list(generated(whole, prompt, TOKENS)) for prompt in PROMPTS]
    before = torch.get_num_threads()
    with Ranks(f"tiny:{name}", 2) as ranks:
        mine = sum(one.to_local().numel() if hasattr(one, "to_local") else one.numel() for one in _weights(ranks))
        assert mine < sum(one.numel() for one in whole.model.parameters())
        with ranks.engine(**SIZES, host_memory="4MiB", speculate=NgramDrafter(3)) as engine:
            for again in range(2):
                done = engine.generate(PROMPTS, greedy(TOKENS))
                assert [list(one.token_ids) for one in done] == expected
                hits = [one.hit_tokens for one in done]
                assert not again or hits == [len(prompt) - 1 for prompt in PROMPTS]
    assert torch.get_num_threads() == before


def test_ranks_obey_structured_outputs() -> None:
    """Each rank masks its own logits, and all draw the tokens that rank 0 reports."""
    sampling = SamplingParams(
        max_tokens=24, temperature=1, seed=3, structured=StructuredOutput("choice", '["yes", "no"]')
    )
    with Ranks("tiny:llama", 2) as ranks, ranks.engine(**SIZES) as engine:
        done = engine.generate(["Yes or no?", "No or yes?"] * 3, sampling)
    assert {one.text for one in done} <= {"yes", "no"}
    assert {one.finish_reason for one in done} == {"stop"}


def _weights(ranks: Ranks) -> list[torch.Tensor]:
    return list(ranks.loaded.model.parameters())


@pytest.mark.parametrize(
    ("name", "number", "why"),
    [
        ("llama", 3, "num_attention_heads 4, which 3 ranks cannot divide"),
        ("mamba", 2, "no tensor parallel plan for the layers of MambaForCausalLM"),
        ("gpt_oss", 2, "no tensor parallel plan for the layers of GptOssForCausalLM"),  # only for its output head
    ],
)
def test_models_that_cannot_be_cut_are_rejected_by_name(name: str, number: int, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(why)):
        Ranks(f"tiny:{name}", number)
    assert not torch.distributed.is_initialized()


def test_wrong_arguments_are_rejected_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="ranks must be"):
        Ranks("tiny:llama", 1)
    with pytest.raises(ConfigError, match="device must be cpu or cuda, got 'tpu'"):
        Ranks("tiny:llama", 2, device="tpu")


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("by", "says"), [(signal.SIGKILL, ""), (signal.SIGABRT, "Fatal Python error: Aborted")])
def test_killed_rank_is_an_error_and_nothing_stays(
    by: signal.Signals, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A crash in C is an abort, and prints where the rank was."""
    options = EngineOptions(self_check=False)
    with Ranks("tiny:llama", 2) as ranks, ranks.engine(**SIZES, options=options) as engine:
        engine.generate(PROMPTS[:1], greedy(2))
        (child,) = ranks._children
        os.kill(child.pid, by)
        with pytest.raises((WorkerError, RuntimeError)):
            engine.generate(PROMPTS[1:], greedy(2))
    assert child.returncode == -by
    assert says in capfd.readouterr().err
    assert not torch.distributed.is_initialized()


def test_ranks_end_with_their_leader(tmp_path: Path) -> None:
    """A leader that is killed leaves no process behind."""
    script = tmp_path / "leads.py"
    script.write_text(
        "import time\n"
        "from hybridkv.runner import EngineOptions\n"
        "from hybridkv.runner.tensor_parallel import Ranks\n"
        "ranks = Ranks('tiny:llama', 2)\n"
        "engine = ranks.engine(memory='8MiB', max_model_len=64, options=EngineOptions(self_check=False))\n"
        "print(ranks._children[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as leader:  # noqa: S603 - our own
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        ended = os.pidfd_open(child)
        leader.kill()
    try:
        assert select.select([ended], [], [], 60)[0], "the rank still runs"
    finally:
        os.close(ended)
