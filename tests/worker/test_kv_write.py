from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import WorkerError
from hybridkv.worker import KVPages, PageOrder, WriteSlots, write_kv, write_latent, write_slots, write_states

BLOCKS, SIZE, HEADS = 6, 4, 2


def slots_of(*slots: int) -> WriteSlots:
    return write_slots(torch.tensor(slots, dtype=torch.int64), BLOCKS, SIZE)


def views(order: PageOrder, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    inner = (HEADS, SIZE) if order is PageOrder.HND else (SIZE, HEADS)
    return torch.zeros(BLOCKS, *inner, 8).to(dtype), torch.zeros(BLOCKS, *inner, 6).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("order", PageOrder)
@given(data=st.data())
def test_kv_write_puts_each_token_in_its_slot_only(order: PageOrder, dtype: torch.dtype, data: st.DataObject) -> None:
    slots = data.draw(st.lists(st.integers(0, BLOCKS * SIZE - 1), unique=True, max_size=9))
    kept = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    keys = torch.arange(1, 1 + len(slots) * HEADS * 8).remainder(13).reshape(-1, HEADS, 8).to(dtype)
    values = torch.arange(2, 2 + len(slots) * HEADS * 6).remainder(11).reshape(-1, HEADS, 6).to(dtype)
    both = views(order, dtype)
    target = slots_of(*(slot if keep else -1 for slot, keep in zip(slots, kept, strict=True)))
    write_kv(target, KVPages.of_views(both, order), keys, values)
    for view, states in zip(both, (keys, values), strict=True):
        expected = torch.zeros_like(view, dtype=torch.float32)
        for token, (slot, keep) in enumerate(zip(slots, kept, strict=True)):
            if keep:
                for head in range(HEADS):
                    at = (head, slot % SIZE) if order is PageOrder.HND else (slot % SIZE, head)
                    expected[slot // SIZE][at] = states[token, head].float()
        assert view.float().equal(expected)


def test_kv_write_of_float8_is_scaled_and_rounded() -> None:
    keys, values = views(PageOrder.NHD, torch.float8_e4m3fn)
    states = torch.tensor([1.0, -1.0, 1.06, 1e6, -1e6, 2**-10, 0.3, 17.0]).expand(1, HEADS, 8)
    pages = KVPages(keys, values, key_scale=0.5, value_scale=4.0)
    write_kv(slots_of(6), pages, states, states[..., :6].bfloat16())
    # steps of 1/8 of the power of two below; the smallest number is 2 ** -9
    assert keys[1, 2, 1].tolist() == [2.0, -2.0, 2.0, 448.0, -448.0, 2**-9, 0.625, 32.0]
    assert values[1, 2, 1].tolist() == [0.25, -0.25, 0.25, 448.0, -448.0, 0.0]
    latents = torch.zeros(BLOCKS, SIZE, 10).to(torch.float8_e4m3fn)
    write_latent(slots_of(9), latents, torch.full((1, 8), 3.0), torch.full((1, 2), -5.0), scale=2.0)
    assert latents[2, 1].tolist() == [1.5] * 8 + [-2.5] * 2
    with pytest.raises(WorkerError, match="keys have shape"):
        write_kv(slots_of(6), pages, states.int(), states[..., :6])


def test_kv_write_of_latents_puts_rotary_parts_next_to_them() -> None:
    pages = torch.zeros(BLOCKS, SIZE, 10, dtype=torch.bfloat16)
    latent, rotary = torch.randn(3, 8).bfloat16(), torch.randn(3, 2).bfloat16()
    write_latent(slots_of(9, -1, 20), pages, latent, rotary)
    assert pages[2, 1].equal(torch.cat((latent[0], rotary[0])))
    assert pages[5, 0].equal(torch.cat((latent[2], rotary[2])))
    assert int(torch.count_nonzero(pages.float().abs().sum(-1))) == 2


@pytest.mark.parametrize(("heads", "dtype"), [((), torch.uint8), ((HEADS,), torch.bfloat16)])
def test_kv_write_of_states_puts_each_row_in_its_slot_only(heads: tuple[int, ...], dtype: torch.dtype) -> None:
    pages = torch.zeros(BLOCKS, SIZE, *heads, 13, dtype=dtype)
    rows = torch.arange(1, 1 + 3 * 13 * max(1, *heads, 0)).reshape(3, *heads, 13).to(dtype)
    write_states(slots_of(9, -1, 20), pages, rows)
    assert pages[2, 1].equal(rows[0])
    assert pages[5, 0].equal(rows[2])
    assert int(torch.count_nonzero(pages)) == 2 * rows[0].numel()


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (torch.tensor([0, 24]), "0 .. 23"),
        (torch.tensor([-2, 3]), "got -2 .. 3"),
        (torch.tensor([5, 7, 5]), "two tokens go to slot 5"),
        (torch.tensor([1], dtype=torch.int32), "must be int64"),
        (torch.tensor([[1]]), "must be int64"),
    ],
)
def test_kv_write_to_invalid_slot_is_rejected(slots: torch.Tensor, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        write_slots(slots, BLOCKS, SIZE)


KEYS, VALUES = torch.ones(2, HEADS, 8), torch.ones(2, HEADS, 6)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda pages: write_kv(slots_of(1, 2), pages, KEYS, VALUES[:1]), "values have shape"),
        (lambda pages: write_kv(slots_of(1, 2), pages, KEYS, KEYS), "values have shape"),
        (lambda pages: write_kv(slots_of(1, 2), pages, KEYS, VALUES.double()), "values have shape"),
        (lambda pages: write_kv(slots_of(1), pages, KEYS, VALUES), "keys have shape"),
        (lambda pages: write_kv(write_slots(torch.tensor([1, 2]), 5, SIZE), pages, KEYS, VALUES), "do not fit pages"),
        (lambda pages: write_kv(write_slots(torch.tensor([1, 2]), 12, 2), pages, KEYS, VALUES), "do not fit pages"),
        (
            lambda pages: write_latent(slots_of(1, 2), pages.keys[:, :, 0], KEYS[:, 0, :6], KEYS[:1, 0, :2]),
            "rotary parts",
        ),
        (lambda pages: write_latent(slots_of(1, 2), pages.keys[:, :, 0], KEYS[:, 0], KEYS[:, 0, :2]), "do not fill"),
        (lambda pages: write_states(slots_of(1, 2), pages.keys, KEYS[:, 0]), "do not fit pages of shape"),
        (lambda pages: write_states(slots_of(1, 2), pages.keys, KEYS[..., :7]), "states have shape"),
        (lambda pages: write_states(slots_of(1, 2), pages.keys, KEYS, scale=0.0), "must be a positive number"),
    ],
)
def test_kv_write_of_wrong_shape_writes_nothing(write: Callable[[KVPages], None], message: str) -> None:
    keys, values = views(PageOrder.NHD)
    with pytest.raises(WorkerError, match=message):
        write(KVPages(keys, values))
    assert not keys.any()
    assert not values.any()
