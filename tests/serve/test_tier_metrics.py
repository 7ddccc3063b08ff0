"""What a server's metrics, page, `top` and `doctor` say of the tiers behind its cache."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from page_support import browser, tab
from prometheus_client.parser import text_string_to_metric_families
from serve_support import PATH, Served, serving, until
from test_live import LISTENS, holds, needs_chromium, one_sample

from hybridkv.cache import KVCacheManager
from hybridkv.cli import top
from hybridkv.cli.top import Exposition, metrics_url, read_metrics
from hybridkv.doctor import examine_server
from hybridkv.runner import Engine, EngineOptions, load
from hybridkv.serve import ServeOptions
from hybridkv.specs import Keeps
from hybridkv.stores import DiskFolder
from hybridkv.units import format_bytes, format_count
from hybridkv.worker import tier as copying
from hybridkv.worker.store import Ended

CHATS = "abcdefgh"
BLOCK = 16
Found = dict[tuple[str, ...], float]


def engine_with_host(name: str = "llama", memory: str = "168KiB", host_memory: str = "8MiB") -> Engine:
    """The device of a llama holds one request of the longest."""
    return Engine(load(f"tiny:{name}"), memory=memory, max_model_len=200, host_memory=host_memory)


def asked(served: Served, chat: str, turn: int = 0, *, tokens: int = 120) -> int:
    """Ask for a turn of a chat; return how many tokens were cached, as the client is told."""
    body: dict[str, Any] = {"prompt": chat * tokens + "?" * turn, "max_tokens": 3, "ignore_eos": True}
    cached: int = served.post(PATH, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def samples(served: Served) -> Found:
    """Values by the name without prefix and the labels' values, sorted by label; of a histogram count and sum."""
    found: Found = {}
    for family in text_string_to_metric_families(served.client.get("/metrics").text):
        for one in family.samples:
            labels = {key: value for key, value in sorted(one.labels.items()) if key != "model_name"}
            if "le" not in labels:
                found[one.name.partition(":")[2], *labels.values()] = one.value
    return found


def of_cpu(found: Found) -> dict[str, float]:
    """The values that have the tier alone as a label."""
    start = "kv_offload_tiering_"
    return {name.removeprefix(start): value for (name, *labels), value in found.items() if labels == ["CPU"]}


@pytest.fixture(scope="module")
def busy() -> Iterator[tuple[Served, Engine, int]]:
    """A server after three rounds of chats, and the cached tokens that its clients were told."""
    target = engine_with_host("gemma3", "400KiB")
    with serving(target, ServeOptions(metrics_prefix="vllm")) as served:
        cached = sum(asked(served, chat, turn) for turn in range(3) for chat in CHATS)
        cached += asked(served, "z", tokens=126)  # its output fills the block in which its prompt ends
        yield served, target, cached


def test_metrics_of_a_tier_match_its_counts(busy: tuple[Served, Engine, int]) -> None:
    served, target, cached = busy
    found = samples(served)
    assert target.tier is not None
    now, counts = target.tier.statistics(), of_cpu(found)
    assert counts["read_bytes_total"] == now.loaded_bytes > 0
    assert counts["write_bytes_total"] == now.stored_bytes > 0
    assert counts["loaded_tokens_total"] == now.loaded_tokens > 0
    assert counts["promotion_jobs_total"] == now.loads > 0
    assert counts["cascade_jobs_total"] == now.stores > 0
    assert counts["promotion_job_failures_total"] == counts["cascade_job_failures_total"] == 0
    for direction in ("promotion", "cascade"):  # no faster than memory, no slower than a tape
        assert 1e5 < counts[f"{direction}_bytes_per_second"] < 1e12
    assert counts["active_promotion_jobs"] == counts["active_cascade_jobs"] == counts["waiting_cascade_jobs"] == 0
    for direction, jobs in (("promotion", now.loads), ("cascade", now.stores)):
        latency = f"kv_offload_tiering_{direction}_latency_seconds"
        assert found[f"{latency}_count", "success", "CPU"] == jobs
        assert 0 < found[f"{latency}_sum", "success", "CPU"] < 60
        assert found[f"{latency}_count", "failure", "CPU"] == 0
    by_source = {source: found["prompt_tokens_cached_by_source_total", source] for source in ("device", "host")}
    assert sum(by_source.values()) == cached == found["prefix_cache_hits_total",]
    assert min(by_source.values()) > 0


