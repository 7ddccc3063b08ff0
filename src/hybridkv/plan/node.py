"""Typed access to a parsed JSON document: whatever is missing or of the wrong type raises a SchemaError."""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.errors import SchemaError


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

    def integer(self, key: str, *, minimum: int = 0) -> int:
        """An integer of at least ``minimum``."""
        found = self.get(key)
        if isinstance(found, bool) or not isinstance(found, int) or found < minimum:
            raise SchemaError(f"{self.where}.{key} must be an integer of at least {minimum}, got {found!r}")
        return found

    def optional(self, key: str) -> int | None:
        """An integer or null."""
        return None if self.get(key) is None else self.integer(key)

    def text(self, key: str) -> str:
        """A string."""
        found = self.get(key)
        if not isinstance(found, str):
            raise SchemaError(f"{self.where}.{key} must be a string, got {found!r}")
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        found = self.get(key)
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise SchemaError(f"{self.where}.{key} must be a list of strings")
        return tuple(found)
