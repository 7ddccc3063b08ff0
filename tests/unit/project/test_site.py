"""The documentation site: it builds, every link of it leads somewhere, and the API is in it."""

import csv
import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hybridkv

ROOT = Path(__file__).parents[3]
IDS = re.compile(r'\bid="([^"]+)"')
LINKS = re.compile(r'(?:href|src)="([^"]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("site")
    done = subprocess.run(  # noqa: S603 - our own site
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(where)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return where


def test_site_link_targets_exist(site: Path) -> None:
    pages = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
    ids = {path: set(IDS.findall(text)) for path, text in pages.items()}
    wrong, seen = [], 0
    for page, text in pages.items():
        for link in () if page.name == "404.html" else LINKS.findall(text):
            file, _, anchor = link.partition("#")
            if re.match(r"\w+:", link):
                continue
            where = (page.parent / file).resolve() if file else page
            where = where / "index.html" if where.is_dir() else where
            seen += 1
            if not where.exists() or (anchor and where in ids and anchor not in ids[where]):
                wrong.append((page.relative_to(site).as_posix(), link))
    assert wrong == []
    assert seen > 1000


def test_site_loads_no_external_resources(site: Path) -> None:
    text = "".join(path.read_text("utf-8") for path in site.rglob("*.html"))
    assert not re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(?:https?:)?//[^"]*"', text)


def test_site_has_documents_files_and_api(site: Path) -> None:
    for name in ("glossary", "contracts", "design/0009-natural-cache", "repository/examples/foreign_engine.py"):
        assert (site / name / "index.html").exists(), name
    text = "".join(path.read_text("utf-8") for path in (site / "api").rglob("*.html"))
    anchors = {one.rpartition(".")[2] for one in IDS.findall(text)}
    assert {*hybridkv.__all__} - anchors == set()
    assert {"allocate_slots", "take_transfers", "get_computed_blocks", "schedule", "generate"} <= anchors


def test_site_keeps_columns_of_docstring_diagrams(site: Path) -> None:
    """What has columns stands in a block of code: a paragraph would squash it."""
    text = "".join(path.read_text("utf-8") for path in (site / "api").rglob("*.html"))
    assert re.findall(r"<p>[^<]*\S {2,}\S[^<]*", text) == []


def test_site_shows_every_table_of_docs_data(site: Path) -> None:
    pages = "\n".join(
        path.read_text("utf-8") for path in [*site.glob("*/index.html"), *site.glob("design/*/index.html")]
    )
    for table in (ROOT / "docs" / "data").glob("*.csv"):
        with table.open(newline="", encoding="utf-8") as lines:
            *_, last = csv.reader(lines)
        assert f'../data/{table.name}"' in pages
        assert f"<td>{html.escape(last[0], quote=False)}</td>" in pages
