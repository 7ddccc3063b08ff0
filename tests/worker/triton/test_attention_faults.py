"""Faults in the attention kernel and in its inputs must fail the comparison with the reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_support import MATRIX, ONE, Call, KernelCase
from mutants import mutant

from hybridkv.worker import AttentionMask, kernels, triton_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# each (what stands in the kernels, the fault, the call that notices); nothing is read or written out of bounds
MUTANTS = {
    "a token of the future": ("at[None, :] <= position[:, None]", "at[None, :] <= position[:, None] + 1", "mixed step"),
    "not its own token": ("at[None, :] <= position[:, None]", "at[None, :] < position[:, None]", "mixed step"),
    "the last token missing": ("queries - 1) + 1\n", "queries - 1)\n", "mixed step"),
    "no mask but lengths": ("tl.where(seen, scores", "tl.where(held[None, :], scores", "mixed step"),
    "slots of nobody seen": ("seen = held[None, :]", "seen = held[None, :] | True", "cross attention"),
    "window wide by one": ("position - window + 1, position", "position - window, position", "window"),
    "window short by one": ("position - window + 1, position", "position - window + 2, position", "window"),
    "window begins late": ("lowest - window + 1", "lowest - window + 2", "window"),
    "chunk of another query": ("position // chunk * chunk)", "lowest // chunk * chunk)", "across chunks"),
    "chunk wide": ("position // chunk * chunk)", "position // chunk * chunk - 1)", "chunks"),
    "always the first page": ("slot // block_size, mask=held", "slot * 0, mask=held", "mixed step"),
    "the page before": ("block = block.to(tl.int64)\n", "block = block.to(tl.int64) - 1\n", "mixed step"),
    "a neighbour's pages": ("request.to(tl.int64) * table_stride", "0 * table_stride", "mixed step"),
    "a neighbour's slot": ("inner = slot % block_size", "inner = (slot + 1) % block_size", "mixed step"),
    "a neighbour's queries": (
        "token = (start + of_query).to(tl.int64)\n\n",
        "token = of_query.to(tl.int64)\n\n",
        "split",
    ),
    "keys of the other head": ("head * key_head", "(kv_heads - 1 - head) * key_head", "HND"),
    "values of the other head": ("head * value_head", "(kv_heads - 1 - head) * value_head", "HND"),
    "query heads swapped": (
        "token * out_token + of_head * out_head)[",
        "token * out_token + (kv_heads * group - 1 - of_head) * out_head)[",
        "mixed step",
    ),
    "combined heads swapped": (
        "+ (tile * block_m + row) % group\n    if",
        "+ group - 1 - (tile * block_m + row) % group\n    if",
        "learned sinks split",
    ),
    "learned sink ignored": ("mask=live, other=0.0)", "mask=live & (row < 0), other=-100.0)", "learned sinks"),
    "learned sink of another head": ("sinks + of_head, mask", "sinks + of_head * 0, mask", "learned sinks"),
    "learned sink of a split": ("sinks + of_head)", "sinks + of_head * 0)", "learned sinks split"),
    "what a former owner left": (
        "inside = held[:, None] & (out_a < value_width)",
        "inside = (held[:, None] | True) & (out_a < value_width)",
        "mixed step",
    ),
    "cap": ("cap * (1 - 2 /", "cap * (1 - 1.9 /", "soft cap"),
    "sums not shrunk": ("sum_a * shrunk[:, None], input", "sum_a, input", "mixed step"),
    "denominator not shrunk": ("total * shrunk + tl.sum(weights, 1)", "total + tl.sum(weights, 1)", "mixed step"),
    "rest of the keys": ("tl.trans(tile_b), scores,", "tl.trans(tile_b), scores * 0,", "width 80"),
    "rest of the values": ("sum_b * shrunk[:, None], input", "sum_b, input", "width 80"),
    "a split's last keys": ("split * each + each, turns", "split * each + each - 1, turns", "split"),
    "parts of the other head": ("(part * kv_heads + head) * block_m", "(part * kv_heads) * block_m", "split"),
    "later parts": (
        "range(0, parts, parts_held)",
        "range(0, 1, parts_held)",
        "more splits than are combined at a time",
    ),
    "parts not shrunk": ("summed * shrunk", "summed", "more splits than are combined at a time"),
    "scale of values": ("whole = value_scale * shrunk", "whole = shrunk", "fp8, bfloat16"),
    "scale of keys": ("scale *= pages.key_scale", "scale *= 1.0", "fp8"),
    "exponent of float8": ("* 256.0", "* 128.0", "fp8"),
    "logarithm": ("* 0.6931471805599453", "* 0.7", "mixed step"),
    "slots of another rank": ("* ranks + rank)", "* ranks)", "ranks"),
}


_LEFT = 7.0

IN_CI = list(MUTANTS)[::4]
"""The interpreter takes a second for each: the rest is `make test-all`'s."""


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory: of what a fault leaves unwritten, any other number could be right, or be NaN and only warn."""
    empty = torch.empty

    def full(*size: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401  # as torch.empty
        return empty(*size, **options).fill_(_LEFT)

    monkeypatch.setattr(torch, "empty", full)


@pytest.mark.usefixtures("filled")
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # what the interpreter says of a fault
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in IN_CI else pytest.mark.thorough) for one in MUTANTS]
)
def test_attention_kernel_with_a_fault_fails_the_comparison(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, case = MUTANTS[name]
    changed = mutant(kernels, old, new, tmp_path)
    call = Call(MATRIX[case].on(DEVICE))
    monkeypatch.setattr(triton_attention, "load_kernels", lambda _: changed)
    with pytest.raises(AssertionError, match="not close"):
        call.check()


def test_attention_kernel_with_faulty_inputs_fails_the_comparison() -> None:
    call = Call(KernelCase(replace(ONE, requests=((37, 3), (20, 1))), splits=2).on(DEVICE))
    good = call.prepared()
    call.check(good)
    work = good.work.clone()
    work[:, 1] = 0
    faults: tuple[dict[str, Any], ...] = (
        {"lengths": good.lengths - 1},
        {"lengths": good.lengths + 1},
        {"starts": torch.roll(good.starts, 1)},
        {"table": good.table.roll(1, 0)},
        {"table": torch.cat((good.table[:, 1:], good.table[:, :1]), 1)},
        {"work": work.index_fill(1, torch.tensor([2], device=DEVICE), 0)},
        {"mask": AttentionMask(window=20)},
        {"mask": AttentionMask(causal=False)},
    )
    for fault in faults:
        with pytest.raises(AssertionError, match="not close"):
            call.check(replace(good, **fault))
