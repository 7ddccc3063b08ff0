"""Shares of memory that tenants have of what is kept, and which tenant gives way (docs/design/0026).

    within its guaranteed share     gives way last
    above it                        before those
    above its greatest share        first of all; of each of the three, the tenant that has the most too much

A tenant may use memory that no other wants: shares only say whose resume points go when room is short.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from hybridkv.arguments import check_fields, each, one_of, or_none, real, text
from hybridkv.errors import ConfigError
from hybridkv.units import shown

Standing = tuple[bool, float, int]
"""Whether a tenant is within its greatest share, its bytes that are left of the share, and its number."""

_OTHERS: Final = "*"
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Share:
    """tenant: the label of its requests, or their salt where they have none; None for all that are not named.

    guaranteed, greatest: of memory, 0 .. 1. ConfigError for others, and for a greatest below the guaranteed.
    """

    tenant: str | None
    guaranteed: float = 0.0
    greatest: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, or_none(text), "tenant")
        check_fields(self, real, "guaranteed", "greatest")
        if not 0 <= self.guaranteed <= self.greatest <= 1:
            raise ConfigError(
                f"the share of {self.name} must be guaranteed and greatest with 0 <= guaranteed <= greatest <= 1, "
                f"got {self.guaranteed:g} and {self.greatest:g}"
            )

    @property
    def name(self) -> str:
        """For messages, and as ``parse`` reads it."""
        return _OTHERS if self.tenant is None else self.tenant


@dataclass(frozen=True, slots=True)
class TenantShares:
    """of: in any order; made to begin with that of all who are not named, who are one tenant, number 0.

    ConfigError for a tenant named twice, and for guaranteed shares of more than all memory.
    """

    of: tuple[Share, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, each(one_of(Share)), "of")
        times = Counter(one.tenant for one in self.of)
        twice = next((one for one in self.of if times[one.tenant] > 1), None)
        if twice is not None:
            raise ConfigError(f"{shown(twice.name)} has more than one share: name it once")
        total = math.fsum(one.guaranteed for one in self.of)
        if total > 1 + _ROUNDING:
            raise ConfigError(f"guaranteed shares are {total:.0%} of memory together: lower them to 100% or less")
        others = [one for one in self.of if one.tenant is None] or [Share(None)]
        object.__setattr__(self, "of", (*others, *(one for one in self.of if one.tenant is not None)))

    def numbers(self) -> dict[str, int]:
        """Of the tenants that are named."""
        return {one.tenant: number for number, one in enumerate(self.of) if one.tenant is not None}

    def standing(self, tenant: int, weight: int, memory_bytes: int) -> Standing:
        """Return where a tenant stands among all: of two, the one that stands lower gives way first.

        tenant: its number. weight: bytes that are kept of it. memory_bytes: of which the shares are.
        """
        share = self.of[tenant]
        above = weight > share.greatest * memory_bytes
        bound = share.greatest if above else share.guaranteed
        return not above, bound * memory_bytes - weight, tenant

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Of ``NAME=GUARANTEED`` or ``NAME=GUARANTEED..GREATEST`` each, * for all not named: ``team-a=30%..60%``.

        ConfigError for anything else.
        """
        return cls(tuple(map(_parsed, texts)))


EVERYBODY: Final = TenantShares()
"""All requests are of one tenant."""


def _parsed(asked: str) -> Share:
    name, _, bounds = asked.rpartition("=")
    low, dots, high = bounds.partition("..")
    try:
        guaranteed, greatest = _fraction(low), _fraction(high) if dots else 1.0
    except ValueError:
        name = ""
    if not name:
        raise ConfigError(f"not a share: {shown(asked)}; write it like team-a=30% or team-a=30%..60%")
    return Share(None if name == _OTHERS else name, guaranteed, greatest)


def _fraction(number: str) -> float:
    """``30%`` or ``0.3``."""
    return float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)


class Weights:
    """Bytes that each tenant is charged, not followed for a single one.

    For reading: of, by number; changed, the tenants whose bytes were changed, until the one reader clears it.
    """

    __slots__ = ("changed", "of")

    def __init__(self, tenants: int) -> None:
        self.of = [0] * tenants
        self.changed = set[int]()

    def add(self, tenant: int, size: int) -> None:
        """Charge ``tenant`` for ``size`` bytes more, or less where it is negative."""
        self.of[tenant] += size
        self.changed.add(tenant)

    def replace(self, sizes: Sequence[int]) -> None:
        """Charge each tenant for so many bytes. O(tenants)."""
        self.of[:] = sizes
        self.changed.update(range(len(sizes)))