def test_metrics_of_a_tier_say_what_fills_it(busy: tuple[Served, Engine, int]) -> None:
    """Counted again from the keys of the host's blocks."""
    served, target, _ = busy
    found = samples(served)
    assert target.tier is not None
    host, filled = target.tier.host, Counter[str]()
    for number, group in enumerate(host.config.groups):
        whole, partial = keyed(host, number)
        kind = group.spec.keeps
        size = host.config.block_bytes_of(number)
        filled[str(kind)] += size * len(whole)
        filled["partial" if kind in {Keeps.TOKENS, Keeps.WINDOW} else str(kind)] += size * len(partial)
    kinds = {labels[0]: value for (name, *labels), value in found.items() if name.endswith("cached_bytes")}
    assert kinds == filled
    assert set(kinds) == {"tokens", "window", "partial"}
    assert min(kinds.values()) > 0
    counts = of_cpu(found)
    assert counts["capacity_bytes"] == host.config.arena_bytes == 8 << 20
    assert counts["usage_perc"] == pytest.approx(sum(filled.values()) / (8 << 20))
    assert found["kv_cache_capacity_bytes",] == 400 << 10
    blocks = [value for (name, *labels), value in found.items() if name == "kv_group_blocks" and "partial" in labels]
    assert blocks == [len(keyed(target.cache, number)[1]) for number in range(len(host.config.groups))]
    assert sum(blocks) > 0


def keyed(cache: KVCacheManager, group: int) -> tuple[set[int], set[int]]:
    """Blocks of a group with a key of all their tokens, and those with keys of some of them only."""
    index = cache.block_pool.indexes[group]
    whole = {block for _, block in index.entries()}
    return whole, {entry.block for _, entry in index.partial_entries()} - whole


def test_top_shows_a_row_for_each_tier(busy: tuple[Served, Engine, int], capsys: pytest.CaptureFixture[str]) -> None:
    served, target, _ = busy
    assert top.top_command(url=served.url, every=1.0, once=True, api_key=None) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert target.tier is not None
    now, usage = target.tier.statistics(), of_cpu(samples(served))["usage_perc"]
    moved = f"{format_bytes(now.loaded_bytes)} {format_bytes(now.stored_bytes)}"
    assert f"CPU {usage:.1%} 8 MiB {format_count(now.hit_tokens)} {moved} 0 0 0" in lines
    assert max(map(len, lines)) <= 80


def test_live_sample_shows_the_tiers(busy: tuple[Served, Engine, int]) -> None:
    served, _, _ = busy
    counts, found = of_cpu(samples(served)), one_sample(served)
    ((name, capacity, kinds, hits, loaded, stored, *jobs),) = found["tiers"]
    assert (name, capacity, hits) == ("CPU", counts["capacity_bytes"], counts["hit_tokens_total"])
    assert (loaded, stored) == (counts["read_bytes_total"], counts["write_bytes_total"])
    assert jobs == [0, 0, counts["promotion_allocation_failures_total"], 0, 0]
    assert sum(kinds.values()) == pytest.approx(counts["usage_perc"] * capacity)


@needs_chromium
def test_live_page_shows_the_tiers(busy: tuple[Served, Engine, int]) -> None:
    served, target, _ = busy
    assert target.tier is not None
    with browser() as opened, tab(opened, served.url) as page:
        holds(page, LISTENS)
        assert page.locator("#tiers").is_visible()
        cells = page.locator("#tier-rows tbody td").all_inner_texts()
        assert (cells[0], cells[3]) == ("CPU", format_count(target.tier.statistics().hit_tokens))
        widths = page.evaluate("[...document.querySelectorAll('#tier-rows .track span')].map((one) => one.className)")
        assert set(widths) == {"tokens", "window", "partial"}
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def found_by_doctor(served: Served) -> dict[str, str]:
    """The problems by name; and what is fine of tiers, as "fine: ..."."""
    diagnosis = examine_server(served.url, Exposition.parse(read_metrics(metrics_url(served.url), None), 0.0))
    fine = {name: f"fine: {figure}" for name, figure in diagnosis.figures.items() if name.startswith("tier")}
    return fine | {one.name: f"{one.said} {one.figure}: {one.remedy}" for one in diagnosis.findings}


def test_doctor_of_a_tier_that_works_finds_nothing(busy: tuple[Served, Engine, int]) -> None:
    served, target, _ = busy
    assert target.tier is not None
    now = target.tier.statistics()
    assert found_by_doctor(served)["tier_CPU"] == (
        f"fine: CPU: {now.stores} resume points stored, {now.loads} prefixes loaded, "
        f"{format_count(now.hit_tokens)} tokens hit after a load"
    )


