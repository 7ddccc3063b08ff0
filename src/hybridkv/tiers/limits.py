"""Bounds of a host tier and of the store behind it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from hybridkv.arguments import check_types, integer, or_none, real
from hybridkv.errors import ConfigError
from hybridkv.units import MOST_COUNT


def _rate(name: str, value: object) -> object:
    if real(name, value) <= 0:
        raise ConfigError(f"{name} must be above 0, got {value}: leave it out if it is unknown")
    return value


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Bounds of a host tier.

    Attributes:
        max_loads: Loads at once. Each holds a row of the device's manager, beside those of running requests.
        least_tokens: Fewest tokens that are worth a load.
        max_fetches: Fetches from the store at once.
        max_spills: Spills to the store at once. A resume point that finds no room among them is not spilled. So a slow
            store gets fewer.
        max_ahead: Waiting requests for which a step without room for them begins transfers.
        patience_s: Seconds after which a request no longer waits for a transfer.
        load_bytes_per_s: Bytes per second from the host to the device; ``None``: the tier measures it.
        fetch_bytes_per_s: Bytes per second from the store to the host; ``None``: the tier measures it.
        tokens_per_s: Tokens per second that the device computes of a prompt; ``None``: the tier measures it. A prefix
            is loaded only where that is faster than computing it (``Prices``).

    Raises:
        ConfigError: A value is out of range or has another type. The error names the field.
    """

    max_loads: Annotated[int, partial(integer, least=1, most=1 << 10)] = 8
    least_tokens: Annotated[int, partial(integer, least=1, most=MOST_COUNT)] = 16
    max_fetches: Annotated[int, partial(integer, least=1, most=1 << 10)] = 4
    max_spills: Annotated[int, partial(integer, least=1, most=1 << 10)] = 16
    max_ahead: Annotated[int, partial(integer, least=0, most=1 << 10)] = 4
    patience_s: Annotated[float, _rate] = 10.0
    load_bytes_per_s: Annotated[float | None, or_none(_rate)] = None
    fetch_bytes_per_s: Annotated[float | None, or_none(_rate)] = None
    tokens_per_s: Annotated[float | None, or_none(_rate)] = None

    def __post_init__(self) -> None:
        check_types(self)
