"""The command line at the hands of somebody who means harm: one line, exit 2, in little time and memory."""

import gzip
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridkv.cli import main
from hybridkv.models import known_models

Call = Callable[..., tuple[int, str, str]]
HYBRIDKV = (sys.executable, "-m", "hybridkv")
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 9,
    "num_attention_heads": 4, "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip
PLAN = ("plan", "llama-3-8b", "--memory", "40GiB")
REPLAY = ("replay", "workload:uniform", "--model", "llama-3-8b", "--memory", "40GiB")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """The command in this process: (exit code, stdout, stderr)."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hybridkv", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


def assert_one_line(outcome: tuple[int, str, str]) -> str:
    code, _, said = outcome
    lines = [line for line in said.split("\n") if line and "names no dtype" not in line]  # a warning, by the logger
    assert code == 2, said
    assert len(lines) == 1, said
    assert lines[0].startswith("error: ")
    assert lines[0].isprintable()
    assert len(lines[0]) < 1100
    return lines[0]


def assert_ended(outcome: tuple[int, str, str]) -> None:
    """Done, or one line."""
    if outcome[0] != 0:
        assert_one_line(outcome)


def process(
    *arguments: str | bytes | Path, streams: str = "", environment: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """The same as a process of little memory. streams: what to do with its streams, as ``>&-``."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))

    command = (*HYBRIDKV, *arguments)
    done = subprocess.run(  # noqa: S603  # our own command
        command if not streams else ("sh", "-c", f'exec "$@" {streams}', "sh", *command),
        capture_output=True, check=False, timeout=60, preexec_fn=limit,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


# -- options

NUMBERS = (
    "9" * 400,
    "9" * 5000,
    "1e308",
    "nan",
    "inf",
    "-1",
    "0",
    "",
    str(2**63),
    "1" + "0" * 30,
    "[/]",
    "\udcff",
    "\n",
)
OPTIONS = {
    PLAN: ("--memory", "--max-model-len", "--tp", "--block-size", "--dtype", "--layout", "--placement",
           "--kernel-block-size", "--plan"),
    REPLAY: ("--memory", "--model", "--max-model-len", "--max-running", "--token-budget", "--time-scale", "--layout",
             "--block-size", "--placement", "--tp", "--plan"),
    ("replay", "workload:api", "--model", "llama-3-8b", "--memory", "4GiB", "--limit", "2", "--hours", "0.01"): (
        "--seed", "--hours", "--rate", "--limit",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("command", "option"), [(one, option) for one, some in OPTIONS.items() for option in some])
def test_option_with_any_value_is_used_or_rejected(command: tuple[str, ...], option: str, here: Call) -> None:
    for value in NUMBERS:
        assert_ended(here(*command, f"{option}={value}"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "llama-3-8b", "--memory", "9" * 400), "not a size: '9999"),
        (("plan", "llama-3-8b", "--memory", "9" * 25), "size must be at most 4194304 TiB"),
        (("plan", "llama-3-8b", "--memory", "1e308"), "not a size"),
        (("plan", "llama-3-8b", "--memory", "40GiB", "--block-size", "1" + "0" * 30), "block_size must be at most"),
        (("plan", "llama-3-8b", "--memory", "1000000TiB", "--block-size", "1"), "more than there are ids"),
        (("plan", "whisper-large-v3", "--memory", "4GiB", "--max-model-len", str(2**31)), "max_model_len"),
        ((*REPLAY, "--max-running", str(10**9)), "max_running (--max-running) must be at most 1048576"),
        ((*REPLAY, "--token-budget", str(2**63)), "token_budget (--token-budget) must be at most 2147483647"),
        ((*REPLAY, "--time-scale", "1e308"), "must be at most 1e+06"),
        ((*REPLAY[:-1], "4000TiB", "--hardware", "h100-unbounded"), "more than a replay keeps"),
        (("replay", "workload:mix", "--hours", "1000", "--rate", "1000"), "hours times rate must be at most 100"),
    ],
)
def test_option_with_invalid_size_is_rejected(arguments: tuple[str, ...], said: str, here: Call) -> None:
    assert said in assert_one_line(here(*arguments))


# -- configs

