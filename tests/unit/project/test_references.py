"""What comments and documents point to is there: documents, their sections, files, tests, links."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],  # noqa: S607 - whatever git there is
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.split("\n") if not listed.returncode else []
    found = [ROOT / name for name in names if name] or [path for path in ROOT.rglob("*") if ".venv" not in path.parts]
    return [path for path in found if path.is_file()]


FILES = _tracked()
CODE = [path for path in FILES if path.suffix == ".py" and path != Path(__file__)]
DOCUMENTS = [path for path in FILES if path.suffix == ".md"]
TESTS = {
    name for path in CODE for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
}
NAMES = {path.name for path in FILES}


def headings(path: Path) -> list[str]:
    return re.findall(r"^#+ +(.*)$", path.read_text("utf-8"), re.MULTILINE)


def cited(text: str) -> Iterator[str]:
    """What of the documents that ``text`` names is not there."""
    text = re.sub(r"\s*\n\s*#?\s*", " ", text)
    for found in re.finditer(r"(?<![\w/])((?:[\w.-]+/)*)([\w-]+)\.md(?:, ((?:\d+(?:, | and )?)+))?", text):
        folder, name, sections = found.groups()
        path = ROOT / folder / f"{name}.md"
        if not path.is_file():
            yield found[0]
            continue
        known = [int(number) for number in re.findall(r"^## (\d+)\.", path.read_text("utf-8"), re.MULTILINE)]
        yield from (
            f"{found[0]}: no section {one}" for one in re.findall(r"\d+", sections or "") if int(one) not in known
        )
    for number in re.findall(r"docs/design/(\d{4})\b", text):
        if not list((ROOT / "docs" / "design").glob(f"{number}-*.md")):
            yield f"docs/design/{number}"


def test_reference_checks_find_code_documents_and_missing_sections() -> None:
    assert len(CODE) > 300
    assert len(DOCUMENTS) > 15
    text = "\n".join(path.read_text("utf-8") for path in CODE)
    assert len(re.findall(r"docs/contracts\.md, \d", text)) > 25
    assert len(re.findall(r"docs/design/\d{4}", text)) > 5
    assert list(cited("see contracts.md, 4")) == ["contracts.md, 4"]
    assert list(cited("see docs/contracts.md, 4 and 99")) == ["docs/contracts.md, 4 and 99: no section 99"]
    assert list(cited("see docs/design/0999")) == ["docs/design/0999"]


def test_documents_cited_in_code_exist() -> None:
    wrong = {}
    for path in CODE:
        text = re.sub(r"[\"'][\w/{}.-]*\.md[\"']", "", path.read_text("utf-8"))  # files that a test writes
        if missing := list(cited(text)):
            wrong[str(path.relative_to(ROOT))] = missing
    assert wrong == {}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_link_targets_of_documents_exist(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        where = path.parent / file if file else path
        assert where.exists(), target
        if anchor:
            slugs = [re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings(where)]
            assert anchor in slugs, target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_tests_named_in_documents_exist(path: Path) -> None:
    if path.name == "CHANGELOG.md":
        return  # it tells of what was
    for name in re.findall(r"`((?:src|tests|benchmarks|examples|docs)/[\w./-]+)`", path.read_text("utf-8")):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(test_\w+(?:\.py|\.\.\.)?)`", path.read_text("utf-8")):
        if name.endswith(".py"):
            assert name in NAMES, name
        elif name.endswith("..."):
            assert any(test.startswith(name.removesuffix("...")) for test in TESTS), name
        else:
            assert name in TESTS or f"{name}.py" in NAMES, name


@pytest.mark.parametrize("folder", ["cache", "eviction", "observe", "schedule"])
def test_module_tables_list_every_module(folder: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = text.partition(f"| in `{folder}/` |")[2].partition("\n\n")[0]
    in_table = {name for line in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    in_table |= set(re.findall(r"`(\w+)_\*`", table))
    modules = {path.stem for path in (ROOT / "src" / "hybridkv" / folder).glob("*.py")} - {"__init__"}
    missing = {name for name in modules if not any(name == one or name.startswith(f"{one}_") for one in in_table)}
    assert missing == set()
    assert {name for name in in_table if not any(one == name or one.startswith(f"{name}_") for one in modules)} == set()
