"""A request answers for its tokens and counts, wherever they live."""

import sys
from collections.abc import Sequence
from fractions import Fraction
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.cache import BlockHasher
from hybridkv.errors import CacheError, ConfigError
from hybridkv.request import MAX_TOKEN_ID, Request, SamplingParams
from hybridkv.request_rows import RequestRows, append_tokens


@pytest.mark.parametrize("token", [-1, 1 << 31])
def test_stop_tokens_that_are_not_token_ids_are_rejected(token: int) -> None:
    with pytest.raises(ConfigError, match="stop_token_ids must lie in"):
        SamplingParams(stop_token_ids=(1, token))
    with pytest.raises(ConfigError, match=r"eos_token_ids must (not be negative|be at most 2147483647)"):
        Request("a", [1], eos_token_ids=(token,))


def test_request_that_waits_has_initial_counts() -> None:
    request = Request("r", [1, 2, 3])
    request.append(4)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (4, 3, 1)
    assert request.output_token_ids == [4]
    assert request.token_ids().tolist() == [1, 2, 3, 4]
    assert request.token_ids(1, 3).tolist() == [2, 3]
    assert request.num_computed_tokens == 0
    assert request.first_hit_tokens is None
    assert repr(request) == "Request('r', prompt=3, tokens=4, computed=0)"


_KINDS = ("i1", "u1", "i2", "u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8", ">u8")


@pytest.mark.parametrize("kind", _KINDS)
def test_request_token_ids_are_read_from_every_array_kind(kind: str) -> None:
    """Its ends, both byte orders, no whole row of memory: what fits is taken, what does not is refused in any place."""
    info = np.iinfo(kind)
    most = min(int(info.max), MAX_TOKEN_ID)
    fine = np.array([0, 1, most, 7, most, 3], kind)
    assert Request("r", fine).token_ids().tolist() == fine.tolist()
    assert Request("r", fine[::-2]).token_ids().tolist() == fine[::-2].tolist()
    wrong = {int(info.min), -1, MAX_TOKEN_ID + 1, 1 << 32, (1 << 32) + 5, int(info.max)}
    for value in sorted(wrong - {0, most}):
        if not info.min <= value <= info.max:
            continue
        for place in (0, 2, 5):
            bad = fine.copy()
            bad[place] = value
            with pytest.raises(ConfigError, match="token ids must"):
                Request("r", bad)
            with pytest.raises(ConfigError, match="token ids must"):
                Request("r", bad.tolist())


@pytest.mark.parametrize("prompt", [[], np.empty(0, np.int32)])
def test_request_with_empty_prompt_is_rejected(prompt: Sequence[int]) -> None:
    with pytest.raises(ConfigError, match="request 'r' has an empty prompt"):
        Request("r", prompt)


def test_request_prompt_is_copied() -> None:
    prompt = np.array([1, 2, 3])
    request = Request("r", prompt)
    prompt[0] = 9
    assert request.token_ids().tolist() == [1, 2, 3]
    request.token_ids()[0] = 9
    assert request.token_ids().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be above 0"),
        ({"min_p": -0.1}, "min_p must be between"),
        ({"min_p": 1.1}, "min_p must be between"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": float("nan")}, "temperature must be a number, and finite"),
        ({"temperature": float("inf")}, "temperature must be a number, and finite"),
        ({"temperature": 10**400}, "temperature must be a number, and finite"),
        ({"temperature": "1"}, "temperature must be a number, and finite, got '1'"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": 1e-320}, r"temperature must be 0 \(greedy\), or 1e-200 or more, got 1e-320"),
        ({"top_p": None}, "top_p must be a number"),
        ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"top_k": 2**70}, r"top_k must be 0 \(off\) or more, below 2\*\*31"),
        ({"repetition_penalty": 1e300}, "repetition_penalty must be above 0 .*between 1e-6 and 1e6"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"seed": None}, "seed must be an integer"),
        ({"max_tokens": 2.5}, "max_tokens must be an integer"),
        ({"max_tokens": float("inf")}, "max_tokens must be an integer"),
        ({"n": 1.5}, "n must be an integer"),
        ({"n": 0}, "n must be at least 1"),
        ({"logprobs": True}, "logprobs must be an integer"),
        ({"logprobs": 2**31}, r"logprobs must be 0 or more and below 2\*\*31, or None"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be 0 or more"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
        ({"stop": 5}, "stop must be a list of strings that are not empty, got 5"),
        ({"stop": ""}, "stop must be a list of strings that are not empty"),
        ({"stop": ("a", b"b")}, "stop must be a list of strings"),
        ({"stop": {"a": 1}}, "stop must be a list of strings"),
        ({"stop_token_ids": "5"}, "stop_token_ids must be a list of token ids, got '5'"),
        ({"stop_token_ids": (1, 2.0)}, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": True}, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": 2**31}, "stop_token_ids must lie in"),
    ],
)
def test_sampling_with_invalid_values_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        SamplingParams(**options)