HOSTILE: tuple[Any, ...] = (
    float("inf"), float("nan"), -1, 0, 10**400, 2**70, 2**31, 2**31 - 1, 10**6, True, "12", [1], {}, None, 0.5,
)  # fmt: skip


def shape(value: Any) -> Any:  # noqa: ANN401  # JSON
    """What is told from other parts of a document: by kind, keys, and what lies in them."""
    if isinstance(value, dict):
        return value.get("kind"), *((key, shape(inner)) for key, inner in value.items())
    return tuple(dict.fromkeys(map(shape, value))) if isinstance(value, list) else type(value)


def places(config: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401  # JSON
    """Every container of a config, with each key in it; of a list the first one of each shape stands for all."""
    if isinstance(config, dict):
        yield from ((config, key) for key in config)
        inner = list(config.values())
    else:
        first = {shape(value): at for at, value in reversed(list(enumerate(config)))}
        yield from ((config, at) for at in sorted(first.values()))
        inner = [config[at] for at in sorted(first.values())]
    for value in inner:
        if isinstance(value, dict | list):
            yield from places(value)


DESCRIBED = (
    *("deepseek-v3", "falcon-h1-7b", "gemma-3-27b", "gemma-4-e2b", "glm-5.2", "gpt-oss-120b", "jamba-1.5-mini"),
    *("kimi-linear-48b-a3b", "lfm2-1.2b", "llama-3-8b", "llama-4-scout", "mimo-v2-flash", "minimax-text-01"),
    *("nemotron-3-super-120b-a12b", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "whisper-large-v3"),
)
"""One of every reader and recipe; of the others, one of each model type, for thorough runs."""
OTHERS = {one.config["model_type"]: one.name for one in known_models() if one.name not in DESCRIBED}.values()


@pytest.mark.parametrize("name", [*DESCRIBED, *(pytest.param(one, marks=pytest.mark.thorough) for one in OTHERS)])
def test_config_with_any_fields_is_planned_or_rejected(name: str, here: Call, tmp_path: Path) -> None:
    """One value after the other is replaced, by the next of HOSTILE."""
    path = tmp_path / "config.json"
    config = json.loads(json.dumps(next(one.config for one in known_models() if one.name == name)))
    values = itertools.cycle(HOSTILE)
    for container, key in list(places(config)):
        kept = container[key]
        container[key] = next(values)
        path.write_text(json.dumps(config), "utf-8")
        assert_ended(here("plan", path, "--memory", "80GiB", "--max-model-len", "64"))
        container[key] = kept


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most 4096, got 1000000"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 4096"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 10**5}, "layer_types has 100000 entries"),
        ({"model_type": "gemma2", "num_hidden_layers": 4096}, "packs at most 256: use the reference layout"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*" * 10**6}, "has 2000000 entries: at most 4096"),
        ({"num_attention_heads": 2**31 - 1, "head_dim": 4, "num_key_value_heads": 2}, "cannot share 2 KV heads"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor must lie above 0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 10.0**9}}, "is 4096000000000 positions"),
        ({"head_dim": 2**31 - 1, "num_key_value_heads": 2**31 - 1, "num_attention_heads": 2**31 - 1}, "parameters"),
        ({"hidden_size": 10**400}, "hidden_size must be at most 2147483647, got a number of over 38 digits"),
    ],
)
def test_config_with_huge_value_is_rejected(changed: dict[str, object], said: str, here: Call, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changed}), "utf-8")
    begun = time.process_time()
    assert said in assert_one_line(here("plan", tmp_path, "--memory", "1GiB", "--max-model-len", "64"))
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "not JSON that can be read: maximum recursion"),
        ('{"a": ' * 100_000, "not JSON that can be read: maximum recursion"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "not JSON that can be read: Exceeds the limit"),
        ("", "not JSON"),
        ("\0" * 100, "not JSON"),
        (b"\xff\xfe\xfd", "not UTF-8"),
        (" " * (1 << 24) + "{}", "longer than 16777216 bytes"),
    ],
)
def test_document_of_any_form_is_read_or_rejected(text: str | bytes, said: str, here: Call, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert said in assert_one_line(here("plan", path, "--memory", "1GiB"))
    assert said in assert_one_line(here("plan", "--plan", path))
    assert said in assert_one_line(here("replay", "workload:uniform", "--plan", path))


@pytest.fixture
def in_time() -> Iterator[None]:
    """Fail a test that waits, say for a pipe that nobody writes to."""

    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)  # a first run imports torch
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["pipe.toml", "folder.toml", "/dev/zero", "/dev/null", "x" * 300])
@pytest.mark.usefixtures("in_time")
def test_file_that_is_missing_or_special_is_rejected(name: str, here: Call, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    path = tmp_path / name  # or name, where that is absolute
    sized = ("--model", "llama-3-8b", "--memory", "4GiB")
    for command in (
        ("plan", path, "--memory", "1GiB"),
        ("plan", "--plan", path),
        ("doctor", path),
        ("doctor", path, *sized),
        ("replay", path, *sized),
        ("replay", "workload:uniform", "--plan", path),
        ("replay", "workload:uniform", *sized, "--hardware", path),
        ("trace", "describe", path),
        ("generate", "--model", "tiny:llama", "--prompts", path),
        ("generate", "--prompts", prompts, "--model", "tiny:llama", "--plan", path),
        ("serve", "--model", "tiny:llama", "--memory", "8MiB", "--api-key-file", path),
    ):
        said = assert_one_line(here(*command))
        assert name != "pipe.toml" or "not a regular file" in said, (command, said)


@pytest.mark.parametrize("layout", ["natural", "reference"])
def test_plan_document_with_any_fields_is_read_or_rejected(layout: str, here: Call, tmp_path: Path) -> None:
    """As configs, but a plan that was changed contradicts itself."""
    path = tmp_path / "plan.json"
    text = here("plan", "qwen3.5-35b-a3b", "--memory", "40GiB", "--layout", layout, "--json")[1]
    plan, values = json.loads(text), itertools.cycle((*HOSTILE, "\ud800[/]", [], 10**30))
    for container, key in list(places(plan)):
        kept = container[key]
        container[key] = next(values)
        path.write_text(json.dumps(plan), "utf-8")
        assert_ended(here("plan", "--plan", path))
        container[key] = kept


def test_plan_document_with_nested_uniform_spec_is_rejected(here: Call, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = json.loads(here(*PLAN, "--json")[1])
    spec = plan["model"]["specs"][0]
    for _ in range(200):
        spec = {"kind": "UniformTypeKVCacheSpecs", "block_size": 16, "layers": [{"name": "a", "spec": spec}]}
    plan["model"]["specs"][0] = spec
    path.write_text(json.dumps(plan), "utf-8")
    assert "spec.kind: Invalid value 'UniformTypeKVCacheSpecs'" in assert_one_line(here("plan", "--plan", path))


# -- names

NAMES = (
    "[/]",
    "[bold]x[/bold]",
    "[link=http://x]y",
    ":smile:",
    "a\nb",
    "\x1b[31mred",
    "\ud800",
    "\u202egpj.exe",
    "n\0l",
)


@pytest.mark.parametrize("name", NAMES)
def test_model_names_with_markup_are_printed_unchanged(name: str, here: Call, tmp_path: Path) -> None:
    literal = "".join(one if one.isprintable() else repr(one)[1:-1] for one in name)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "_name_or_path": name}), "utf-8")
    for command in (
        ("plan", tmp_path), ("plan", tmp_path, "--compare"), ("replay", "workload:uniform", "--model", tmp_path),
    ):  # fmt: skip
        code, out, err = here(*command, "--memory", "64MiB")
        assert (code, err) == (0, "")
        assert literal in out.splitlines()[0]
    assert literal.replace("\\n", " ") in assert_one_line(here("plan", tmp_path, "--memory", "1KiB"))


