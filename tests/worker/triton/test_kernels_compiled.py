"""Attention, writes and shifts compiled for Ampere and Hopper: the interpreter takes more than the compiler does.

In a process of its own, for GPUs that need not be there: in this one Triton may be set to interpret. The arguments are
those of real calls, recorded instead of launched.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridkv.worker import AttentionMask, KVPages, TritonBatch, paged_batch, triton_batch, triton_paged_attention

# bytes of shared memory that a program may take
SHARED = {80: 163 << 10, 90: 227 << 10}
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Shape:
    """A layer, the queries of its one request, and the GPU; with all that a mask can have, or with none."""

    capability: int
    heads: tuple[int, int]
    widths: tuple[int, int]
    queries: int = 1
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    latent: bool = False
    everything: bool = False
    out: torch.dtype = torch.float32


SHAPES = {
    "decode": Shape(90, (32, 8), (128, 128)),
    "prefill with everything": Shape(90, (32, 8), (192, 128), queries=64, everything=True),
    "latents": Shape(80, (128, 1), (576, 512), latent=True),
    "float8 by bits": Shape(80, (8, 2), (64, 64), fp8=True),
    "float8 by instruction": Shape(90, (8, 2), (64, 64), fp8=True),
    "float32": Shape(80, (8, 2), (64, 64), dtype=torch.float32),
    "bfloat16 outputs": Shape(90, (32, 8), (128, 128), out=torch.bfloat16),
    "bfloat16 outputs with everything": Shape(90, (32, 8), (192, 160), everything=True, out=torch.bfloat16),
}


class Recorder:
    """In a kernel's place: keeps what it would have been launched with."""

    def __init__(self, kernel: Any) -> None:  # noqa: ANN401 - Triton is not typed
        self.kernel = kernel
        self.arguments: dict[str, Any] = {}
        self.constants: set[str] = set()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*positional: object, **constants: object) -> None:
            self.arguments = dict(zip(self.kernel.arg_names, positional, strict=False)) | constants
            self.constants = set(constants)

        return launch

    def compiled(self, capability: int) -> dict[str, Any]:
        """Shared memory, and instructions that matter, as a launch of these arguments would compile it."""
        import triton  # noqa: PLC0415 - only in the process that compiles
        from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - as above
        from triton.compiler import ASTSource  # noqa: PLC0415 - as above

        signature, constants, attributes = {}, {}, {}
        for i, name in enumerate(self.kernel.arg_names):
            value, plain = self.arguments[name], self.kernel.params[i].do_not_specialize
            if name in self.constants or (isinstance(value, int) and value == 1 and not plain):
                signature[name], constants[i,] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
            whole = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
            if whole and signature[name] != "constexpr" and not plain:
                attributes[i,] = [["tt.divisibility", 16]]
        options = {name: self.arguments[name] for name in ("num_warps", "num_stages") if name in self.arguments}
        source = ASTSource(self.kernel, signature, constants, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        ptx: str = made.asm["ptx"]
        return {
            "shared": made.metadata.shared,
            "tensor cores": "mma.sync" in ptx or "wgmma" in ptx,
            "asynchronous copies": "cp.async.cg" in ptx,  # of 16 bytes each
            "float8": "e4m3x2" in ptx,
            "stores": "st.global" in ptx,
        }

    def compiled_for(self) -> list[str]:
        """What Triton looks at to find out whether it has compiled for these arguments."""
        from triton._C.libtriton import native_specialize_impl  # noqa: PLC0415 - only in the process that compiles
        from triton.backends.compiler import BaseBackend  # noqa: PLC0415 - as above

        keys = []
        for name, parameter in zip(self.kernel.arg_names, self.kernel.params, strict=True):
            value, looked_at = self.arguments[name], not parameter.do_not_specialize
            key = (
                value
                if name in self.constants
                else native_specialize_impl(BaseBackend, value, *(False, looked_at, True))
            )
            keys.append(f"{name} {key}")
        return keys


def layer(shape: Shape, requests: int = 1, columns: int = 8) -> tuple[torch.Tensor, KVPages, TritonBatch]:
    heads, kv_heads = shape.heads
    cache = torch.float8_e4m3fn if shape.fp8 else shape.dtype
    keys, values = (torch.zeros(4, 16, kv_heads, width).to(cache) for width in shape.widths)
    pages = KVPages(keys, keys[..., : shape.widths[1]] if shape.latent else values)
    table = torch.zeros(requests, columns, dtype=torch.int32)
    starts = range(0, requests * shape.queries + 1, shape.queries)
    paged = paged_batch(starts, [16 * columns] * requests, table, block_size=16, num_blocks=4)
    mask = AttentionMask(window=40, chunk=64) if shape.everything else AttentionMask()
    batch = triton_batch(paged, mask, num_heads=heads, pages=pages, dtype=shape.dtype, splits=2)
    tiles = replace(batch.tiles, native_fp8=shape.capability >= 89)
    query = torch.zeros(requests * shape.queries, heads, shape.widths[0], dtype=shape.dtype)
    return query, pages, replace(batch, tiles=tiles)


def record_attention(
    shape: Shape, kernels: tuple[Any, ...], requests: int = 1, columns: int = 8
) -> tuple[Recorder, Recorder]:
    from hybridkv.worker import kernels as ours  # noqa: PLC0415 - only in the process that compiles

    recorders = Recorder(kernels[0]), Recorder(kernels[1])
    ours.attention_kernel, ours.combine_kernel = recorders
    ours.INTERPRETED = True  # type: ignore[misc] # so that a batch is made on a CPU
    query, pages, batch = layer(shape, requests, columns)
    ours.INTERPRETED = False  # type: ignore[misc] # as on a GPU
    with_everything: dict[str, Any] = {"softcap": 30.0, "sink_logits": torch.zeros(shape.heads[0])}
    out = torch.zeros(*query.shape[:2], shape.widths[1], dtype=shape.out)
    triton_paged_attention(query, pages, batch, 0.1, **with_everything if shape.everything else {}, out=out)
    return recorders


def steps(kernels: tuple[Any, ...]) -> list[list[str]]:
    """Of one layer, in steps of other numbers of requests and other widths of the table."""
    recorded = [
        record_attention(SHAPES["decode"], kernels, r, c) for r, c in ((1, 1), (2, 16), (3, 9), (4, 10), (5, 11))
    ]
    return [[key for recorder in recorders for key in recorder.compiled_for()] for recorders in recorded]


def compile_writes() -> list[dict[str, Any]]:
    from hybridkv.worker import kernels as ours  # noqa: PLC0415 - as above
    from hybridkv.worker import triton_write_kv  # noqa: PLC0415 - only in the process that compiles

    recorder = Recorder(ours.write_kernel)
    ours.write_kernel = recorder
    made = []
    for cache, capability in ((torch.bfloat16, 90), (torch.float8_e4m3fn, 80)):
        pages = KVPages(torch.zeros(4, 16, 8, 128).to(cache), torch.zeros(4, 16, 8, 128).to(cache))
        states = torch.zeros(2, 8, 128, dtype=torch.bfloat16)
        triton_write_kv(torch.zeros(2, dtype=torch.int64), pages, states, states)
        made.append(recorder.compiled(capability))
    return made


def compile_shift(one: str, other: str) -> str:
    """The shift of 2-byte elements, ``one`` of whose strides is 1 and known when it is compiled."""
    import triton  # noqa: PLC0415 - only in the process that compiles
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - as above
    from triton.compiler import ASTSource  # noqa: PLC0415 - as above

    from hybridkv.worker import kernels as ours  # noqa: PLC0415 - as above

    signature = {"stack": "*i16", "source": "*i64", "destination": "*i64", "bias": "*i64"}
    signature |= {"layer_stride": "i64", "block_stride": "i64", one: "constexpr", other: "i32"}
    signature |= dict.fromkeys(("layers", "tiles", "columns", "channels"), "i32")
    signature |= {"all_columns": "constexpr", "tile": "constexpr"}
    source = ASTSource(fn=ours._shift_kernel, signature=signature, constexprs={one: 1, "all_columns": 8, "tile": 256})
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return ptx


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("compiled")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, str(Path(__file__))]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)  # noqa: S603 - this very file
    made: dict[str, Any] = json.loads(ran.stdout)
    return made


