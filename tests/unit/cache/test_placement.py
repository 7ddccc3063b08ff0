"""Placements: where they keep states, by hand and against a plain definition, and the names they go by."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import (
    DEFAULT_PLACEMENT,
    AlignPlacement,
    BoundaryPlacement,
    EndsPlacement,
    IntervalPlacement,
    NoStates,
    Placement,
    placement_named,
)
from hybridkv.cache.policies import NEVER
from hybridkv.errors import ConfigError
from hybridkv.eviction import HAZARD
from hybridkv.request import Request, SamplingParams
from hybridkv.specs import KVCacheSpec
from hybridkv.testing.configs import full_spec, natural_model_config, state_spec, window_spec

MOST = 2**31 - 1
ALL = (
    NoStates(),
    AlignPlacement(4),
    IntervalPlacement(7),
    EndsPlacement(),
    BoundaryPlacement(4, at_chunk_ends=True),
    BoundaryPlacement(4, at_chunk_ends=False),
)

placements = st.one_of(
    st.just(NoStates()),
    st.builds(AlignPlacement, st.integers(1, 40)),
    st.builds(IntervalPlacement, st.integers(1, 40)),
    st.just(EndsPlacement()),
    st.builds(BoundaryPlacement, st.integers(1, 40), at_chunk_ends=st.booleans()),
)


def request(prompt: int = 10, marks: Sequence[int] = (), branch: int = 0) -> Request:
    made = Request("r", range(prompt), marks=marks)
    made.branch_tokens = branch
    return made


requests = st.builds(
    request,
    prompt=st.integers(1, 60),
    marks=st.lists(st.integers(1, 120), unique=True, max_size=8),
    branch=st.integers(0, 60),
)


def kept(placement: Placement, of: Request, tokens: int, end: int) -> bool:
    """Whether a chunk up to ``end`` should keep the state after ``tokens`` tokens: each placement in a line."""
    prompt, marked = of.num_prompt_tokens, tokens in of.marks
    match placement:
        case NoStates():
            return False
        case AlignPlacement(size):
            # the last multiple before each: nothing of the grid lies between it and the edge
            return marked or (
                tokens % size == 0 and any(0 <= e - tokens < size for e in (end, prompt - 1, of.branch_tokens))
            )
        case IntervalPlacement(size):
            return marked or tokens % size == 0
        case BoundaryPlacement(size):
            own = [prompt - 1, of.branch_tokens, *of.marks]
            ends = [*own, end] if placement.at_chunk_ends else own
            inside = tokens <= prompt or placement.at_chunk_ends
            return inside and tokens % size == 0 and any(0 <= e - tokens < size for e in ends)
        case _:
            return marked or tokens == prompt - 1 or tokens == of.branch_tokens


# -- where


@given(placement=placements, of=requests, start=st.integers(0, 130), length=st.integers(0, 130))
def test_placement_checkpoints_match_their_definition(
    placement: Placement, of: Request, start: int, length: int
) -> None:
    counts = range(start + 1, start + length + 1)
    end = start + length
    assert placement.checkpoints(of, start, end) == tuple(t for t in counts if kept(placement, of, t, end))


@given(placement=placements, of=requests, after=st.integers(0, 130))
def test_placement_next_checkpoint_is_the_first_of_checkpoints(placement: Placement, of: Request, after: int) -> None:
    found = placement.next_checkpoint(of, after)
    assert found > after
    if found == NEVER:
        assert placement.checkpoints(of, after, 10_000) == ()
    else:
        # to the very end of the range, and not one before
        assert placement.checkpoints(of, after, found) == (found,)
        assert placement.checkpoints(of, after, found - 1) == ()


@given(placement=placements, of=requests, cuts=st.lists(st.integers(0, 130), max_size=6))
def test_placement_checkpoints_in_steps_of_any_size_come_once(
    placement: Placement, of: Request, cuts: list[int]
) -> None:
    edges = [0, *sorted(cuts), 130]
    parts = [placement.checkpoints(of, start, end) for start, end in pairwise(edges)]
    met, whole = tuple(t for part in parts for t in part), placement.checkpoints(of, 0, 130)
    if isinstance(placement, AlignPlacement | BoundaryPlacement):  # each step adds the last multiple in it
        assert set(whole) <= set(met) <= {t for t in range(131) if t % placement.tokens == 0 or t in of.marks}
        assert len(met) == len(set(met))
    else:
        assert met == whole


@pytest.mark.parametrize("placement", [IntervalPlacement(7), EndsPlacement(), NoStates()])
@pytest.mark.parametrize("multiple", [1, 8, 40])
@given(of=requests, cuts=st.lists(st.integers(0, 130), max_size=6))
def test_checkpoints_with_eviction_corner_add_one_to_each_prompt(
    placement: Placement, multiple: int, of: Request, cuts: list[int]
) -> None:
    options = CacheOptions(placement=placement, eviction=replace(HAZARD, prefix_multiple=multiple))
    cache = KVCacheManager(natural_model_config(9, (full_spec(4), state_spec(4)), (4, 1)), 200, options=options)
    edges = [0, *sorted(cuts), 130]
    met = [t for start, end in pairwise(edges) for t in cache.checkpoints.positions(of, start, end)]
    corners = {(of.num_prompt_tokens - 1) // multiple * multiple} - {0} if placement.keeps_states else set()
    assert met == [t for t in range(1, of.num_tokens + 1) if kept(placement, of, t, 130) or t in corners]


@pytest.mark.parametrize(("specs", "corners"), [((full_spec(4),), []), ((full_spec(4), window_spec(4, 8)), [120])])
def test_checkpoints_of_full_attention_lack_eviction_corner(specs: Sequence[KVCacheSpec], corners: list[int]) -> None:
    options = CacheOptions(eviction=replace(HAZARD, prefix_multiple=40))
    cache = KVCacheManager(natural_model_config(9, specs, (1,) * len(specs)), 200, options=options)
    of = Request("r", range(130), SamplingParams(max_tokens=1), hasher=cache.hasher)
    assert cache.checkpoints._positions(of, 0, 128) == tuple(corners)


def test_placement_kinds_declare_states_and_final_state() -> None:
    assert [one.keeps_states for one in ALL] == [False, True, True, True, True, True]
    assert [one.keeps_final_state for one in ALL] == [False, False, True, True, True, True]


@given(placement=placements, of=requests, tokens=st.integers(1, 130))
def test_placement_supersedes_only_unshared_prompt_ends(placement: Placement, of: Request, tokens: int) -> None:
    own = tokens == of.num_prompt_tokens - 1
    others = tokens in of.marks or tokens == of.branch_tokens
    assert placement.is_supersedable(of, tokens) == (isinstance(placement, EndsPlacement) and own and not others)


# -- names


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("none", NoStates()),
        ("ends", EndsPlacement()),
        ("align", AlignPlacement(528)),
        ("align:16", AlignPlacement(16)),
        ("interval:1", IntervalPlacement(1)),
        ("interval:0064", IntervalPlacement(64)),
        (f"interval:{MOST}", IntervalPlacement(MOST)),
    ],
)
def test_placement_name_is_parsed(name: str, placement: Placement) -> None:
    assert placement_named(name, 528) == placement
    assert placement_named(placement.name, 1) == placement


def test_placement_default_is_ends() -> None:
    assert DEFAULT_PLACEMENT.name == "ends"
    assert [one.name for one in ALL] == ["none", "align:4", "interval:7", "ends", "boundaries", "boundaries"]


@pytest.mark.parametrize(
    "name",
    [
        *("interval", "interval:", "interval:0", "interval:-1", "interval:x", "interval: 8", "interval:1.5"),
        *("interval:8:8", "interval:" + "9" * 5000),
        *("align:", "align:0", "align:+4", "align:\u0664", f"align:{2**31}"),
    ],
)
def test_placement_with_bad_number_names_the_fix(name: str) -> None:
    kind = name.partition(":")[0]
    with pytest.raises(ConfigError, match=f"needs a number of tokens, 1 .. {MOST}: write {kind}:528"):
        placement_named(name, 16)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("intervals:8", " (did you mean interval:N?)"),
        ("Align", " (did you mean align or align:N?)"),
        ("end", " (did you mean ends?)"),
        ("ends:4", " (did you mean ends?)"),
        ("no", " (did you mean none?)"),
        ("", ""),
        ("everywhere", ""),
    ],
)
def test_placement_with_unknown_name_lists_known_names(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        placement_named(name, 16)
    assert str(caught.value) == f"unknown placement '{name}': use none, ends, interval:N, align or align:N{hint}"


@pytest.mark.parametrize("kind", [AlignPlacement, IntervalPlacement])
@pytest.mark.parametrize("tokens", [0, -1, 2**31])
def test_placement_with_bad_interval_is_rejected(kind: Callable[[int], Placement], tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"needs a number of tokens, 1 .. {MOST}, got {tokens}"):
        kind(tokens)
