"""Pages say what reports say, in figures that a browser draws; recording changes nothing of a replay."""

import json
import re
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assumed import plan_of
from cli_support import error, run
from hybridkv.cache import EDGES_S
from hybridkv.cli.options import checked_page
from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.planner import Plan
from hybridkv.report import Chart, page, plan_page, replay_page, sweep_page, tune_page
from hybridkv.simulator import Cell, ReplayReport, ReplaySettings, Swept, Tried, Workload, plan_for_trace, simulation_of
from hybridkv.simulator.report import MOST_SAMPLES, Recorded, Recording
from hybridkv.simulator.tune import parse_aims

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SOURCE = Workload("chat", hours=0.03)
SHORT = Workload("chat", hours=0.01)
AIMS = parse_aims("ttft-p99=1s,tpot-p99=50ms")
TRIED = [
    Tried(
        Cell("llama-3-8b", memory),
        price,
        reached={"ttft-p99": first, "tpot-p99": later},
        worst=max(("ttft-p99", first), ("tpot-p99", later / 0.05), key=lambda one: one[1]),
        goodput_per_s=goodput,
        tokens=1e6 / price,
    )
    for memory, price, first, later, goodput in (
        ("3GiB", 2.0, 0.4, 0.02, 0.5),
        ("4GiB", 2.5, 0.3, 0.02, 0.6),
        ("6GiB", 3.0, 0.2, 0.02, 0.6),
        ("2GiB", 1.0, 4.0, 0.06, 0.0),
    )
]
TRIED.append(Tried(Cell("llama-3-8b", "1MiB"), 1.0, refused="too small"))
SETTINGS = ReplaySettings(block_times=True, remembered_losses=1 << 16)


def replayed(
    model: str, memory: str, settings: ReplaySettings = SETTINGS, source: Workload = SOURCE
) -> tuple[Plan, ReplayReport, Recorded]:
    summary = source.summary()
    plan = plan_for_trace(summary, read_model(model), memory)
    simulation = simulation_of(plan, settings)
    recording = Recording(simulation.scheduler)
    report = simulation.run(source, summary=summary, recording=recording)
    simulation.scheduler.check()
    return plan, report, recording.recorded()


@pytest.fixture(scope="module")
def hybrid() -> tuple[Plan, ReplayReport, Recorded]:
    return replayed("qwen3.5-35b-a3b", "2GiB")


def swept() -> list[Swept]:
    """Two models, one of them in two memories and once refused."""
    cells = [Cell("llama-3-8b", memory) for memory in ("4GiB", "2GiB", "64MiB")]
    documents = [cell.run(SHORT, SHORT.summary()) for cell in (*cells, Cell("gemma-3-27b", "4GiB"))]
    return [
        Swept(cell, document, again=False)
        for cell, document in zip((*cells, Cell("gemma-3-27b", "4GiB")), documents, strict=True)
    ]


def charts(text: str) -> dict[str, Any]:
    """Title of each chart and its traces, as they stand in a page."""
    titles = re.findall(r"<section><h2>(.*?)</h2>", text)
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    drawn = json.loads(found.group(1).replace("<\\/", "</"))
    assert len(drawn) == len(titles) == len(set(titles))
    return {title: one["traces"] for title, one in zip(titles, drawn, strict=True)}


def test_report_page_matches_the_report(hybrid: tuple[Plan, ReplayReport, Recorded]) -> None:
    plan, report, recorded = hybrid
    text = replay_page(plan, report, recorded)
    shown = charts(text)
    _, so_far = shown["Hit rate"]
    assert so_far["y"][-1] == pytest.approx(report.hit_rate, abs=1e-5)
    assert 0.1 < (report.hit_rate or 0) < 1
    missed = {one["name"].replace(" ", "_"): one["y"][-1] for one in shown["Missed prompt tokens, by reason"]}
    assert missed == pytest.approx(report.misses, rel=1e-5)
    whole = np.sum([one["y"] for one in shown["Memory over time"]], axis=0)
    assert whole == pytest.approx(plan.config.arena_bytes / 2**30, rel=1e-4)
    at_the_end = sum(one["y"][-1] for one in shown["Memory over time"] if one["name"].endswith("cached"))
    by_age = np.sum([one["y"] for one in shown["Age of cached blocks"]])
    cached = [group.cached_blocks * plan.config.block_bytes_of(at) for at, group in enumerate(report.groups)]
    assert by_age == pytest.approx(sum(cached) / 2**30, rel=1e-4)
    assert at_the_end == pytest.approx(by_age, rel=1e-4)
    assert sum(cached)
    slowest = np.sum([one["x"] for one in shown["Slowest requests"]], axis=0)
    took = recorded.requests.end_s - recorded.requests.arrival_s
    assert slowest.tolist() == pytest.approx(np.sort(took)[-40:].tolist(), rel=1e-4)
    waste = {one["name"]: one["x"][0] for one in shown["Waste"]}
    assert waste["resume points never hit"] == pytest.approx(
        sum(one.unused for one in report.ends) / sum(one.made for one in report.ends), rel=1e-4
    )
    assert 0 < waste["padding of keys and values of 10 layers"] < 0.01
    assert f"<dd>{report.hit_rate:.1%}</dd>" in text


