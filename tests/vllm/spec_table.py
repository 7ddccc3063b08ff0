"""Write vLLM's bytes and concurrency of layer specs: spec_table.py > tests/unit/planner/vllm_specs.json

Runs in an environment that has the Python modules of vLLM 0.33; kernels are not needed. vLLM's own functions compute
every number: pages, blocks, requests, groups and the largest concurrency. Settings are those that the functions read.

A case is a list of (layers, kind, fields), limits of a request, and vLLM's name of the layout. A field that JSON has no
type for is a list: ["fraction", n, d] or ["kernel_blocks", tokens]. A quantization is vLLM's --kv-cache-dtype: the
attention backend that has it sets the bytes of a state (customize_spec), as in vLLM's workers. FlashInfer's kernels are
not called, so empty modules take their place where the package is missing.
"""

import json
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.core import kv_cache_planning as planning
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_layout import KVCacheLayout

import vllm

KERNELS = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
if find_spec("flashinfer") is None:
    sys.modules |= {name: MagicMock() for name in KERNELS}
from vllm.v1.attention.backends.flashinfer import FlashInferBackend  # noqa: E402 - after its kernels

MEMORY = 1 << 30
LBNHC, BLHNC = "LBNHC", "BLHNC"
SMALL = {"max_model_len": 4096, "max_in_flight_tokens": 2048, "dcp": 1, "tp": 8}
LONG = {"max_model_len": 100_000, "max_in_flight_tokens": 8192, "dcp": 1, "tp": 8}
TWO = SMALL | {"dcp": 2}
HEADS = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
LATENT = {"block_size": 256, "num_kv_heads": 1, "head_size": 512, "dtype": "bfloat16"}
PACKED = {"block_size": 256, "num_kv_heads": 1, "head_size": 512, "dtype": "uint8", "state_content_bytes": 584}
INDEX = {"block_size": 256, "num_kv_heads": 1, "head_size": 132, "dtype": "uint8", "alignment": 576}
STATE = {"block_size": 16, "shapes": [[3, 8192], [32, 128, 128]], "dtypes": ["bfloat16", "float32"]}
FULL, MLA, WINDOW, RING = "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "CircularBufferSpec"
LATENT_WINDOW, CHUNKS, CROSS, MAMBA = (
    "SlidingWindowMLASpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "MambaSpec",
)


Fields = dict[str, Any]
Limits = dict[str, int]
Part = tuple[int, str, Fields]


def at_rates() -> Iterator[tuple[str, Fields]]:
    """Yield specs that any limits suit: plain and compressed attention, windows and rings."""
    yield FULL, HEADS
    yield FULL, HEADS | {"head_size_v": 64}
    for rate in (2, 8, ["fraction", 1, 4], ["fraction", 3, 2]):
        yield FULL, HEADS | {"block_size": 48, "tokens_per_state": rate}
    for rate in (1, 4, 128):
        for alignment in (None, 512, 576):
            yield MLA, PACKED | {"tokens_per_state": rate, "alignment": alignment}
        yield MLA, LATENT | {"tokens_per_state": rate}
        yield MLA, INDEX | {"tokens_per_state": rate, "cache_role": "indexer"}
    for window, block_size in ((8, 4), (128, 8), (128, 64)):
        fields = PACKED | {"block_size": block_size, "sliding_window": window, "alignment": 576}
        yield LATENT_WINDOW, fields
        yield LATENT_WINDOW, fields | {"extra_retained_tokens": 3}
    for window, extra in ((1024, 0), (1024, 1), (1024, 40), (100, 3)):
        yield WINDOW, HEADS | {"sliding_window": window, "extra_retained_tokens": extra}
    for block_size, heads in ((8, 1), (16, 2), (64, 1)):
        yield RING, HEADS | {"block_size": block_size, "num_kv_heads": heads, "head_size_v": 0}


