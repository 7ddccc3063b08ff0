"""What is faster: to compute a prefix, or to bring it up. Rates are measured, given, or not known yet."""

from random import Random

import pytest

from hybridkv.tiers import TierLimits
from hybridkv.tiers.carriers import Way
from hybridkv.tiers.price import Pace, Prices

MB = 10**6


def measured(pace: Pace, seconds_of: dict[int, float], times: int = 8, now: float = 0.0) -> Pace:
    for _ in range(times):
        for amount, seconds in seconds_of.items():
            pace.add(amount, seconds, now)
    return pace


def prices(bytes_per_s: float, tokens_per_s: float, limits: TierLimits | None = None) -> Prices:
    """Eight fetches and steps of two sizes each."""
    made = Prices(TierLimits() if limits is None else limits)
    measured(made.of[Way.FETCH], {size: size / bytes_per_s for size in (MB, 3 * MB)})
    for _ in range(8):
        for tokens in (100, 500):
            made.computed(tokens, tokens / tokens_per_s, 0.0)
    return made


def test_line_through_measurements_gives_latency_and_rate() -> None:
    """Source of the numbers: 0.2 s and 50 MB/s, with noise of 5 percent."""
    random, pace = Random(1), Pace()
    for _ in range(100):
        size = random.randint(1, 100) * MB
        pace.add(size, (0.2 + size / (50 * MB)) * random.uniform(0.95, 1.05), 0.0)
    for size in (MB, 10 * MB, 1000 * MB):
        assert pace.seconds(size) == pytest.approx(0.2 + size / (50 * MB), rel=0.15)
    assert pace.rate == pytest.approx(50 * MB * 1.01 / 1.21, rel=0.15)  # the mean transfer: 1.01 s after 0.2


def test_few_measurements_are_no_rate() -> None:
    pace = measured(Pace(), {MB: 1.0}, times=3)
    assert (pace.seconds(MB), pace.rate) == (None, None)
    pace.add(MB, 1.0, 0.0)
    assert (pace.seconds(MB), pace.rate) == (1.0, MB)
    pace.add(0, 5.0, 0.0)  # nothing was moved
    assert pace.seconds(MB) == 1.0


def test_guess_is_low_where_nothing_was_measured() -> None:
    alike = measured(Pace(), {100: 1.0, 101: 1.0})
    assert alike.seconds(10_000) == pytest.approx(1.0)
    assert alike.seconds(10) == pytest.approx(0.1, rel=0.01)
    falling = measured(Pace(), {100: 2.0, 1000: 1.0})
    assert falling.seconds(5000) == pytest.approx(1.5, rel=0.1)
    through_0 = measured(Pace(), {100: 0.1, 1000: 2.0})  # a line would begin below 0
    assert (through_0.seconds(1) or 0.0) > 0


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.01), (0.01, 1.0)])
def test_changed_rate_is_known_after_some_measurements(before: float, after: float) -> None:
    pace = measured(Pace(), {MB: before}, times=100)
    measured(pace, {MB: after}, times=8)
    assert abs((pace.seconds(MB) or 0.0) - after) < 0.2 * max(before, after)


def test_slow_pace_is_tried_again_after_30_seconds_and_at_once_after_a_fast_one() -> None:
    pace = measured(Pace(), {MB: 1.0}, now=100.0)
    assert not pace.retries(129.0)
    assert pace.retries(130.0)
    assert not pace.retries(131.0)  # that one is on its way
    pace.add(MB, 1.0, 132.0)
    assert not pace.retries(161.0)
    assert pace.retries(162.0)
    pace.add(MB, 0.1, 163.0)
    assert pace.retries(163.0)
    assert not Pace(given=5.0).retries(1e9)


@pytest.mark.parametrize(
    ("bytes_per_s", "tokens_per_s", "is_faster"), [(MB, 1e4, False), (100 * MB, 1e4, True), (MB, 50.0, True)]
)
def test_faster_of_both_is_chosen(bytes_per_s: float, tokens_per_s: float, *, is_faster: bool) -> None:
    """300 tokens of 3 MB take 0.03 s at 10,000 tokens a second."""
    assert prices(bytes_per_s, tokens_per_s).is_faster(300, 3 * MB, Way.FETCH) is is_faster


def test_loads_after_a_fetch_count() -> None:
    made = prices(150 * MB, 1e4)  # 3 MB take 0.02 s, of 0.03
    assert made.is_faster(300, 3 * MB, Way.FETCH, Way.LOAD)  # loads are not known yet
    measured(made.of[Way.LOAD], {MB: 0.01, 3 * MB: 0.02})
    assert made.is_faster(300, 3 * MB, Way.LOAD)
    assert not made.is_faster(300, 3 * MB, Way.FETCH, Way.LOAD)


