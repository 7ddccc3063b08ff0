"""The write kernel leaves the bytes that ``write_kv`` leaves: on a GPU, or in the interpreter where there is none."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import mutant

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker import (
    KVPages,
    PageOrder,
    kernels,
    triton_write_kv,
    triton_write_latent,
    triton_write_states,
    write_kv,
    write_latent,
    write_slots,
    write_states,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn
BLOCKS = 5
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def pages_of(order: PageOrder, size: int, widths: tuple[int, int], dtype: torch.dtype) -> KVPages:
    """Of 2 heads, in an arena where something else lies behind each block."""
    views = []
    for width in widths:
        inner = (2, size, width) if order is PageOrder.HND else (size, 2, width)
        arena = torch.zeros(BLOCKS, 2 * size * width + 8, device=DEVICE).to(dtype)
        views.append(arena[:, : 2 * size * width].view(BLOCKS, *inner))
    return KVPages.of_views((views[0], views[1]), order)


def same_bits(one: KVPages, other: KVPages) -> bool:
    return all(
        mine.contiguous().view(torch.uint8).equal(its.contiguous().view(torch.uint8))
        for mine, its in ((one.keys, other.keys), (one.values, other.values))
    )


def states_of(tokens: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Strided, as a slice of a fused projection is; from subnormal to too large for float8."""
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tokens, 2, width + 3, generator=rng)
    return (drawn * 10.0 ** torch.randint(-4, 4, drawn.shape, generator=rng)).to(dtype).to(DEVICE)[..., :width]