def more() -> Iterator[tuple[str, Fields]]:
    """Yield specs of the other kinds, of packed heads, and of aligned strides."""
    yield WINDOW, HEADS | {"sliding_window": 1024, "tokens_per_state": 4}
    yield RING, HEADS
    yield CHUNKS, HEADS | {"attention_chunk_size": 512}
    yield CHUNKS, HEADS | {"attention_chunk_size": 512, "tokens_per_state": 2}
    yield FULL, HEADS | {"num_head_slots": 2}
    yield FULL, HEADS | {"num_head_slots": 2, "state_content_bytes": 72, "dtype": "uint8"}
    yield FULL, HEADS | {"page_size_padded": 70_000}
    yield MLA, LATENT | {"is_index_group_leader": True}
    for stride in (4096, 4480, ["kernel_blocks", 64], ["kernel_blocks", 100], ["kernel_blocks", 256]):
        yield MLA, LATENT | {"head_size": 500, "block_stride_alignment": stride}
        yield MLA, LATENT | {"head_size": 500, "block_stride_alignment": stride, "tokens_per_state": 4}
    yield MLA, PACKED | {"alignment": 576, "block_stride_alignment": 65_536, "tokens_per_state": 4}
    for mode, drafts in (("none", 0), ("none", 2), ("align", 0), ("align", 2)):
        yield MAMBA, STATE | {"mode": mode, "num_speculative_blocks": drafts}
    yield MAMBA, STATE | {"mode": "align", "num_speculative_blocks": 0, "block_stride_alignment": 1000}


def over_ranks() -> Iterator[tuple[str, Fields]]:
    """Yield specs that two context parallel ranks share, or keep whole."""
    for shards in (1, 2, 3, 8, 16):
        yield MLA, LATENT | {"max_tp_shards": shards}
        yield MLA, LATENT | {"max_tp_shards": shards, "dcp_sharded": False}
    for kind, fields in ((FULL, HEADS), (MLA, LATENT | {"tokens_per_state": 4})):
        for sharded in (True, False):
            yield kind, fields | {"dcp_sharded": sharded}
    yield WINDOW, HEADS | {"sliding_window": 1024, "dcp_sharded": False}


def alone() -> Iterator[tuple[str, Fields, Limits]]:
    """Yield cases of one spec: kind, fields, limits."""
    yield from ((kind, fields, limits) for limits in (SMALL, LONG) for kind, fields in at_rates())
    yield from ((kind, fields, SMALL) for kind, fields in more())
    yield from ((FULL, HEADS | {"max_tp_shards": shards}, SMALL) for shards in (1, 2, 3, 8, 16))
    yield from ((kind, fields, TWO) for kind, fields in over_ranks())
    yield from ((kind, fields, SMALL) for kind, fields in quantized())
    yield from ((kind, fields, TWO) for kind, fields in quantized() if kind in {FULL, MLA})


QUANTIZED = {"int8_per_token_head": "int8", "fp8_per_token_head": "uint8", "int4_per_token_head": "uint8"}
"""vLLM's dtype of codes by --kv-cache-dtype; besides these, nvfp4."""


def quantized() -> Iterator[tuple[str, Fields]]:
    """Yield specs of codes with scales of each token and head."""
    for name, dtype in QUANTIZED.items():
        form = {"dtype": dtype, "quantization": name}
        for sizes in ({}, {"head_size_v": 64}, {"num_kv_heads": 3, "head_size": 80, "block_size": 32}):
            yield FULL, HEADS | form | sizes
        yield WINDOW, HEADS | form | {"sliding_window": 1024}
        yield CHUNKS, HEADS | form | {"attention_chunk_size": 512}
        yield MLA, LATENT | form | {"head_size": 576}
        yield MLA, LATENT | form | {"head_size": 576, "tokens_per_state": 4, "alignment": 576}
        yield FULL, HEADS | form | {"block_stride_alignment": 4096}
    form = {"dtype": "uint8", "quantization": "nvfp4"}
    for sizes in ({}, {"num_kv_heads": 3, "head_size": 80}, {"block_stride_alignment": 4096}):
        yield FULL, HEADS | form | sizes
    yield WINDOW, HEADS | form | {"sliding_window": 1024}


