"""Divide the memory of resume points between tenants, and choose the tenant that evicts next (docs/design/0026).

    above its greatest share        evicts first
    above its guaranteed share      evicts next
    within its guaranteed share     evicts last

Among tenants of one line, the tenant with the largest excess evicts first. A tenant may use memory that no other tenant
wants: shares matter only when room is short.
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
"""The order of a tenant among all: the smallest one evicts first.

It holds whether the tenant is within its greatest share, the bytes left until the next share, and the tenant's number.
"""

_OTHERS: Final = "*"
_ROUNDING: Final = 1e-9
"""The allowed rounding error of a sum of shares; chosen by hand."""


@dataclass(frozen=True, slots=True)
class Share:
    """Give one tenant a share of the memory.

    Attributes:
        tenant: The tenant label of its requests, or their salt if they have no label; None for all unnamed tenants.
        guaranteed: Fraction of the memory, 0 to 1, up to which the tenant evicts last.
        greatest: Fraction of the memory, ``guaranteed`` to 1, above which the tenant evicts first.

    Raises:
        ConfigError: A fraction is outside its limits.
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
        """The tenant as ``parse`` reads it: ``*`` for all unnamed tenants."""
        return _OTHERS if self.tenant is None else self.tenant


@dataclass(frozen=True, slots=True)
class TenantShares:
    """Hold the shares of all tenants.

    Attributes:
        of: The shares in any order. The constructor moves the share of unnamed tenants to the front, or adds it:
            they count as one tenant, number 0.

    Raises:
        ConfigError: A tenant has two shares, or the guaranteed shares exceed the memory.
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
            raise ConfigError(f"guaranteed shares add up to {total:.0%} of memory: lower them to 100% or less")
        others = [one for one in self.of if one.tenant is None] or [Share(None)]
        object.__setattr__(self, "of", (*others, *(one for one in self.of if one.tenant is not None)))

    def numbers(self) -> dict[str, int]:
        """Return the number of each named tenant. O(tenants)."""
        return {one.tenant: number for number, one in enumerate(self.of) if one.tenant is not None}

    def standing(self, tenant: int, weight: int, memory_bytes: int) -> Standing:
        """Return the order of a tenant among all: the tenant with the smallest value evicts first.

        Args:
            tenant: The number of the tenant.
            weight: Bytes that the tenant is charged.
            memory_bytes: Bytes of the memory that the shares divide.
        """
        share = self.of[tenant]
        above = weight > share.greatest * memory_bytes
        bound = share.greatest if above else share.guaranteed
        return not above, bound * memory_bytes - weight, tenant

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Read shares from the command line.

        Args:
            texts: ``NAME=GUARANTEED`` or ``NAME=GUARANTEED..GREATEST`` each, for example ``team-a=30%..60%``. The name
                ``*`` means all unnamed tenants.

        Raises:
            ConfigError: A text has another form, or the shares contradict each other.
        """
        return cls(tuple(map(_parsed, texts)))


EVERYBODY: Final = TenantShares()
"""No tenant has a share: all requests count as one tenant."""


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
    """Return the fraction of ``30%`` or ``0.3``."""
    return float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)


class Weights:
    """Count the bytes that each tenant is charged. With a single tenant the counts stay 0.

    Args:
        tenants: Number of tenants.

    Attributes:
        of: Bytes of each tenant, by its number.
        changed: Tenants with changed bytes. Its only reader clears it.
    """

    __slots__ = ("changed", "of")

    def __init__(self, tenants: int) -> None:
        self.of = [0] * tenants
        self.changed = set[int]()

    def add(self, tenant: int, size: int) -> None:
        """Charge ``tenant`` for ``size`` more bytes; a negative size reduces the charge."""
        self.of[tenant] += size
        self.changed.add(tenant)

    def replace(self, sizes: Sequence[int]) -> None:
        """Set the charge of each tenant to its entry of ``sizes``, in bytes. O(tenants)."""
        self.of[:] = sizes
        self.changed.update(range(len(sizes)))
