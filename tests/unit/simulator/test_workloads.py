"""Generated workloads: what each promises, within tolerances of what the reference streams measure.

The figures are those of one hour of the reference files, whose seed is another. Hit rates are those of an endless
cache at 16-token blocks; over seeds they move by some points, with the lengths drawn for the popular prefixes.
"""

import itertools
from collections import Counter
from dataclasses import replace
from statistics import mean, median

import numpy as np
import pytest

from hybridkv.errors import ConfigError, TraceError
from hybridkv.simulator import WORKLOADS, TraceRequest, UniformWorkload, Workload

BLOCK = 16


def endless_hit_tokens(requests: list[TraceRequest], block_size: int = BLOCK) -> int:
    """Prompt tokens that an endless cache knows: a dictionary of prefixes, block by block."""
    known: dict[tuple[int, bytes], int] = {}
    hits = 0
    for request in requests:
        ids = np.concatenate((request.prompt.token_ids(), request.output.token_ids()[:-1]))
        parent, hit, whole = 0, 0, True
        for end in range(block_size, len(ids) + 1, block_size):
            key = (parent, ids[end - block_size : end].tobytes())
            if key not in known:
                known[key] = len(known) + 1
                whole = False
            elif whole and end < request.num_prompt_tokens:
                hit = end
            parent = known[key]
        hits += hit
    return hits


# kind: requests an hour, prompt tokens each, output tokens each, hit rate; and how far a seed may be from them
FIGURES = {
    "chat": (5796, 1591, 248, 0.9451),
    "think": (5796, 1591, 248, 0.8356),
    "agent": (6516, 4213, 89, 0.9039),
    "api": (6000, 954, 20, 0.8075),
    "mix": (18509, 2359, 118, 0.9027),
}


@pytest.mark.parametrize("kind", FIGURES)
def test_workload_hour_matches_the_reference_lengths(kind: str) -> None:
    requests, prompt_tokens, output_tokens, _ = FIGURES[kind]
    measured = [Workload(kind, seed).summary() for seed in range(4)]
    assert mean(one.requests for one in measured) == pytest.approx(requests, rel=0.10)
    drawn = sum(one.requests for one in measured)
    assert sum(one.prompt_tokens for one in measured) / drawn == pytest.approx(prompt_tokens, rel=0.15)
    assert sum(one.output_tokens for one in measured) / drawn == pytest.approx(output_tokens, rel=0.10)


@pytest.mark.parametrize("kind", ["chat", "think", "agent", "api"])
def test_workload_hour_matches_the_reference_hit_rate(kind: str) -> None:
    # mix is the sum of the others: no need to hash its tokens as well
    requests = list(Workload(kind, seed=1))
    rate = endless_hit_tokens(requests) / sum(request.num_prompt_tokens for request in requests)
    assert rate == pytest.approx(FIGURES[kind][3], abs=0.03)


@pytest.mark.parametrize("kind", WORKLOADS)
def test_workload_of_equal_seed_is_equal(kind: str) -> None:
    first, again = (list(Workload(kind, seed=5, hours=0.05)) for _ in range(2))
    assert first == again
    assert first != list(Workload(kind, seed=6, hours=0.05))
    times = [request.timestamp_s for request in first]
    assert times == sorted(times)
    assert all(time == round(time, 3) for time in times)


@pytest.mark.parametrize("kind", WORKLOADS)
def test_workload_resume_marks_are_at_the_shared_prefix_end(kind: str) -> None:
    plain, marked = (list(Workload(kind, seed=5, hours=0.2, marks=marks)) for marks in (False, True))
    assert all(request.marks == () for request in plain)
    assert [replace(request, marks=()) for request in marked] == plain
    beginnings = Counter(request.prompt.pieces[0] for request in marked)
    # forks of one task and turns of one conversation share more; conversations share this
    assert len(beginnings) < len(marked) / 4
    assert all(request.marks == (request.prompt.pieces[0][2],) for request in marked)
    assert all(request.marks[0] < request.num_prompt_tokens for request in marked)


@pytest.mark.parametrize("kind", WORKLOADS)
def test_workload_segment_has_one_length(kind: str) -> None:
    """A segment stands for one length everywhere, and no two requests have one output."""
    lengths: dict[int, int] = {}
    outputs = Counter[int]()
    for request in Workload(kind, seed=2, hours=0.1):
        for segment, offset, length in request.prompt.pieces + request.output.pieces:
            assert offset == 0
            assert lengths.setdefault(segment, length) == length
        outputs[request.output.pieces[0][0]] += 1
    assert max(outputs.values()) == 1


def test_workload_arrivals_scale_with_hours_and_rate() -> None:
    one = Workload("api", seed=1).summary().requests
    assert Workload("api", seed=1, hours=0.5).summary().requests == pytest.approx(one / 2, rel=0.1)
    assert Workload("api", seed=1, rate=3).summary().requests == pytest.approx(one * 3, rel=0.1)
    assert max(request.timestamp_s for request in Workload("api", seed=1, hours=0.5)) <= 1800


