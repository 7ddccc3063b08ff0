"""The price of a prefix: seconds to compute it, to load it from the host, or to fetch it from the store before.

    transfer   latency + bytes / rate     fitted to transfers that arrived, as the worker timed them
    compute    latency + tokens / rate    fitted to steps that mostly compute prompts, from schedule to result
    look-up    a mean                     of look-ups in a store, as their threads timed them

A rate that ``TierLimits`` gives is not measured: a replay knows its machine. Guesses are low where measurements do not
reach: what is then tried is measured. A transfer that is too slow is tried now and then, because a store may recover.
"""

from __future__ import annotations

from typing import Final

from hybridkv.tiers.carriers import Way
from hybridkv.tiers.limits import TierLimits

_FADES: Final = 0.95
"""Weight of the past at a new measurement. Chosen by hand, as the next five."""
_FADES_AT_A_CHANGE: Final = 0.5
"""The same if the new one differs from what was expected by more than a factor of 2: a few bring the rate there."""
_LEAST: Final = 4
"""Fewest measurements that decide: the first ones open files and compile kernels."""
_AT_ONCE_S: Final = 0.01
"""Measured transfers of at most so long are always worth it: a request waits at least a step for any transfer."""
_ASKED_AT_ONCE_S: Final = 0.05
"""Look-ups of at most so long are always worth it: they often run while a request waits for its turn."""
_RETRY_S: Final = 30.0
"""Seconds after which a transfer or a look-up that seems too slow is tried."""


class Pace:
    """How long amounts take: given, or a line through measurements, of which older ones count less.

    Args:
        given: Amount per second; ``None`` if it is to be measured.
    """

    def __init__(self, given: float | None = None) -> None:
        self.given = given
        self._count = 0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, amounts, seconds, amounts squared, amounts * seconds
        self._slow_at: float | None = None

    def add(self, amount: float, seconds: float, now: float) -> None:
        """Count a measurement. O(1).

        Args:
            amount: What was done; nothing is not counted.
            seconds: How long it took.
            now: Seconds on the clock.
        """
        if amount <= 0:
            return
        expected = self.seconds(amount)
        is_as_expected = expected is None or expected / 2 <= seconds <= 2 * expected
        fades = _FADES if is_as_expected else _FADES_AT_A_CHANGE
        values = (1.0, amount, seconds, amount**2, amount * seconds)
        self._sums = tuple(fades * old + new for old, new in zip(self._sums, values, strict=True))  # type: ignore[assignment]  # five
        self._count += 1
        self._slow_at = None if expected is not None and seconds < expected / 2 else now

    @property
    def rate(self) -> float | None:
        """Amount per second, latency included; ``None`` while too little is known."""
        if self.given is not None:
            return self.given
        _, amounts, seconds, *_ = self._sums
        return amounts / seconds if self._count >= _LEAST and seconds > 0 else None

    def seconds(self, amount: float) -> float | None:
        """Return how long an amount takes; ``None`` while too little is known. Source: least squares.

        If all measured amounts are alike, a larger one takes no longer, and a smaller one its share.

        Args:
            amount: What is to be done.
        """
        if self.given is not None:
            return amount / self.given
        if self._count < _LEAST:
            return None
        weight, amounts, seconds, squares, products = self._sums
        spread = weight * squares - amounts**2
        if spread < 0.05 * weight * squares:
            return seconds / weight * min(amount * weight / amounts, 1.0)
        slope = max((weight * products - amounts * seconds) / spread, 0.0)
        latency = (seconds - slope * amounts) / weight
        return latency + slope * amount if latency > 0 else amount * products / squares

    def retries(self, now: float) -> bool:
        """Return whether an amount that takes too long is tried, and count that as begun.

        That is so 30 seconds after the last measurement, and at once after one that took less than half the time.

        Args:
            now: Seconds on the clock.
        """
        is_due = self.given is None and (self._slow_at is None or now - self._slow_at >= _RETRY_S)
        if is_due:
            self._slow_at = now
        return is_due


class Prices:
    """The prices of prefixes on one machine.

    Args:
        limits: Bounds of transfers, and rates that are known.

    Attributes:
        limits: As given.
        of: The pace of bytes on each way.
    """

    def __init__(self, limits: TierLimits) -> None:
        self.limits = limits
        given = {Way.LOAD: limits.load_bytes_per_s, Way.FETCH: limits.fetch_bytes_per_s}
        self.of = {way: Pace(given.get(way)) for way in Way}
        self._lookups = Pace()
        self._compute = Pace(limits.tokens_per_s)

    def computed(self, tokens: int, seconds: float, now: float) -> None:
        """Count a step that computed prompts.

        Args:
            tokens: Its tokens.
            seconds: How long it took; one without time is not counted.
            now: Seconds on the clock.
        """
        if seconds > 0:
            self._compute.add(tokens, seconds, now)

    def tokens_per_byte(self, way: Way) -> float | None:
        """Return the tokens that are computed in the time of one byte on a way; ``None`` while too little is known.

        Args:
            way: The way.
        """
        computed, moved = self._compute.rate, self.of[way].rate
        return None if computed is None or moved is None else computed / moved

    def is_faster(self, tokens: int, num_bytes: int, *ways: Way) -> bool:
        """Return whether a transfer takes no longer than computing its tokens, or is not known to.

        A transfer that is known to take long is slower than a compute that is not known, which is measured then.

        Args:
            tokens: Tokens of the transfer.
            num_bytes: Its bytes.
            ways: The ways that they go, one after the other.
        """
        paces = [self.of[way] for way in ways]
        seconds = sum(pace.seconds(num_bytes) or 0.0 for pace in paces)
        if seconds <= (self._compute.seconds(tokens) or 0.0):
            return True
        return seconds <= _AT_ONCE_S and any(pace.given is None for pace in paces)

    def looked_up(self, seconds: float, now: float, *, late: bool) -> None:
        """Count a look-up in a store. A late one decides alone: each further one would hold up a request.

        Args:
            seconds: How long it took.
            now: Seconds on the clock.
            late: It was given up after these seconds.
        """
        least = self._lookups.seconds(1.0) if late else None
        for _ in range(_LEAST if late else 1):
            self._lookups.add(1.0, max(seconds, least or 0.0), now)

    def may_look_up(self, tokens: int, now: float) -> bool:
        """Return whether a look-up takes no longer than computing what it may find, is not known to, or is tried again.

        Args:
            tokens: Tokens that it may find.
            now: Seconds on the clock.
        """
        seconds = self._lookups.seconds(1.0) or 0.0
        return seconds <= max(self._compute.seconds(tokens) or 0.0, _ASKED_AT_ONCE_S) or self._lookups.retries(now)
