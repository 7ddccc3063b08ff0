"""The live page: figures of /metrics, for who may have them, made while somebody looks and in a bounded message."""

import json
import time
from typing import Any

import numpy as np
import pytest
from page_support import CHROMIUM, browser, tab
from serve_support import LONGEST, PATH, WAIT, Served, engine_of, serving, until

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.models import read_model
from hybridkv.observe.block_map import BlockState, block_map
from hybridkv.planner import plan
from hybridkv.request import Request, SamplingParams
from hybridkv.runner import AsyncEngine, Engine, EngineOptions, load
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.serve import ApiKeys, ServeOptions
from hybridkv.serve.metrics import MOST_CELLS, MOST_ENDED, MOST_REQUESTS, Ages, Live, RequestMetrics, _look
from hybridkv.step import Csr, StepResult

ASKED = {"prompt": "a prompt that comes again, of more than two blocks", "max_tokens": 8, "ignore_eos": True}
LISTENS = "document.getElementById('state').textContent === 'live'"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def one_sample(served: Served, **headers: str) -> dict[str, Any]:
    """The first of a listener that then goes."""
    with served.client.stream("GET", "/live", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        line = next(answer.iter_lines())
    sample: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return sample


def holds(page: Any, condition: str, within_s: float = WAIT) -> None:  # noqa: ANN401 - playwright is optional
    """Wait until ``condition`` does, in the page; its own policy forbids that it evaluates text itself."""
    end = time.monotonic() + within_s
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(20)


def metric(served: Served, name: str) -> float:
    """Of all its samples."""
    lines = served.client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"hybridkv:{name}{{"))


def test_live_sample_matches_metrics(llama: Served) -> None:
    until(lambda: llama.service.live.listeners == 0)
    for _ in range(2):
        llama.post(PATH, **ASKED)
    found = one_sample(llama)
    for name, of in (
        ("running", "num_requests_running"),
        ("waiting", "num_requests_waiting"),
        ("queries", "prefix_cache_queries_total"),
        ("hits", "prefix_cache_hits_total"),
        ("output", "generation_tokens_total"),
        ("preemptions", "num_preemptions_total"),
        ("ended", "requests_finished_total"),
        ("evictions", "kv_group_evictions_total"),
    ):
        assert found[name] == metric(llama, of), name
    ((kind, size, held, cached, *_),) = found["groups"]
    assert (kind, held) == ("tokens", 0)
    assert cached * size == metric(llama, "kv_group_block_bytes") * cached > 0
    assert found["map"]["states"].count("c") > 0
    assert {len(one) for one in found["map"].values()} == {len(found["map"]["states"])}
    assert found["misses"] is None
    assert found["ttft"] is found["tpot"] is None  # nothing ended while somebody listened