def test_doctor_without_a_tier_asks_for_one() -> None:
    options = EngineOptions(remembered_losses=1000)
    for memory, found in (("168KiB", "--host-memory SIZE"), ("8MiB", "fine: ")):
        target = Engine(load("tiny:llama"), memory=memory, max_model_len=200, options=options)
        with serving(target) as served:
            for _ in range(2):
                for chat in CHATS:
                    asked(served, chat, tokens=190)
            assert found in found_by_doctor(served)["tiers"]


def test_hits_of_a_device_that_holds_one_prompt_come_from_the_host() -> None:
    with serving(engine_with_host()) as served:
        first = [asked(served, chat, tokens=190) for chat in CHATS]
        again = [asked(served, chat, tokens=190) for chat in CHATS]
        found = samples(served)
    assert set(first) == {0}
    assert min(again) > 100
    host, device = (found["prompt_tokens_cached_by_source_total", source] for source in ("host", "device"))
    assert host + device == sum(again)
    assert device == BLOCK  # the device has one block beside a prompt
    assert found["kv_offload_tiering_hit_tokens_total", "CPU"] == host


def test_metrics_of_a_tier_count_transfers_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = copying._pieces_of
    broken: set[str] = set()

    def failing(transfer: Any, source: Any, destination: Any) -> Any:  # noqa: ANN401 - passed on
        direction = "down" if destination is hosts[0] else "up"
        if direction in broken:
            raise RuntimeError(f"broken on the way {direction}")
        return pieces(transfer, source, destination)

    monkeypatch.setattr(copying, "_pieces_of", failing)
    target = engine_with_host()
    assert target.runner._tier is not None
    hosts = [target.runner._tier._host]
    with serving(target) as served:
        for chat in "abc":
            asked(served, chat, tokens=190)
        broken.add("up")
        assert asked(served, "a", tokens=190) <= BLOCK  # computed again
        broken.clear()
        broken.add("down")
        for chat in "xyz":
            asked(served, chat, tokens=190)
        found, problem = samples(served), found_by_doctor(served)["failures_of_tier_CPU"]
    counts = of_cpu(found)
    assert "Transfers of the tier CPU fail" in problem
    assert counts["promotion_job_failures_total"] == 1
    assert counts["cascade_job_failures_total"] >= 3
    for direction in ("promotion", "cascade"):
        latency = f"kv_offload_tiering_{direction}_latency_seconds_count"
        assert found[latency, "failure", "CPU"] == counts[f"{direction}_job_failures_total"]
        assert found[latency, "success", "CPU"] == counts[f"{direction}_jobs_total"]


def test_metrics_of_a_tier_count_dropped_stores() -> None:
    """A host that holds no prompt drops every store."""
    with serving(engine_with_host(host_memory="40KiB")) as served:
        for chat in CHATS:
            asked(served, chat)
        counts, problems = of_cpu(samples(served)), found_by_doctor(served)
    assert counts["cascade_jobs_total"] == counts["write_bytes_total"] == 0
    assert counts["backpressure_stores_dropped_total"] >= len(CHATS)
    problem = problems["size_of_tier_CPU"]
    assert "CPU is no larger than the device" in problem
    assert "15 of 15 stores dropped" in problems["stores_of_tier_CPU"]
    assert "36 KiB behind 168 KiB on the device: more of it than the device has, such as 672 KiB" in problem


