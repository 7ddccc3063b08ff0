"""FlashInfer over pages: its wrappers get what they document, and the package still has what is asked of it."""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_support import Case, Scene, assert_close, cases, sunk
from hypothesis import given, settings

import flashinfer_here
from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker import (
    WHOLE,
    AttentionMask,
    KVPages,
    PagedIndex,
    PageOrder,
    paged_attention,
    paged_batch,
    paged_index,
)
from hybridkv.worker.attention import flashinfer
from hybridkv.worker.attention.flashinfer import FlashInfer, flashinfer_paged_attention, flashinfer_refusal

CPU = torch.device("cpu")
CHUNKS = Case(
    requests=((9, 6), (0, 5), (12, 1)),
    shared=0,
    block_size=4,
    kv_heads=2,
    group=2,
    widths=(8, 8),
    order=PageOrder.NHD,
    dtype=torch.float32,
    mask=AttentionMask(chunk=8),
    softcap=None,
    sinks=True,
    ranks=1,
    interleave=1,
    seed=3,
)


@pytest.fixture(autouse=True, scope="module")
def stand_in() -> Iterator[None]:
    """The wrappers in torch, on a CPU, over heads of any width and dtype, wherever they lie."""
    with pytest.MonkeyPatch.context() as patch:
        flashinfer_here.install(patch)
        yield


def attended(scene: Scene, pages: KVPages, softcap: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    kept: dict[str, Any] = {"softcap": softcap, "sink_logits": scene.sinks}
    batch = FlashInfer(CPU).batch(scene.batch(), scene.case.mask, pages)
    return flashinfer_paged_attention(scene.query, pages, batch, scene.case.scale, **kept)


@settings(max_examples=settings().max_examples // 2)
@given(cases())
def test_it_gives_what_one_softmax_a_query_gives(case: Case) -> None:
    """Chunks, dropped columns and sinks included, among pages full of NaN."""
    chunk = case.mask.chunk
    mask = replace(
        case.mask, first_tokens=0, chunk=None if chunk is None else -(-chunk // case.block_size) * case.block_size
    )
    width = case.widths[0]
    dtype = torch.float32 if case.dtype == torch.bfloat16 else case.dtype
    scene = Scene(replace(case, mask=mask, widths=(width, width), dtype=dtype))
    got = attended(scene, scene.pages(WHOLE), case.softcap)
    assert_close((got[0].float(), got[1].float()), sunk(*scene.expected(), scene.sinks))


def test_chunks_are_pieces_of_their_own() -> None:
    scene = Scene(CHUNKS)
    index, rows = paged_index(scene.batch(), CHUNKS.mask), scene.rows()
    assert index.query_indptr.tolist() == [0, 6, 11, 12]
    assert index.indptr.tolist() == [0, 2, 4, 6]
    assert index.indices.tolist() == [*rows[0][2:4], *rows[1][:2], *rows[2][2:4]]
    assert index.last_page_len.tolist() == [3, 1, 1]
    cut = Scene(replace(CHUNKS, requests=((6, 6),)))
    index, rows = paged_index(cut.batch(), CHUNKS.mask), cut.rows()
    assert index.query_indptr.tolist() == [0, 2, 6]
    assert index.indptr.tolist() == [0, 2, 3]
    assert index.indices.tolist() == rows[0][:3]
    assert index.last_page_len.tolist() == [4, 4]


def test_the_example_of_the_docstring() -> None:
    table = torch.tensor([[7, 3, 5, 0], [8, 0, 0, 0]])
    index: PagedIndex = paged_index(paged_batch([0, 2, 3], [9, 4], table, block_size=4, num_blocks=9))
    parts = (index.query_indptr, index.indptr, index.indices, index.last_page_len)
    assert [part.tolist() for part in parts] == [[0, 2, 3], [0, 3, 4], [7, 3, 5, 8], [1, 4]]
    assert {part.dtype for part in parts} == {torch.int32}


def test_a_plan_is_made_once_a_step_and_kind_and_kept_from_step_to_step() -> None:
    """Two layers share one, another cap has one of its own; a step that only decodes has another wrapper."""
    scene = Scene(replace(CHUNKS, mask=AttentionMask(window=5)))
    owner, pages = FlashInfer(CPU), scene.pages(WHOLE)
    first, others = pages, KVPages(pages.keys * 2, pages.values * 2)
    for _ in range(2):
        batch = owner.batch(scene.batch(), scene.case.mask, first)
        for layer, softcap in ((first, None), (others, None), (first, 2.0)):
            out, _ = flashinfer_paged_attention(scene.query, layer, batch, 0.3, softcap=softcap)
            wanted, _ = paged_attention(scene.query, layer, batch.batch, 0.3, mask=scene.case.mask, softcap=softcap)
            torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)
    decoding = Scene(replace(scene.case, requests=((9, 1), (4, 1))))
    batch = owner.batch(decoding.batch(), scene.case.mask, first)
    flashinfer_paged_attention(decoding.query, decoding.pages(WHOLE), batch, 0.3)
    made = {plan.decodes: wrapper for (_, plan), wrapper in owner._wrappers.items()}
    assert len(owner._wrappers) == 3
    assert isinstance(made[True], flashinfer_here.BatchDecodeWithPagedKVCacheWrapper)
    assert [wrapper.plans for wrapper in owner._wrappers.values()] == [2, 2, 1]


def test_float8_pages_times_their_scales() -> None:
    scene = Scene(replace(CHUNKS, mask=AttentionMask(window=6)))
    held = scene.pages(WHOLE)
    pages = KVPages(held.keys.to(torch.float8_e4m3fn), held.values.to(torch.float8_e4m3fn), 0.75, 3.0)
    kept: dict[str, Any] = {"softcap": 2.0, "sink_logits": scene.sinks}
    wanted = paged_attention(scene.query, pages, scene.batch(), 0.3, mask=scene.case.mask, **kept)
    batch = FlashInfer(CPU).batch(scene.batch(), scene.case.mask, pages)
    torch.testing.assert_close(
        flashinfer_paged_attention(scene.query, pages, batch, 0.3, **kept), wanted, rtol=2e-5, atol=2e-5
    )


def test_nothing_to_read() -> None:
    scene = Scene(CHUNKS)
    pages = scene.pages(WHOLE)
    nobody = paged_batch([0], [], torch.empty(0, 3), block_size=4, num_blocks=pages.num_blocks)
    batch = FlashInfer(CPU).batch(nobody, CHUNKS.mask, pages)
    out, lse = flashinfer_paged_attention(scene.query[:0], pages, batch, 1.0)
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))


