"""Panels of `--help`: options of every command stand under the same headings."""

from typing import Final

MODEL: Final = "The model"
CACHE: Final = "Its cache"
REQUESTS: Final = "What is asked"
RUN: Final = "How it runs"
OUTPUT: Final = "What is shown"
