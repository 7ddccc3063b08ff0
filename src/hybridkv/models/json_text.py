"""Read the JSON documents of configs and plans in bounded time and memory, with an error for any bad content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, overload

from hybridkv.errors import ConfigError
from hybridkv.regular_files import open_regular

MOST_BYTES: Final = 1 << 24
"""Bytes of a document: ten times the plan of the deepest model. Parsed, it takes up to 20 times as much memory."""


class DocumentError(Exception):
    """A document is not valid. The caller adds where it comes from."""


@overload
def read_json_file(path: Path, kind: Literal["object"]) -> dict[str, Any]: ...


@overload
def read_json_file(path: Path, kind: Literal["array"]) -> list[Any]: ...


def read_json_file(path: Path, kind: Literal["object", "array"]) -> Any:
    """Return the value in a JSON file.

    Args:
        path: The file.
        kind: What the value must be.

    Raises:
        ConfigError: The file cannot be read, or its value is of another kind.
    """
    try:
        with open_regular(path) as file:
            found = read_json(file)
    except (OSError, DocumentError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict if kind == "object" else list):
        raise ConfigError(f"{path} holds no JSON {kind}: save the model there again, or give another path")
    return found


def read_json(file: BinaryIO) -> object:
    """Return the value in ``file``, of which at most MOST_BYTES are read. Raises DocumentError, and OSError."""
    data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise DocumentError(f"longer than {MOST_BYTES} bytes")
    return parse_json(data)


def parse_json(text: str | bytes) -> object:
    """Return the value of ``text``. Raises DocumentError."""
    try:
        found: object = json.loads(text)
    except UnicodeDecodeError as error:
        raise DocumentError(f"not UTF-8 text: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise DocumentError(f"not JSON: {error}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets nested as deep
        raise DocumentError(f"not JSON that can be read: {error}") from None
    return found
