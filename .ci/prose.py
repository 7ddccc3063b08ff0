#!/usr/bin/env python3
"""Check the prose of docstrings and docs against the writing guide in CONTRIBUTING.md.

    .ci/prose.py                every check, the counts by package, and exit status 1 if a check fails
    .ci/prose.py worker serve   the findings in the docstrings of these packages alone

Needs the standard library alone. Code blocks, tables and lines indented by four spaces are not prose.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "hybridkv"
HARD = re.compile(r"\b(nobody|whoever|whom|whose|somebody|beside|behind|none|those|such|what)\b", re.IGNORECASE)
NOT_PROSE = re.compile(r"```.*?```|^    [^\n]*$|^\|[^\n]*$", re.DOTALL | re.MULTILINE)
POINTER = re.compile(r"^See (the|its) \w+\.$", re.MULTILINE)
MARKER = re.compile(r"^\s*(?:[-*>#]+|\d+[.)])\s", re.MULTILINE)
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|\n\s*\n")
MOST_HARD = {"docstrings": 1.0, "docs": 0.8}
"""Hard words per 100 words. Measured in other projects: httpx .51 and .32, attrs .96 and .45, trio .43 and .42."""
MOST_WORDS = 40
"""Words of a sentence in the README and the guides. The writing guide asks for 25; readers lose the thread at 40."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def hard_words(text: str) -> float:
    """Return the hard words per 100 words of ``text``."""
    return 100 * len(HARD.findall(text)) / max(1, len(text.split()))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring in the Python file ``path``."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Module | Definition) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def exported(part: Path) -> set[str]:
    """Return the names that a package's ``__init__`` imports or lists, and those in ``__all__`` of a module."""
    tree = ast.parse((part / "__init__.py" if part.is_dir() else part).read_text("utf-8"))
    names = {one.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names}
    if part.is_file():
        names = set()
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)] if names else []
    return names | {text for text in texts if isinstance(text, str) and text.isidentifier()}


def undocumented(path: Path, public: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and a message for each public callable in ``path`` with a parameter that no line documents.

    Args:
        path: a Python file.
        public: names that its package exports; methods of exported classes are public too.
    """
    for node in ast.parse(path.read_text("utf-8")).body:
        if not isinstance(node, Definition) or node.name not in public:
            continue
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            callables = [(f"{node.name}.{one.name}", one) for one in methods if not one.name.startswith("_")]
            callables += [(node.name, one) for one in methods if one.name == "__init__"]
        else:
            callables = [(node.name, node)]
        for name, function in callables:
            text = ast.get_docstring(node if name == getattr(node, "name", "") else function) or ""
            arguments = function.args
            names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            names += [one.arg for one in (arguments.vararg, arguments.kwarg) if one]
            for parameter in names:
                if parameter in {"self", "cls"} or parameter.startswith("_"):
                    continue
                if not re.search(rf"^\s*\*{{0,2}}{parameter}(, \w+)*:", text, re.MULTILINE):
                    yield function.lineno, f"{name} does not document its parameter {parameter}"


def findings(path: Path, public: set[str]) -> Iterator[str]:
    """Yield a line for each finding in the docstrings of ``path``.

    Args:
        path: a Python file of the package.
        public: names that its package exports.
    """
    where = path.relative_to(ROOT)
    for line, text in docstrings(path):
        if POINTER.search(text):
            yield f"{where}:{line}: this docstring only points elsewhere"
    yield from (f"{where}:{line}: {text}" for line, text in undocumented(path, public))


def long_sentences(path: Path) -> Iterator[str]:
    """Yield a line for each sentence of the page ``path`` that has more than MOST_WORDS words."""
    prose = MARKER.sub("\n\n", NOT_PROSE.sub("\n\n", path.read_text("utf-8")))
    for sentence in SENTENCE_END.split(prose):
        if len(words := sentence.split()) > MOST_WORDS:
            yield f"{path.relative_to(ROOT)}: {len(words)} words: {' '.join(words[:12])} ..."


def pages() -> list[Path]:
    """Return README, CONTRIBUTING and the pages of docs."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(packages: list[str]) -> int:
    """Print the findings and the counts; return the exit status."""
    parts = sorted(path for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())
    everything, found = [], []
    for part in parts:
        if packages and part.stem not in packages:
            continue
        paths = sorted(part.rglob("*.py")) if part.is_dir() else [part]
        public = exported(part) | exported(SOURCE)
        found += [line for path in paths for line in findings(path, public)]
        texts = [text for path in paths for _, text in docstrings(path)]
        everything += texts
        text = "\n".join(texts)
        print(f"{hard_words(text):5.2f} hard words per 100 of {len(text.split()):6,}  {part.stem}")
        if packages:
            for path in paths:
                found += [
                    f"{path.relative_to(ROOT)}:{line}: {word}"
                    for line, text in docstrings(path)
                    if hard_words(text) > MOST_HARD["docstrings"]
                    for word in HARD.findall(text)
                ]
    if not packages:
        prose = "\n".join(NOT_PROSE.sub("", page.read_text("utf-8")) for page in pages())
        for kind, text in (("docstrings", "\n".join(everything)), ("docs", prose)):
            if (share := hard_words(text)) > MOST_HARD[kind]:
                found.append(f"{kind}: {share:.2f} hard words per 100, at most {MOST_HARD[kind]}")
        guides = [page for page in pages() if "design" not in page.parts]
        found += [line for page in guides for line in long_sentences(page)]
    print(*found, sep="\n")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
