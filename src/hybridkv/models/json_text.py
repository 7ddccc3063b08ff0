"""JSON documents of configs and plans, read in bounded time and memory: whatever a file holds, an error says so."""

from __future__ import annotations

import json
from typing import BinaryIO, Final

MOST_BYTES: Final = 1 << 24
"""Of a document: ten times the plan of the deepest model. Parsed, it takes up to 20 times as much memory."""


class DocumentError(Exception):
    """What is wrong with a document; whoever knows where it comes from says so in an error of its own."""


def read_json(file: BinaryIO) -> object:
    """The value in ``file``, of which no more than MOST_BYTES are read. Raises DocumentError, and OSError."""
    data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise DocumentError(f"longer than {MOST_BYTES} bytes")
    return parse_json(data)


def parse_json(text: str | bytes) -> object:
    """The value of ``text``. Raises DocumentError."""
    try:
        found: object = json.loads(text)
    except UnicodeDecodeError as error:
        raise DocumentError(f"not UTF-8 text: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise DocumentError(f"not JSON: {error}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets nested as deep
        raise DocumentError(f"not JSON that can be read: {error}") from None
    return found
