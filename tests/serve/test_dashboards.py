"""The board and the rules ask for what is exported; so says Prometheus itself, where it is installed."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from serve_support import LONGEST, WAIT, Served, engine_of, serving

from hybridkv.runner import Engine, EngineOptions, load
from hybridkv.serve import ServeOptions, listen

BOARDS = Path(__file__).parents[2] / "docs" / "dashboards"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(not (PROMETHEUS and PROMTOOL), reason="Prometheus is not installed")


def expressions() -> list[str]:
    """Of the board and the rules."""
    board = json.loads((BOARDS / "grafana.json").read_text("utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    rules = yaml.safe_load((BOARDS / "alerts.yml").read_text("utf-8"))
    return asked + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def exported(text: str) -> dict[str, set[str]]:
    """Names of samples and of their labels."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(hybridkv:\w+)\{(.*)\} ", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_dashboard_queries_use_exported_metrics() -> None:
    options = EngineOptions(remembered_losses=100, block_times=True)
    engine = Engine(load("tiny:llama"), memory="4MiB", max_model_len=LONGEST, options=options, host_memory="8MiB")
    with serving(engine) as served:
        served.post("/v1/completions", prompt="a", max_tokens=1)
        names = exported(served.client.get("/metrics").text)
    asked = expressions()
    assert len(asked) > 20
    for one in asked:
        wanted = set(re.findall(r"hybridkv:\w+", one))
        assert wanted
        assert wanted <= names.keys(), one
        for labels in re.findall(r"by \(([^)]*)\)", one):
            assert set(labels.split(", ")) <= set.union(*(names[name] for name in wanted)), one
        for labels in re.findall(r"\{([^}]*)\}", one):
            assert set(re.findall(r"(\w+)=", labels)) <= set.union(*(names[name] for name in wanted)), one


@needs_prometheus
@pytest.mark.thorough
def test_alert_rules_pass_promtool() -> None:
    done = subprocess.run(  # noqa: S603 - Prometheus' own tool
        [str(PROMTOOL), "check", "rules", str(BOARDS / "alerts.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 rules found" in done.stdout


@needs_prometheus
@pytest.mark.thorough
def test_prometheus_scrapes_the_server(tmp_path: Path) -> None:
    with serving(engine_of("llama"), ServeOptions(name="scraped")) as served:
        for _ in range(3):
            served.post("/v1/completions", prompt="what is asked three times is found twice", max_tokens=4)
        target = served.url.removeprefix("http://")
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "hybridkv", "static_configs": [{"targets": [target]}]}],
            "rule_files": [str(BOARDS / "alerts.yml")],
        }
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        with listen("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        command = [
            str(PROMETHEUS),
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with subprocess.Popen(  # noqa: S603 - Prometheus itself
            command, stderr=subprocess.DEVNULL
        ) as process:
            try:
                _queries(f"http://127.0.0.1:{port}", served)
            finally:
                process.kill()


def _queries(url: str, served: Served) -> None:
    """Three of them equal the engine's own counts."""
    now = served.service.engine.statistics()
    for query, value in (
        ('hybridkv:prefix_cache_hits_total{model_name="scraped"}', now.hit_tokens),
        ("sum(hybridkv:generation_tokens_total)", 12),
        ("hybridkv:e2e_request_latency_seconds_count", 3),
    ):
        assert _answer(url, query) == value > 0


def _answer(url: str, query: str) -> float:
    end = time.monotonic() + WAIT
    while True:
        try:
            said: dict[str, Any] = httpx2.get(f"{url}/api/v1/query", params={"query": query}).json()
        except httpx2.TransportError:
            said = {}
        if said.get("data", {}).get("result"):
            return float(said["data"]["result"][0]["value"][1])
        assert time.monotonic() < end, query
        time.sleep(0.2)
