#!/usr/bin/env python3
"""Print the texts that users read, so that they can be reviewed as one list.

    .ci/messages.py                  every option and argument of the command line, then every error message
    .ci/messages.py cli simulator    options, and the error messages of these packages alone

Run it with the project's Python, ``hybridkv[cli]`` installed. Options are read from the typer app; error messages are
the texts of ``raise SomeError(...)`` in the source, where ``{expression}`` stands for a value.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "hybridkv"


def option_lines() -> Iterator[str]:
    """Yield a line for each command, and one for each of its options: names, metavar, default and help."""
    sys.path.insert(0, str(SOURCE.parent))
    from hybridkv.cli.app import command  # noqa: PLC0415  # only this function needs the package

    stack = [("hybridkv", command())]
    while stack:
        path, one = stack.pop()
        yield f"{path}: {' '.join((one.help or '').split())}"
        for option in one.params:
            names = "/".join(option.opts)
            shown = getattr(option, "show_default", None)
            default = shown if isinstance(shown, str) else option.default
            yield f"    {names} {option.metavar or ''} [{default}]: {' '.join((option.help or '').split())}"
        stack += [(f"{path} {name}", inner) for name, inner in reversed(getattr(one, "commands", {}).items())]


def text_of(node: ast.expr) -> str:
    """Return the text of a string expression, with ``{expression}`` for each of its values."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case _:
            return f"{{{ast.unparse(node)}}}"


def error_lines(path: Path) -> Iterator[str]:
    """Yield ``file:line: Error: text`` for each raised error of the Python file ``path``."""
    raised = (node.exc for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Raise))
    calls = (one for one in raised if isinstance(one, ast.Call) and one.args)
    for call in sorted(calls, key=lambda one: one.lineno):
        name = ast.unparse(call.func)
        if name.endswith("Error"):
            yield f"{path.relative_to(ROOT)}:{call.lineno}: {name}: {text_of(call.args[0])}"


def main(packages: list[str]) -> None:
    """Print options, then the error messages of ``packages``; all of them if none is named."""
    print(*option_lines(), sep="\n")
    for path in sorted(SOURCE.rglob("*.py")):
        if not packages or path.relative_to(SOURCE).parts[0].removesuffix(".py") in packages:
            print(*error_lines(path), sep="\n", end="\n" if list(error_lines(path)) else "")


if __name__ == "__main__":
    main(sys.argv[1:])
