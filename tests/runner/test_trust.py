"""Python code in a model folder runs only with trust_remote_code, whatever standard input has."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hostile_folder import CONFIG_CODE, TOKENIZER_CODE, TRACE, hostile_folder, put, ran
from runner_support import greedy

import warm
from cli_support import error
from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.runner import Engine, load
from hybridkv.runner.load import LoadedModel

UNKNOWN = "XTokenizer"
"""A tokenizer that transformers does not have."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With somebody at the keyboard who says yes to everything, and what is run copied elsewhere than home."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return hostile_folder(tmp_path)


def command(*arguments: str | Path, home: Path) -> subprocess.CompletedProcess[str]:
    """`hybridkv` in a process of its own, with ``yes`` on its standard input."""
    environment = {"HF_MODULES_CACHE": str(home / "modules")}
    return warm.run(["-m", "hybridkv", *arguments], text="y\n" * 9, environment=environment)


def generates(loaded: LoadedModel) -> bool:
    with Engine(loaded, memory="2MiB", max_model_len=128) as engine:
        return len(engine.generate(["a prompt"], greedy(4))[0].token_ids) == 4


def test_tokenizer_with_code_is_rejected(folder: Path) -> None:
    put(folder, "tokenizer_config.json", auto_map=TOKENIZER_CODE, tokenizer_class=UNKNOWN)
    with pytest.raises(ConfigError, match=r"Python code .*--trust-remote-code \(trust_remote_code=True\)"):
        load(str(folder))
    assert not ran(folder)


@pytest.mark.parametrize("auto_map", [TOKENIZER_CODE["AutoTokenizer"], {"AutoTokenizer": ["x--y.Z", None]}, [], 5])
def test_tokenizer_with_code_in_other_forms_is_rejected(folder: Path, auto_map: object) -> None:
    put(folder, "tokenizer_config.json", auto_map=auto_map, tokenizer_class=None)
    with pytest.raises(ConfigError, match=r"Python code|cannot load the tokenizer"):
        load(str(folder))
    assert not ran(folder)


def test_code_of_a_known_model_is_not_run(folder: Path) -> None:
    put(folder, "config.json", auto_map=CONFIG_CODE)
    put(folder, "tokenizer_config.json", auto_map=TOKENIZER_CODE, tokenizer_class="PreTrainedTokenizerFast")
    loaded = load(str(folder))
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert generates(loaded)
    assert not ran(folder)


@pytest.mark.parametrize("name", ["AutoImageProcessor", "AutoConfig", "LlavaProcessor", "AutoModelForImageToImage", 5])
def test_tokenizer_class_of_another_kind_is_rejected(folder: Path, name: object) -> None:
    """Other classes load more than a tokenizer."""
    put(folder, "config.json", auto_map={"AutoModelForImageToImage": "modeling_x.XForCausalLM"})
    put(folder, "preprocessor_config.json", auto_map={"AutoImageProcessor": "modeling_x.XForCausalLM"})
    for file in ("tokenizer_config.json", "config.json"):
        put(folder, "tokenizer_config.json", tokenizer_class=None)
        put(folder, file, tokenizer_class=name)
        with pytest.raises(ConfigError, match="tokenizer_class"):
            load(str(folder))
        assert not ran(folder)


def pickled(folder: Path, name: str) -> None:
    """A checkpoint that leaves a trace where it is unpickled."""

    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return exec, (f"with open({str(folder.parent / TRACE)!r}, 'a') as trace: trace.write('pickle')",)

    torch.save({"model.embed_tokens.weight": Runs()}, folder / name)


def test_pickled_checkpoint_is_never_opened(folder: Path) -> None:
    for name in ("pytorch_model.bin", "adapter_model.bin", "model.pt", "training_args.bin"):
        pickled(folder, name)
    assert generates(load(str(folder)))
    # named by the config, in spite of use_safetensors
    put(folder, "config.json", transformers_weights="adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.bin.*safetensors"):
        load(str(folder))
    # by the index of shards
    put(folder, "config.json", transformers_weights=None)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    for shard in ("pytorch_model.bin", "../outside.safetensors", str(folder / "other.safetensors"), 5):
        put(folder, "model.safetensors.index.json", metadata={}, weight_map={"model.embed_tokens.weight": shard})
        with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json.*safetensors"):
            load(str(folder))
    assert not ran(folder)


def test_trusted_code_of_a_folder_is_run(folder: Path) -> None:
    put(folder, "config.json", auto_map=CONFIG_CODE)
    put(folder, "tokenizer_config.json", auto_map=TOKENIZER_CODE, tokenizer_class=UNKNOWN)
    loaded = load(str(folder), trust_remote_code=True)
    assert (type(loaded.model).__name__, type(loaded.tokenizer).__name__) == ("XForCausalLM", "XTokenizer")
    assert generates(loaded)
    assert ran(folder) >= {"configuration_x", "modeling_x", "tokenization_x"}


def test_trust_option_that_is_not_a_boolean_is_rejected(folder: Path) -> None:
    for given in ("yes", 1, None):
        with pytest.raises(ConfigError, match="trust_remote_code must be true or false"):
            load(str(folder), trust_remote_code=given)  # type: ignore[arg-type]  # what is refused


def test_plan_of_a_folder_runs_no_code(folder: Path) -> None:
    put(folder, "config.json", auto_map=CONFIG_CODE)
    put(folder, "tokenizer_config.json", auto_map=TOKENIZER_CODE, tokenizer_class=UNKNOWN)
    assert read_model(folder).model_type == "llama"
    assert command("plan", folder, "--memory", "1GiB", home=folder.parent).returncode == 0
    assert not ran(folder)


def test_generate_command_runs_code_with_the_option_only(folder: Path) -> None:
    put(folder, "config.json", auto_map=CONFIG_CODE)
    put(folder, "tokenizer_config.json", auto_map=TOKENIZER_CODE, tokenizer_class=UNKNOWN)
    models = [("--model", folder), ("--model", "tiny:llama", "--speculate", f"draft:{folder}")]
    for model in models:
        assert "--trust-remote-code" in error("generate", *model, "--max-new-tokens", "3", stdin="y\n" * 9)
    assert not ran(folder)
    both = ("generate", *models[0], *models[1][2:], "--max-new-tokens", "3", "--trust-remote-code")
    done = command(*both, home=folder.parent)
    assert done.returncode == 0, done.stderr
    assert ran(folder) >= {"configuration_x", "modeling_x", "tokenization_x"}
