"""`hybridkv bench` sends one load to a server and to an engine in the process: both do the same work."""

import json
from pathlib import Path

import pytest
from serve_support import engine_of, serving

from cli_support import run

LOAD = ("--dataset-name", "prefix_repetition", "--num-prompts", "8", "--max-concurrency", "1", "--temperature", "0")
LENGTHS = ("--prefix-repetition-num-prefixes", "2", "--prefix-repetition-prefix-len", "48")
MORE = ("--prefix-repetition-suffix-len", "10", "--prefix-repetition-output-len", "6", "--ignore-eos", "--save-result")


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_bench_serve_and_bench_engine_do_equal_work(endpoint: str, tmp_path: Path) -> None:
    with serving(engine_of("llama")) as served:
        where = ("--base-url", served.url, "--endpoint", endpoint, "--result-filename", tmp_path / "serve")
        run("bench", "serve", *where, *LOAD, *LENGTHS, *MORE)
    model = ("--model", "tiny:llama", "--memory", "4MiB", "--max-model-len", "512")
    run("bench", "engine", *model, "--result-filename", tmp_path / "engine", *LOAD, *LENGTHS, *MORE)
    over_http, alone = (json.loads((tmp_path / name).read_text("utf-8")) for name in ("serve", "engine"))
    assert (alone["completed"], alone["failed"], alone["total_output_tokens"]) == (8, 0, 48)
    # of four requests with one prefix, three hit its three blocks
    assert (alone["total_input_tokens"], alone["total_cached_tokens"]) == (8 * 58, 2 * 3 * 48)
    assert over_http["total_output_tokens"] == 48
    if endpoint == "/v1/completions":
        assert all(over_http[f"total_{name}_tokens"] == alone[f"total_{name}_tokens"] for name in ("input", "cached"))
    else:  # the template adds a beginning
        assert over_http["total_input_tokens"] > 8 * 58
        assert over_http["total_cached_tokens"] >= 2 * 3 * 48


def test_bench_engine_reports_rejected_requests() -> None:
    done = run(
        *(
            "bench",
            "engine",
            "--model",
            "tiny:llama",
            "--memory",
            "4MiB",
            "--max-model-len",
            "64",
            "--num-prompts",
            "2",
        ),
        code=1,
    )
    assert "failed: " in done.stderr
    assert "Successful requests:                     0" in done.stdout