def models() -> Iterator[tuple[str, list[Part], Limits]]:
    """Yield cases of several specs: a name, then (layers, kind, fields) and limits."""
    yield "v32", [(61, MLA, LATENT), (61, MLA, INDEX)], SMALL
    yield "v32-leaders", [(1, MLA, LATENT | {"is_index_group_leader": True}), (3, MLA, LATENT), (1, MLA, INDEX)], SMALL
    window = PACKED | {"block_size": 64, "sliding_window": 128, "alignment": 576}
    states = {"num_kv_heads": 1, "dtype": "float32", "alignment": 576}
    four = [
        (30, MLA, PACKED | {"tokens_per_state": 4, "alignment": 576}),
        (30, MLA, INDEX | {"tokens_per_state": 4}),
        (31, MLA, PACKED | {"tokens_per_state": 128, "alignment": 576}),
        (61, LATENT_WINDOW, window),
        (30, LATENT_WINDOW, states | {"block_size": 4, "head_size": 2048, "sliding_window": 8}),
        (30, LATENT_WINDOW, states | {"block_size": 4, "head_size": 512, "sliding_window": 8}),
        (31, LATENT_WINDOW, states | {"block_size": 8, "head_size": 1024, "sliding_window": 128}),
    ]
    yield "v4", four, LONG
    yield "v4-short", four, SMALL
    yield "v4-aligned", [(n, kind, one | {"block_stride_alignment": 1024}) for n, kind, one in four], LONG
    yield "ties", [(2, *four[0][1:]), (2, *four[1][1:]), (3, *four[3][1:])], SMALL
    ring = {"block_size": 8, "num_kv_heads": 1, "head_size": 128, "head_size_v": 0, "dtype": "bfloat16"}
    keys = LATENT | {"head_size": 128}
    yield (
        "rings",
        [(12, FULL, HEADS | {"block_size": 256}), (12, MLA, keys | {"tokens_per_state": 8}), (12, RING, ring)],
        LONG,
    )
    large = ring | {"block_size": 256}
    yield (
        "many-rings",
        [(2, FULL, HEADS | {"block_size": 256}), (2, MLA, keys | {"tokens_per_state": 8}), (50, RING, large)],
        LONG,
    )
    yield "rings-alone", [(2, FULL, HEADS | {"block_size": 256}), (50, RING, large)], LONG
    apart = [
        (n, kind, one | {"block_stride_alignment": 1024 + 512 * (at % 2)}) for at, (n, kind, one) in enumerate(four)
    ]
    yield "two-strides", apart, LONG
    pools = [(20, MLA, LATENT), (20, MLA, keys | {"tokens_per_state": 4}), (20, RING, ring | {"num_kv_heads": 2})]
    yield "pools", pools, LONG
    for name, dtype in (*QUANTIZED.items(), ("nvfp4", "uint8")):
        # layers 0 and 1 are left out
        yield f"{name}-skips", [(2, FULL, HEADS), (34, FULL, HEADS | {"dtype": dtype, "quantization": name})], LONG
    yield "pools-shared-twice", [(20, MLA, LATENT), (5, MLA, keys | {"tokens_per_state": 4}), (5, RING, ring)], LONG


READ: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda name: getattr(torch, name),
    "dtypes": lambda names: tuple(getattr(torch, one) for one in names),
    "shapes": lambda shapes: tuple(map(tuple, shapes)),
    "cache_role": interface.SparseCacheRole,
    "quantization": interface.get_kv_quant_mode,
}
"""A field in vLLM's type."""


def read(name: str, value: Any) -> Any:  # noqa: ANN401 - a field of any type
    """Return the value of a field in vLLM's type."""
    match value:
        case ["fraction", above, below]:
            return Fraction(above, below)
        case ["kernel_blocks", tokens]:
            return MultipleOf(tokens)
    return READ[name](value) if name in READ else value