def test_live_page_without_listeners_costs_nothing(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    service, looks = llama.service, []
    between = service.engine.between_steps

    def counted(ask: Any) -> Any:  # noqa: ANN401 - as it is
        looks.append(ask)
        return between(ask)

    monkeypatch.setattr(service.engine, "between_steps", counted)
    until(lambda: service.live.listeners == 0)
    before = service.live.samples
    llama.post(PATH, **ASKED)
    time.sleep(1.2)
    assert (looks, service.live.samples, len(service.live._ended)) == ([], before, 0)
    one_sample(llama)
    assert len(looks) == service.live.samples - before == 1
    until(lambda: service.live.listeners == 0)
    time.sleep(1.2)
    assert len(looks) == 1


def test_live_listeners_share_samples(llama: Served) -> None:
    with llama.client.stream("GET", "/live") as one, llama.client.stream("GET", "/live") as other:
        before = llama.service.live.samples
        lines = [one.iter_lines(), other.iter_lines()]
        first, second = (next(each) for each in lines)
        assert llama.service.live.samples - before <= 1
        assert llama.service.live.listeners == 2
        assert first.startswith("data: {")
        assert second.startswith("data: {")


def test_live_finished_requests_are_sorted_by_time() -> None:
    with serving(engine_of("llama")) as served, served.client.stream("GET", "/live") as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        for tokens in (4, 40):
            served.post(PATH, **{**ASKED, "max_tokens": tokens})
        for line in lines:
            slowest = json.loads(line[6:])["slowest"]
            if len(slowest) == 2:
                break
    assert [one[7] for one in slowest] == [40, 4]
    found = json.loads(line[6:])
    longer, shorter = slowest
    assert found["ttft"] == pytest.approx(sorted((longer[3], shorter[3])), abs=1e-4)
    each = sorted((one[4] - one[3]) / (one[7] - 1) for one in slowest)
    assert found["tpot"] == pytest.approx(each, abs=1e-4)
    for _, ago, queued, first, whole, prompt, found, _, preempted in slowest:
        assert 0 <= queued < first < whole
        assert 0 <= ago < 60
        assert (prompt, preempted) == (len(ASKED["prompt"]), 0)  # type: ignore[arg-type]  # text, a token a letter
        assert 0 <= found < prompt


def test_live_page_with_keys_hides_secrets() -> None:
    keys = ApiKeys({"sk-all": None, "sk-one": "salt-of-one"})
    with serving(engine_of("llama"), ServeOptions(keys=keys)) as served:
        one, everybody = {"Authorization": "Bearer sk-one"}, {"Authorization": "Bearer sk-all"}
        body = {**ASKED, "max_tokens": 400, "stream": True}
        with served.client.stream("POST", PATH, json=body, headers=one) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert served.client.get("/live").status_code == 401
            assert served.client.get("/live", headers=one).status_code == 403
            found = one_sample(served, **everybody)
        text = json.dumps(found)
        assert found["running"] == 1
        assert len(found["runs"]) == 1
        assert "salt-of-one" not in text
        assert str(ASKED["prompt"]) not in text
        for path in (
            "",
            *(f"page/{name}" for name in ("page.js", "page.css", "uplot.js", "uplot.css", "uplot.LICENSE")),
        ):
            file = served.client.get(f"/{path}")
            assert file.status_code == 200
            assert "connect-src 'self'" in file.headers["content-security-policy"]
            assert "salt" not in file.text or not path
        assert served.client.get("/page/nothing.js").status_code == 401


def test_draining_server_with_live_listener_ends() -> None:
    with serving(engine_of("llama")) as served, served.client.stream("GET", "/live") as answer:
        lines = answer.iter_lines()
        next(lines)
        served.stop()
        assert all(not line or line.startswith("data: ") for line in lines)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3"])
def test_live_map_has_every_block_once(name: str) -> None:
    with Engine(load(f"tiny:{name}"), memory="3MiB", max_model_len=LONGEST) as engine:
        pinned = [5] * 40
        engine.generate([pinned, [6] * 70], SamplingParams(max_tokens=30, ignore_eos=True))
        for prompt in ([1] * 50, [2] * 90, pinned):
            engine.add(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(5):
            engine.step()
        cache = engine.cache
        found, groups = block_map(cache.config, cache.block_pool, cache.groups, cache.pins), cache.statistics().groups
        assert (found.starts[1:] >= found.ends[:-1]).all()
        assert found.ends.max() <= cache.config.arena_bytes
        sizes = [cache.config.block_bytes_of(group) for group in range(len(groups))]
        assert (found.ends - found.starts == np.array(sizes)[found.groups]).all()
        for number, group in enumerate(groups):
            states = found.states[found.groups == number]
            assert np.count_nonzero(states == BlockState.RUNNING) == group.held_blocks > 0
            assert np.count_nonzero(states == BlockState.CACHED) == group.evictable_blocks
        assert found.at(found.starts).tolist() == found.at(found.ends - 1).tolist() == list(range(len(found.starts)))
        assert found.at(np.array([0])).tolist() == [-1]  # the null block


@pytest.fixture(scope="module")
def crowd() -> tuple[bytes, float]:
    """A sample of a thousand that run and a thousand that wait, and the seconds that it took, its look included."""
    options = EngineOptions(max_running=1000, token_budget=1000)
    with Engine(load("tiny:llama"), memory="64MiB", max_model_len=64, options=options) as engine:
        for number in range(2000):
            engine.add([number % 97], SamplingParams(max_tokens=40, ignore_eos=True))
        engine.step()
        samples = Live(AsyncEngine(engine), RequestMetrics("hybridkv", "crowd"))  # whose thread would go on stepping
        begun = time.perf_counter()
        text = json.dumps(samples._sample(_look(engine))).encode()
        return text, time.perf_counter() - begun


def test_live_message_of_a_thousand_requests_is_short(crowd: tuple[bytes, float]) -> None:
    text, took = crowd
    assert took < 0.25  # some 15 ms where nothing else runs
    found = json.loads(text)
    assert (found["running"], found["waiting"]) == (1000, 1000)
    assert found["waits"] == {"seats": 1000}
    assert len(found["runs"]) == len(found["queue"]) == MOST_REQUESTS
    assert len(found["map"]["states"]) == MOST_CELLS
    assert len(found["slowest"]) <= MOST_ENDED
    assert len(text) < 32_768


def test_live_sample_stays_unchanged_while_the_engine_runs() -> None:
    options = EngineOptions(max_running=2)
    with Engine(load("tiny:llama"), memory="4MiB", max_model_len=64, options=options) as engine:
        for number in range(4):
            engine.add([number, 5], SamplingParams(max_tokens=3, ignore_eos=True))
        engine.step()
        samples = Live(AsyncEngine(engine), RequestMetrics("hybridkv", "looked"))
        look = _look(engine)
        before = samples._sample(look)
        assert [list(one[1:]) for one in before["runs"]] == [[2, 0, 2, 1, 0]] * 2
        assert [list(one[1:]) for one in before["queue"]] == [[2, "seats"]] * 2
        for _ in range(4):  # rows are released, and taken by those that waited
            engine.step()
        after = samples._sample(look)
        assert (after["runs"], after["queue"]) == (before["runs"], before["queue"])


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (820, "dark"), (390, "light")])
def test_live_page_matches_metrics(llama: Served, width: int, scheme: str) -> None:
    llama.post(PATH, **ASKED)
    with browser() as opened, tab(opened, llama.url, width, scheme) as page:
        holds(page, LISTENS)
        shown = "Number(document.querySelector('[data-figure=hits]').dataset.value)"
        before = page.evaluate(shown)
        llama.post(PATH, **ASKED)
        holds(page, f"{shown} > {before}", within_s=2)
        holds(page, "Number(document.querySelector('[data-figure=running]').dataset.value) === 0")
        for figure, name in (
            ("hits", "prefix_cache_hits_total"),
            ("queries", "prefix_cache_queries_total"),
            ("output", "generation_tokens_total"),
            ("waiting", "num_requests_waiting"),
            ("preemptions", "num_preemptions_total"),
            ("evictions", "kv_group_evictions_total"),
        ):
            tile = page.locator(f"[data-figure={figure}]")
            assert float(tile.get_attribute("data-value")) == metric(llama, name), figure
            assert tile.inner_text() == f"{int(metric(llama, name)):,}"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator(".uplot").count() == 6
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 29)"
        assert dark == (scheme == "dark")
        page.wait_for_selector("#slowest li")
        for name in ("ttft", "tpot"):
            holds(page, f"/^[0-9.]+ m?s$/.test(document.getElementById('{name}').textContent)")
            holds(page, f"/^[0-9.]+ m?s$/.test(document.getElementById('{name}-p99').textContent)")
        page.locator("#groups button").press("Enter")
        assert page.locator("#groups button").get_attribute("aria-pressed") == "true"
        page.locator("#map").press("ArrowRight")
        page.locator("#map").press("ArrowRight")
        assert "B in: " in page.locator("#cell").inner_text()