def test_report_recording_matches_the_report(hybrid: tuple[Plan, ReplayReport, Recorded]) -> None:
    _, report, recorded = hybrid
    samples, requests = recorded.samples, recorded.requests
    assert samples.prompt_tokens[-1] == report.prompt_tokens == requests.prompt_tokens.sum()
    assert samples.hit_tokens[-1] == report.hit_tokens == requests.hit_tokens.sum()
    assert samples.missed[-1].sum() == sum(report.misses.values())
    assert samples.running[-1] == samples.waiting[-1] == samples.held[-1].sum() == 0
    assert samples.running.max() > 1
    assert samples.usage.max() <= report.peak_usage
    assert (np.diff(samples.time_s) >= 0).all()
    assert samples.time_s[-1] == pytest.approx(report.simulated_s)
    assert len(requests.end_s) == report.requests
    for before, after in (("arrival_s", "begun_s"), ("begun_s", "first_token_s"), ("first_token_s", "end_s")):
        assert (getattr(requests, before) <= getattr(requests, after)).all()
    assert (requests.begun_s < requests.first_token_s).all()
    assert (requests.begun_s > requests.arrival_s).any()
    first = np.mean(requests.first_token_s - requests.arrival_s)
    assert first == pytest.approx(report.time_to_first_token_s.mean, abs=1e-6)
    assert [sum(counts) for counts in recorded.idle] == [group.cached_blocks for group in report.groups]
    assert all(len(counts) == len(EDGES_S) + 1 for counts in recorded.idle)


def test_report_recording_is_the_same_with_fast_forward() -> None:
    short = Workload("agent", hours=0.006)
    plan, report, recorded = replayed("qwen3.5-35b-a3b", "2GiB", source=short)
    alone = simulation_of(plan, SETTINGS).run(short)
    assert asdict(alone) == asdict(report)
    _, _, slowly = replayed("qwen3.5-35b-a3b", "2GiB", replace(SETTINGS, step_by_step=True), short)
    for name in recorded.requests.__dataclass_fields__:
        assert getattr(recorded.requests, name) == pytest.approx(getattr(slowly.requests, name)), name
    assert list(map(sum, recorded.idle)) == list(map(sum, slowly.idle))


def test_report_samples_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.simulator.report.MOST_SAMPLES", 50)
    _, report, recorded = replayed("llama-3-8b", "8GiB")
    at = recorded.samples.time_s
    assert 25 <= len(at) <= 51 < MOST_SAMPLES
    assert at[0] < report.simulated_s / 20
    assert np.median(np.diff(at)) < report.simulated_s / 20


def test_report_page_counts_layers_and_checkpoint_weights() -> None:
    """An indexer beside every latent makes two caches of a layer; experts of 4 bits are not counted as 16."""
    model = read_model("deepseek-v3.2")
    shown = charts(plan_page(plan_of(model, "80GiB", max_model_len=4096)))
    assert "keys and values of 61 layers" in {one["name"] for one in shown["One request"]}
    shown = charts(plan_page(plan_of(read_model("gpt-oss-20b"), "4GiB", max_model_len=4096)))
    (weights,) = (one["x"][0] for one in shown["Memory map"] if one["y"] == ["weights"])
    assert weights == pytest.approx(12.8, abs=0.05)


def test_report_of_a_plan_is_drawn_to_scale() -> None:
    plan = plan_for_trace(SOURCE.summary(), read_model("nemotron-3-nano-30b-a3b"), "4GiB")
    shown = charts(plan_page(plan))
    cache = sum(one["x"][0] for one in shown["Memory map"] if one["y"] == ["cache"])
    assert cache == pytest.approx(4.0, rel=1e-4)
    weights = sum(one["x"][0] for one in shown["Memory map"] if one["y"] == ["weights"])
    assert weights == pytest.approx(2 * plan.model.parameters / 2**30, rel=1e-4)
    (fit,) = shown["Requests that fit"]
    assert fit["y"][-1] == pytest.approx(plan.capacity.concurrency, rel=1e-4)
    assert fit["y"] == sorted(fit["y"], reverse=True)
    states = next(one for one in shown["One request"] if one["name"].startswith("states"))
    assert len(set(states["y"])) == 1


