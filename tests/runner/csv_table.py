"""CSV files in docs/data: tables that the pages of the documentation show."""

import csv
from collections.abc import Iterable
from pathlib import Path

DATA = Path(__file__).parents[2] / "docs" / "data"

Row = tuple[object, ...]


def write(path: Path, header: Iterable[str], rows: Iterable[Row]) -> None:
    """Write a table.

    Args:
        path: the file; an old one is replaced.
        header: names of the columns.
        rows: one tuple a row, in the order of the columns.
    """
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table, each by the names of its columns."""
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))