def test_sampling_accepts_equivalent_values() -> None:
    given: dict[str, Any] = {
        "temperature": 1, "top_k": np.int64(3), "top_p": Fraction(1, 2), "repetition_penalty": np.float32(1.5),
        "stop": "##n", "stop_token_ids": np.array([7, 9]), "logprobs": np.int32(2), "max_tokens": 10**12, "seed": 2**70,
    }  # fmt: skip
    made = SamplingParams(**given)
    assert made == SamplingParams(
        1.0, 3, 0.5, 0.0, 1.5, 2**70, 10**12, stop=("##n",), stop_token_ids=(7, 9), logprobs=2
    )
    types = [type(value) for value in (made.temperature, made.top_k, made.repetition_penalty, *made.stop_token_ids)]
    assert types == [float, int, float, int, int]
    alone: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": 5}
    assert SamplingParams(**alone) == SamplingParams(stop=("a", "b"), stop_token_ids=(5,))


@given(st.data())
def test_request_tokens_survive_row_changes(data: st.DataObject) -> None:
    hasher = BlockHasher(data.draw(st.integers(1, 5)))
    rows = RequestRows(hasher.block_size, capacity=1)
    requests = [
        Request(str(i), data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12)), hasher=hasher)
        for i in range(3)
    ]
    naive = [request.token_ids().tolist() for request in requests]
    for _ in range(data.draw(st.integers(1, 40))):
        i = data.draw(st.integers(0, 2))
        action = data.draw(st.sampled_from(["bind or release", "append", "append all", "append rows"]))
        if action == "bind or release":
            if requests[i].row < 0:
                rows.bind(requests[i])
            else:
                rows.release(requests[i])
        elif action == "append":
            requests[i].append(7)
            naive[i].append(7)
        elif action == "append all":
            append_tokens(requests, [5, 6, 7])
            for j in range(3):
                naive[j].append(5 + j)
        else:
            bound = [j for j in range(3) if requests[j].row >= 0]
            rows.append(np.array([requests[j].row for j in bound], np.int64), np.array(bound, np.int32))
            for j in bound:
                naive[j].append(j)
        start, stop = sorted(data.draw(st.tuples(st.integers(0, 60), st.integers(0, 60))))
        for request, tokens in zip(requests, naive, strict=True):
            assert request.token_ids().tolist() == tokens
            assert request.token_ids(start, stop).tolist() == tokens[start:stop]
            assert request.num_tokens == len(tokens)
            assert request.hashes == hasher.hash_chain(None, np.array(tokens))


def test_request_rows_not_held_are_rejected() -> None:
    rows, other = RequestRows(4), RequestRows(4)
    request = Request("r", [1])
    rows.bind(request)
    with pytest.raises(CacheError, match="already holds row 0"):
        rows.bind(request)
    with pytest.raises(CacheError, match="already holds row 0"):
        other.bind(request)
    with pytest.raises(CacheError, match="holds no row here"):
        other.release(request)
    with pytest.raises(CacheError, match="holds no row here"):
        other.rows_of([request])
    with pytest.raises(CacheError, match="row 3 belongs to no request"):
        rows.owners(np.array([0, 3]))
    for _ in range(3):
        rows.append(np.array([5]), np.array([1], np.int32))
    with pytest.raises(CacheError, match="row 5 belongs to no request"):  # told where a block is full
        rows.append(np.array([5]), np.array([1], np.int32))


