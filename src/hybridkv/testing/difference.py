"""What was seen and what should have been."""

from __future__ import annotations


class DifferenceError(Exception):
    """The library did something else than it should have."""


def same(what: str, real: object, expected: object) -> None:
    """DifferenceError unless ``real`` is ``expected``."""
    if real != expected:
        raise DifferenceError(f"{what}: {real}, not {expected}")