def table_of(text: str) -> list[list[str]]:
    """Rows of a page's table, the first its head."""
    found = re.findall(r"<tr>(.*?)</tr>", text)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in found]


def test_report_of_a_sweep_is_drawn_over_memory() -> None:
    done = swept()
    assert "refused" in done[2].document
    text = sweep_page("chat", done)
    shown = charts(text)
    rates: list[Any] = [one.document["report"] for one in done if "report" in one.document]
    (llama,) = (one for one in shown["Hit rate over memory"] if one["name"] == "llama-3-8b")
    assert llama["x"] == [2, 4]
    assert llama["y"] == pytest.approx([rates[1]["hit_rate"], rates[0]["hit_rate"]], rel=1e-5)
    assert llama["y"][0] < llama["y"][1]
    assert {one["name"] for one in shown["Time to first token over memory"]} == {"llama-3-8b", "gemma-3-27b"}
    (heat,) = shown["Hit rate of every setting"]
    assert heat["x"] == ["64MiB", "2GiB", "4GiB"]
    assert dict(zip(heat["y"], heat["z"], strict=True))["llama-3-8b"][0] is None
    rows = table_of(text)
    assert [len(row) for row in rows] == [8, 8, 8, 3, 8]
    assert rows[1][2] == f"{rates[0]['hit_rate']:.2%}"
    assert rows[3][2].startswith("refused: ")


def test_report_of_many_settings_draws_the_best() -> None:
    (one, *_) = swept()
    report: Any = one.document["report"]
    many = [
        Swept(
            replace(one.cell, memory=memory, settings=ReplaySettings(max_running=at + 1)),
            {"report": {**report, "hit_rate": at / 100}},
            again=False,
        )
        for at in range(70)
        for memory in ("2GiB", "4GiB")
    ]
    shown = charts(sweep_page("chat", many))
    assert [line["name"] for line in shown["Hit rate over memory"]] == [str(at) for at in range(70, 50, -1)]
    (heat,) = shown["Hit rate of every setting"]
    assert heat["y"] == [str(at) for at in range(11, 71)]


def test_report_of_a_search_is_drawn_by_cost_and_goodput() -> None:
    text = tune_page("chat", TRIED, AIMS)
    shown = charts(text)
    drawn = {one["name"]: (one["x"], one["y"]) for one in shown["Cost and goodput"]}
    assert drawn["cheapest"] == ([2.0], [0.5])
    assert drawn["runner-up"] == ([2.5], [0.6])
    assert drawn["meet the aims"] == ([3.0], [0.6])
    assert drawn["miss the aims"] == ([1.0], [0.0])
    first, _ = shown["Latencies compared with the aims"]
    assert first["x"] == [4.0, 0.2, 0.3, 0.4]
    assert "<dd>memory 4GiB: 25.0% dearer, tpot-p99 is 40.0% of the aim</dd>" in text
    assert table_of(text)[-1][-1] == "refused: too small"
    only_refused = tune_page("chat", TRIED[-1:], AIMS)
    assert charts(only_refused) == {}
    assert "<dd>too small</dd>" in only_refused
    nearest = tune_page("chat", TRIED[3:4], AIMS)
    assert [one["name"] for one in charts(nearest)["Cost and goodput"]] == ["nearest"]


def test_report_pages_are_written_by_sweep_and_tune(tmp_path: Path) -> None:
    asked = ("workload:chat", "--hours", "0.01", "--model", "llama-3-8b", "--memory", "2GiB,4GiB", "--jobs", "1")
    run("sweep", *asked, "--out", tmp_path / "out", "--report", tmp_path / "sweep.html")
    assert "Hit rate over memory" in charts((tmp_path / "sweep.html").read_text("utf-8"))
    pytest.importorskip("optuna")
    more = ("--slo", "ttft-p99=1s", "--price", "h100=2/h", "--report", tmp_path / "tune.html")
    run("tune", *asked, "--out", tmp_path / "out", *more)
    assert "Cost and goodput" in charts((tmp_path / "tune.html").read_text("utf-8"))


