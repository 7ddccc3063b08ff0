"""Codes with scales in pages: bounds, exact codes, bytes of neighbours, copies, and attention (docs/design/0037)."""

import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.models import read_model
from hybridkv.planner import plan
from hybridkv.spec_fields import Quantization
from hybridkv.specs import AttentionSpec, FullAttentionSpec
from hybridkv.step import Copy
from hybridkv.worker import (
    BlockCopier,
    KVPages,
    PagedStorage,
    PageOrder,
    QuantizedPages,
    layer_pages,
    paged_attention,
    paged_batch,
    parts_of,
    write_quantized,
    write_slots,
)
from hybridkv.worker.codecs import dequantize, quantize
from hybridkv.worker.pages import WriteSlots
from small_steps import small_step

FORMS = list(Quantization)
ONE_SCALE = [Quantization.INT8, Quantization.FP8, Quantization.INT4]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def there_and_back(form: Quantization, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read back, and the scale of each element, float64."""
    codes, scales = quantize(form, states)
    read = dequantize(form, codes, scales, torch.float32).double()
    if form is Quantization.NVFP4:
        each = scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, -1)
    else:
        each = scales.double()[..., None].expand(states.shape)
    return read, each


def bound(form: Quantization, states: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The stated bound of each element."""
    exact = states.double().abs()
    match form:
        case Quantization.INT8 | Quantization.INT4:
            return scales / 2
        case Quantization.FP8:
            return torch.maximum(exact / 16, scales / 1024)
        case Quantization.NVFP4:
            return torch.maximum(scales, exact - 2688)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", FORMS)
def test_error_of_every_element_is_within_the_stated_bound(form: Quantization, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(5)
    for exponent in (-130, -60, -20, -12, -8, -4, 0, 4, 8, 12, 60):
        states = torch.randn(64, 3, 48, generator=draw, dtype=torch.float64)
        states[torch.rand(states.shape, generator=draw) < 0.2] = 0
        states[::7] *= torch.logspace(-6, 0, 48, dtype=torch.float64)  # elements of very different sizes
        given = (states * 2.0**exponent).to(dtype)
        given = given.clamp(-60_000, 60_000) if dtype == torch.float16 else given
        read, scales = there_and_back(form, given)
        within = bound(form, given, scales)
        assert bool(((given.double() - read).abs() <= within * (1 + 2**-15)).all()), exponent
        assert bool((read[given == 0] == 0).all())
        assert bool((torch.sign(read) * torch.sign(given.double()) >= 0).all())


@pytest.mark.parametrize(
    ("form", "divisor"), [(Quantization.INT8, 127), (Quantization.FP8, 448), (Quantization.INT4, 7)]
)
def test_scale_of_a_head_is_its_largest_element(form: Quantization, divisor: int) -> None:
    states = torch.randn(40, 2, 16)
    _, scales = quantize(form, states)
    for token in range(40):
        for head in range(2):
            largest = max(abs(Fraction(one)) for one in states[token, head].tolist())
            assert abs(Fraction(scales[token, head].item()) - largest / divisor) <= largest / divisor / 2**23


def exact_values(form: Quantization) -> list[float]:
    """Values that the form holds exactly next to its largest code."""
    match form:
        case Quantization.INT8:
            return [float(one) for one in range(-127, 128)] + [0.0]
        case Quantization.INT4:
            return [float(one) for one in range(-7, 8)] + [0.0]
        case Quantization.FP8:
            # 1.mmm * 2**e of every e4m3, and its subnormals mmm * 2**-9
            sizes = [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)]
            sizes += [m * 2.0**-9 for m in range(8)]
            return [sign * size for size in sizes for sign in (1.0, -1.0)]
        case Quantization.NVFP4:
            return [sign * size for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0) for sign in (1.0, -1.0)]


@pytest.mark.parametrize("power", [-3, 0, 5])
@pytest.mark.parametrize("form", FORMS)
def test_values_of_the_format_are_kept_exactly(form: Quantization, power: int) -> None:
    values = exact_values(form)
    random.Random(3).shuffle(values)
    states = torch.tensor(values) * 2.0**power
    read, scales = there_and_back(form, states)
    assert read.tolist() == states.double().tolist()
    assert set(scales.flatten().tolist()) == {2.0**power}


def test_codes_of_four_bits_lie_two_in_a_byte() -> None:
    codes, scales = quantize(Quantization.INT4, torch.tensor([7.0, -1.0, 0.0, -7.0]))
    assert (codes.tolist(), scales.item()) == ([0xF7, 0x90], 1.0)
    codes, scales = quantize(Quantization.NVFP4, torch.tensor([6.0, -0.5, *([0.0] * 14)]))
    # indexes 7 and 1, the second with its sign; e4m3 of 1 is 0 0111 000
    assert (codes.tolist(), scales.tolist()) == ([0x97, *([0] * 7)], [0x38])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", FORMS)
