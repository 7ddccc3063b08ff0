"""A running request that only grows is served without a plan: what a plan would have done, to the last fact."""

from typing import Any

import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.testing.configs import full_spec, model_config

BLOCK = 4
MAX_LEN = 200


def test_what_only_grows_takes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding asks the planner for nothing; a hit, and what does not fit, still do."""
    manager = KVCacheManager(model_config(6, [full_spec(BLOCK)]), MAX_LEN)
    planned: list[Request] = []
    plan = manager._planner.plan

    def noted(request: Request, *rest: Any) -> object:  # noqa: ANN401 - whatever a plan is asked for
        planned.append(request)
        return plan(request, *rest)

    monkeypatch.setattr(manager._planner, "plan", noted)
    one = Request("a", [1, 2, 3], hasher=manager.hasher)
    manager.allocate_slots(one, 3)
    one.num_computed_tokens = 3
    assert planned == [one]
    for _ in range(17):
        one.append(5)
        assert manager.allocate_slots(one, 1) is not None
        one.num_computed_tokens += 1
    assert planned == [one]
    assert manager.get_block_ids("a") == ([1, 2, 3, 4, 5],)
    assert manager.allocate_slots(one, 1) is None
    assert planned == [one, one]


@pytest.mark.parametrize(
    "wrong", [{"num_new_computed_tokens": 0.0}, {"num_encoder_tokens": False}, {"num_lookahead_tokens": -1}]
)
def test_what_is_no_count_is_refused_for_who_runs(wrong: dict[str, float]) -> None:
    manager = KVCacheManager(model_config(6, [full_spec(BLOCK)]), MAX_LEN)
    one = Request("a", [1, 2, 3, 4, 5, 6, 7, 8], hasher=manager.hasher)
    manager.allocate_slots(one, 3)
    one.num_computed_tokens = 3
    for new in (1, 2):
        with pytest.raises(ConfigError):
            manager.allocate_slots(one, new, **wrong)  # type: ignore[arg-type]
