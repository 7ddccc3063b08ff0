"""The counts of a host tier, split into those of the host and those of the store behind it."""

from dataclasses import asdict

from hybridkv.tiers import HostTierStatistics

NAMES = HostTierStatistics.__dataclass_fields__


def test_counts_of_host_and_store_are_separate() -> None:
    """Powers of two, so that a sum names its parts."""
    one = {name: 1 << place for place, name in enumerate(NAMES)}
    one["hit_tokens"] += one["fetched_hit_tokens"]
    lost, in_flight = one["loads_lost"] + one["fetches_lost"], one["loading"] + one["fetching"] + one["spilling"]
    both = HostTierStatistics(**one | {"lost": lost, "in_flight": in_flight})
    host, store = both.of_host, both.of_store
    assert (host.lost, host.loads_lost, host.in_flight, host.loading) == (
        one["loads_lost"],
        one["loads_lost"],
        one["loading"],
        one["loading"],
    )
    assert host.hit_tokens == one["hit_tokens"] - one["fetched_hit_tokens"]
    assert asdict(store) == dict.fromkeys(NAMES, 0) | {
        "stores": one["spills"],
        "stored_bytes": one["spilled_bytes"],
        "stores_refused": one["spills_dropped"],
        "loads": one["fetches"],
        "loaded_tokens": one["fetched_tokens"],
        "loaded_bytes": one["fetched_bytes"],
        "hit_tokens": one["fetched_hit_tokens"],
        "loads_refused": one["fetches_refused"],
        "lost": one["fetches_lost"] + one["spills_lost"],
        "loads_lost": one["fetches_lost"],
        "in_flight": one["fetching"] + one["spilling"],
        "loading": one["fetching"],
        "late": one["late"],
    }
