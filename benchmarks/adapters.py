"""Measure what LoRA adapters cost: seconds of decoding steps of the model alone and of a mix, in turns, in one process.

    python adapters.py [--model tiny:llama] [--adapters 4] [--rank 16] [--rows 32] [--new-tokens 64] [--rounds 7]

``beside`` are rows of the model with adapters loaded, ``mixed`` are rows of the model and all adapters in turn. Every
linear layer has adapters. Processor seconds change little with other work on the machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from larger_models import llama_100m, qwen3_next_100m
from safetensors.torch import save_file

from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, LoadedModel, load

MODELS = {"llama-100m": llama_100m, "qwen3-next-100m": qwen3_next_100m}


def save_adapter(folder: Path, loaded: LoadedModel, rank: int) -> str:
    """Save an adapter with random weights for every linear layer below the output head."""
    folder.mkdir()
    head, tensors = loaded.model.get_output_embeddings(), dict[str, torch.Tensor]()
    for name, layer in loaded.model.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer is not head:
            outputs, inputs = layer.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs) / inputs**0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank) / 100
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    return str(folder)


def main() -> None:
    """Print the seconds of a step, and the ratios of steps with adapters to steps without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny:llama", help=f"tiny:NAME, a folder, {' or '.join(MODELS)}")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    alone, beside = (MODELS[asked.model]() if asked.model in MODELS else load(asked.model) for _ in range(2))
    sampling = SamplingParams(max_tokens=asked.new_tokens, ignore_eos=True)
    names = [f"adapter-{number}" for number in range(asked.adapters)]
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: save_adapter(Path(folder) / name, alone, asked.rank) for name in names}
        common = EngineOptions(asked.rows, self_check=False, prefix_caching=False)
        mixing = EngineOptions(asked.rows, self_check=False, prefix_caching=False, lora_modules=folders)
        plain = Engine(alone, options=common, memory="512MiB", max_model_len=256)
        adapted = Engine(beside, options=mixing, memory="512MiB", max_model_len=256)
    mix: list[str | None] = [None, *names]
    sides = {"alone": (plain, mix[:1]), "beside": (adapted, mix[:1]), "mixed": (adapted, mix)}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(asked.rounds + 1):
        for side, (engine, adapters) in sides.items():
            for at in range(asked.rows):
                engine.add([at, 7, 9, 11], sampling, lora=adapters[at % len(adapters)])
            begun, worked = time.perf_counter(), time.process_time()
            while not engine.idle:
                engine.step()
            if number:  # the first round warms up
                took[side].append((time.perf_counter() - begun, time.process_time() - worked))
    print(f"{asked.model}, {asked.rows} rows, {asked.adapters} adapters of rank {asked.rank}:", end="")
    for side, seconds in took.items():
        by_clock, by_work = (
            median(one[kind] / other[kind] for one, other in zip(seconds, took["alone"], strict=True))
            for kind in (0, 1)
        )
        step = median(one for one, _ in seconds) / asked.new_tokens * 1e3
        print(f" {side} {step:.2f} ms a step ({by_clock - 1:+.1%}, processor {by_work - 1:+.1%})", end="")
    print()
    plain.close()
    adapted.close()


if __name__ == "__main__":
    main()
