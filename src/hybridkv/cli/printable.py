"""Text from files and arguments as a terminal may get it."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` with every character that does not print (controls, escapes, lone surrogates) as Python writes it."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def printable_lines(text: str) -> str:
    """As ``printable``, but lines stay lines."""
    return "\n".join(map(printable, text.split("\n")))
