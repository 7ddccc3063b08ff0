"""Show the CSV tables of docs/data in the pages that link to them.

A paragraph that is only a link to a CSV file keeps its link, and the site shows the whole table below it.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
LINK = re.compile(r"^\[[^\]]+\]\((?:\.\./)?(data/[\w-]+\.csv)\)$", re.MULTILINE)


def markdown(path: Path) -> str:
    """Return the table of the CSV file ``path`` in Markdown; columns of numbers are aligned to the right."""
    with path.open(newline="", encoding="utf-8") as lines:
        header, *rows = csv.reader(lines)
    numeric = [all(re.fullmatch(r"[-+]?[\d.,]*%?", row[place]) for row in rows) for place in range(len(header))]
    align = ["--:" if right else "---" for right in numeric]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, align, *rows))


def on_page_markdown(text: str, **_: Any) -> str:  # noqa: ANN401  # what mkdocs passes
    """Return the page ``text`` with a table below each link that stands alone; mkdocs calls it."""
    return LINK.sub(lambda found: f"{found[0]}\n\n{markdown(DOCS / found[1])}", text)
