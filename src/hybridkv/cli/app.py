"""The typer app with all commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Annotated, Any, Final

import typer

from hybridkv.cli import (
    bench,
    calibrate,
    chat,
    doctor,
    explain,
    generate,
    models,
    plan,
    replay,
    serve,
    sweep,
    top,
    trace,
)
from hybridkv.cli.options import gathered

app = typer.Typer(
    name="hybridkv",
    help="Plan, share, schedule and simulate the KV cache of hybrid LLMs.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_traces = typer.Typer(
    help="Describe a trace, convert it to the token-exact format, or record KV events as a trace.", no_args_is_help=True
)
_loads = typer.Typer(help="Send a load to a server or an engine, and measure it.", no_args_is_help=True)
_DEMO: Final = (
    ("plan", "llama-3-8b", "--memory", "40GiB"),
    ("replay", "workload:chat", "--hours", "0.05", "--model", "llama-3-8b", "--memory", "40GiB"),
    ("generate", "--model", "tiny:llama", "--repeat", "2", "--check"),
)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        print(f"hybridkv {version('hybridkv')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
    # threads wait for each other without using a core: by spinning, a chat on a busy machine took 6 times the CPU time
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
    if sys.stderr is None or not sys.stderr.isatty():
        # progress bars of libraries (downloads, dequantization) would mix with error lines in a file
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when torch is imported


@cache  # reading the options from type hints takes some milliseconds
def command() -> Callable[..., Any]:
    """Return the function that runs a command line."""
    return typer.main.get_command(app)


def demo_command() -> None:
    """Run three example commands: plan a model, replay a workload, and check generated text against transformers."""
    for name in ("torch", "transformers"):  # the last command needs them; the first two take half a minute
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    for words in _DEMO:
        print(f"\n$ hybridkv {' '.join(words)}", flush=True)
        failed = app(list(words), standalone_mode=False)
        sys.stdout.flush()
        if failed:
            raise typer.Exit(int(failed))


app.command("plan")(gathered(plan.plan_command, first=["memory", "max_model_len", "tp"]))
app.command("generate")(gathered(generate.generate_command))
app.command("chat", epilog=chat.HELP)(gathered(chat.chat_command))
app.command("serve")(gathered(serve.serve_command))
app.add_typer(_loads, name="bench")
_loads.command("serve")(gathered(bench.serve_load_command))
_loads.command("engine")(gathered(bench.engine_load_command))
app.command("top")(gathered(top.top_command))
app.command("replay")(gathered(replay.replay_command))
app.command("explain")(gathered(explain.explain_command))
app.command("doctor")(gathered(doctor.doctor_command))
app.command("sweep")(gathered(sweep.sweep_command))
app.command("tune")(gathered(sweep.tune_command))
app.add_typer(_traces, name="trace")
_traces.command("describe")(gathered(trace.describe_command, without=["marks"]))  # marks do not change a description
_traces.command("convert")(gathered(trace.convert_command))
_traces.command("record")(trace.record_command)
app.command("hardware")(gathered(models.hardware_command))
app.command("calibrate")(gathered(calibrate.calibrate_command))
app.command("models")(gathered(models.models_command))
app.command("demo")(demo_command)