def test_trace_names_with_markup_are_printed_unchanged(here: Call, tmp_path: Path) -> None:
    path = tmp_path / "[]x[bold]"
    path.write_text('{"timestamp": 0, "prompt": [[1, 0, 40]], "output": [[2, 0, 3]]}\n', "utf-8")
    code, out, err = here("replay", path, "--model", "llama-3-8b", "--memory", "4GiB")
    assert (code, err) == (0, "")
    assert "[]x[bold]" in out


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1:strict"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_names_are_printed_in_any_output_encoding(environment: dict[str, str], tmp_path: Path) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/\xff\xe4"))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "_name_or_path": "Größe"}), "utf-8")
    code, out, err = process("plan", folder, "--memory", "64MiB", environment=environment)
    assert (code, err) == (0, "")
    assert "longest request" in out
    for path in (bytes(folder) + b"\xff", b"\xff[/]"):
        assert_one_line(process("plan", path, "--memory", "1GiB", environment=environment))


# -- streams and signals


def test_output_stream_that_is_closed_or_full_is_handled() -> None:
    assert "standard output is closed" in assert_one_line(process(*PLAN, streams=">&-"))
    assert "No space left" in assert_one_line(process(*PLAN, streams=">/dev/full"))
    assert "No space left" in assert_one_line(process("--help", streams=">/dev/full"))
    assert "standard input is closed" in assert_one_line(process("plan", "--plan", "-", streams="<&-"))
    assert process(*PLAN, streams="2>&-")[0] == 0
    for streams in ("2>&-", "2>/dev/full", ">&- 2>&-", ">/dev/full 2>/dev/full"):
        assert process("plan", "nothing", streams=streams) == (2, "", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("slow", ["typer", "numpy"])
def test_signal_during_imports_ends_quietly(number: int, code: int, slow: str, tmp_path: Path) -> None:
    (tmp_path / f"{slow}.py").write_text(
        "import sys, time\n"
        "class Field:\n"
        "    def __set_name__(self, owner, name):  # what is raised here is another exception outside\n"
        "        sys.stdout.write('now\\n'); sys.stdout.flush(); time.sleep(60)\n"
        "class Owner: field = Field()\n",
        "utf-8",
    )
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    with subprocess.Popen(  # noqa: S603  # our own command
        [*HYBRIDKV, *PLAN],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # a background shell ignores it
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"now\n"
        running.send_signal(number)
        assert running.stderr.read() == b""
        assert running.wait(20) == code


def test_ignored_signal_stays_ignored() -> None:
    ignoring = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code = f"{ignoring}sys.argv = ['hybridkv', '--version']\nfrom hybridkv.cli import main\ntry: main()\nfinally: "
    asked = "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    subprocess.run([sys.executable, "-c", code + asked], check=True, timeout=60, stdout=subprocess.DEVNULL)  # noqa: S603


# -- what is not installed


@pytest.mark.parametrize(
    ("missing", "arguments", "said"),
    [
        ("typer", PLAN, "error: the command line needs typer and rich: pip install 'hybridkv[cli]'"),
        ("rich", PLAN, "error: the command line needs typer and rich: pip install 'hybridkv[cli]'"),
        ("torch", ("generate", "--model", "tiny:llama"), "needs torch and transformers: pip install 'hybridkv[cli,run"),
        ("transformers", ("demo",), "needs torch and transformers: pip install 'hybridkv[cli,runner]'"),
        ("transformers", ("generate", "--model", "tiny:llama"), "needs torch and transformers: pip install 'hybridkv["),
    ],
)
def test_missing_package_is_named(missing: str, arguments: tuple[str, ...], said: str) -> None:
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {missing!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        f"sys.argv = {['hybridkv', *arguments]}\n"
        "from hybridkv.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(  # noqa: S603  # our own code
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=120, text=True
    )
    assert said in assert_one_line((done.returncode, done.stdout, done.stderr))


def test_internal_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridkv.cli import plan  # noqa: PLC0415  # to be broken

    def broken(*_: object, **__: object) -> None:
        import hybridkv.no_such_module  # type: ignore[import-not-found]  # noqa: PLC0415, F401

    monkeypatch.setattr(plan, "plan", broken)
    monkeypatch.setattr(sys, "argv", ["hybridkv", *PLAN])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        main()


# -- traces


def test_endless_trace_line_is_rejected(tmp_path: Path) -> None:
    """3 GB in 3 MB."""
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"timestamp": 0, "prompt": [[1, 0, 40]], "output": [[2, 0, 3]]}\n')
    part = gzip.compress(b" " * (1 << 24), 1)
    with path.open("ab") as bytes_of:
        for _ in range(192):
            bytes_of.write(part)
    begun = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    said = assert_one_line(process("replay", path, "--model", "llama-3-8b", "--memory", "4GiB", "--skip-bad-lines"))
    assert "bomb.jsonl.gz, line 2: longer than 16777216 bytes" in said
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begun < 10
