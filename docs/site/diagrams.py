"""Diagrams of docstrings stay diagrams, where taking the margin off has moved them left."""

from __future__ import annotations

import re
from typing import Any

import griffe

COLUMNS = re.compile(r"\S {2,}\S")


class Diagrams(griffe.Extension):
    """Indents paragraphs with columns in them, as code is."""

    def on_object(self, *, obj: Any, **_: Any) -> None:  # noqa: ANN401 - griffe calls it
        """Show the drawings of a module, class, function or attribute as code."""
        if obj.docstring is not None:
            first, *behind = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join([first, *map(_indented, behind)])


def _indented(paragraph: str) -> str:
    lines = paragraph.split("\n")
    if paragraph.startswith("    ") or not any(map(COLUMNS.search, lines)):
        return paragraph
    return "\n".join(f"    {line}" for line in lines)