@pytest.mark.parametrize(
    "mask", [AttentionMask(chunk=6), AttentionMask(window=3, first_tokens=2)], ids=["chunk", "first tokens"]
)
def test_lists_that_cannot_say_what_is_seen_are_refused(mask: AttentionMask) -> None:
    with pytest.raises(WorkerError, match="pages of 4 tokens in a list cannot say what"):
        paged_index(Scene(CHUNKS).batch(), mask)


def test_queries_that_see_no_token_are_refused() -> None:
    batch = paged_batch([0, 1], [0], torch.zeros(1, 1, dtype=torch.int64), block_size=4, num_blocks=2)
    with pytest.raises(WorkerError, match="a request has queries and no token to read"):
        paged_index(batch, AttentionMask(causal=False))


def pages_of(width: int, values: int, dtype: torch.dtype = torch.bfloat16, *, behind: int = 0) -> KVPages:
    arena = torch.zeros(2, 4 * 2 * max(width, values) + behind, dtype=dtype)
    strides = (arena.shape[1], 2 * width, width, 1), (arena.shape[1], 2 * values, values, 1)
    return KVPages(arena.as_strided((2, 4, 2, width), strides[0]), arena.as_strided((2, 4, 2, values), strides[1]))


@pytest.mark.parametrize(
    ("pages", "heads", "dtype", "mask", "why"),
    [
        (pages_of(64, 64), 4, torch.float32, AttentionMask(), "queries of torch.float32: it takes float16"),
        (pages_of(64, 64, torch.float16), 4, torch.bfloat16, AttentionMask(), "pages of torch.float16 under queries"),
        (pages_of(80, 80), 4, torch.bfloat16, AttentionMask(), "keys of 80 and values of 80 columns"),
        (pages_of(128, 64), 4, torch.bfloat16, AttentionMask(), "keys of 128 and values of 64 columns"),
        (pages_of(64, 64), 3, torch.bfloat16, AttentionMask(), "3 query heads, no multiple of 2 KV heads"),
        (pages_of(64, 64, behind=1), 4, torch.bfloat16, AttentionMask(), "not at multiples of 16 bytes"),
        (pages_of(64, 64), 4, torch.bfloat16, AttentionMask(window=9, first_tokens=4), "4 tokens at the beginning"),
        (pages_of(64, 64), 4, torch.bfloat16, AttentionMask(chunk=6), "chunks of 6 tokens, no multiple of the 4"),
        (pages_of(128, 128), 4, torch.bfloat16, AttentionMask(window=9, chunk=8), None),
        (pages_of(64, 64, torch.float8_e4m3fn), 4, torch.float16, AttentionMask(), None),
    ],
)
def test_what_it_cannot_run_is_said(  # noqa: PLR0917 - one case
    pages: KVPages,
    heads: int,
    dtype: torch.dtype,
    mask: AttentionMask,
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flashinfer_here.as_documented(monkeypatch)
    found = flashinfer_refusal(pages, heads, dtype, mask)
    assert found is None if why is None else found is not None and why in found


def test_a_layer_that_was_not_asked_about_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_here.as_documented(monkeypatch)
    scene = Scene(CHUNKS)
    monkeypatch.setattr(flashinfer, "_DEVICES", ("cpu",))
    with pytest.raises(WorkerError, match=r"FlashInfer cannot run a layer with queries of torch\.float32"):
        attended(scene, scene.pages(WHOLE))


def test_without_the_package_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_here.as_documented(monkeypatch)
    with pytest.raises(ConfigError, match="FlashInfer runs on CUDA GPUs, not on cpu: use attention=gather"):
        FlashInfer(CPU)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="needs FlashInfer: pip install flashinfer-python, or use triton or gather"):
        FlashInfer(CPU)