@needs_chromium
def test_live_page_asks_for_a_key_and_stores_none() -> None:
    keys = ApiKeys({"sk-all": None})
    with serving(engine_of("llama"), ServeOptions(keys=keys)) as served, browser() as opened:
        page = opened.new_page()
        page.goto(served.url)
        page.wait_for_selector("#ask:not([hidden])")
        assert page.locator("[data-figure=running]").inner_text() == "-"
        page.locator("#key").fill("sk-all")
        page.locator("#key").press("Enter")
        holds(page, LISTENS)
        assert not page.locator("#ask").is_visible()
        assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        page.close()


@needs_chromium
def test_live_page_continues_when_misses_change(llama: Served) -> None:
    sample = one_sample(llama)
    assert sample["misses"] is None
    with browser() as opened, tab(opened, llama.url) as page:
        holds(page, LISTENS)
        labels = page.evaluate(
            """(sample) => {
            ending.abort();
            const shown = [];
            let time = sample.time;
            for (const misses of [null, { evicted: 5 }, { evicted: 0, no_room: 3 }]) {
                show({ ...sample, time: time += 1, misses });
                shown.push([...document.querySelectorAll("#chart-misses .u-label")].map((one) => one.textContent));
            }
            return shown;
            }""",
            sample,
        )
    assert [one[1:] for one in labels] == [[], ["evicted"], ["no room"]]  # the first is time