def test_short_transfers_are_always_worth_it_if_measured() -> None:
    """Computing 10 tokens takes 1 ms; the transfer 9 ms, which no request sees beside a step."""
    assert prices(MB, 1e4).is_faster(10, 9_000, Way.FETCH)
    assert not prices(MB, 1e4).is_faster(10, 11_000, Way.FETCH)
    given = TierLimits(fetch_bytes_per_s=MB, tokens_per_s=1e4)
    assert not Prices(given).is_faster(10, 9_000, Way.FETCH)


def test_unknown_sides_are_tried() -> None:
    nothing = Prices(TierLimits())
    assert nothing.is_faster(1, 10**12, Way.FETCH, Way.LOAD)
    measured(nothing.of[Way.FETCH], {MB: 1.0})
    assert not nothing.is_faster(10**6, MB, Way.FETCH)  # so that computing is measured
    nothing.computed(10, 0.0, 0.0)  # a clock that stands still
    assert not nothing.is_faster(10**6, MB, Way.FETCH)


def test_price_of_a_byte_is_the_tokens_computed_in_its_time() -> None:
    assert prices(MB, 1e4).tokens_per_byte(Way.FETCH) == pytest.approx(1e4 / MB)
    assert prices(MB, 1e4).tokens_per_byte(Way.LOAD) is None  # not measured
    given = Prices(TierLimits(load_bytes_per_s=200.0))
    assert given.tokens_per_byte(Way.LOAD) is None  # computing is not measured
    assert Prices(TierLimits(load_bytes_per_s=200.0, tokens_per_s=10.0)).tokens_per_byte(Way.LOAD) == 0.05


def test_given_rates_are_not_measured() -> None:
    limits = TierLimits(fetch_bytes_per_s=100.0, load_bytes_per_s=100.0, tokens_per_s=10.0)
    made = prices(1e9, 1e9, limits)
    assert made.is_faster(40, 200, Way.FETCH, Way.LOAD)
    assert not made.is_faster(39, 200, Way.FETCH, Way.LOAD)
    assert made.is_faster(20, 200, Way.LOAD)
    assert not made.is_faster(19, 200, Way.LOAD)


def test_look_ups_that_take_longer_than_computing_are_left_alone_and_tried_again() -> None:
    made = prices(MB, 1e4)  # 1,000 tokens take 0.1 s
    for _ in range(3):
        made.looked_up(0.3, 10.0, late=False)
    assert made.may_look_up(1000, 10.0)  # three measurements are no rate
    made.looked_up(0.3, 10.0, late=False)
    assert [made.may_look_up(tokens, 39.0) for tokens in (2_900, 3_100)] == [False, True]
    assert [made.may_look_up(1000, 40.0) for _ in range(2)] == [True, False]
    made.looked_up(0.01, 41.0, late=False)  # the store is quick again
    assert made.may_look_up(1000, 41.0)


def test_short_look_ups_are_always_worth_it() -> None:
    for seconds, worth_it in ((0.049, True), (0.051, False)):
        made = prices(MB, 1e4)
        for _ in range(4):
            made.looked_up(seconds, 10.0, late=False)
        assert made.may_look_up(10, 10.0) is worth_it


def test_late_look_ups_took_at_least_what_others_took() -> None:
    """One that was given up after a second is no sign that the store is quick again."""
    made = prices(MB, 1e4)
    for _ in range(4):
        made.looked_up(3.0, 10.0, late=False)
    made.looked_up(1.0, 11.0, late=True)
    assert not made.may_look_up(1000, 11.0)
    assert not made.may_look_up(20_000, 11.0)  # 2 s


def test_one_late_look_up_decides() -> None:
    """Each more of them would hold up a request."""
    made = prices(MB, 1e4)
    made.looked_up(1.0, 10.0, late=True)
    assert not made.may_look_up(1000, 10.0)
    assert made.may_look_up(20_000, 10.0)  # 2 s
    assert [made.may_look_up(1000, 40.0) for _ in range(2)] == [True, False]
    for _ in range(5):
        made.looked_up(0.01, 41.0, late=False)  # the store answers again
        assert made.may_look_up(1000, 41.0)
    made.looked_up(0.01, 41.0, late=False)
    assert [made.may_look_up(1000, 41.0) for _ in range(2)] == [True, True]
