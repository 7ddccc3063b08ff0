"""Faults of tiers are seen: each by one of at most 100 random runs that have no fault otherwise.

rule                                                      shown by
a state goes down only from a boundary                    fault state_by_place; test_prefixes, test_host_tier_steps
loads run after the step's clearing of blocks             fault loads_first; worker/test_host_tier, "in this order"
a state after E tokens never applies token E - 1 again    fault applied_twice
a look-up answers miss, hit, pending or retry             tests/unit/tiers/test_prefixes, test_store_contract
a hit is what all pools have whole                        faults partial_fetch, half_a_block, look_up_of_one_pool
failed, partial and late transfers are computed again     test_tier_content; faults lost_silently, lost_is_kept
nothing rests while something fits                        StallError in all runs; faults of vllm#45388 to #57841,
                                                          whose scenarios are in test_host_tier_steps
a slow store gets fewer resume points, and counts them    test_tier_content: spills_dropped, stores_refused
a late look-up or fetch is a miss                         test_tier_content: late
"""

import pytest
from tier_faults import FAULTS, HARMLESS, Fault
from tier_runs import StallError

from hybridkv.errors import CacheError
from hybridkv.testing import ContentError, DifferenceError

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

RUNS = 100


def name_of(fault: Fault) -> str:
    return f"{fault.bug}: {fault.name}"


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_fault_is_shown_by_a_run(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.patch(monkeypatch)
    for seed in [*fault.seeds, *(seed for seed in range(RUNS) if seed not in fault.seeds)][:RUNS]:
        try:
            fault.run(seed)
        except (ContentError, DifferenceError, CacheError, StallError):
            return
    pytest.fail(f"{RUNS} runs saw nothing")


@pytest.mark.parametrize("fault", HARMLESS, ids=name_of)
def test_fault_costs_hits_alone(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.patch(monkeypatch)
    for seed in range(4):
        fault.run(seed, steps=60)