@pytest.mark.parametrize("name", SHAPES)
def test_attention_kernels_compile_for_gpus(name: str, compiled: dict[str, Any]) -> None:
    shape = SHAPES[name]
    kernel, combining = compiled[name]
    assert 0 < kernel["shared"] <= SHARED[shape.capability]
    assert kernel["tensor cores"]
    assert kernel["asynchronous copies"]
    assert kernel["float8"] == (shape.fp8 and shape.capability >= 89)
    assert combining["stores"]


def test_attention_steps_of_other_sizes_reuse_the_compiled_kernel(compiled: dict[str, Any]) -> None:
    """That would take seconds, in the middle of serving: a table's width, addresses within what was sent at once."""
    first, *others = compiled["steps"]
    assert others == [first] * 4


def test_write_kernels_compile_for_gpus(compiled: dict[str, Any]) -> None:
    assert all(kernel["stores"] for kernel in compiled["writes"])


@pytest.mark.parametrize("stride", ["channel_stride", "column_stride"])
def test_state_shift_reads_all_columns_before_it_writes(stride: str, compiled: dict[str, Any]) -> None:
    """A state shifts into its own block; the interpreter runs one thread after the other."""
    lines = compiled[stride].splitlines()
    reads = [i for i, line in enumerate(lines) if re.search(r"ld\.global\S*b16", line)]
    writes = [i for i, line in enumerate(lines) if "st.global" in line]
    barriers = [i for i, line in enumerate(lines) if "bar.sync" in line]
    assert reads
    assert any(max(reads) < barrier < min(writes) for barrier in barriers)


if __name__ == "__main__":
    from hybridkv.worker import kernels as ours

    kernels = (ours.attention_kernel, ours.combine_kernel)
    recorded = {name: record_attention(shape, kernels) for name, shape in SHAPES.items()}
    made = {name: [one.compiled(SHAPES[name].capability) for one in both] for name, both in recorded.items()}
    strides = ("channel_stride", "column_stride")
    shifts = {one: compile_shift(one, other) for one, other in (strides, strides[::-1])}
    print(json.dumps(made | shifts | {"writes": compile_writes(), "steps": steps(kernels)}))  # noqa: T201 - for the tests
