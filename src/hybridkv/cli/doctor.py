"""`hybridkv doctor`: find problems of a plan, a trace or a running server, and what to change."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Final

import typer

from hybridkv.cli.options import key_option, output_option
from hybridkv.cli.output import say
from hybridkv.cli.running import WORKLOAD, RunOptions
from hybridkv.cli.top import MOST_BYTES, RUNNING_SUFFIX, Exposition, metrics_url, read_metrics
from hybridkv.doctor import Diagnosis, Finding, examine_plan, examine_server, examine_trace
from hybridkv.errors import ConfigError
from hybridkv.models.json_text import DocumentError, parse_json
from hybridkv.planner import read_plan
from hybridkv.planner.document import SCHEMA
from hybridkv.regular_files import open_regular

_LOOKED_AT: Final = 1 << 16


def doctor_command(
    *,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|TRACE|URL|METRICS",
            help="Plan file of `hybridkv plan --json`; trace or workload:NAME; http://HOST:PORT of a server; or a file "
            "with the text of its /metrics.",
        ),
    ],
    options: RunOptions,
    api_key: str | None = key_option(),
    as_json: bool = output_option("Print the findings as JSON.", "--json", default=False),
) -> None:
    """Report problems, the figure that shows each, and what to change; for a trace, a replay proves each change."""
    diagnosis = _diagnosis(subject, options, api_key)
    if as_json:
        print(json.dumps(asdict(diagnosis), indent=2))
        return
    say(diagnosis.subject)
    for finding in diagnosis.findings:
        for line in _in_words(finding):
            say(line)
    if not diagnosis.findings:
        say("no problems found")
    wrong = {finding.name for finding in diagnosis.findings}
    for name, figure in diagnosis.figures.items():
        if name not in wrong:
            say(f"fine: {name.replace('_', ' ')}: {figure}")


def _diagnosis(subject: str, options: RunOptions, api_key: str | None) -> Diagnosis:
    if subject.startswith(("http://", "https://")):
        url = metrics_url(subject)
        return _server(url, read_metrics(url, api_key))
    beginning = "" if subject.startswith(WORKLOAD) else _read(subject, _LOOKED_AT)
    if beginning.lstrip().startswith("{") and f'"{SCHEMA}"' in beginning:
        return examine_plan(read_plan(subject), options.max_running)
    if RUNNING_SUFFIX in beginning:
        return _server(subject, _read(subject, MOST_BYTES))
    if not options.plan_file and (options.model is None or options.planned.memory is None) and _is_document(beginning):
        raise ConfigError(f"{subject} is not a plan (schema {SCHEMA}), a trace or metrics: name one of these")
    run = options.prepare(subject, options.settings())
    return examine_trace(
        run.source,
        run.plan,
        run.settings,
        summary=run.summary,
        on_replay=lambda change: print(f"doctor: replay {change}", file=sys.stderr),
    )


def _server(subject: str, text: str) -> Diagnosis:
    try:
        return examine_server(subject, Exposition.parse(text, 0.0))
    except ConfigError as error:
        raise ConfigError(f"{subject}: {error}") from error


def _read(subject: str, most_bytes: int) -> str:
    """Return the first ``most_bytes`` of a file as text. Raises ConfigError if it cannot be read."""
    try:
        with open_regular(subject) as file:
            return file.read(most_bytes).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read {subject}: {error.strerror or error}") from error


def _is_document(beginning: str) -> bool:
    """Whether the text is one JSON object over several lines, which no trace is."""
    try:
        return isinstance(parse_json(beginning), dict) and beginning.count("\n") > 1
    except DocumentError:
        return False


def _in_words(finding: Finding) -> list[str]:
    said = [f"WRONG: {finding.said}", f"  shown by: {finding.figure}", f"  change:   {finding.remedy}"]
    proof = finding.proof
    if proof is not None:
        shares = proof.figure == "hit rate"
        before, after = (f"{one:.2%}" if shares else f"{one:,.2f}" for one in (proof.before, proof.after))
        said.append(f"  proof:    {proof.figure} {before} -> {after}, {proof.change}")
    return said
