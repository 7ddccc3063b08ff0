"""What is distributed: a source distribution that is a whole clone, a wheel that is the package, and what indexes show.

Both are built without a network, by the setuptools that is installed, as pip builds them: the wheel from the source
distribution.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
FOLDERS = (".ci", "benchmarks", "docs", "examples", "native", "src", "tests")
NOT_KEPT = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")


def _build(tree: Path, hook: str, into: Path) -> Path:
    """What ``hook`` of the build backend makes of ``tree``."""
    code = f"import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"
    subprocess.run(  # noqa: S603  # our own code, as pip runs it
        [sys.executable, "-c", code, str(into)], cwd=tree, check=True, timeout=120, capture_output=True
    )
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's files: building writes beside them."""
    copy = tmp_path_factory.mktemp("tree")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=NOT_KEPT)
    for path in ROOT.iterdir():
        if path.is_file() and path.name not in {".git", ".gitignore", "PKG-INFO", "setup.cfg"}:
            shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="module")
def unpacked(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution's files. ``tree`` is left as it was, but for what building wrote into src."""
    sdist = _build(tree, "build_sdist", tmp_path_factory.mktemp("sdist"))
    into = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    (root,) = into.iterdir()
    assert root.name == f"hybridkv-{PROJECT['version']}"
    return root


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(_build(unpacked, "build_wheel", tmp_path_factory.mktemp("wheel")))


def _files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and ".egg-info" not in str(path)}


def _metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_source_distribution_has_every_file(tree: Path, unpacked: Path) -> None:
    found = {one for one in _files(unpacked) if not one.startswith("build/")}
    assert found - _files(tree) == {"PKG-INFO", "setup.cfg"}
    assert _files(tree) <= found
    assert {"Makefile", "tests/unit/project/test_distribution.py", "docs/architecture.md", "LICENSE"} <= found


def test_wheel_has_the_package_only(wheel: zipfile.ZipFile) -> None:
    package = {one for one in _files(ROOT / "src") if "__pycache__" not in one}
    found = {one for one in wheel.namelist() if ".dist-info/" not in one}
    assert found == package
    assert any(one.endswith(".json") for one in found)
    for licence in ("LICENSE", "src/hybridkv/serve/page/uplot.LICENSE"):
        assert any(one.endswith(f"licenses/{licence}") for one in wheel.namelist())
    (points,) = (one for one in wheel.namelist() if one.endswith("entry_points.txt"))
    assert wheel.read(points).decode() == "[console_scripts]\nhybridkv = hybridkv.cli:main\n"


def test_package_metadata_lists_requirements_and_extras(wheel: zipfile.ZipFile) -> None:
    said = _metadata(wheel)
    assert (said["Name"], said["Author"], said["License-Expression"]) == (
        "hybridkv",
        "The hybridkv developers",
        "Apache-2.0 AND MIT",
    )
    assert said["Requires-Python"] == ">=3.11"
    assert said["Summary"].startswith("Plans, shares, schedules")
    assert len(said["Keywords"].split(",")) >= 5
    kinds = {one.partition(" :: ")[0] for one in said.get_all("Classifier", [])}
    assert {"Development Status", "Intended Audience", "Programming Language", "Topic", "Typing"} <= kinds
    urls = [one.partition(", ")[2] for one in said.get_all("Project-URL", [])]
    assert urls
    assert all(one.startswith("https://") for one in urls)
    # alone it needs numpy, cbor2 and msgspec; whatever is tested and documented comes with an extra
    alone = [one for one in said.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert alone == ["numpy>=1.26", "cbor2>=5.6", "msgspec>=0.19"]
    assert {"cli", "runner", "all"} <= set(said.get_all("Provides-Extra", []))


def test_long_description_has_absolute_links_only(wheel: zipfile.ZipFile) -> None:
    said = _metadata(wheel)
    text = said.get_payload()
    assert isinstance(text, str)
    assert said["Description-Content-Type"].startswith("text/markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert [one for one in links if not one.startswith("https://")] == []
    # and says in text where the README's links lead
    assert "Architecture (`docs/architecture.md`)" in text
    readme = (ROOT / "README.md").read_text("utf-8")
    assert text.count("\n") >= readme.count("\n")


def test_extra_all_excludes_development_and_large_packages() -> None:
    """VLLM asks for a torch of its own, native needs a compiler, and Ray and Mooncake are large."""
    extras = PROJECT["optional-dependencies"]
    (every,) = extras["all"]
    named = set(every.removeprefix("hybridkv[").removesuffix("]").split(","))
    assert named == extras.keys() - {"all", "docs", "dev", "mooncake", "native", "ray", "vllm"}
    readme = (ROOT / "README.md").read_text("utf-8")
    shown = set(re.findall(r"`pip install '?\.(?:\[([a-z,]+)\])?'?`", readme))
    assert {"", "cli", "cli,runner", "all"} <= shown
    assert {one for group in shown for one in group.split(",") if one} <= extras.keys()
