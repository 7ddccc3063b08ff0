"""Measure the bytes of cache per second that paged attention reads on a GPU: `python attention_bandwidth.py`.

Decoding reads every key and value once, so its bandwidth, compared with a plain copy, shows how close it is to the
device's limit. Needs a CUDA build of torch and `hybridkv[gpu]`. Prints one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from hybridkv.worker import KVPages, paged_batch, triton_batch, triton_paged_attention, triton_write_kv


@dataclass(frozen=True)
class Decode:
    """Requests that decode one token each over ``context`` tokens, in one layer. latent: MLA, values in the keys."""

    requests: int
    context: int
    num_heads: int = 32
    num_kv_heads: int = 8
    key_width: int = 128
    value_width: int = 128
    block_size: int = 16
    fp8: bool = False
    latent: bool = False

    @property
    def bytes_read(self) -> int:
        """Of keys and values, each once."""
        width = self.key_width + (0 if self.latent else self.value_width)
        return self.requests * self.context * self.num_kv_heads * width * (1 if self.fp8 else 2)


@dataclass(frozen=True)
class Bandwidth:
    """GB/s (1e9 bytes) of cache read, or of tokens written, and what a plain copy of as much moves."""

    reached: float
    plain_copy: float
    milliseconds: float


CASES = (
    *(Decode(requests, context) for requests, context in ((1, 1 << 17), (16, 8192), (64, 2048), (256, 1024))),
    Decode(64, 2048, fp8=True),
    Decode(64, 2048, num_heads=16, num_kv_heads=16),
    Decode(16, 8192, num_heads=16, num_kv_heads=1, key_width=576, value_width=512, latent=True),
)


def milliseconds(work: Callable[[], object], times: int = 20) -> float:
    """Of one of ``times`` replays of a CUDA graph of ``work``: launches do not count."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / times


def pages_of(case: Decode) -> KVPages:
    """Random pages: as many blocks as the requests need, and the null block."""
    blocks = 1 + case.requests * -(-case.context // case.block_size)
    dtype = torch.float8_e4m3fn if case.fp8 else torch.bfloat16
    shape = (blocks, case.block_size, case.num_kv_heads)
    keys = torch.randn(*shape, case.key_width, device="cuda", dtype=torch.bfloat16).to(dtype)
    if case.latent:
        return KVPages(keys, keys[..., : case.value_width])
    return KVPages(keys, torch.randn(*shape, case.value_width, device="cuda", dtype=torch.bfloat16).to(dtype))


def read_bandwidth(case: Decode) -> Bandwidth:
    """Of one layer's decode step, in bfloat16, blocks in random order."""
    pages = pages_of(case)
    columns = -(-case.context // case.block_size)
    table = 1 + torch.randperm(pages.num_blocks - 1, device="cuda").view(case.requests, columns)
    batch = triton_batch(
        paged_batch(
            range(case.requests + 1),
            [case.context] * case.requests,
            table,
            block_size=case.block_size,
            num_blocks=pages.num_blocks,
        ),
        num_heads=case.num_heads,
        pages=pages,
        dtype=torch.bfloat16,
    )
    query = torch.randn(case.requests, case.num_heads, case.key_width, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(case.requests, case.num_heads, case.value_width, device="cuda", dtype=torch.bfloat16)
    return _beside_a_copy(lambda: triton_paged_attention(query, pages, batch, 0.1, out=out), case.bytes_read)


def write_bandwidth(case: Decode, tokens: int) -> Bandwidth:
    """Of ``tokens`` tokens of one layer written in random order: bytes that are read and bytes that are written."""
    pages = pages_of(case)
    slots = torch.randperm(pages.num_blocks * case.block_size, device="cuda")[:tokens]
    keys = torch.randn(tokens, case.num_kv_heads, case.key_width, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(tokens, case.num_kv_heads, case.value_width, device="cuda", dtype=torch.bfloat16)
    moved = (keys.numel() + values.numel()) * (3 if case.fp8 else 4)
    return _beside_a_copy(lambda: triton_write_kv(slots, pages, keys, values), moved)


def _beside_a_copy(work: Callable[[], object], moved: int) -> Bandwidth:
    """Measure ``work``, and a copy of ``moved`` / 2 bytes, which reads and writes ``moved`` bytes."""
    source = torch.zeros(max(1, moved // 2), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    plain, taken = milliseconds(lambda: target.copy_(source)), milliseconds(work)
    return Bandwidth(moved / taken / 1e6, moved / plain / 1e6, taken)


def main() -> None:
    """One line a case, then one of writes."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    device = torch.cuda.get_device_name()
    for case in CASES:
        print(json.dumps({"device": device, "read": asdict(case)} | asdict(read_bandwidth(case))), flush=True)
    for fp8 in (False, True):
        case = Decode(64, 2048, fp8=fp8)
        print(json.dumps({"device": device, "write": asdict(case)} | asdict(write_bandwidth(case, 8192))), flush=True)


if __name__ == "__main__":
    main()