def test_nan_and_infinity_spoil_their_own_scale_alone(form: Quantization, wrong: float) -> None:
    states = torch.full((3, 2, 32), 6.0)
    states[1, 0, 3] = wrong
    codes, scales = quantize(form, states)
    read = dequantize(form, codes, scales, torch.float32)
    spoiled = torch.zeros(3, 2, 32, dtype=torch.bool)
    spoiled[1, 0, : form.scaled or 32] = True
    assert bool((read.isnan() == spoiled).all())
    assert bool(((read - 6).abs()[~spoiled] <= 2**-20).all())


# -- pages


def small_storage(
    form: Quantization | None, layout: str = "natural", order: PageOrder = PageOrder.NHD
) -> tuple[PagedStorage, list[tuple[str, AttentionSpec]]]:
    fields: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": 100,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 64,
    }
    skipped = () if form is None else ("1",)
    made = plan(
        read_model(fields, block_size=4, dtype=form, dtype_skip_layers=skipped),
        "64KiB",
        layout=layout,
        max_model_len=64,
    )
    storage = PagedStorage(made.config, order=order)
    layers = [
        (name, spec)
        for group in made.config.groups
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True)
        if isinstance(spec, AttentionSpec)
    ]
    return storage, layers


def drawn(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(tokens, 2, 16, generator=draw) for _ in range(2))
    return keys, values


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("layout", ["reference", "natural"])
@pytest.mark.parametrize("form", FORMS)
def test_write_reads_back_and_leaves_every_other_byte(form: Quantization, layout: str, order: PageOrder) -> None:
    storage, layers = small_storage(form, layout, order)
    assert [spec.quantization for _, spec in sorted(layers)] == [form, None, form]
    storage.arena.copy_(torch.randint(1, 100, storage.arena.shape, dtype=torch.uint8))
    tensors = {name: tensor for tensor in storage.config.tensors for name in tensor.shared_by}
    keys, values = drawn(9)
    for name, spec in layers:
        pages = layer_pages(spec, storage.views[name], order)
        if isinstance(pages, KVPages):
            continue
        last = pages.num_blocks - 1
        # block 2 whole, the last one but for its first slot, and a token that is not written
        slots = write_slots(torch.tensor([8, 9, 10, 11, -1, *(last * 4 + at for at in (3, 1, 2)), -1]), last + 1, 4)
        before = storage.arena.clone()
        write_quantized(slots, pages, keys, values)
        read = pages.take(torch.tensor([2, last]), torch.float32)
        for held, states in zip(read, (keys, values), strict=True):
            wanted, scales = there_and_back(form, states)
            assert bool(((wanted - states.double()).abs() <= bound(form, states, scales) * (1 + 2**-15)).all())
            assert torch.equal(held[0], wanted[:4].float())
            assert torch.equal(held[1, [3, 1, 2]], wanted[5:8].float())
        # bytes of blocks 2 and last in this layer may change, all others may not
        tensor, page = tensors[name], spec.content_bytes
        own = torch.zeros(storage.arena.shape, dtype=torch.bool)
        for block in (2, last):
            start = tensor.offset_bytes + block * tensor.block_stride_bytes
            own[start : start + page] = True
        assert torch.equal(storage.arena[~own], before[~own])
        changed = int((storage.arena != before).sum())
        assert changed <= 7 * page // 4


@pytest.mark.parametrize("layout", ["reference", "natural"])
def test_page_has_scales_of_keys_then_of_values_then_codes_of_both(layout: str) -> None:
    storage, layers = small_storage(Quantization.INT8, layout)
    name, spec = next(one for one in layers if one[1].quantization is not None)
    pages = layer_pages(spec, storage.views[name])
    assert isinstance(pages, QuantizedPages)
    keys, values = torch.full((4, 2, 16), 127.0), torch.full((4, 2, 16), -254.0)
    write_quantized(write_slots(torch.arange(8, 12), pages.num_blocks, 4), pages, keys, values)
    tensor = next(one for one in storage.config.tensors if name in one.shared_by)
    start = tensor.offset_bytes + 2 * tensor.block_stride_bytes
    page = storage.arena[start : start + spec.content_bytes].numpy()
    # 4 tokens of 2 heads: 8 float32 scales of 1, 8 of 2, then 128 codes of 127, 128 of -127
    assert page[:64].view(np.float32).tolist() == [1.0] * 8 + [2.0] * 8
    assert page[64:].view(np.int8).tolist() == [127] * 128 + [-127] * 128


@pytest.mark.parametrize("form", FORMS)
def test_pages_hold_the_same_bytes_whatever_the_steps(form: Quantization) -> None:
    keys, values = drawn(16)
    arenas = []
    for parts in ((range(16),), (range(5), range(5, 6), range(6, 16)), tuple(range(at, at + 1) for at in range(16))):
        storage, layers = small_storage(form)
        name, spec = layers[0]
        pages = layer_pages(spec, storage.views[name])
        assert isinstance(pages, QuantizedPages)
        for part in parts:
            slots = write_slots(torch.tensor([4 + at for at in part]), pages.num_blocks, 4)
            write_quantized(slots, pages, keys[part.start : part.stop], values[part.start : part.stop])
        arenas.append(storage.arena)
    assert int(arenas[0].count_nonzero())
    assert all(torch.equal(arenas[0], other) for other in arenas[1:])


