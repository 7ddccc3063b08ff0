"""Command line options, declared once as fields of frozen dataclasses that commands take as a whole."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from hybridkv.errors import ConfigError
from hybridkv.eviction import DEFAULT_EVICTIONS, EVICTIONS
from hybridkv.planner.plan import NATURAL, REFERENCE
from hybridkv.regular_files import write_whole
from hybridkv.schedule.limits import SHORT_SHARE


def gathered(
    command: Callable[..., Any], *, without: Collection[str] = (), first: Sequence[str] = ()
) -> Callable[..., Any]:
    """Return ``command`` for typer: each parameter that is a dataclass becomes one parameter for each of its fields.

    Fields that are dataclasses are replaced in the same way. Parameters without a default come first, then the
    parameters in ``first``; the rest keep their order.

    Args:
        command: a function with type hints. A default of a dataclass parameter holds the defaults of its fields.
        without: fields that this command does not have.
        first: parameters to list first in the help.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters.values()
    flat = [one for of in parameters for one in _flat(of.name, hints[of.name], of.default, without)]
    ranks = {name: rank - len(first) for rank, name in enumerate(first)}
    flat.sort(key=lambda one: (one.default is not Parameter.empty, ranks.get(one.name, 0)))

    @wraps(command)
    def run(**given: Any) -> Any:  # noqa: ANN401 - values of any option
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
    """Return the option of the parameter ``name``."""
    return "--" + name.replace("_", "-")


# -- panels of `--help`: every command lists its options under the same headings


def _panel(title: str) -> Callable[..., Any]:
    """Return a function that declares a field whose option is listed under ``title``.

    The function takes the help text, option names that differ from the field's name, the default (``...`` for a
    required option), and the arguments of typer.Option.
    """

    def setting(text: str, *names: str, default: object = None, **others: Any) -> Any:  # noqa: ANN401 - typer's
        option = typer.Option(*names, help=text, rich_help_panel=title, **others)
        return field(default=MISSING if default is ... else default, metadata={"option": option})

    return setting


model_option: Final = _panel("Model")
cache_option: Final = _panel("Cache")
request_option: Final = _panel("Requests")
run_option: Final = _panel("Execution")
output_option: Final = _panel("Output")


# -- options of several commands

eviction_option: Final = partial(
    cache_option,
    f"Eviction policy: {', '.join(EVICTIONS)}.",
    show_default=f"{DEFAULT_EVICTIONS[NATURAL].name}; {DEFAULT_EVICTIONS[REFERENCE].name} in the reference layout",
)
shares_option: Final = partial(
    cache_option,
    "Share of the cache that a tenant or salt is guaranteed, and its limit, such as team-a=30%..60%; * stands for all "
    "other tenants. May be repeated.",
    "--share",
    metavar="TENANT=SHARE[..GREATEST]",
    show_default="one tenant",
)
skip_layers_option: Final = partial(
    cache_option,
    "Layer whose keys and values are not quantized: the index of a layer, or sliding_window for all layers with a "
    "window. May be repeated.",
    "--kv-dtype-skip-layers",
    metavar="LAYER",
)
short_share_option: Final = partial(
    run_option,
    "Share of a step's tokens that short prompts and decoding requests get before long prompts: at least 0, below 1.",
    metavar="SHARE",
    show_default=f"{SHORT_SHARE}; 0 in the reference layout",
)
no_prefix_caching_option: Final = partial(run_option, "Turn prefix caching off.", "--no-prefix-caching", default=False)
skip_bad_lines_option: Final = partial(
    request_option,
    "Skip and count malformed lines, where otherwise the first one is an error.",
    "--skip-bad-lines",
    default=False,
)
explain_option: Final = partial(output_option, "Report missed prompt tokens by reason.", "--explain", default=False)
REMEMBERED: Final = 1 << 20
"""Default number of evicted keys that are remembered to explain misses; each takes some 200 bytes."""
key_option: Final = partial(
    request_option,
    "API key of the server, one without a salt; prefer the environment variable.",
    envvar="HYBRIDKV_API_KEY",
    show_default="none",
)
page_option: Final = partial(
    output_option, "Write an HTML report with charts that needs no network.", "--report", metavar="FILE.html"
)


def checked_page(path: Path | None) -> Path | None:
    """Check ``path`` of `--report` before the command runs, and return it.

    Raises:
        ConfigError: if the file cannot be written, and if plotly is not installed.
    """
    if path is None:
        return None
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError("--report needs plotly: pip install 'hybridkv[report]'")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--report {path} cannot be written: name a file in an existing folder")
    return path


def require_writable(option: str, path: Path | None) -> None:
    """Check the file that ``option`` names, if any. Raises ConfigError if it cannot be written."""
    if path is not None and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{option} {path} cannot be written: name a file in an existing, writable folder")


def write_file(option: str, path: Path, text: str) -> None:
    """Write the file that ``option`` names in one piece. Raises ConfigError if it cannot be written."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror or error}") from error
