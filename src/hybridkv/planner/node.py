"""Typed access to a parsed JSON document: whatever is missing or of the wrong type raises a SchemaError."""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.errors import SchemaError
from hybridkv.units import MOST_BYTES, shown


@dataclass(frozen=True, slots=True)
class Node:
    """A JSON value and where it stands in the document, for messages."""

    value: object
    where: str

    def get(self, key: str) -> object:
        """The member ``key``."""
        if not isinstance(self.value, dict):
            raise SchemaError(f"{self.where} must be an object")
        if key not in self.value:
            raise SchemaError(f"{self.where}.{key} is missing")
        return self.value[key]

    def child(self, key: str) -> Node:
        """The object in ``key``."""
        found = self.get(key)
        if not isinstance(found, dict):
            raise SchemaError(f"{self.where}.{key} must be an object")
        return Node(found, f"{self.where}.{key}")

    def children(self, key: str) -> list[Node]:
        """The list in ``key``."""
        found = self.get(key)
        if not isinstance(found, list):
            raise SchemaError(f"{self.where}.{key} must be a list")
        return [Node(one, f"{self.where}.{key}[{i}]") for i, one in enumerate(found)]

    def has(self, key: str) -> bool:
        """Whether there is a member ``key``."""
        return isinstance(self.value, dict) and key in self.value

    def integer(self, key: str, *, minimum: int = 0, default: int | None = None) -> int:
        """An integer of at least ``minimum``; ``default``, where there is one, for a member that is missing."""
        if default is not None and not self.has(key):
            return default
        found = self.get(key)
        if isinstance(found, bool) or not isinstance(found, int) or found < minimum:
            raise SchemaError(f"{self.where}.{key} must be an integer of at least {minimum}, got {shown(found)}")
        if found > MOST_BYTES:
            raise SchemaError(f"{self.where}.{key} must be at most {MOST_BYTES}, got {shown(found)}")
        return found

    def optional(self, key: str) -> int | None:
        """An integer or null."""
        return None if self.get(key) is None else self.integer(key)

    def text(self, key: str) -> str:
        """A string."""
        found = self.get(key)
        if not isinstance(found, str):
            raise SchemaError(f"{self.where}.{key} must be a string, got {shown(found)}")
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        found = self.get(key)
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise SchemaError(f"{self.where}.{key} must be a list of strings")
        return tuple(found)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers that are not negative."""
        found = self.get(key)
        if not isinstance(found, list) or not all(type(one) is int and one >= 0 for one in found):
            raise SchemaError(f"{self.where}.{key} must be a list of integers of at least 0")
        if max(found, default=0) > MOST_BYTES:
            raise SchemaError(f"{self.where}.{key} must be a list of integers of at most {MOST_BYTES}")
        return tuple(found)

    def shapes(self, key: str) -> tuple[tuple[int, ...], ...]:
        """A list of lists of integers."""
        found = self.get(key)
        if not isinstance(found, list) or not all(isinstance(shape, list) for shape in found):
            raise SchemaError(f"{self.where}.{key} must be a list of lists of integers")
        if not all(type(size) is int and abs(size) <= MOST_BYTES for shape in found for size in shape):
            raise SchemaError(f"{self.where}.{key} must be a list of lists of integers, of at most {MOST_BYTES}")
        return tuple(tuple(shape) for shape in found)
