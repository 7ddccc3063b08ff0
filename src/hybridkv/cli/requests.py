"""Where requests come from: the options of a trace file or a generated workload, and what is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from hybridkv.cli.panels import REQUESTS
from hybridkv.errors import ConfigError
from hybridkv.simulator import FORMATS, WORKLOADS, RequestSource, TraceFile, UniformWorkload, Workload
from hybridkv.simulator.formats.events import KvEventsFormat
from hybridkv.simulator.trace import ARRIVALS_PER_S

WORKLOAD: Final = "workload:"
_UNIFORM: Final = "uniform"

TraceArgument = Annotated[
    str,
    typer.Argument(
        help=f"A trace, plain or gzip, or workload:NAME of {', '.join(WORKLOADS)}, {_UNIFORM}.",
        metavar="TRACE|workload:NAME",
    ),
]
_Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help=f"Of the trace: {', '.join(FORMATS)}.",
        metavar="NAME",
        show_default="known by its content",
        rich_help_panel=REQUESTS,
    ),
]
_TraceBlockSize = Annotated[
    int | None, typer.Option(help="Tokens of a Mooncake hash id.", show_default="512", rich_help_panel=REQUESTS)
]
_Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="Of a trace that holds text: a tokenizer.json, its folder, or bytes:N, N bytes a token.",
        rich_help_panel=REQUESTS,
    ),
]
_Arrivals = Annotated[
    float | None,
    typer.Option(
        "--arrivals",
        help="A second, of a trace without times.",
        show_default=f"{ARRIVALS_PER_S:g}",
        rich_help_panel=REQUESTS,
    ),
]
_Seed = Annotated[int | None, typer.Option(help="Of a workload.", show_default="0", rich_help_panel=REQUESTS)]
_Hours = Annotated[
    float | None, typer.Option(help="Of arrivals of a workload.", show_default="1", rich_help_panel=REQUESTS)
]
_Rate = Annotated[
    float | None,
    typer.Option(help="Multiplies the arrivals of a workload.", show_default="1", rich_help_panel=REQUESTS),
]
_Marks = Annotated[
    bool,
    typer.Option(
        "--marks", help="Of a workload: mark where the shared beginning of each prompt ends.", rich_help_panel=REQUESTS
    ),
]
_Limit = Annotated[
    int | None, typer.Option(help="The first N requests only.", show_default="all", rich_help_panel=REQUESTS)
]
_SkipBadLines = Annotated[
    bool, typer.Option("--skip-bad-lines", help="Count malformed lines, go on.", rich_help_panel=REQUESTS)
]


def untold(source: RequestSource, *, tokens_known: bool) -> dict[str, str]:
    """What the format of ``source`` cannot tell, as a fact by its name; nothing of most.

    tokens_known: as TraceSummary has it.
    """
    if not tokens_known:
        return {"lengths alone": "which tokens are equal is unknown, and so are hits; times are those without any"}
    if not isinstance(source, TraceFile) or source.format_name != KvEventsFormat.name:
        return {}
    return {source.format_name: "requests as blocks tell of them, without those that stored none, and what fills none"}


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What was given; None for what was not."""

    format_name: _Format = None
    trace_block_size: _TraceBlockSize = None
    tokenizer: _Tokenizer = None
    arrivals: _Arrivals = None
    seed: _Seed = None
    hours: _Hours = None
    rate: _Rate = None
    marks: _Marks = False
    limit: _Limit = None
    skip_bad_lines: _SkipBadLines = False

    def read(self, trace: str) -> RequestSource:
        """The trace file or workload. ConfigError for options of the other kind."""
        generated, kind = trace.startswith(WORKLOAD), trace.removeprefix(WORKLOAD)
        foreign = dict(self._of_files if generated else self._of_workloads)
        if generated and kind == _UNIFORM:
            foreign |= {**self._of_workloads, "--limit": self.limit}
        wrong = [name for name, value in foreign.items() if value is not None]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)} means nothing for {trace}: leave it out")
        if not generated:
            return TraceFile(
                trace,
                format_name=self.format_name,
                trace_block_size=512 if self.trace_block_size is None else self.trace_block_size,
                tokenizer=self.tokenizer,
                arrivals_per_s=ARRIVALS_PER_S if self.arrivals is None else self.arrivals,
                skip_bad_lines=self.skip_bad_lines,
                limit=self.limit,
            )
        if kind == _UNIFORM:
            return UniformWorkload()
        if kind not in WORKLOADS:
            raise ConfigError(f"unknown workload {kind!r}: use one of {', '.join((*WORKLOADS, _UNIFORM))}")
        chosen = {name.removeprefix("--"): value for name, value in self._of_workloads.items() if value is not None}
        return Workload(kind, limit=self.limit, **chosen)  # type: ignore[arg-type]  # an int, a bool, the others floats

    @property
    def _of_workloads(self) -> Mapping[str, float | None]:
        return {"--seed": self.seed, "--hours": self.hours, "--rate": self.rate, "--marks": self.marks or None}

    @property
    def _of_files(self) -> Mapping[str, object]:
        return {
            "--format": self.format_name,
            "--trace-block-size": self.trace_block_size,
            "--tokenizer": self.tokenizer,
            "--arrivals": self.arrivals,
            "--skip-bad-lines": self.skip_bad_lines or None,
        }