@pytest.mark.parametrize("layout", ["reference", "natural"])
@pytest.mark.parametrize("form", FORMS)
def test_copied_block_carries_its_scales(form: Quantization, layout: str) -> None:
    storage, layers = small_storage(form, layout)
    keys, values = drawn(4)
    written = {}
    for number, (name, spec) in enumerate(layers):
        pages = layer_pages(spec, storage.views[name])
        if isinstance(pages, QuantizedPages):
            slots = write_slots(torch.arange(12, 16), pages.num_blocks, 4)
            write_quantized(slots, pages, keys * (number + 1), values)
            written[name] = pages
    step = small_step(
        1, copies=tuple(Copy("before", group, 3, 2, "block") for group in range(len(storage.config.groups)))
    )
    BlockCopier(storage).execute_before(step)
    assert written
    for pages in written.values():
        for held in pages.take(torch.tensor([3, 2]), torch.float32):
            assert torch.equal(held[0], held[1])
            assert int(held.count_nonzero())


@pytest.mark.parametrize("form", ONE_SCALE)
def test_latents_have_a_scale_for_their_rotary_part(form: Quantization) -> None:
    made = plan(read_model("deepseek-v3", tp=128, dtype=form), "64MiB", max_model_len=32)
    storage = PagedStorage(made.config)
    group = made.config.groups[0]
    pages = QuantizedPages.of_latent(form, storage.views[group.layer_names[0]], 512)
    assert pages.widths == (512, 64)
    latent, rotary = torch.randn(3, 1, 512) * 100, torch.randn(3, 1, 64)
    write_quantized(write_slots(torch.tensor([17, 16, 40]), pages.num_blocks, 16), pages, latent, rotary)
    for held, states in zip(pages.take(torch.tensor([1, 2]), torch.float32), (latent, rotary), strict=True):
        wanted, _ = there_and_back(form, states)
        assert torch.equal(held[[0, 0, 1], [1, 0, 8]], wanted.float())
    with pytest.raises(ConfigError, match="do not hold latents of rank 576"):
        QuantizedPages.of_latent(form, storage.views[group.layer_names[0]], 576)


@pytest.mark.parametrize("form", FORMS)
def test_attention_reads_what_a_plain_cache_of_the_read_values_holds(form: Quantization) -> None:
    storage, layers = small_storage(form)
    name, spec = layers[0]
    pages = layer_pages(spec, storage.views[name])
    assert isinstance(pages, QuantizedPages)
    keys, values = drawn(7)
    slots: WriteSlots = write_slots(torch.tensor([12, 13, 14, 15, 8, 9, 10]), pages.num_blocks, 4)
    write_quantized(slots, pages, keys, values)
    blocks = torch.arange(pages.num_blocks)
    plain = KVPages(*pages.take(blocks, torch.float32))
    query = torch.randn(3, 4, 16)
    batch = paged_batch([0, 3], [7], torch.tensor([[3, 2]]), block_size=4, num_blocks=pages.num_blocks)
    found, wanted = paged_attention(query, pages, batch, 0.25), paged_attention(query, plain, batch, 0.25)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    exact = KVPages(torch.zeros(pages.num_blocks, 4, 2, 16), torch.zeros(pages.num_blocks, 4, 2, 16))
    exact.put(slots.blocks, slots.offsets, keys, values)
    error = (found[0] - paged_attention(query, exact, batch, 0.25)[0]).abs().max()
    assert 0 < error < {Quantization.INT8: 0.05, Quantization.FP8: 0.3}.get(form, 1.0)


def test_wrong_tensors_are_rejected_before_anything_is_written() -> None:
    storage, layers = small_storage(Quantization.INT8)
    name, spec = layers[0]
    pages = layer_pages(spec, storage.views[name])
    assert isinstance(pages, QuantizedPages)
    keys, values = drawn(2)
    slots = write_slots(torch.tensor([4, 5]), pages.num_blocks, 4)
    for wrong, message in (
        ((keys[:1], values), "keys are torch.float32 of shape"),
        ((keys, values[..., :8]), "values are torch.float32 of shape"),
        ((keys.to(torch.int8), values), "keys are torch.int8"),
    ):
        with pytest.raises(WorkerError, match=message):
            write_quantized(slots, pages, *wrong)
    with pytest.raises(WorkerError, match="use the slots of this layer's group"):
        write_quantized(write_slots(torch.tensor([4, 5]), 9, 8), pages, keys, values)
    assert int(storage.arena.count_nonzero()) == 0
    with pytest.raises(ConfigError, match="give the four views"):
        QuantizedPages.of_views(Quantization.INT8, storage.views[name][:2])


def test_parts_have_the_bytes_of_the_spec() -> None:
    for form in FORMS:
        spec = FullAttentionSpec(
            block_size=16, num_kv_heads=3, head_size=64, head_size_v=32, dtype=form.dtype, quantization=form
        )
        for one in (spec, replace(spec, tokens_per_state=1, num_kv_heads=1)):
            assert 16 * sum(part.token_bytes for part in parts_of(one)) == one.content_bytes
    assert np.prod([part.shape[0] for part in parts_of(spec)]) == 3**4