def test_append_tokens_needs_one_token_per_request() -> None:
    with pytest.raises(ConfigError, match="1 requests but 2 tokens"):
        append_tokens([Request("r", [1])], [2, 3])
    append_tokens([], [])


@pytest.mark.parametrize("field", ["priority", "arrival_time"])
@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_request_sort_key_that_is_not_finite_is_rejected(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} of 'a' must be a number, and finite"):
        Request("a", [1], **{field: value})  # type: ignore[arg-type]  # on purpose


def test_resume_marks_are_sorted() -> None:
    assert Request("a", [1, 2]).marks == ()
    # 9 lies in the output, the last where nobody will come
    request = Request("a", [1, 2], marks=[9, 1, 2**31 - 1])
    assert request.marks == (1, 9, 2**31 - 1)
    marked = Request("b", [1, 2], marks=np.array([5, 3], np.int64))
    assert marked.marks == (3, 5)
    assert all(type(mark) is int for mark in marked.marks)  # they go into documents and messages
    assert request.branch("c", SamplingParams()).marks == request.marks


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        *(([3, mark], r"token counts, 1 \.\. 2\*\*31 - 1, got") for mark in (0, -1, 2**31, True, 1.0, "1", None)),
        *((marks, "a list of token counts, got") for marks in (7, None, "12", b"12")),
        ([4, 1, 4], "distinct, got 4 twice"),
    ],
)
def test_resume_marks_that_are_invalid_are_rejected(marks: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=f"marks of 'a' must be {message}"):
        Request("a", [1], marks=marks)


def test_request_branch_starts_with_its_own_hashes() -> None:
    parent = Request("a", range(9), hasher=BlockHasher(4))
    rows = RequestRows(4)
    rows.bind(parent)
    parent.num_computed_tokens, parent.num_preemptions, parent.branches = 8, 2, 3
    parent.first_hit_tokens, parent.branch_tokens = 4, 4
    child = parent.branch("a#1", SamplingParams())
    assert (child.row, child.num_computed_tokens, child.num_preemptions, child.branches) == (-1, 0, 0, 0)
    assert (child.first_hit_tokens, child.branch_tokens) == (None, 0)
    assert child.token_ids().tolist() == list(range(9))
    assert child.hashes == parent.hashes
    assert child.hashes is not parent.hashes


def _of_a_life(hasher: BlockHasher) -> list[object]:
    """What one request says of its tokens while it waits, is bound, grows, is cut, goes, and comes again."""
    said: list[object] = []
    request = Request("r", range(10), hasher=hasher)
    rows = RequestRows(hasher.block_size)
    for _ in range(2):
        rows.bind(request)
        said.append(request.token_ids().tolist())
        for token in range(9):
            request.append(token)
        rows.append(np.array([request.row]), np.array([5], np.int32))
        said.append((request.token_ids(3).tolist(), request.token_bytes(0, 7)))
        request.truncate(11)
        append_tokens([request], [8])
        rows.append_many(np.array([request.row]), np.arange(9, dtype=np.int32)[None])
        said += [request.token_ids().tolist(), list(request.hashes)]
        rows.release(request)
        again = Request("s", request.token_ids(), hasher=hasher, continues=request)
        request.truncate(10)
        request.append(3)
        said += [again.hashes, again.token_ids().tolist(), request.token_ids().tolist()]
    return said


def test_request_tokens_viewed_by_a_profiler_can_still_grow() -> None:
    """A profiler holds frames that ended, and with them views of a request's tokens: those cannot be resized then."""
    frames: list[FrameType] = []
    before = sys.getprofile()
    plain = _of_a_life(BlockHasher(4))
    sys.setprofile(lambda frame, *_: frames.append(frame))
    try:
        watched = _of_a_life(BlockHasher(4))
    finally:
        sys.setprofile(before)
    assert frames
    assert watched == plain
