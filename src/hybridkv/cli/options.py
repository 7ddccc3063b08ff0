"""Options: declared once, as fields of frozen dataclasses that commands take whole."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import partial, wraps
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

    @wraps(command)
    def run(**given: Any) -> Any:  # noqa: ANN401 - whatever typer made of it
        return command(**{of.name: _made(of.name, hints[of.name], given, without) for of in parameters})

    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]  # as inspect wants it
    return run


def _flat(name: str, kind: Any, default: Any, without: Collection[str]) -> Iterator[Parameter]:  # noqa: ANN401 - a type
    metadata: Mapping[str, Any] = {}
    if isinstance(default, Field):
        default, metadata = default.default, default.metadata
    if not is_dataclass(kind):
        own = Annotated[kind, metadata["option"]] if metadata else kind
        default = Parameter.empty if default is MISSING else default
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=own)
        return
    hints = get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        if one.name not in without:
            held = field(default=getattr(default, one.name, one.default), metadata=one.metadata)
            yield from _flat(one.name, hints[one.name], held, without)


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
    """Return a function that declares a setting whose option stands under ``title``.

    It takes the option's help, its names where it has others than the setting, the default, ... for none, and what
    typer.Option takes.
    """

    def setting(text: str, *names: str, default: object = None, **others: Any) -> Any:  # noqa: ANN401 - typer's
        option = typer.Option(*names, help=text, rich_help_panel=title, **others)
        return field(default=MISSING if default is ... else default, metadata={"option": option})

    return setting


model_option: Final = _panel("The model")
cache_option: Final = _panel("Its cache")
request_option: Final = _panel("What is asked")
run_option: Final = _panel("How it runs")
output_option: Final = _panel("What is shown")


# -- options of several commands

eviction_option: Final = partial(
    cache_option,
    f"What is given up next, in the natural layout: {', '.join(EVICTIONS)}.",
    show_default=DEFAULT_EVICTIONS[NATURAL].name,
)
shares_option: Final = partial(
    cache_option,
    "Of what is kept, promised to a tenant or salt: team-a=30%..60%; * is all not named. Repeat it.",
    "--share",
    metavar="TENANT=SHARE[..GREATEST]",
    show_default="all are one tenant",
)
short_share_option: Final = partial(
    run_option,
    "Of a step, what short prompts and decoding requests take before long prompts: 0 or more, below 1.",
    metavar="SHARE",
    show_default=f"{SHORT_SHARE}; of the reference layout 0",
)
no_prefix_caching_option: Final = partial(run_option, "Share nothing.", "--no-prefix-caching", default=False)
skip_bad_lines_option: Final = partial(
    request_option, "Count malformed lines, go on.", "--skip-bad-lines", default=False
)
explain_option: Final = partial(
    output_option, "Say why tokens were not found in the cache.", "--explain", default=False
)
REMEMBERED: Final = 1 << 20
"""Keys of evicted blocks, where misses are explained: some 200 bytes each."""
page_option: Final = partial(
    output_option, "Write a page with pictures, which needs no network.", "--report", metavar="FILE.html"
)


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
