"""`hybridkv plan` and `hybridkv models` as a user runs them."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from cli_support import error, run
from hybridkv.models import known_models, read_model
from hybridkv.models.reader import text_fields
from hybridkv.planner import plan, plan_from_json


def test_plan_command_prints_text() -> None:
    text = run("plan", "llama-3-70b", "--memory", "40GiB").stdout
    for said in (
        "llama-3-70b: llama, 80 layers, bfloat16 cache, tp 1",
        # 8191 blocks for requests of 512: not 16
        "requests          15.99 at once, of 8,192 tokens each, without shared prefixes\n",
        "tokens            131,056 in one request\n",
        "a token takes     320 KiB\n",
        "memory            40 GiB; 0 B unused\n",
        "padding           0 B in the 512 blocks of a longest request\n",
        "allocated in      8,192 slabs of 5 MiB, one of them always empty\n",
        "a slab holds      as many blocks of one group as fit\n",
    ):
        assert said in text
    assert "\x1b" not in text
    # nothing is cut or wrapped in a pipe: one line a row
    assert re.search(r"0 +80 x full attention +16 +64 KiB +5 MiB +0 B +1 *\n", text)
    # what a reader wants first comes first
    assert text.splitlines()[1].startswith("requests ")
    assert text.splitlines()[2].startswith("tokens ")


INSIDE = ("null", "Spec", "admission_limit", "stops kept")
"""Words of the code and of JSON documents."""


@pytest.mark.parametrize("layout", ["natural", "reference"])
@pytest.mark.parametrize("model", ["llama-3-8b", "gemma-3-27b", "nemotron-3-super-120b-a12b", "whisper-large-v3"])
def test_plan_command_output_fits_a_terminal(model: str, layout: str) -> None:
    text = run("plan", model, "--memory", "40GiB", "--layout", layout).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert [word for word in INSIDE if word in text] == []


@pytest.mark.parametrize("command", ["plan", "replay", "generate", "chat", "models", "demo"])
def test_help_shows_panels_and_defaults(command: str) -> None:
    text = run(command, "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "╭─" in text
    assert [word for word in INSIDE if word in text] == []
    if command in {"plan", "replay", "generate"}:
        for panel in ("Model", "Cache", "Requests", "Output"):
            assert f"─ {panel} ─" in text
        assert re.search(r"Tokens in a block\.[^─]*?\[default: \(16\)\]", text)
        # a default stands in its brackets alone
        assert re.search(r"; \d+\.", text) is None


def test_plan_command_prints_json(tmp_path: Path) -> None:
    options = ("--memory", "80GiB", "--tp", "8", "--max-model-len", "8000", "--block-size", "32", "--dtype", "fp32")
    text = run("plan", "llama-3-70b", *options, "--json").stdout
    model = read_model("llama-3-70b", block_size=32, tp=8, dtype="float32")
    assert plan_from_json(text) == plan(model, "80GiB", max_model_len=8000)
    path = tmp_path / "plan.json"
    path.write_text(text, "utf-8")
    assert run("plan", "--plan", path, "--json").stdout == text
    shown = run("plan", "--plan", path).stdout
    assert shown == run("plan", "llama-3-70b", *options).stdout
    assert "float32 cache, tp 8" in shown


def test_plan_command_of_hybrid_prints_text() -> None:
    text = run("plan", "qwen3.5-35b-a3b", "--memory", "40GiB", "--layout", "reference").stdout
    # 2,146,304 bytes of state in a page of 1056 tokens of 2048 bytes, in each of 10 layers
    assert re.search(r"0 +10 x recurrent state +1,056 +2\.06 MiB +20\.47 MiB +160 KiB *\n", text)
    assert re.search(r"3 +10 x full attention +1,056 +2\.06 MiB +20\.62 MiB +0 B *\n", text)
    assert "a token takes     20 KiB\n" in text
    assert "a state takes     61.41 MiB\n" in text
    assert re.search(r"allocated in +1,985 blocks of 20\.62 MiB, one of them always empty\n", text)
    options = ("--layout", "reference", "--placement", "none", "--kv-dtype", "fp8", "--json")
    found = plan_from_json(run("plan", "qwen3.5-35b-a3b", "--memory", "40GiB", *options).stdout)
    assert found == plan(read_model("qwen3.5-35b-a3b", dtype="fp8"), "40GiB", placement="none", layout="reference")
    # 2096 tokens of half as many bytes are just the state
    assert [group.blocks_per_request for group in found.capacity.groups] == [1, 1, 1, 126]


def test_plan_command_in_natural_layout_prints_text_and_json(tmp_path: Path) -> None:
    options = ("gemma-3-27b", "--memory", "40GiB", "--layout", "natural")
    text = run("plan", *options).stdout
    assert re.search(r"0 +10 x window +16 +128 KiB +1\.25 MiB +0 B +1 *\n", text)
    assert re.search(r"5 +2 x window +16 +128 KiB +256 KiB +0 B +5 *\n", text)
    assert "allocated in      32,768 slabs of 1.25 MiB, one of them always empty\n" in text
    path = tmp_path / "plan.json"
    path.write_text(run("plan", *options, "--json").stdout, "utf-8")
    assert run("plan", "--plan", path).stdout == text
    replayed = run("replay", "workload:uniform", "--plan", path, "--hardware", "h200").stdout
    assert re.search(r"layout natural, no recurrent states", replayed)


def test_plan_command_keeps_the_placement() -> None:
    options = ("plan", "qwen3.5-35b-a3b", "--memory", "40GiB", "--layout", "natural")
    model = read_model("qwen3.5-35b-a3b")
    for name in (None, "align", "interval:64", "none"):
        asked = () if name is None else ("--placement", name)
        made = plan(model, "40GiB", layout="natural", placement=name)
        assert plan_from_json(run(*options, *asked, "--json").stdout) == made
        assert made.placement == name or (name, made.placement) == (None, "ends")


def test_plan_command_compares_layouts() -> None:
    text = run("plan", "qwen3.5-35b-a3b", "--memory", "40GiB", "--compare").stdout
    assert re.search(r"attention block, tokens +1,056 +16 *\n", text)
    assert re.search(r"blocks in a unit, by group +1 x4 +1, 196 *\n", text)
    assert re.search(r"padding +0\.76% +0\.31% *\n", text)
    assert re.search(r"lost in a longest request +960 KiB +16\.07 MiB *\n", text)
    assert re.search(r"share of the request +0\.02% +0\.31% *\n", text)
    assert re.search(r"states that fit +661 +665 *\n", text)
    assert re.search(r"requests of 1,024 tokens +283\.42 +285\.50 *\n", text)
    assert re.search(r"one of these takes +144\.38 MiB +142\.95 MiB *\n", text)
    assert re.search(r"one alone, in whole units +144\.38 MiB +184\.32 MiB *\n", text)
    assert max(map(len, text.splitlines())) <= 80
    # what gemma's 8 empty layer slots cost is enough for a request to fit
    still = ("--max-batched-tokens", "0")
    narrow = run("plan", "gemma-3-27b", "--memory", "4000MiB", "--max-model-len", "45776", "--compare", *still).stdout
    assert re.search(r"longest request, tokens +does not fit +45,776 *\n", narrow)


def test_plan_command_shows_tokens_in_flight_and_placement() -> None:
    text = run("plan", "gemma-3-27b", "--memory", "40GiB", "--layout", "reference").stdout
    assert "windows           plus 8,192 tokens in flight\n" in text
    assert "requests          2.81 at once" in text
    options = ("--memory", "40GiB", "--layout", "reference", "--max-batched-tokens", "2048")
    assert "requests          3.50 at once" in run("plan", "gemma-3-27b", *options).stdout
    text = run("plan", "nemotron-h-8b", "--memory", "40GiB", "--layout", "reference").stdout
    assert "states a request  2: one read and one written\n" in text
    text = run("plan", "nemotron-h-8b", *options, "--prefill-checkpoints", "1").stdout
    assert "states a request  3: one read and one written, 1 inside a prefill step\n" in text
    assert "requests          145.97 at once" in text
    assert "--prefill-checkpoints" in error(
        "plan", "llama-3-8b", *options[:2], "--compare", "--prefill-checkpoints", "1"
    )
    assert "drop --token-budget" in error("plan", "--plan", "p.json", "--token-budget", "1")


def test_plan_command_with_windows_as_full_shows_them() -> None:
    text = run("plan", "gpt-oss-120b", "--memory", "40GiB", "--windows-as-full").stdout
    assert re.search(r"0 +36 x full attention +16 +32 KiB", text)
    assert "36 KiB, 36 KiB in windows" in text
    text = run("plan", "whisper-large-v3", "--memory", "4GiB").stdout
    assert "160 KiB, 160 KiB for an encoder token" in text


def test_plan_command_reads_a_folder(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 9, "max_position_embeddings": 64, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    holds = json.loads(run("plan", tmp_path, "--memory", "1MiB", "--json").stdout)["capacity"]
    # 2 layers of 2 * 16 tokens * 64 elements * 4 bytes
    assert holds["num_blocks"] == 2**20 // (2 * 2 * 16 * 64 * 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "llama-3-8b", "--memory", "1GiB"), "1075838976 bytes"),
        (("plan", "llama-3-80b", "--memory", "1GiB"), "did you mean llama-3-8b, llama-3-70b"),
        (("plan", "llama-3-8b", "--memory", "-4GiB"), "not a size"),
        (("plan", "llama-3-8b", "--memory", "4GiB", "--tp", "3"), "use one of 1, 2, 4, 8, 16, 32"),
        (("plan", "llama-3-8b", "--memory", "4GiB", "--block-size", "-16"), "block_size must be at least 1, got -16"),
        (("plan", "llama-3-8b", "--memory", "4GiB", "--max-model-len", "9000"), "use at most 8192"),
        (("plan", "llama-3-8b", "--memory", "4GiB", "--dtype", "int4"), "'auto', 'bf16', 'fp16', 'fp32', 'fp8'"),
        (("plan", "llama-3-8b", "--memory", "4GiB", "--layout", "sideways"), "'reference', 'natural'"),
        (
            ("plan", "llama-3-8b", "--memory", "4GiB", "--layout", "reference", "--kernel-block-size", "16"),
            "has no meaning in the reference",
        ),
        (
            ("plan", "llama-3-8b", "--memory", "4GiB", "--layout", "natural", "--kernel-block-size", "5"),
            "block_size 16 is not a multiple of kernel_block_size 5",
        ),
        (("plan", "llama-3-8b", "--memory", "4GiB", "--compare", "--layout", "natural", "--json"), "drop --layout, --"),
        (("plan", "llama-3-8b", "--memory", "1MiB", "--compare"), "513 slabs of 2 MiB, one of them always empty"),
        (("plan", "--compare"), "CONFIG is missing"),
        (("plan", "llama-3-8b", "--memory", "4GiB", "--placement", "all"), "none, ends, interval:N, align or align:N"),
        (("plan", "llama-3-8b", "--memory", "4GiB", "--placement", "interval:0"), "interval:528"),
        (
            ("plan", "llama-3-8b", "--memory", "4GiB", "--layout", "reference", "--placement", "ends"),
            "the reference layout has no placement 'ends': choose align or none, or --layout natural",
        ),
        (
            ("plan", "llama-3-8b", "--memory", "4GiB", "--layout", "natural", "--placement", "intervall:8"),
            "unknown placement 'intervall:8': use none, ends, interval:N, align or align:N (did you mean interval:N?)",
        ),
        (
            ("plan", "llama-3-8b", "--memory", "4GiB", "--layout", "natural", "--placement", "align:0"),
            "placement 'align:0' needs a number of tokens",
        ),
        (
            ("plan", "--plan", "p.json", "--placement", "none", "--windows-as-full"),
            "drop --placement, --windows-as-full,",
        ),
        (("plan", "llama-3-8b"), "--memory is missing"),
        (("plan",), "CONFIG is missing"),
        (("plan", "llama-3-8b", "--plan", "p.json", "--tp", "1"), "drop CONFIG, --tp, or drop --plan"),
        (("plan", "--plan", "no-such-file.json"), "cannot read the plan"),
        (("plan", "--no-such-option"), "--no-such-option"),
        (("no-such-command",), "no-such-command"),
    ],
)
def test_plan_command_with_mistake_prints_one_line(arguments: tuple[str, ...], said: str) -> None:
    assert said in error(*arguments)


def test_plan_command_of_unsupported_model_names_its_layers(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "reformer", "num_hidden_layers": 32}), "utf-8")
    assert "its layers keep buckets of hidden states" in error("plan", path, "--memory", "40GiB")


def test_models_command_lists_facts_and_sources() -> None:
    text = run("models").stdout
    for said in ("llama-3-8b", "llama-3-70b", "qwen2.5-7b", "deepseek-v3", " 320 KiB ", "68.62 KiB"):
        assert said in text
    assert "https://" not in text
    assert max(len(line) for line in text.splitlines() if "iB" in line) <= 80
    some = run("models", "GPT-OSS", "-v").stdout
    assert "  read in " in some
    assert "gpt-oss-20b: https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json" in some
    assert "llama" not in some
    assert "did you mean qwen3-8b" in error("models", "qwen3-8c")
    listed = json.loads(run("models", "--json").stdout)
    assert (listed["schema"], listed["version"]) == ("hybridkv.models", 1)
    by_name = {one["name"]: one for one in listed["models"]}
    assert by_name["deepseek-v3"]["kv_bytes_per_token"] == 70272
    assert by_name["deepseek-v3"]["config"]["kv_lora_rank"] == 512
    assert all(one["source"].startswith("https://") for one in by_name.values())


def test_version_and_help() -> None:
    assert run("--version").stdout == f"hybridkv {version('hybridkv')}\n"
    assert "plan" in run("--help").stdout
    assert run().stdout == run("--help").stdout


def test_closed_output_pipe_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "hybridkv", "plan", "llama-3-70b", "--memory", "40GiB", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""


def test_plan_command_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['hybridkv', 'plan', 'llama-3-8b', '--memory', '40GiB']\n"
        "from hybridkv.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)  # noqa: S603  # as above


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama-3-8b", 32),
        # attention and a state in every layer; an indexer beside every latent; cross attention
        ("falcon-h1-7b", 44),
        ("deepseek-v3.2", 61),
        ("whisper-large-v3", 32),
        # layers of MLPs and experts keep nothing; the last ones read what others keep
        ("nemotron-3-nano-30b-a3b", 52),
        ("gemma-3n-e4b", 35),
        ("kimi-linear-48b-a3b", 27),
    ],
)
def test_plan_command_titles_count_the_layers(name: str, layers: int) -> None:
    assert read_model(name).depth == layers
    options = ("--memory", "80GiB", "--max-model-len", "400")
    assert f", {layers} layers, " in run("plan", name, *options).stdout.splitlines()[0]
    assert f": {layers} layers, " in run("plan", name, *options, "--compare").stdout
    known = json.loads(run("models", name, "--json").stdout)["models"]
    assert next(one["layers"] for one in known if one["name"] == name) == layers


def test_plan_and_replay_commands_count_a_layer_with_an_indexer_once() -> None:
    """122 entries of 61 layers: latents, and an indexer's keys."""
    options = ("deepseek-v3.2", "--memory", "80GiB")
    assert re.search(r"\n 0 +61 x attention, mixed widths +16 ", run("plan", *options).stdout)
    short = ("workload:chat", "--hours", "0.001", "--hardware", "h100-unbounded", "--memory", "8GiB")
    assert re.search(r"\n 0 +61 x attention, mixed", run("replay", *short, "--model", "deepseek-v3.2").stdout)


def test_plan_command_of_known_models_counts_config_layers() -> None:
    keys = ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "num_layers")
    for known in known_models():
        fields = text_fields(known.config, known.name)
        said = [fields.values[key] for key in keys if fields.values.get(key) is not None]
        pattern = fields.values.get("layers_block_type") or fields.values.get("hybrid_override_pattern")
        assert isinstance(pattern, list | str | None)
        assert read_model(known.name).depth == (said[0] if said else len(pattern or ())), known.name
