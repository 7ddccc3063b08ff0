"""Compare a replay with an independent endless cache: ``python benchmarks/check_trace.py TRACE``.

The endless cache is a dictionary of prefixes. Its key for a block of 16 tokens is the block's pieces (segment or hash
id, start and end) and the block before it. It shares no code with hybridkv: it reads the JSON lines itself, makes no
token ids and hashes nothing. The replay has memory for everything, so the scheduler must hit exactly the tokens that
the dictionary knows. A prompt's last token always runs, and an answer's last token never does. Outputs count as known
for requests with a later timestamp. Where outputs return in prompts (token-exact traces), the replay's steps take no
time, so that this holds.

Exits with 1 if a figure differs or the replay takes three minutes or more.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hybridkv.models import read_model
from hybridkv.simulator import H100_UNBOUNDED, ReplayReport, ReplaySettings, TraceFile, plan_for_trace, replay
from hybridkv.units import MiB

BLOCK = 16
HASH_BLOCK = 512
LONGEST_S = 180.0
MODEL = "llama-3-70b"
CONVERSATION_SHA256 = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
CONVERSATION_PROMPT_TOKENS = 144_793_823
CONVERSATION_HIT_RATE = "0.3736"

Piece = tuple[object, int, int]


def read(data: bytes) -> Iterator[tuple[float, list[Piece], list[Piece]]]:
    """(timestamp, prompt, output) of every line, as pieces (segment, first, behind the last)."""
    for number, line in enumerate(data.splitlines()):
        one = json.loads(line)
        if "hash_ids" in one:
            length = one["input_length"]
            starts = range(0, length, HASH_BLOCK)
            prompt = [(i, 0, min(HASH_BLOCK, length - at)) for i, at in zip(one["hash_ids"], starts, strict=True)]
            yield one["timestamp"], prompt, [(("output", number), 0, one["output_length"])]
        else:
            prompt, output = ([(s, at, at + n) for s, at, n in one[name]] for name in ("prompt", "output"))
            yield one["timestamp"], prompt, output


def blocks(pieces: list[Piece], tokens: int) -> Iterator[tuple[Piece, ...]]:
    """Yield the full blocks of the first ``tokens`` tokens, each as its pieces with neighbours joined."""
    block: list[Piece] = []
    room, left = BLOCK, tokens // BLOCK * BLOCK
    for segment, first, end in pieces:
        at = first
        while at < end and left:
            take = min(end - at, room)
            if block and block[-1][0] == segment and block[-1][2] == at:
                block[-1] = (segment, block[-1][1], at + take)
            else:
                block.append((segment, at, at + take))
            at, room, left = at + take, room - take, left - take
            if not room:
                yield tuple(block)
                block, room = [], BLOCK


def endless_cache(data: bytes) -> tuple[int, int, bool]:
    """(prompt tokens, tokens an endless cache hits, whether outputs come back in prompts)."""
    known: dict[tuple[int, tuple[Piece, ...]], int] = {}
    prompt_tokens = hit_tokens = 0
    outputs_return = False
    waiting: list[tuple[float, list[Piece], int]] = []  # outputs of requests that may still run
    for timestamp, prompt, output in read(data):
        while waiting and waiting[0][0] < timestamp:
            _, pieces, tokens = waiting.pop(0)
            learn(known, pieces, tokens)
        length = sum(end - first for _, first, end in prompt)
        prompt_tokens += length
        hit_tokens += learn(known, prompt, length)
        if not isinstance(output[0][0], tuple):
            outputs_return = True
            waiting.append((timestamp, prompt + output, length + sum(end - first for _, first, end in output) - 1))
    return prompt_tokens, hit_tokens, outputs_return


def learn(known: dict[tuple[int, tuple[Piece, ...]], int], pieces: list[Piece], tokens: int) -> int:
    """Make the blocks of ``pieces`` known; how many tokens of the first ``tokens`` - 1 were, from the start."""
    parent, hit, whole = 0, 0, True
    for at, block in enumerate(blocks(pieces, tokens), start=1):
        found = known.get((parent, block))
        if found is None:
            whole = False
            found = known[parent, block] = len(known) + 1
        elif whole and at * BLOCK < tokens:
            hit = at * BLOCK
        parent = found
    return hit


def replayed(path: Path, *, take_time: bool) -> tuple[ReplayReport, float]:
    """Return the report of a replay with memory for every token, and its wall time in seconds."""
    begun = time.perf_counter()
    source = TraceFile(path, trace_block_size=HASH_BLOCK)
    summary = source.summary()
    model = read_model(MODEL, block_size=BLOCK)
    blocks_for_all = (summary.prompt_tokens + summary.output_tokens) // BLOCK + 2 * summary.requests
    memory = int(blocks_for_all * BLOCK * model.kv_bytes_per_token) + MiB
    settings = ReplaySettings(hardware=H100_UNBOUNDED, time_scale=1.0 if take_time else 0.0)
    report = replay(source, plan_for_trace(summary, model, memory, layout="reference"), settings, summary=summary)
    return report, time.perf_counter() - begun


def main() -> int:
    """0 when everything agrees, 1 otherwise."""
    parser = argparse.ArgumentParser(description="replay a trace and compare with an endless cache computed apart")
    parser.add_argument("trace", type=Path, metavar="TRACE", help="JSON lines, plain or gzip")
    path = parser.parse_args().trace
    raw = path.read_bytes()
    data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    print(f"{path.name}: an endless cache at {BLOCK}-token blocks, from a dictionary of prefixes")
    prompt_tokens, hit_tokens, outputs_return = endless_cache(data)
    print(f"  prompt tokens {prompt_tokens:,}, hit tokens {hit_tokens:,}, hit rate {hit_tokens / prompt_tokens:.4f}")
    print(f"hybridkv replay, {MODEL}, memory for everything")
    report, wall_s = replayed(path, take_time=not outputs_return)
    print(
        f"  prompt tokens {report.prompt_tokens:,}, hit tokens {report.hit_tokens:,}, hit rate {report.hit_rate:.4f}, "
        f"{report.requests:,} requests, {report.steps:,} steps, {report.preemptions} preemptions, {wall_s:.1f} s"
    )
    checks: list[tuple[str, object, object]] = [
        ("prompt tokens", report.prompt_tokens, prompt_tokens),
        ("hit tokens", report.hit_tokens, hit_tokens),
    ]
    if hashlib.sha256(data).hexdigest() == CONVERSATION_SHA256:
        print("  this is the Mooncake conversation trace: its published figures count too")
        checks += [
            ("prompt tokens", report.prompt_tokens, CONVERSATION_PROMPT_TOKENS),
            ("hit rate", f"{report.hit_rate:.4f}", CONVERSATION_HIT_RATE),
        ]
    wrong = [f"{what}: the replay says {has}, expected {wants}" for what, has, wants in checks if has != wants]
    if wall_s >= LONGEST_S:
        wrong.append(f"the replay took {wall_s:.1f} s, {LONGEST_S:.0f} s are allowed")
    print("\n".join(f"DIFFERENT: {one}" for one in wrong) or f"the same, in under {LONGEST_S:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
