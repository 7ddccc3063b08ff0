"""Options: declared once, as fields of frozen dataclasses that commands take whole."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from hybridkv.errors import ConfigError
from hybridkv.eviction import DEFAULT_EVICTIONS, EVICTIONS
from hybridkv.planner.plan import NATURAL
from hybridkv.regular_files import write_whole
from hybridkv.schedule.limits import SHORT_SHARE


def gathered(
    command: Callable[..., Any], *, without: Collection[str] = (), first: Sequence[str] = ()
) -> Callable[..., Any]:
    """``command`` for typer: parameters that are dataclasses become one for each of their fields, theirs as well.

    A value as the default of such a parameter holds theirs. without: fields that this command does not ask for.
    Those without a default come first, then those named in ``first``; else they keep their order.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters.values()
    flat = [one for of in parameters for one in _flat(of.name, hints[of.name], of.default, without)]
    ranks = {name: rank - len(first) for rank, name in enumerate(first)}
    flat.sort(key=lambda one: (one.default is not Parameter.empty, ranks.get(one.name, 0)))

    @functools.wraps(command)
    def run(**given: Any) -> Any:  # noqa: ANN401 - whatever typer made of it
        return command(**{of.name: _made(of.name, hints[of.name], given, without) for of in parameters})

    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]  # as inspect wants it
    return run


def _flat(name: str, kind: Any, default: object, without: Collection[str]) -> Iterator[Parameter]:  # noqa: ANN401 - a type
    if not is_dataclass(kind):
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        return
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if field.name not in without:
            own = Parameter.empty if field.default is MISSING else field.default
            yield from _flat(field.name, hints[field.name], getattr(default, field.name, own), without)


def _made(name: str, kind: Any, given: dict[str, Any], without: Collection[str]) -> Any:  # noqa: ANN401 - as above
    if not is_dataclass(kind) or not isinstance(kind, type):
        return given[name]
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind) if field.name not in without]
    return kind(**{one: _made(one, hints[one], given, without) for one in names})


def as_option(name: str) -> str:
    """The option of the parameter ``name``."""
    return "--" + name.replace("_", "-")


# -- panels of `--help`: options of every command stand under the same headings


def _panel(title: str) -> Callable[..., Any]:
    """Return a function that declares an option under ``title``: by its help, its names and what typer takes."""

    def option(text: str, *names: str, **others: Any) -> Any:  # noqa: ANN401 - typer's
        return typer.Option(*names, help=text, rich_help_panel=title, **others)

    return option


model_option: Final = _panel("The model")
cache_option: Final = _panel("Its cache")
request_option: Final = _panel("What is asked")
run_option: Final = _panel("How it runs")
output_option: Final = _panel("What is shown")


# -- options of several commands

Eviction = Annotated[
    str | None,
    cache_option(
        f"What is given up next, in the natural layout: {', '.join(EVICTIONS)}.",
        show_default=DEFAULT_EVICTIONS[NATURAL].name,
    ),
]
Shares = Annotated[
    list[str] | None,
    cache_option(
        "Of what is kept, promised to a tenant or salt: team-a=30%..60%; * is all not named. Repeat it.",
        "--share",
        metavar="TENANT=SHARE[..GREATEST]",
        show_default="all are one tenant",
    ),
]
ShortShare = Annotated[
    float | None,
    run_option(
        "Of a step, what short prompts and decoding requests take before long prompts: 0 or more, below 1.",
        metavar="SHARE",
        show_default=f"{SHORT_SHARE}; of the reference layout 0",
    ),
]
NoPrefixCaching = Annotated[bool, run_option("Share nothing.", "--no-prefix-caching")]
SkipBadLines = Annotated[bool, request_option("Count malformed lines, go on.", "--skip-bad-lines")]
Explain = Annotated[bool, output_option("Say why tokens were not found in the cache.", "--explain")]
REMEMBERED: Final = 1 << 20
"""Keys of evicted blocks, where misses are explained: some 200 bytes each."""
PageFile = Annotated[
    Path | None, output_option("Write a page with pictures, which needs no network.", "--report", metavar="FILE.html")
]


def checked_page(path: Path | None) -> Path | None:
    """``path`` of `--report`, said early: ConfigError where it cannot be written, or nothing draws."""
    if path is None:
        return None
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError("--report needs plotly: pip install 'hybridkv[report]'")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--report: no file can be written at {path}: name one in a folder that is there")
    return path


def write_page(path: Path, page: str) -> None:
    """``page`` as ``path``, whole or not at all. ConfigError where there is no room or no right to."""
    try:
        write_whole(path, page.encode())
    except OSError as error:
        raise ConfigError(f"--report: {path} could not be written: {error.strerror or error}") from error
