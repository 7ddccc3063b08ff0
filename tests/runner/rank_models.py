"""Tiny models cut for tensor parallel ranks by hand, which add their attention outputs up over processes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel


def rows_of(weight: torch.Tensor, heads: Sequence[int], width: int) -> torch.Tensor:
    """The rows of some heads of ``width`` rows each."""
    return torch.cat([weight[head * width : (head + 1) * width] for head in heads])


Cut = Callable[[torch.Tensor], torch.Tensor]


def share_of(whole: PreTrainedModel, rank: int, ranks: int, *, keep_states: bool = False) -> PreTrainedModel:
    """The model of one rank: its heads of attention and, unless states are whole, of delta rules; all of the rest."""
    config: Any = copy.deepcopy(whole.config)
    cuts = (
        _latent_attention(config, rank, ranks) if hasattr(config, "kv_lora_rank") else _attention(config, rank, ranks)
    )
    cuts_states = hasattr(config, "linear_num_key_heads") and not keep_states
    if cuts_states:
        cuts |= _delta_rules(config, rank, ranks)

    def cut(name: str, weight: torch.Tensor) -> torch.Tensor:
        kind = name.removesuffix(".weight").rpartition(".")[2]
        return cuts[kind](weight) if kind in cuts else weight

    made = type(whole)(config).to(whole.dtype).eval()
    made.load_state_dict({name: cut(name, weight).contiguous() for name, weight in whole.state_dict().items()})
    for name, module in made.named_modules():
        if name.endswith(("o_proj", "out_proj") if cuts_states else "o_proj"):
            module.register_forward_hook(_summed)
    return made


def _attention(config: Any, rank: int, ranks: int) -> dict[str, Cut]:  # noqa: ANN401  # a config of transformers
    """How the weights of attention are cut, by their names."""
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    kv_mine = sorted({head * kv_heads // heads for head in mine})
    config.num_attention_heads, config.num_key_value_heads = len(mine), len(kv_mine)
    gated = 2 if "qwen3_next" in config.model_type else 1
    return {
        "q_proj": lambda weight: rows_of(weight, mine, gated * width),
        "k_proj": lambda weight: rows_of(weight, kv_mine, width),
        "v_proj": lambda weight: rows_of(weight, kv_mine, width),
        "o_proj": lambda weight: rows_of(weight.T, mine, width).T,
    }


def _latent_attention(config: Any, rank: int, ranks: int) -> dict[str, Cut]:  # noqa: ANN401  # a config of transformers
    """How the weights of attention over latents are cut: each rank has the whole latent."""
    heads, nope, value = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    config.num_attention_heads = config.num_key_value_heads = len(mine)
    return {
        "q_b_proj": lambda weight: rows_of(weight, mine, nope + config.qk_rope_head_dim),
        "kv_b_proj": lambda weight: rows_of(weight, mine, nope + value),
        "o_proj": lambda weight: rows_of(weight.T, mine, value).T,
    }


def _delta_rules(config: Any, rank: int, ranks: int) -> dict[str, Cut]:  # noqa: ANN401  # a config of transformers
    """How the weights of gated delta rules are cut, by their names."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim, each = config.linear_key_head_dim, config.linear_value_head_dim, values // keys
    mine = range(rank * keys // ranks, (rank + 1) * keys // ranks)
    of_values = range(rank * values // ranks, (rank + 1) * values // ranks)
    config.linear_num_key_heads, config.linear_num_value_heads = len(mine), len(of_values)

    def channels(weight: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.split(weight, [keys * key_dim, keys * key_dim, values * value_dim])
        return torch.cat((rows_of(q, mine, key_dim), rows_of(k, mine, key_dim), rows_of(v, of_values, value_dim)))

    return {
        "in_proj_qkvz": lambda weight: rows_of(weight, mine, 2 * key_dim + 2 * each * value_dim),
        "in_proj_ba": lambda weight: rows_of(weight, mine, 2 * each),
        "conv1d": channels,
        "A_log": lambda weight: rows_of(weight, of_values, 1),
        "dt_bias": lambda weight: rows_of(weight, of_values, 1),
        "out_proj": lambda weight: rows_of(weight.T, of_values, value_dim).T,
    }


def _summed(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
    total = output.contiguous().clone()
    dist.all_reduce(total)
    return total
