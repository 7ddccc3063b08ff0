"""What a wheel of vLLM's CPU build asks for, torch and what comes with it left out: python wheel_requirements.py WHEEL

The wheel names a build of torch that the package registry has not, and pictures, sound and films are not read here.
"""

import re
import sys
from collections.abc import Iterator
from email.parser import Parser
from zipfile import ZipFile

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}


def requirements(metadata: str) -> Iterator[str]:
    """Of a METADATA file, extras left out."""
    for line in Parser().parsestr(metadata, headersonly=True).get_all("Requires-Dist", []):
        name = re.match(r"[\w.-]+", line)
        if name and name[0].lower() not in LEFT_OUT and "extra ==" not in line:
            yield line


def metadata_of(wheel: str) -> str:
    with ZipFile(wheel) as packed:
        (name,) = (one for one in packed.namelist() if one.endswith(".dist-info/METADATA"))
        return packed.read(name).decode()


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in requirements(metadata_of(sys.argv[1]))))