@needs_chromium
def test_live_page_second_key_ends_the_first_stream(llama: Served) -> None:
    with browser() as opened, tab(opened, llama.url) as page:
        holds(page, LISTENS)
        first, second = page.evaluate(
            """() => {
            const first = ending;
            document.getElementById("ask").requestSubmit();
            return [first.signal.aborted, ending.signal.aborted];
            }"""
        )
    assert (first, second) == (True, False)


@needs_chromium
def test_live_page_with_a_thousand_requests_stays_smooth(llama: Served, crowd: tuple[bytes, float]) -> None:
    with browser() as opened, tab(opened, llama.url) as page:
        holds(page, LISTENS)
        took, rows, said = page.evaluate(
            """(text) => {
            for (let at = 0; at < 1750; at += 1) { const one = JSON.parse(text); one.time += at - 1800; keep(one); }
            const all = [];
            for (let at = 0; at < 50; at += 1) {
                const begun = performance.now();
                const one = JSON.parse(text);
                one.time += at - 50;
                show(one);
                all.push(performance.now() - begun);
            }
            const rows = document.querySelectorAll("#runs tbody tr").length;
            return [all.sort((a, b) => a - b)[25], rows, document.getElementById("runs-more").textContent];
            }""",
            crowd[0].decode(),
        )
    assert (rows, said) == (MOST_REQUESTS, f"the first {MOST_REQUESTS} of 1,000")
    assert took < 250  # milliseconds of a sample, half an hour of history there; the machine may be busy


def test_live_sample_reports_pinned_blocks_and_block_ages() -> None:
    cache = KVCacheManager(
        plan(read_model("llama-3-8b"), memory="1GiB", max_model_len=512), options=CacheOptions(max_pinned_blocks=10)
    )
    scheduler = Scheduler(cache, SchedulerLimits())
    prompt = list(range(50))
    scheduler.add(Request("a", prompt, SamplingParams(max_tokens=1), hasher=cache.hasher))
    ages = Ages()

    def looked(now: float) -> dict[int, set[float]]:
        found = block_map(cache.config, cache.block_pool, cache.groups, cache.pins)
        old = ages.of(found, cache.block_pool.num_blocks, now)
        return {state: set(old[found.states == state].tolist()) for state in set(found.states.tolist())}

    assert looked(1.0) == {}
    step = scheduler.schedule()
    assert looked(2.0) == {BlockState.RUNNING: {0.0}}
    assert looked(5.0) == {BlockState.RUNNING: {3.0}}
    scheduler.update(StepResult(step.id, Csr.from_lists([[7]])))
    assert looked(6.0) == {BlockState.CACHED: {0.0}}
    pin = cache.pin([*prompt[:32], 99])
    assert looked(9.0) == {BlockState.CACHED: {3.0}, BlockState.PINNED: {0.0}}
    cache.unpin(pin)
    assert looked(10.0) == {BlockState.CACHED: {0.0, 4.0}}