def test_metrics_of_a_tier_show_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers that take long are on their way, and the request that waits for one says so."""
    ended, slow = copying._InPlace.ended, threading.Event()

    def late(self: Any, *, wait: bool) -> list[Ended]:  # noqa: ANN401 - private
        return [] if slow.is_set() else ended(self, wait=wait)

    monkeypatch.setattr(copying._InPlace, "ended", late)
    with serving(engine_with_host(memory="400KiB")) as served, ThreadPoolExecutor(1) as thread:
        for chat in "abcdefghijklmnopqr":
            asked(served, chat)
        slow.set()
        waiting = thread.submit(asked, served, "b")
        until(lambda: of_cpu(samples(served))["active_promotion_jobs"] == 1)
        found = samples(served)
        assert found["num_requests_waiting_by_reason", "prefix_loading"] == 1
        asked(served, "x")
        asked(served, "x", 1)
        counts = of_cpu(samples(served))
        assert counts["active_promotion_jobs"] == 1
        assert counts["active_cascade_jobs"] > 0
        assert counts["waiting_cascade_jobs"] > 0
        slow.clear()
        assert waiting.result() > 100
        until(lambda: of_cpu(samples(served))["active_cascade_jobs"] == 0)
        counts = of_cpu(samples(served))
        assert counts["active_promotion_jobs"] == counts["waiting_cascade_jobs"] == 0


RECORDED = """
x:num_requests_running{model_name="m"} 0.0
x:kv_cache_capacity_bytes{model_name="m"} 1073741824.0
x:kv_offload_tiering_capacity_bytes{model_name="m",tier="DISK"} 4294967296.0
x:kv_offload_tiering_read_bytes_total{model_name="m",tier="DISK"} 5.0
x:kv_offload_tiering_cascade_jobs_total{model_name="m",tier="DISK"} 1000.0
x:kv_offload_tiering_promotion_jobs_total{model_name="m",tier="DISK"} 400.0
x:kv_offload_tiering_backpressure_stores_dropped_total{model_name="m",tier="DISK"} 99.0
x:kv_offload_tiering_promotion_allocation_failures_total{model_name="m",tier="DISK"} 399.0
x:kv_offload_tiering_promotion_job_failures_total{model_name="m",tier="DISK"} 5.0
x:kv_offload_tiering_cascade_job_failures_total{model_name="m",tier="DISK"} 5.0
"""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "fine"),
        ({"capacity_bytes": 1073741824.0}, "DISK is no larger than the device"),
        ({"promotion_allocation_failures_total": 400.0}, "The device has no room for prefixes from the tier DISK"),
        ({"backpressure_stores_dropped_total": 112.0}, "The tier DISK has no room for what it should keep"),
        ({"promotion_job_failures_total": 10.0}, "Transfers of the tier DISK fail"),
        (
            {"promotion_jobs_total": 9.0, "promotion_allocation_failures_total": 0.0},
            "Prefixes go down to the tier DISK and hardly ever come up",
        ),
    ],
)
def test_doctor_reads_the_metrics_of_any_tier(changed: dict[str, float], said: str) -> None:
    """Each limit just kept in what was recorded, and just passed."""
    text = RECORDED
    for name, value in changed.items():
        text = re.sub(rf"(_{name}\{{.*tier=.*\}}) .*", rf"\1 {value}", text)
    assert text != RECORDED or not changed
    diagnosis = examine_server("there", Exposition.parse(text, 0.0))
    problems = [one.said for one in diagnosis.findings] or ["fine"]
    assert [said in one for one in problems] == [True]
    assert [name.endswith("tier_DISK") for name in diagnosis.figures] == [True]


def test_store_behind_the_host_is_a_tier_of_its_own(tmp_path: Path) -> None:
    """Metrics and the page show it; the host's row has nothing of its transfers."""
    disk = DiskFolder(tmp_path, "64MiB")
    more: dict[str, Any] = {"memory": "168KiB", "max_model_len": 200, "host_memory": "600KiB", "store": disk}
    with serving(Engine(load("tiny:llama"), **more), ServeOptions(metrics_prefix="vllm")) as served:
        cached = sum(asked(served, chat, turn) for turn in range(2) for chat in CHATS)
        until(lambda: samples(served)["kv_offload_tiering_active_cascade_jobs", "STORAGE"] == 0)
        found = samples(served)
        rows = {
            name.removeprefix("kv_offload_tiering_"): (found[name, "CPU"], value)
            for (name, *labels), value in found.items()
            if labels == ["STORAGE"]
        }
        page = one_sample(served)["tiers"]
    assert rows["cascade_jobs_total"][1] >= len(CHATS)
    assert rows["write_bytes_total"][1] > 0
    assert rows["promotion_jobs_total"][1] > 0  # the host holds few chats
    assert rows["loaded_tokens_total"][1] > 0
    idle = ("promotion_job_failures_total", "cascade_job_failures_total", "active_cascade_jobs")
    assert [rows[name] for name in idle] == [(0, 0)] * len(idle)
    hits = {source: found["prompt_tokens_cached_by_source_total", source] for source in ("device", "host", "storage")}
    assert sum(hits.values()) == cached == found["prefix_cache_hits_total",]
    assert (hits["host"], hits["storage"]) == rows["hit_tokens_total"]
    assert 0 < hits["storage"] <= rows["loaded_tokens_total"][1]
    for way, jobs in (("promotion", "promotion_jobs_total"), ("cascade", "cascade_jobs_total")):
        counted = found[f"kv_offload_tiering_{way}_latency_seconds_count", "success", "STORAGE"]
        assert counted == rows[jobs][1]
    assert [row[0] for row in page] == ["CPU", "STORAGE"]
