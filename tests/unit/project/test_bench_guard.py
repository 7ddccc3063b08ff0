"""benchmarks/guard.py: work that grows is reported with its row, whatever its time; see `make bench-guard`."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.cache.lookup import KVCacheBlocks
from hybridkv.request import Request

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("guard", BENCHMARKS / "guard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "guard", module)
    spec.loader.exec_module(module)
    return module


def test_bench_guard_reports_growth_only(guard: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code counts the same twice; one more layer around a call is reported in the rows of that call only."""
    before = guard.measure(["lookups"])
    assert guard.measure(["lookups"]) == before
    declared = {row: list(work) for row, work in before.items()}
    assert guard.grown(declared, before) == []
    own = KVCacheManager.get_computed_blocks

    def layered(self: KVCacheManager, request: Request) -> tuple[KVCacheBlocks, int]:
        for _ in range(3):
            if request.request_id != str(request.request_id):
                break
        return own(self, request)

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", layered)
    reported = guard.grown(declared, guard.measure(["lookups"]))
    rows = {line.partition(":")[0] for line in reported}
    assert "lookup.miss.per_call" in rows
    assert rows <= {row for row in before if row.startswith(("lookup.miss", "lookup.hit"))}  # nobody else looks up


def test_bench_guard_growth_limit_is_applied(guard: ModuleType) -> None:
    declared = {"a": [1000, 100], "b": [20, 1]}
    assert guard.grown(declared, {"a": (1050, 105), "b": (28, 1)}) == []
    assert guard.grown(declared, {"a": (500, 50), "b": (1, 0)}) == []
    assert guard.grown(declared, {"a": (1051, 100)}) == ["a: 1000 bytecodes, now 1051 (+5%)"]
    assert guard.grown(declared, {"a": (1000, 106), "b": (29, 1)}) == [
        "a: 100 C calls, now 106 (+6%)",
        "b: 20 bytecodes, now 29 (+45%)",
    ]
    assert guard.grown(declared, {"c": (1, 1)}) == ["c: not declared"]


def test_named_tenants_cost_a_request_nothing(guard: ModuleType) -> None:
    """What a tenant needs is made for its first request, and nobody walks all tenants to find who gives way."""
    guard.Bench(guard.Counter()).tenants("first uses", 32)
    counter = guard.Counter()
    for count in (100, 10_000):
        guard.Bench(counter).tenants(f"{count}", count)
    rows = counter.per_operation()
    few, many = (rows[f"{count}.request.per_call"] for count in (100, 10_000))
    assert all(after <= 1.02 * before for before, after in zip(few, many, strict=True)), (few, many)
    assert rows["10000.manager"][1] == rows["100.manager"][1]  # C calls: nothing is made for each tenant


def test_bench_guard_declares_every_row(guard: ModuleType) -> None:
    """Of one scenario here; `make bench-guard` compares all."""
    declared = json.loads((BENCHMARKS / "work.json").read_text())
    assert set(guard.measure(["tables", "decode_one"])) <= set(declared["rows"])
    assert {"python", "numpy"} <= set(declared)


def test_shared_prefix_work_is_constant_in_requests(guard: ModuleType) -> None:
    """A request behind 400 with the same system prompt costs what one behind 100 costs (2.3 times as much before)."""
    work = {}
    server = guard.SharedPrefix("llama-3-8b", "natural")
    for behind, more in ((100, 100), (400, 280)):
        server.serve(more)
        counter = guard.Counter()
        with counter.counted("request", 20):
            server.serve(20)
        work[behind] = counter.per_operation()["request"]
    assert work[400][0] < 1.1 * work[100][0]
    assert work[400][1] < 1.1 * work[100][1]
    server.cache.check()