def layer_outermost() -> Iterator[tuple[str, list[Part], Limits]]:
    """Yield cases of several specs that share one block table, each layer with a run of blocks of its own."""
    latents = LATENT | {"head_size": 500, "block_stride_alignment": 4096}
    yield "v32-aligned", [(3, MLA, latents), (3, MLA, INDEX | {"block_stride_alignment": 1000})], SMALL


def theirs(kind: str, fields: Fields) -> Any:  # noqa: ANN401 - vLLM is not typed here
    """Return vLLM's spec."""
    named = {"mode": "mamba_cache_mode", "quantization": "kv_quant_mode"}
    spec = getattr(interface, kind)(**{named.get(name, name): read(name, value) for name, value in fields.items()})
    if "quantization" not in fields:
        return spec
    backend: Any = MLACommonBackend if kind == MLA else TritonAttentionBackend
    return (FlashInferBackend if spec.kv_quant_mode.is_nvfp4 else backend).customize_spec(spec)


def settings(limits: Limits, layout: str, mode: str) -> SimpleNamespace:
    """Return the settings that vLLM's functions read."""
    return SimpleNamespace(
        max_in_flight_tokens=limits["max_in_flight_tokens"],
        model_config=SimpleNamespace(max_model_len=limits["max_model_len"]),
        parallel_config=SimpleNamespace(decode_context_parallel_size=limits["dcp"]),
        cache_config=SimpleNamespace(
            mamba_cache_mode=mode,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, max_num_encoder_input_tokens=0),
        attention_config=SimpleNamespace(hisparse_config=None),
    )


def measured(name: str, parts: list[Part], limits: Limits, layout: str) -> dict[str, Any]:
    """Return a case with vLLM's numbers."""
    mode = next((fields["mode"] for _, _, fields in parts if "mode" in fields), "none")
    started = settings(limits, layout, mode)
    specs: dict[str, Any] = {}
    each = []
    for at, (layers, kind, fields) in enumerate(parts):
        spec = theirs(kind, fields)
        specs |= {f"{at}.{layer}": spec for layer in range(layers)}
        each.append(
            {
                "page_bytes": spec.page_size_bytes,
                "states": spec.num_states,
                "stride_multiple": spec.get_block_stride_alignment(),
                "request_bytes": spec.max_memory_usage_bytes(started),
                "row_blocks": spec.max_num_blocks_per_req(started, limits["max_model_len"]),
                "is_cached": spec.prefix_cacheable,
            }
        )
    groups = planning.get_kv_cache_groups(started, specs)
    config = planning.get_kv_cache_config_from_groups(started, groups, MEMORY)
    return {
        "name": name,
        "parts": parts,
        "limits": limits,
        "specs": each,
        "group_layers": sorted(len(group.layer_names) for group in groups),
        "block_bytes": planning._get_kv_cache_bytes_per_block(
            groups, started.cache_config.get_resolved_kv_cache_layout()
        ),
        "num_blocks": config.num_blocks,
        "concurrency": get_max_concurrency_for_kv_cache_config(started, config),
        "tp_replicas": planning.kv_cache_groups_tp_replicas(groups, limits["tp"], limits["dcp"]),
    }


def table() -> dict[str, Any]:
    """Return all cases with vLLM's numbers."""
    cases = [
        measured(f"{kind}-{at}", [(2, kind, fields)], limits, LBNHC)
        for at, (kind, fields, limits) in enumerate(alone())
    ]
    cases += [measured(name, parts, limits, BLHNC) for name, parts, limits in models()]
    cases += [measured(name, parts, limits, LBNHC) for name, parts, limits in layer_outermost()]
    return {"vllm": vllm.__version__, "memory_bytes": MEMORY, "cases": cases}


if __name__ == "__main__":
    made = table()
    rows = ",\n".join(json.dumps(case, separators=(", ", ": ")) for case in made.pop("cases"))
    sys.stdout.write(json.dumps(made)[:-1] + ', "cases": [\n' + rows + "\n]}\n")
