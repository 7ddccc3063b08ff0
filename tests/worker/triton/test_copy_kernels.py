"""The Triton kernels do what the torch ones do: the same loops, on a GPU or in the interpreter."""

import sys

import pytest
import torch
from copy_support import Row, StateCase, StepCase, check_states, check_step, state_cases, step_cases
from hypothesis import given, settings

from hybridkv.errors import ConfigError
from hybridkv.worker import StatePart, triton_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@given(case=state_cases(most_rows=3, most_parts=3, most_layers=2))
def test_triton_state_copies_match_a_loop(case: StateCase) -> None:
    check_states(case, triton_kernels(), device=DEVICE)


@settings(max_examples=settings().max_examples // 2)
@given(case=step_cases(most=4))
def test_triton_block_copies_match_a_loop(case: StepCase) -> None:
    check_step(case, triton_kernels(), device=DEVICE)


@pytest.mark.parametrize("axis", [0, 1])
def test_triton_states_of_several_tiles_shift_in_their_own_block(axis: int) -> None:
    """5 columns are 8 in a tile, so that 300 channels take two; 600 fp32 words of a temporal state one, 1500 two."""
    row = Row(held=1, computed=5, scheduled=3, drafts=2, before=1, after=3)
    conv = StatePart((300, 5) if axis else (5, 300), torch.bfloat16, "conv", axis)
    for words in (600, 1500):
        temporal = StatePart((words,), torch.float32, "temporal")
        case = StateCase((conv, temporal), (0, 0), 2, 4, 2, (row,), 5)
        assert check_states(case, triton_kernels(), device=DEVICE) == 1


def test_copy_kernels_without_triton_raise_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hybridkv.worker.kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"pip install 'hybridkv\[gpu\]'"):
        triton_kernels()