# -- the package itself


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("requests", [((40, 6), (0, 5), (70, 1)), ((40, 1), (3, 1))], ids=["mixed", "decoding"])
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(window=9), AttentionMask(chunk=16)])
@pytest.mark.parametrize("group", [1, 4, 5])
def test_its_kernels_give_what_the_reference_gives(
    requests: tuple[tuple[int, int], ...], mask: AttentionMask, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    flashinfer_here.as_documented(monkeypatch)
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 128 << 20)
    case = replace(CHUNKS, requests=requests, mask=mask, group=group, widths=(64, 64), dtype=torch.bfloat16)
    scene = Scene(replace(case, device="cuda"))
    held = scene.pages(WHOLE)
    pages = KVPages(held.keys.contiguous(), held.values.contiguous())
    kept: dict[str, Any] = {"softcap": 20.0, "sink_logits": scene.sinks}
    batch = FlashInfer(torch.device("cuda")).batch(scene.batch(), mask, pages)
    wanted = paged_attention(scene.query, pages, scene.batch(), case.scale, mask=mask, **kept)
    got = flashinfer_paged_attention(scene.query, pages, batch, case.scale, **kept)
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)


def parameters(path: Path, owner: str, name: str) -> list[str]:
    """Of ``owner.name`` in a module of the package, without running any of it; those behind ``**kwargs``, too."""
    classes = [one for one in ast.parse(path.read_text("utf-8")).body if isinstance(one, ast.ClassDef)]
    methods = [
        one for one in next(one for one in classes if one.name == owner).body if isinstance(one, ast.FunctionDef)
    ]
    found = [one.args for one in methods if one.name == name][-1:]  # behind its overloads
    if found and found[0].kwarg is not None:
        found += [one.args for one in methods if one.name == f"_{name}_impl"]
    return [argument.arg for one in found for argument in (*one.args, *one.kwonlyargs)]


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
@pytest.mark.parametrize("name", ["BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"])
def test_the_package_takes_what_the_stand_in_takes(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    found = importlib.util.find_spec("flashinfer")
    if found is None or not found.submodule_search_locations:
        pytest.skip("flashinfer-python is not installed: its signatures cannot be read")
    folder = Path(next(iter(found.submodule_search_locations)))
    path = folder / ("prefill.py" if "Prefill" in name else "decode.py")
    real = parameters(path, name, method)
    asked = inspect.signature(getattr(getattr(flashinfer_here, name), method)).parameters.values()
    positional = [one.name for one in asked if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert real[: len(positional)] == positional
    assert {one.name for one in asked} <= set(real)