def test_workload_chat_turns_repeat_the_conversation() -> None:
    said: dict[int, TraceRequest] = {}
    turns = 0
    for request in Workload("chat", seed=3, hours=0.2):
        pieces = request.prompt.pieces
        assert len(pieces) % 2 == 0
        if len(pieces) > 2:
            before = said[pieces[-2][0]]
            assert pieces[:-1] == before.prompt.pieces + before.output.pieces
            assert request.timestamp_s - before.timestamp_s >= 2
            turns += 1
        said[request.output.pieces[0][0]] = request
    assert turns > 500


def test_workload_chat_lengths_match_the_medians() -> None:
    requests = list(Workload("chat", seed=3))
    users = [request.prompt.pieces[-1][2] for request in requests]
    outputs = [request.num_output_tokens for request in requests]
    systems = {request.prompt.pieces[0] for request in requests}
    assert median(users) == pytest.approx(45, rel=0.1)
    assert median(outputs) == pytest.approx(180, rel=0.1)
    assert 30 <= len(systems) <= 40
    assert all(200 <= length <= 1500 for _, _, length in systems)
    depths = Counter(len(request.prompt.pieces) // 2 for request in requests)
    assert max(depths) <= 20
    assert len(requests) / depths[1] == pytest.approx(3.45, rel=0.1)


def test_workload_think_shares_the_prompt_only() -> None:
    outputs: set[int] = set()
    prompts: set[tuple[object, ...]] = set()
    for request in Workload("think", seed=3, hours=0.2):
        assert not outputs & {segment for segment, _, _ in request.prompt.pieces}
        if len(request.prompt.pieces) > 2:
            assert request.prompt.pieces[:-1] in prompts
        outputs.add(request.output.pieces[0][0])
        prompts.add(request.prompt.pieces)
    # the same conversations as chat, token counts included
    chat, think = (Workload(kind, seed=3, hours=0.2).summary() for kind in ("chat", "think"))
    assert (chat.requests, chat.prompt_tokens, chat.output_tokens) == (
        think.requests,
        think.prompt_tokens,
        think.output_tokens,
    )


def test_workload_agents_fork() -> None:
    requests = list(Workload("agent", seed=4))
    goes_on = Counter(request.prompt.pieces[-2][0] for request in requests if len(request.prompt.pieces) > 2)
    forks = Counter(goes_on.values())
    assert set(forks) == {1, 2, 3, 4}
    tasks = sum(len(request.prompt.pieces) == 2 for request in requests)
    assert sum(forks[k] for k in (2, 3, 4)) / tasks == pytest.approx(0.15, abs=0.05)
    depth = Counter(len(request.prompt.pieces) // 2 for request in requests)
    assert max(depth) <= 40
    assert median(request.prompt.pieces[-1][2] for request in requests) == pytest.approx(220, rel=0.1)
    assert median(request.num_output_tokens for request in requests) == pytest.approx(70, rel=0.1)


def test_workload_limit_keeps_the_first_requests() -> None:
    assert list(Workload("mix", hours=0.1, limit=7)) == list(itertools.islice(Workload("mix", hours=0.1), 7))


def test_workload_with_invalid_values_is_rejected() -> None:
    with pytest.raises(ConfigError, match="unknown workload 'chats': use one of agent, api, chat, documents"):
        Workload("chats")
    with pytest.raises(ConfigError, match=r"seed \(--seed\) must be at least 0, got -1"):
        Workload("chat", seed=-1)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="hours must be above 0 and at most 1000"):
            Workload("chat", hours=bad)
        with pytest.raises(ConfigError, match="rate must be above 0 and at most 1000"):
            Workload("chat", rate=bad)
    with pytest.raises(ConfigError, match=r"limit \(--limit\) must be at least 1 request"):
        Workload("chat", limit=0)
    with pytest.raises(TraceError, match="workload:chat holds no requests"):
        Workload("chat", hours=1e-9).summary()
    with pytest.raises(ConfigError, match="turns must be at least 1, got 0"):
        UniformWorkload(turns=0)


@pytest.mark.parametrize("block_size", [1, 7, 16, 64])
@pytest.mark.parametrize(
    "workload",
    [
        UniformWorkload(),
        UniformWorkload(templates=1, conversations=3, turns=1, system_tokens=64, user_tokens=1),
        UniformWorkload(templates=9, conversations=4, turns=5, user_tokens=16, answer_tokens=1),
        UniformWorkload(system_tokens=16, user_tokens=16, answer_tokens=16),
    ],
)
def test_workload_closed_form_matches_a_dictionary(workload: UniformWorkload, block_size: int) -> None:
    assert workload.hit_tokens(block_size) == endless_hit_tokens(list(workload), block_size)


def test_workload_uniform_matches_hand_calculation() -> None:
    # 2 conversations of one template, 2 turns: 150 + 37 tokens, then 21 + 37 more
    workload = UniformWorkload(templates=1, conversations=2, turns=2)
    summary = workload.summary()
    assert (summary.requests, summary.prompt_tokens, summary.output_tokens) == (4, 2 * (187 + 245), 84)
    assert (summary.longest_tokens, summary.longest_at) == (266, "request 2")
    # the second conversation hits 9 blocks of the system prompt, every later turn 12 of 187 + 20 tokens
    assert workload.hit_tokens(16) == 16 * (9 + 12 + 12)
    assert [request.timestamp_s for request in workload] == [0, 10, 20, 30]
