"""The documentation site links to files outside of docs/: they become pages of it, below ``repository/``."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def _outside(page: str, target: str) -> str | None:
    """Return the repository path of ``target``, a link of ``page`` (a path below docs/), unless it is below docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") or not (ROOT / path).is_file() else path


def _page_of(path: str) -> str:
    """Where the site has a file of the repository."""
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def _text_of(path: str) -> str:
    """Return a file of the repository as a page: code as a block, links of documents as seen from docs/."""
    text = (ROOT / path).read_text("utf-8")
    if not path.endswith(".md"):
        return f"# {path}\n\n```python\n{text}```\n"

    def seen(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[1]))
        here = posixpath.dirname(_page_of(path))
        if target.startswith("docs/") and (ROOT / target).is_file():
            return f"]({posixpath.relpath(target.removeprefix('docs/'), here)}{found[2] or ''})"
        if target in FILES:
            return f"]({posixpath.relpath(_page_of(target), here)}{found[2] or ''})"
        return "](#)" if not (ROOT / target).is_dir() else f"]({posixpath.relpath('index.md', here)})"

    return LINK.sub(seen, text)


FILES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    *(f"examples/{path.name}" for path in sorted((ROOT / "examples").glob("*.py"))),
)


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401 - mkdocs calls it
    """Add them."""
    for path in FILES:
        files.append(File.generated(config, _page_of(path), content=_text_of(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:  # noqa: ANN401 - as above
    """Lead there."""
    here = posixpath.dirname(page.file.src_uri)

    def seen(found: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, found[1])
        return found[0] if path is None else f"]({posixpath.relpath(_page_of(path), here)}{found[2] or ''})"

    return markdown if page.file.src_uri.startswith("repository/") else LINK.sub(seen, markdown)
