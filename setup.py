"""The long description for package indexes: the README, whose links into the repository lead nowhere from there.

Each becomes its text and its path in the source distribution. Everything else about the package is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

SOURCES = "https://pypi.org/project/hybridkv/#files"


def described(readme: str) -> str:
    """``readme`` with no link but absolute ones."""
    text = re.sub(r"!?\[([^\]]+)\]\((?!\w+:)([^)\s]+)\)", r"\1 (`\2`)", readme)
    return f"{text}\nPaths here are those of the [source distribution]({SOURCES}).\n"


setup(
    long_description=described((Path(__file__).parent / "README.md").read_text("utf-8")),
    long_description_content_type="text/markdown",
)
