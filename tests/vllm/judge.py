"""vLLM's own tests of its scheduler, with stock and with ours: ``make test-vllm-own VLLM_PYTHON=... VLLM_TESTS=...``.

VLLM_TESTS is the folder ``tests`` of vLLM's sources, which are not part of its wheel; none of them is part of this
repository. Tests that stock passes and ours fails are listed in judge.txt, each with its reason; any other is a fault,
and so is a listed one that passes.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import judge_plugin
from transformers import OPTConfig

HERE = Path(__file__).parent
LISTED = HERE / "judge.txt"
FILES = (  # those whose tests make a scheduler: a manager that a test makes itself is vLLM's
    "v1/core/test_scheduler.py",
    "v1/core/test_async_scheduler.py",
    "v1/core/test_deferred_block_free.py",
    "v1/core/test_prefix_replay.py",
    "v1/core/test_priority_preemption_bug.py",
    "v1/core/test_priority_scheduler_random.py",
    "v1/core/test_swa_inflight_window_free.py",
    "v1/kv_connector/unit/test_cache_pollution_prevention.py",
    "v1/kv_connector/unit/test_error_propagation.py",
    "v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "v1/kv_connector/unit/test_kv_load_failure_recovery.py",
    "v1/kv_connector/unit/test_remote_decode_lifecycle.py",
    "v1/kv_connector/unit/test_remote_prefill_lifecycle.py",
)
MODEL = "facebook/opt-125m"
"""What the tests ask the hub for; its config alone is read."""


def outcomes(tests: Path, files: Sequence[str], folder: Path, *, ours: bool) -> dict[str, str]:
    """By test, as the plug-in has them. folder: where the model's config lies."""
    out = folder / ("ours.json" if ours else "stock.json")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        judge_plugin.OUT: str(out),
        judge_plugin.OURS: "1" if ours else "",
    }
    paths = (environment.get("PYTHONPATH"), str(HERE))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    options = (
        "-q",
        "--timeout=120",
        "--noconftest",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        judge_plugin.__name__,
    )
    command = (sys.executable, "-m", "pytest", *options, "--rootdir", str(tests.parent))
    log = out.with_suffix(".log")
    with log.open("w", encoding="utf-8") as told:
        subprocess.run(  # noqa: S603 - pytest, on a folder that the user names
            [*command, *(str(tests / name) for name in files if (tests / name).exists())],
            cwd=folder, env=environment, stdout=told, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    if not out.exists():
        raise SystemExit(log.read_text("utf-8")[-2000:])
    found: dict[str, str] = json.loads(out.read_text("utf-8"))
    return found


def listed(text: str) -> dict[str, str]:
    """Test by test the reason above it: lines that begin with # are the reason of those below."""
    reason, found = "", dict[str, str]()
    for line in filter(None, text.splitlines()):
        if line.startswith("#"):
            reason = line.removeprefix("#").strip()
        else:
            found[line] = reason
    return found


def faults(stock: Mapping[str, str], ours: Mapping[str, str], known: Mapping[str, str]) -> Iterator[str]:
    """What is not as it is listed."""
    for name, said in ours.items():
        if said and stock.get(name) == "" and name not in known:
            yield f"{name}: {said}"
        if not said and name in known:
            yield f"{name} passes, and is listed as one that does not"
    yield from (f"{name} was not run with ours" for name, said in stock.items() if not said and name not in ours)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", type=Path, help="the folder tests of vLLM's sources")
    parser.add_argument("--files", nargs="+", default=FILES, help="in that folder")
    asked = parser.parse_args(arguments)
    known = listed(LISTED.read_text("utf-8"))
    with TemporaryDirectory() as name:
        folder = Path(name)
        OPTConfig(architectures=["OPTForCausalLM"]).save_pretrained(folder / MODEL)
        stock, ours = (outcomes(asked.tests.resolve(), asked.files, folder, ours=one) for one in (False, True))
    passed = [name for name, said in stock.items() if not said]
    wrong = list(faults(stock, ours, known))
    both, named = (sum(one) for one in ((ours.get(name) == "" for name in passed), (name in known for name in passed)))
    told = f"stock passes {len(passed)} of {len(stock)} tests here, ours {both} of those; {named} are listed"
    sys.stdout.write("".join(f"{line}\n" for line in (told, *wrong)))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
