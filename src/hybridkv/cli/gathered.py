"""Options that several commands share, named once: fields of a frozen value that the commands take as one parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter
from typing import Any, get_type_hints


def gathered(command: Callable[..., None], *, without: Collection[str] = ()) -> Callable[..., None]:
    """``command`` for typer: parameters that are dataclasses become one for each of their fields, theirs as well.

    Those without a default come first, else they keep their order. without: fields that this command does not ask for.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters.values()
    flat = [one for of in parameters for one in _flat(of.name, hints[of.name], of.default, without)]
    flat.sort(key=lambda one: one.default is not Parameter.empty)

    @functools.wraps(command)
    def run(**given: Any) -> None:  # noqa: ANN401 - whatever typer made of it
        command(**{of.name: _made(of.name, hints[of.name], given, without) for of in parameters})

    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]  # as inspect wants it
    return run


def _flat(name: str, kind: Any, default: object, without: Collection[str]) -> Iterator[Parameter]:  # noqa: ANN401 - a type
    if not is_dataclass(kind):
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        return
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if field.name not in without:
            default = Parameter.empty if field.default is MISSING else field.default
            yield from _flat(field.name, hints[field.name], default, without)


def _made(name: str, kind: Any, given: dict[str, Any], without: Collection[str]) -> Any:  # noqa: ANN401 - as above
    if not is_dataclass(kind) or not isinstance(kind, type):
        return given[name]
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind) if field.name not in without]
    return kind(**{one: _made(one, hints[one], given, without) for one in names})
