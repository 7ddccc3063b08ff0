"""Plans of any model, whatever had to be assumed of it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from hybridkv.errors import AssumptionWarning
from hybridkv.models import Model
from hybridkv.planner import Plan, plan


def plan_of(model: Model, memory: int | str, **given: Any) -> Plan:  # noqa: ANN401 - arguments of plan
    """``plan``, which must warn if and only if something was assumed."""
    told: AbstractContextManager[object] = pytest.warns(AssumptionWarning) if model.assumptions else nullcontext()
    with told:
        return plan(model, memory, **given)