def check(
    slots: torch.Tensor, order: PageOrder, size: int, widths: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """dtypes: of the pages, of the states."""
    made = [pages_of(order, size, widths, dtypes[0]) for _ in range(2)]
    if dtypes[0] == FP8:
        made = [KVPages(pages.keys, pages.values, 0.37, 2.5) for pages in made]
    keys, values = (states_of(len(slots), width, dtypes[1], i) for i, width in enumerate(widths))
    write_kv(write_slots(slots, BLOCKS, size), made[0], keys, values)
    triton_write_kv(slots, made[1], keys, values)
    assert same_bits(*made)


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_write_kernel_leaves_the_bytes_of_torch(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from((1, 4, 16)))
    slots = data.draw(st.lists(st.integers(0, BLOCKS * size - 1), unique=True, max_size=5))
    kept = [slot if data.draw(st.booleans()) else -1 for slot in slots]
    dtype = data.draw(st.sampled_from((*FLOATS, torch.int8, FP8, FP8)))
    given_as = data.draw(st.sampled_from((*FLOATS, torch.float64, FP8))) if dtype == FP8 else dtype
    check(
        torch.tensor(kept, dtype=torch.int64, device=DEVICE),
        data.draw(st.sampled_from(list(PageOrder))),
        size,
        data.draw(st.sampled_from(((8, 6), (16, 16), (600, 40)))),
        (dtype, given_as),
    )


def every_kind_of_float() -> torch.Tensor:
    """All float16 as float32, float32 between and around every two neighbouring float8, infinities and NaN."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    eights = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (eights[1:] + eights[:-1]) / 2
    around = (middles, middles.nextafter(middles + 1), middles.nextafter(middles - 1))
    odd = torch.tensor([449.0, 464.0, 465.0, 3e38, 1e-45, 1e-40, torch.inf, torch.nan])
    positive = torch.cat((eights, *around, odd))
    return torch.cat((halves, positive, -positive))


def test_write_kernel_rounds_every_float_to_the_nearest_float8() -> None:
    states = every_kind_of_float()
    states = torch.nn.functional.pad(states, (0, -len(states) % 64)).view(1, 1, -1).to(DEVICE)
    wide = states.shape[2]
    made = [KVPages(torch.zeros(1, 1, 1, wide).to(FP8), torch.zeros(1, 1, 1, 2).to(FP8)) for _ in range(2)]
    made = [KVPages(pages.keys.to(DEVICE), pages.values.to(DEVICE)) for pages in made]
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    write_kv(write_slots(slots, 1, 1), made[0], states, states[..., :2])
    triton_write_kv(slots, made[1], states, states[..., :2])
    nan = states[0, 0].isnan()
    mine, its = (pages.keys.view(torch.uint8)[0, 0, 0] for pages in made)
    assert mine[~nan].equal(its[~nan])
    assert (its[nan] & 0x7F == 0x7F).all()
    # the nearest, found by looking at all of them
    finite = ~states[0, 0].isnan() & states[0, 0].isfinite()
    held = made[1].keys.float()[0, 0, 0][finite].double().cpu()
    values = states[0, 0][finite].double().cpu().clamp(-448, 448)
    every = torch.arange(127, dtype=torch.uint8).view(FP8).double()
    best = (values.abs()[:, None] - every[None]).abs().amin(1)
    assert (held - values).abs().equal(best)


@pytest.mark.parametrize("heads", [(), (2,)])
@pytest.mark.parametrize(("dtype", "given_as"), [(torch.uint8, torch.uint8), (FP8, torch.float32)])
def test_write_kernel_of_states_leaves_the_bytes_of_torch(
    heads: tuple[int, ...], dtype: torch.dtype, given_as: torch.dtype
) -> None:
    made = [torch.zeros(BLOCKS, 4, *heads, 584, device=DEVICE).to(dtype) for _ in range(2)]
    states = (torch.randn(3, *heads, 584, device=DEVICE) * 50).abs().to(given_as)
    slots = torch.tensor([9, -1, 0], device=DEVICE)
    write_states(write_slots(slots, BLOCKS, 4), made[0], states, scale=0.5)
    triton_write_states(slots, made[1], states, scale=0.5)
    mine, its = (one.view(torch.uint8) for one in made)
    assert mine.equal(its)
    written = [(block, row) for block, row in ((2, 1), (0, 0)) if mine[block, row].any()]
    assert written == [(2, 1), (0, 0)]
    mine[2, 1] = mine[0, 0] = 0
    assert not mine.any()


def test_write_kernel_of_latents_leaves_the_bytes_of_torch() -> None:
    for dtype, states in ((torch.bfloat16, torch.bfloat16), (FP8, torch.float32)):
        made = [torch.zeros(BLOCKS, 4, 10, device=DEVICE).to(dtype) for _ in range(2)]
        latent, rotary = states_of(3, 8, states, 1)[:, 0], states_of(3, 2, states, 2)[:, 0]
        slots = torch.tensor([9, -1, 19], device=DEVICE)
        write_latent(write_slots(slots, BLOCKS, 4), made[0], latent, rotary, scale=0.5)
        triton_write_latent(slots, made[1], latent, rotary, scale=0.5)
        assert made[0].view(torch.uint8).equal(made[1].view(torch.uint8))
        assert made[1].view(torch.uint8).any()


def test_write_kernel_ignores_slots_outside_the_pages() -> None:
    pages = pages_of(PageOrder.NHD, 4, (8, 8), torch.float32)
    behind = BLOCKS * 4
    slots = torch.tensor([-1, behind, -2, behind + 1000, 3], device=DEVICE)
    states = torch.ones(5, 2, 8, device=DEVICE)
    triton_write_kv(slots, pages, states, states)
    assert int(pages.keys.sum()) == 16
    assert int(pages.keys[0, 3].sum()) == 16


def test_write_kernel_slots_do_not_overflow_int32() -> None:
    """The last slot of 4 Gi, in pages whose blocks all lie in one place."""
    huge = torch.zeros(1, device=DEVICE).as_strided((1 << 28, 16, 1, 1), (0, 0, 1, 1))
    triton_write_kv(
        torch.tensor([(1 << 32) - 1], device=DEVICE),
        KVPages(huge, huge),
        torch.full((1, 1, 1), 3.0, device=DEVICE),
        torch.full((1, 1, 1), 3.0, device=DEVICE),
    )
    assert float(huge[0, 0, 0, 0]) == 3.0


MUTANTS = {
    "neighbour's slot": ("slot // block_size, slot % block_size", "slot // block_size, (slot + 1) % block_size"),
    "neighbour's page": ("slot // block_size, slot % block_size", "slot // block_size + 1, slot % block_size"),
    "heads swapped": ("states + head * state_head", "states + (1 - head) * state_head"),
    "scale of keys for values": ("                value_inverse,\n", "                key_inverse,\n"),
    "rounded down": ("held + 0x7FFFF + ((held >> 20) & 1)", "held"),
    "ties up": ("0x7FFFF + ((held >> 20) & 1)", "0x80000"),
    "too large is NaN": ("tl.minimum(size, largest)", "size"),
    "what has no slot is written": ("tl.load(slots + token)", "tl.maximum(tl.load(slots + token), 0)"),
    "sign lost": (" | ((bits >> 24) & 0x80)", ""),
    "no values": (
        "_put(\n                values + block * value_block",
        "_put(\n                keys + block * value_block",
    ),
}


def check_both() -> None:
    check(torch.tensor([3, -1, 6, 9], device=DEVICE), PageOrder.NHD, 4, (16, 16), (FP8, torch.float32))
    test_write_kernel_rounds_every_float_to_the_nearest_float8()


@pytest.mark.parametrize("name", MUTANTS)
def test_write_kernel_with_a_fault_fails_the_comparison(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = MUTANTS[name]
    monkeypatch.setattr(kernels, "launch_write", mutant(kernels, old, new, tmp_path).launch_write)
    with pytest.raises(AssertionError):
        check_both()


@pytest.mark.parametrize(
    ("slots", "given", "message"),
    [
        (torch.tensor([1], dtype=torch.int32), torch.float32, "contiguous int64"),
        (torch.tensor([[1]]), torch.float32, "contiguous int64"),
        (torch.tensor([1, 2]), torch.float32, "keys have shape"),
        (torch.tensor([1]), torch.bfloat16, "keys have shape"),
    ],
)
def test_write_kernel_with_invalid_inputs_writes_nothing(slots: torch.Tensor, given: torch.dtype, message: str) -> None:
    pages = pages_of(PageOrder.NHD, 4, (8, 8), torch.float32)
    states = torch.ones(1, 2, 8, dtype=given, device=DEVICE)
    with pytest.raises(WorkerError, match=message):
        triton_write_kv(slots.to(DEVICE), pages, states, states)
    assert not pages.keys.any()


def test_write_kernel_rejects_mixed_dtypes_and_zero_scale() -> None:
    pages = pages_of(PageOrder.NHD, 4, (8, 8), FP8)
    states = torch.ones(1, 2, 8, device=DEVICE)
    with pytest.raises(WorkerError, match="give both in one dtype"):
        triton_write_kv(torch.tensor([1], device=DEVICE), pages, states, states.to(FP8))
    with pytest.raises(WorkerError, match="scale of latents"):
        triton_write_latent(
            torch.tensor([1], device=DEVICE), pages.keys[:, :, 0], states[:, 0, :6], states[:, 0, :2], scale=0.0
        )


def test_write_kernel_without_triton_raises_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hybridkv.worker.kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    pages = pages_of(PageOrder.NHD, 4, (8, 8), torch.float32)
    states = torch.ones(1, 2, 8, device=DEVICE)
    with pytest.raises(ConfigError, match=r"pip install 'hybridkv\[gpu\]'"):
        triton_write_kv(torch.tensor([1], device=DEVICE), pages, states, states)
