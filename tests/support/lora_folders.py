"""Adapters of tiny models, trained by nobody: peft draws and saves them."""

import warnings
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model

from hybridkv.runner import tiny_model

CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "few": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "out_proj"]},
    "all": {
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": r".*\.([qkvo]_proj|in_proj\w*|out_proj|shared_mlp\.\w+_linear)",
        "rank_pattern": {"layers.0.*": 2, "v_proj": 6},
        "alpha_pattern": {"o_proj": 9},
    },
}
"""Two adapters of other layers and ranks, scaled in another way; the second of all layers but those beside experts."""


def save_adapter(name: str, folder: Path, kind: str, seed: int = 0) -> Path:
    """Save the adapter ``kind`` of the tiny model ``name`` with random weights, and return its folder."""
    torch.manual_seed(seed)
    model, fields = tiny_model(name, 0), CONFIGS[kind]
    if kind == "all" and not any("experts" in one for one, _ in model.named_modules()):
        fields = {**fields, "target_modules": "all-linear"}
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **fields)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")  # peft's own, for experts
        get_peft_model(model, config).save_pretrained(folder / kind)
    return folder / kind