def test_report_page_escapes_markup() -> None:
    text = page("<b>a</b>", {"<i>": "</script><script>"}, [Chart("<u>", "&", [{"name": "</script>"}])])
    assert "<b>a</b>" not in text
    assert "<i>" not in text
    assert "<script>alert" not in text
    assert text.count("</script>") == 3 + text.count("<script></script>")


def test_report_without_plotly_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"hybridkv\[report\]"):
        page("a", {}, [])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"hybridkv\[report\]"):
        checked_page(tmp_path / "a.html")


@pytest.mark.parametrize("name", ["nowhere/a.html", "."])
def test_report_page_that_cannot_be_written_is_rejected_early(name: str, tmp_path: Path) -> None:
    asked = ("replay", "workload:chat", "--model", "llama-3-8b", "--memory", "8GiB", "--report", tmp_path / name)
    assert "--report" in error(*asked)


def test_report_pages_are_written_by_plan_and_replay(tmp_path: Path) -> None:
    plan, replay = tmp_path / "plan.html", tmp_path / "replay.html"
    run("plan", "gemma-3-27b", "--memory", "40GiB", "--report", plan)
    asked = ("replay", "workload:chat", "--hours", "0.02", "--model", "gemma-3-27b", "--memory", "10GiB", "--explain")
    document = json.loads(run(*asked, "--json", "--report", replay).stdout)
    assert "block_times" not in document["settings"]
    assert "Memory map" in charts(plan.read_text("utf-8"))
    assert "Missed prompt tokens, by reason" in charts(replay.read_text("utf-8"))


COVERED = """[...document.querySelectorAll(".chart")].flatMap((chart) => {
    const boxed = (one) => [one.textContent, one.getBoundingClientRect()];
    const all = (name) => [...chart.querySelectorAll(name)].map(boxed);
    const across = (a, b) => a.left < b.right - 1 && b.left < a.right - 1;
    const over = ([, a], [, b]) => across(a, b) && a.top < b.bottom - 1 && b.top < a.bottom - 1;
    const turned = (one) => one[1].height > 30; // the boxes of turned labels cross where the labels do not
    const beside = ["xtick", "ytick"].flatMap((name) => {
        const ticks = all(`.${name} text`).filter((one) => !turned(one));
        return ticks.filter((one, at) => ticks.slice(at + 1).some((other) => over(one, other)));
    });
    const below = all(".legend").filter((one) => all(".xtitle").some((other) => over(one, other)));
    return [...beside, ...below].map((one) => one[0]);
})"""
"""Text of labels that cover others on an axis, and of legends that cover the title of an axis."""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1400, "light"),
        (420, "dark"),
        pytest.param(1400, "dark", marks=pytest.mark.thorough),
        pytest.param(420, "light", marks=pytest.mark.thorough),
    ],
)
def test_report_pages_are_drawn_by_a_browser(
    width: int, scheme: str, hybrid: tuple[Plan, ReplayReport, Recorded], tmp_path: Path
) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    plan, report, recorded = hybrid
    pages = {"replay": replay_page(plan, report, recorded), "plan": plan_page(plan)}
    pages |= {"sweep": sweep_page("chat", swept()), "tune": tune_page("chat", TRIED, AIMS)}
    with sync_api.sync_playwright() as playing:
        browser = playing.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, text in pages.items():
            (tmp_path / name).with_suffix(".html").write_text(text, "utf-8")
            view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
            errors: list[str] = []
            view.on("console", lambda said, errors=errors: errors.append(said.text) if said.type == "error" else None)
            view.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            view.goto(f"file://{tmp_path / name}.html")
            view.wait_for_function("document.querySelectorAll('.chart .main-svg').length > 0")
            marks = view.evaluate(
                "[...document.querySelectorAll('.chart')].map(one => one.querySelectorAll('.trace, .hm').length)"
            )
            wanted = [len(traces) for traces in charts(text).values()]
            assert all(drawn >= 1 for drawn in marks)
            assert len(marks) == len(wanted)
            assert [drawn for drawn in marks if drawn] == wanted
            assert view.evaluate("document.documentElement.scrollWidth") <= width
            dark = view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 29)"
            assert dark == (scheme == "dark")
            assert view.evaluate(COVERED) == []
            if name == "plan":  # a logarithmic axis has whole numbers
                assert "1,000" in view.evaluate(
                    "[...document.querySelectorAll('.xtick text')].map((one) => one.textContent)"
                )
            assert not errors
        browser.close()
