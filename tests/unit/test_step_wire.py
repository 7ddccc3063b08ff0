"""Steps and replies as bytes: exact, one encoding each, and nothing else is taken."""

from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction
from hashlib import sha256
from typing import Any

import cbor2
import numpy as np
import pytest
from cbor2 import CBORTag
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_support import example_step, failures, results, same, samplings, steps

from hybridkv.errors import HybridKVError, SchemaError, WireError
from hybridkv.request import SamplingParams
from hybridkv.step import SCHEMA_VERSION, Cells, Copy, Csr, EncoderRead, Logprobs, NewRow, Step, StepResult
from hybridkv.wire import Reply, StepFailure, Unreadable, decode_reply, decode_step, encode_reply, encode_step

MANY = settings(max_examples=2 * settings().max_examples)


# -- round trips


@MANY
@given(steps())
def test_any_step_comes_back_as_it_was(step: Step) -> None:
    assert same(decode_step(encode_step(step)), step)


@given(st.one_of(results(), failures()))
def test_any_reply_comes_back_as_it_was(reply: Reply) -> None:
    assert same(decode_reply(encode_reply(reply)), reply)


@given(samplings())
def test_sampling_comes_back_as_it_was(sampling: SamplingParams) -> None:
    new = replace(example_step().new_rows[0], sampling=sampling)
    (back,) = decode_step(encode_step(example_step(new_rows=(new,)))).new_rows
    assert back.sampling == sampling


CHANGED: dict[type, dict[str, Any]] = {
    Step: {
        "id": 8,
        "after": 6,
        "rows": np.array([4, 1], np.int32),
        "num_computed": np.array([17, 0], np.int32),
        "num_scheduled": None,  # with token_ids
        "samples": np.array([True, True]),
        "token_ids": Csr.from_lists([[-1], [10, 11, 99]]),
        "drafts": Csr.from_lists([[], [11, 12]]),
        "cells": Cells.empty(),
        "finished_rows": np.array([3, 5], np.int32),
        "new_rows": (),
        "zero": np.array([[1, 4]], np.int32),
        "copies": (Copy("before", 2, 5, 6, "move"),),
        "state_read": np.empty((0, 3), np.int32),
        "state_writes": np.array([[0, 2, 19, 8]], np.int32),
        "schema_version": None,  # one only
    },
    NewRow: {
        "row": 3,
        "request_id": "r3",
        "token_ids": np.array([10, 11, 12], np.int32),
        "num_prompt_tokens": 2,
        "sampling": SamplingParams(),
        "encoder": None,  # the example has one
        "held_ids": (2, 0),
    },
    EncoderRead: {"digest": "audio", "num_tokens": 31, "encodes": False},
    SamplingParams: {
        "temperature": 0.1,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "seed": -1,
        "max_tokens": 17,
        "stop_token_ids": (4, 3),
        "stop": ("x", "y"),
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": 2,
        "n": 2,
        "presence_penalty": -1.5,
        "frequency_penalty": 0.1,
        "min_tokens": 3,
        "logit_bias": ((3, -2.5), (7, 0.1)),
        "bad_words": ((5,), (5, 6, 7)),
        "logits_processors": None,  # see below
    },
    Cells: {name: np.array([8, 7], np.int32) for name in ("group", "row", "column", "block")},
    Copy: {"stage": "after", "group": 3, "source": 9, "destination": 9, "kind": "block"},
}


def with_change(kind: type, change: dict[str, Any]) -> Step:
    """The example with one field of one of its parts changed."""
    step = example_step()
    new = step.new_rows[0]
    if kind is Step:
        return replace(step, **change)
    if kind is NewRow:
        return replace(step, new_rows=(replace(new, **change),))
    if kind is EncoderRead:
        assert new.encoder is not None
        return replace(step, new_rows=(replace(new, encoder=replace(new.encoder, **change)),))
    if kind is SamplingParams:
        return replace(step, new_rows=(replace(new, sampling=replace(new.sampling, **change)),))
    if kind is Cells:
        return replace(step, cells=replace(step.cells, **change))
    return replace(step, copies=(replace(step.copies[0], **change), *step.copies[1:]))


@pytest.mark.parametrize("kind", CHANGED)
def test_every_field_travels(kind: type) -> None:
    assert set(CHANGED[kind]) == {field.name for field in fields(kind)}, "a new field needs its codec, and a value here"
    plain = encode_step(example_step())
    for name, value in CHANGED[kind].items():
        if value is None:
            continue
        step = with_change(kind, {name: value})
        data = encode_step(step)
        assert data != plain, name
        assert same(decode_step(data), step), name


def some_logprobs() -> list[Logprobs]:
    """One of two entries, and it with every field changed in turn."""
    plain = Logprobs(
        row=np.array([0, 1], np.int32),
        position=np.array([4, 9], np.int32),
        token=np.array([5, 6], np.int32),
        logprob=np.array([-0.25, -1.5], np.float32),
        rank=np.array([1, 3], np.int32),
        best=Csr.from_lists([[5, 7], [8]]),
        best_logprobs=np.array([-0.25, -2, -0.5], np.float32),
    )
    changed = {
        "row": np.array([1, 1], np.int32),
        "best": Csr.from_lists([[5], [7, 8]]),
        "logprob": np.array([-0.25, -np.inf], np.float32),
        "best_logprobs": np.array([-0.25, -2, -0.75], np.float32),
        **{name: np.array([2, 2], np.int32) for name in ("position", "token", "rank")},
    }
    assert set(changed) == {field.name for field in fields(Logprobs)}
    return [plain, *(replace(plain, **{name: value}) for name, value in changed.items())]  # type: ignore[arg-type]  # by name


def test_every_field_of_replies_travels() -> None:
    assert {field.name for field in fields(StepResult)} == {
        "id",
        "sampled",
        "num_accepted",
        "logprobs",
        "schema_version",
    }
    assert {field.name for field in fields(StepFailure)} == {"id", "error", "message", "schema_version"}
    assert {field.name for field in fields(Unreadable)} == {"error", "message", "schema_version"}
    replies: tuple[Reply, ...] = (
        StepResult(1, Csr.from_lists([[5], []])),
        StepResult(2, Csr.from_lists([[5], []])),
        StepResult(1, Csr.from_lists([[], [5]])),
        StepResult(1, Csr.from_lists([[5], []]), np.array([1, 0], np.int32)),
        *(StepResult(1, Csr.from_lists([[5], []]), logprobs=one) for one in some_logprobs()),
        StepFailure(1, "E", "m"),
        StepFailure(1, "F", "m"),
        StepFailure(1, "E", "n"),
        Unreadable("E", "m"),
        Unreadable("F", "m"),
        Unreadable("E", "n"),
    )
    assert len({encode_reply(reply) for reply in replies}) == len(replies)
    assert all(same(decode_reply(encode_reply(reply)), reply) for reply in replies)


# -- one encoding


def test_the_bytes_are_those_of_the_standards() -> None:
    """RFC 8949 with RFC 8746's tags 78 (int32, little-endian) and 79 (int64), written by hand."""
    expected = "".join(
        (
            "a6",  # a map of six, keys by length, then by letter
            "626964" + "07",  # id: 7
            "646b696e64" + "66726573756c74",  # kind: result
            "6773616d706c6564" + "a2",  # sampled: a map of two
            "66696e64707472" + "d84f" + "5818" + "0000000000000000" + "0100000000000000" + "0100000000000000",
            "6676616c756573" + "d84e" + "44" + "fe010000",  # values: 510
            "686c6f6770726f6273" + "f6",  # logprobs: null
            "6c6e756d5f6163636570746564" + "f6",  # num_accepted: null
            "6e736368656d615f76657273696f6e" + "01",  # schema_version: 1
        )
    )
    assert encode_reply(StepResult(7, Csr.from_lists([[510], []]))).hex() == expected


def test_floats_are_tag_85_little_endian() -> None:
    tree = cbor2.loads(encode_reply(StepResult(1, Csr.from_lists([[5], []]), logprobs=some_logprobs()[0])))
    tagged = tree["logprobs"]["logprob"]
    assert (tagged.tag, tagged.value.hex()) == (85, "000080be" + "0000c0bf")


def test_two_dimensions_and_truth_values_in_the_forms_of_the_standards() -> None:
    tree = cbor2.loads(encode_step(example_step()))
    assert (tree["kind"], tree["schema_version"]) == ("step", SCHEMA_VERSION)
    assert tree["samples"] == CBORTag(64, b"\1\0")
    read = tree["state_read"]
    assert (read.tag, list(read.value[0])) == (40, [2, 3])
    assert read.value[1] == CBORTag(78, np.array([-1, 3, 5, -1, 4, 6], "<i4").tobytes())
    assert tree["copies"].value[1] == CBORTag(78, np.array([0, 2, 5, 6, 0, 1, 1, 3, 4, 2], "<i4").tobytes())


def test_equal_steps_give_equal_bytes() -> None:
    """However they were made: views with strides, numpy's numbers, lists, in any order of keyword."""
    plain = example_step()
    new = plain.new_rows[0]
    wide = np.repeat(plain.state_read, 2, axis=1)
    odd = example_step(
        id=np.int64(7),
        rows=np.array([4, 0, 2, 0], np.int32)[::2],
        state_read=wide[:, ::2],
        zero=np.asfortranarray(plain.zero),
        copies=[replace(copy, group=np.int32(copy.group)) for copy in plain.copies],  # type: ignore[arg-type]  # same
        new_rows=[
            NewRow(
                np.int32(2),  # type: ignore[arg-type]  # numbers of numpy
                "r2",
                new.token_ids[:],
                np.int64(3),  # type: ignore[arg-type]  # same
                SamplingParams(stop=["x"], temperature=0, seed=np.int64(5)),  # type: ignore[arg-type]  # same
                EncoderRead(b"audio", np.int64(30), np.True_),  # type: ignore[arg-type]  # same
            )
        ],
    )
    assert encode_step(odd) == encode_step(plain)
    assert same(decode_step(encode_step(odd)), plain)


def test_decoded_arrays_are_their_own_and_may_be_written() -> None:
    data = encode_step(example_step())
    step = decode_step(data)
    for array in (step.rows, step.samples, step.token_ids.indptr, step.state_read, step.new_rows[0].token_ids):
        assert array.flags.writeable
        assert array.flags.c_contiguous
        array[...] = 0
    assert same(decode_step(data), example_step())
    assert encode_step(example_step()) == data


# -- bytes that are no message

LEFT_OUT = object()


def edited(change: Callable[[dict[str, Any]], None], message: bytes | None = None) -> bytes:
    """The example's message with its tree changed, encoded canonically."""
    tree = cbor2.loads(encode_step(example_step()) if message is None else message)
    change(tree)
    return cbor2.dumps(tree, canonical=True)


def put(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Set, or leave out, what stands at ``path``."""

    def change(tree: Any) -> None:  # noqa: ANN401  # CBOR
        *before, last = path.split(".")
        for name in before:
            tree = tree[int(name) if name.isdigit() else name]
        if value is LEFT_OUT:
            del tree[last]
        else:
            tree[last] = value

    return change


def int32(*values: int) -> CBORTag:
    return CBORTag(78, np.array(values, "<i4").tobytes())


def int64(*values: int) -> CBORTag:
    return CBORTag(79, np.array(values, "<i8").tobytes())


def float64(*values: float) -> CBORTag:
    return CBORTag(86, np.array(values, "<f8").tobytes())


def biases(*pairs: tuple[int, float]) -> dict[str, CBORTag]:
    return {"token": int32(*(token for token, _ in pairs)), "bias": float64(*(bias for _, bias in pairs))}


def table(rows: object, columns: object, *values: int) -> CBORTag:
    return CBORTag(40, [[rows, columns], int32(*values)])


WRONG: list[tuple[str, object, str]] = [
    # fields
    ("id", LEFT_OUT, "lacks 'id'"),
    ("extra", 1, "has an unknown field 'extra'"),
    ("new_rows.0.row", LEFT_OUT, r"new_rows: \[0\]: lacks 'row'"),
    ("new_rows.0.sampling.extra", 1, r"new_rows: \[0\]: sampling: has an unknown field 'extra'"),
    ("cells.group", LEFT_OUT, "cells: lacks 'group'"),
    ("token_ids.indptr", LEFT_OUT, "token_ids: lacks 'indptr'"),
    # types
    ("id", 7.0, "id: must be an integer, got float"),
    ("id", True, "id: must be an integer, got bool"),
    ("after", None, "after: must be an integer, got NoneType"),
    ("rows", [4, 2], "rows: must be int32"),
    ("rows", b"\4\0\0\0\2\0\0\0", "rows: must be int32"),
    ("rows", CBORTag(70, b"\4\0\0\0\2\0\0\0"), "rows: must be int32.*tag 78.*got CBORTag 70"),
    ("rows", CBORTag(78, [4, 2]), "rows: must be int32.*around bytes"),
    ("rows", CBORTag(78, b"\4\0\0\0\2\0"), "rows: must be int32.*6 bytes"),
    ("samples", CBORTag(64, b"\1\2"), "samples: .* bytes 0 and 1, got 2"),
    ("token_ids", [[1], [2]], "token_ids: must be a map, got list"),
    ("token_ids.indptr", int32(0, 1, 4), "indptr: must be int64"),
    ("cells", None, "cells: must be a map"),
    ("new_rows", {}, "new_rows: must be a list, got dict"),
    ("new_rows", [5], r"new_rows: \[0\]: must be a map, got int"),
    ("new_rows.0.request_id", b"r2", "request_id: must be text, got bytes"),
    ("new_rows.0.row", "2", "row: must be an integer, got str"),
    ("new_rows.0.row", -1, "row: must be 0 or more"),
    ("new_rows.0.sampling.stop", "x", "stop: must be a list, got str"),
    ("new_rows.0.sampling.stop", [1], r"stop: \[0\]: must be text, got int"),
    ("new_rows.0.sampling.ignore_eos", 1, "ignore_eos: must be true or false"),
    ("new_rows.0.sampling.temperature", 1, "temperature: must be a float, got int"),
    ("new_rows.0.sampling.seed", 1.5, "seed: must be an integer, got float"),
    ("new_rows.0.sampling.logprobs", "none", "logprobs: must be an integer, got str"),
    ("new_rows.0.encoder", [b"audio", 30, True], "encoder: must be a map, got list"),
    ("new_rows.0.encoder.digest", 5, "encoder: digest: must be text, got int"),
    ("new_rows.0.encoder.digest", b"", "encoder: digest: must be bytes or text that names something"),
    ("new_rows.0.encoder.num_tokens", 0, "encoder: num_tokens: must be 1 or more"),
    ("new_rows.0.encoder.encodes", 1, "encoder: encodes: must be true or false"),
    # values that the classes refuse
    ("new_rows.0.sampling.temperature", float("nan"), "sampling: temperature must be a number"),
    ("new_rows.0.sampling.top_p", float("nan"), "sampling: top_p must be a number"),
    ("new_rows.0.sampling.repetition_penalty", float("nan"), "sampling: repetition_penalty must be a number"),
    ("new_rows.0.sampling.min_p", -0.5, "sampling: min_p must be between"),
    ("new_rows.0.sampling.max_tokens", 0, "sampling: max_tokens must be at least 1"),
    ("new_rows.0.sampling.stop_token_ids", [-1], "sampling: stop_token_ids must lie in"),
    ("new_rows.0.sampling.presence_penalty", 2.5, "sampling: presence_penalty must be between -2 and 2"),
    ("new_rows.0.sampling.min_tokens", 17, "sampling: min_tokens must be at most max_tokens, 16, got 17"),
    # fields that are there only where they say something
    ("new_rows.0.sampling.presence_penalty", 0.0, "sampling: presence_penalty: .*what its absence says"),
    ("new_rows.0.sampling.min_tokens", 0, "sampling: min_tokens: .*what its absence says"),
    ("new_rows.0.sampling.bad_words", {"indptr": int64(0), "values": int32()}, "bad_words: .*what its absence says"),
    ("new_rows.0.held_ids", int32(), "held_ids: .*what its absence says"),
    ("new_rows.0.held_ids", [1], "held_ids: must be int32"),
    ("new_rows.0.sampling.bad_words", [[1]], "bad_words: must be a map, got list"),
    ("new_rows.0.sampling.bad_words", {"indptr": int64(0, 0), "values": int32()}, "each of bad_words must be text or"),
    ("new_rows.0.sampling.logit_bias", {3: 1.0}, "logit_bias: has a field whose name is no text|lacks 'bias'"),
    ("new_rows.0.sampling.logit_bias", biases((3, 1.0), (3, 2.0)), "logit_bias: token must ascend"),
    ("new_rows.0.sampling.logit_bias", biases((4, 1.0), (3, 2.0)), "logit_bias: token must ascend"),
    ("new_rows.0.sampling.logit_bias", biases((-4, 1.0)), "token ids of logit_bias must lie in 0"),
    ("new_rows.0.sampling.logit_bias", biases((4, float("nan"))), "logit_bias of token 4 must be a number"),
    ("new_rows.0.sampling.logit_bias", {"token": int32(4), "bias": float64()}, "token and bias must have one length"),
    ("new_rows.0.sampling.logits_processors", [], "logits_processors: are functions, which no message holds"),
    # what one field says of another
    ("id", -1, "id: must be 0 or more"),
    ("after", -2, "after: must be -1 or more"),
    ("after", 7, "after must lie below id 7, got 7"),
    ("rows", int32(4), "num_computed is for 2 rows, but there are 1"),
    ("num_computed", int32(16, 0, 0), "num_computed is for 3 rows"),
    ("num_computed", int32(16, -1), "num_computed must be 0 or more"),
    ("num_scheduled", int32(1), "num_scheduled is for 1 rows"),
    ("num_scheduled", int32(2, 2), "token_ids must hold as many tokens of each row as num_scheduled"),
    ("samples", CBORTag(64, b"\1"), "samples is for 1 rows"),
    ("token_ids", {"indptr": int64(0, 4), "values": int32(1, 2, 3, 4)}, "token_ids is for 1 rows"),
    ("drafts", {"indptr": int64(0, 0), "values": int32()}, "drafts is for 1 rows"),
    ("drafts", {"indptr": int64(0, 2, 2), "values": int32(1, 2)}, "drafts must be a tail of token_ids"),
    ("token_ids.indptr", int64(), "token_ids: indptr must rise from 0 to the 4 values"),
    ("token_ids.indptr", int64(1, 1, 4), "token_ids: indptr must rise from 0 to the 4 values"),
    ("token_ids.indptr", int64(0, 1, 3), "token_ids: indptr must rise from 0 to the 4 values"),
    ("token_ids.indptr", int64(0, 5, 4), "token_ids: indptr must rise .* never fall"),
    ("token_ids.indptr", int64(0, -(2**63), 4), "token_ids: indptr must rise .* never fall"),
    ("cells.block", int32(9), "cells: group, row, column and block must have one length"),
    ("new_rows.0.num_prompt_tokens", 5, "num_prompt_tokens is 5, but there are 4 tokens"),
    ("state_read", table(1, 3, 1, 2, 3), "state_read is for 1 rows, but there are 2"),
    ("state_writes", table(1, 4, 2, 2, 19, 8), r"state_writes must begin with places in rows, 0 \.\. 1"),
    ("state_writes", table(1, 4, -1, 2, 19, 8), "state_writes must begin with places in rows"),
    # dimensions
    ("zero", int32(1, 3), r"zero: must be int32\[n, 2\] as tag 40"),
    ("zero", CBORTag(40, [[1, 2]]), r"zero: must be int32\[n, 2\] as tag 40"),
    ("zero", CBORTag(40, [2, int32(1, 3)]), r"zero: must be int32\[n, 2\] as tag 40"),
    ("zero", table(2, 1, 1, 3), r"zero: must be int32\[n, 2\], got 2 elements for \[2, 1\]"),
    ("zero", table(2, 2, 1, 3), r"zero: must be int32\[n, 2\], got 2 elements for \[2, 2\]"),
    ("zero", table(-1, 2, 1, 3), "zero: .*dimensions that are no such numbers"),
    ("zero", table(1.0, 2, 1, 3), "zero: .*dimensions that are no such numbers"),
    ("state_read", table(2**70, 0), "state_read: .*dimensions that are no such numbers"),
    ("state_read", CBORTag(40, [[2, 1, 3], int32(1, 2, 3, 4, 5, 6)]), "state_read: .*got 3 dimensions"),
    ("copies", table(1, 5, 2, 0, 0, 0, 0), "copies: column 0 must be a place in before, after"),
    ("copies", table(1, 5, 0, 0, 0, 0, -1), "copies: column 4 must be a place in move, block, state"),
    ("copies", [["before", 0, 0, 0, "move"]], r"copies: must be int32\[n, 5\]"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_a_message_that_is_wrong_says_where(path: str, value: object, message: str) -> None:
    with pytest.raises(WireError, match=f"^step: .*{message}"):
        decode_step(edited(put(path, value)))


def test_numbers_that_python_does_not_print() -> None:
    huge = 10**5000
    for path in ("id", "new_rows.0.num_prompt_tokens", "new_rows.0.sampling.seed", "new_rows.0.sampling.top_k"):
        for value in (huge, -huge):
            with pytest.raises(WireError, match="must be an integer of at most 256 bits"):
                decode_step(edited(put(path, value)))
    with pytest.raises(WireError, match="no schema_version"):
        decode_step(edited(put("schema_version", huge)))
    new = replace(example_step().new_rows[0], sampling=forged(seed=1 << 256))
    with pytest.raises(WireError, match="seed: must be an integer of at most 256 bits"):
        encode_step(example_step(new_rows=(new,)))


def test_replies_are_checked_as_well() -> None:
    result = encode_reply(StepResult(1, Csr.from_lists([[5], []]), np.array([1, 0], np.int32)))
    failure = encode_reply(StepFailure(1, "E", "m"))
    probable = encode_reply(StepResult(1, Csr.from_lists([[5], []]), logprobs=some_logprobs()[0]))
    for data, path, value, message in (
        (probable, "logprobs.row", int32(0, 2), r"result: logprobs must be of places in rows, 0 \.\. 1"),
        (probable, "logprobs.row", int32(-1, 1), "logprobs must be of places in rows"),
        (probable, "logprobs.rank", int32(1), "logprobs: row, position, .* must have one length"),
        (probable, "logprobs.best.indptr", int64(0, 3), "must have one length"),
        (probable, "logprobs.best_logprobs", CBORTag(85, bytes(8)), "best_logprobs must be one for each of the 3"),
        (probable, "logprobs.logprob", int32(1, 2), r"logprob: must be float32\[n\] as tag 85"),
        (result, "num_accepted", int32(1), "result: num_accepted is for 1 rows, sampled for 2"),
        (result, "sampled.values", int32(), "result: sampled: indptr must rise from 0 to the 0 values"),
        (failure, "id", -1, "failure: id: must be 0 or more"),
        (failure, "error", None, "failure: error: must be text"),
    ):
        with pytest.raises(WireError, match=message):
            decode_reply(edited(put(path, value), data))


def test_a_newer_schema_says_which_and_what_to_do() -> None:
    """Whatever else it holds: fields and kinds of another schema are not even looked at."""
    newer = edited(lambda tree: tree.update(schema_version=SCHEMA_VERSION + 1, kind="bulletin", id="seven"))
    with pytest.raises(SchemaError, match=r"schema version 2, this hybridkv reads version 1: update.*on this side"):
        decode_step(newer)
    with pytest.raises(SchemaError, match="update hybridkv on the other side"):
        decode_step(edited(put("schema_version", 0)))
    with pytest.raises(WireError, match="no schema_version"):
        decode_step(edited(put("schema_version", "1")))
    with pytest.raises(WireError, match="no schema_version"):
        decode_step(edited(put("schema_version", True)))  # noqa: FBT003  # a value in a message
    with pytest.raises(SchemaError, match="a step of schema version 2 cannot be written"):
        encode_step(replace(example_step(), schema_version=2))


def test_other_kinds_of_message() -> None:
    with pytest.raises(WireError, match="kind 'step' was expected, got 'result'"):
        decode_step(encode_reply(StepResult(0, Csr.empty(0))))
    with pytest.raises(WireError, match="kind 'result' or 'failure' or 'unreadable' was expected, got 'step'"):
        decode_reply(encode_step(example_step()))
    for kind, got in (("telegram", "'telegram'"), (5, "int"), (None, "NoneType"), ([], "list")):
        with pytest.raises(WireError, match=f"expected, got {got}"):
            decode_step(edited(put("kind", kind)))


def test_bytes_too_few_too_many_or_in_another_form() -> None:
    data = encode_step(example_step())
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode_step(data[:length])
    with pytest.raises(WireError, match="cut short"):
        decode_step(data[:-1])
    with pytest.raises(WireError, match="3 bytes too many"):
        decode_step(data + b"abc")
    assert data[0] == 0xA0 + 17  # a map of 17; its number fits two bytes as well
    with pytest.raises(WireError, match="not in canonical form"):
        decode_step(b"\xb8\x11" + data[1:])
    tree = cbor2.loads(data)
    with pytest.raises(WireError, match="not in canonical form"):
        decode_step(cbor2.dumps(dict(reversed(tree.items()))))
    for strange in (
        b"",
        b"\xff",
        b"\x80",
        b"\x05",
        b"\xa0",
        b"\x9b" + b"\xff" * 8,
        b"\x81" * 9999,
        b"\xd8\x1c\x81\xd8\x1d\x00",
    ):
        with pytest.raises(WireError):
            decode_step(strange)


def test_a_field_given_twice_is_refused() -> None:
    data = encode_reply(StepFailure(1, "E", "m"))
    twice = bytes([data[0] + 1]) + data[1:4] + b"\x02" + data[1:]  # id: 2, then id: 1 and the rest
    assert data[1:4].hex() == "626964"
    with pytest.raises(WireError, match="canonical"):
        decode_reply(twice)


# -- fuzzing


def settle(data: bytes) -> bool:
    """Whether ``data`` is a Step; only named errors may come of it, and a Step must be this very message."""
    try:
        step = decode_step(data)
    except (WireError, SchemaError):
        return False
    assert encode_step(step) == data
    return True


def test_every_flipped_bit_is_refused_or_another_step() -> None:
    data, accepted = encode_step(example_step()), 0
    for place in range(len(data)):
        for bit in range(8):
            accepted += settle(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
    assert 0 < accepted < 8 * len(data)  # a token id may be any other one


@MANY
@given(steps(), st.data())
def test_damaged_messages(step: Step, data: st.DataObject) -> None:
    message = bytearray(encode_step(step))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message)))
        piece = data.draw(st.binary(max_size=9))
        message[at : at + data.draw(st.integers(0, 9))] = piece
    settle(bytes(message))


ANY_ITEM = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary(max_size=9)),
    lambda items: st.one_of(
        st.lists(items, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers()), items, max_size=3),
        st.builds(CBORTag, st.sampled_from((0, 1, 2, 4, 5, 28, 29, 30, 35, 40, 64, 78, 79, 258, 260, 999)), items),
    ),
    max_leaves=6,
)


@MANY
@given(st.data())
def test_any_item_in_any_field(data: st.DataObject) -> None:
    tree = cbor2.loads(encode_step(example_step()))
    owner = data.draw(st.sampled_from((tree, tree["cells"], tree["drafts"], tree["new_rows"][0])))
    owner[data.draw(st.sampled_from((*owner, "other")))] = data.draw(ANY_ITEM)
    settle(cbor2.dumps(tree, canonical=True))


@given(st.binary(max_size=40))
def test_any_bytes(data: bytes) -> None:
    assert not settle(data)


# -- Steps that cannot be messages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": np.array([4, 2])}, r"rows: must be int32\[n\], got int64\[2\]"),
        ({"rows": [4, 2]}, r"rows: must be an array int32\[n\], got list"),
        ({"rows": np.array([[4, 2]], np.int32)}, r"rows: must be int32\[n\], got int32\[1, 2\]"),
        ({"zero": np.empty((1, 3), np.int32)}, r"zero: must be int32\[n, 2\], got int32\[1, 3\]"),
        ({"samples": np.array([1, 0], np.uint8)}, r"samples: must be bool\[n\]"),
        ({"id": 7.0}, "id: must be an integer, got float"),
        ({"id": "7"}, "id: must be an integer, got str"),
        ({"after": 7}, "after must lie below id 7"),
        ({"num_scheduled": np.array([2, 2], np.int32)}, "token_ids must hold as many"),
        ({"token_ids": Csr(np.array([0, 3, 1]), np.empty(1, np.int32))}, "token_ids: indptr must rise"),
        ({"copies": (Copy("during", 0, 1, 2, "move"),)}, "copies: stage must be one of before, after.*'during'"),
        ({"copies": (Copy("before", 0, 1, 2, "swap"),)}, "copies: .*kind one of move, block, state, got.*'swap'"),
        ({"copies": (Copy("before", 0, 2**31, 2, "move"),)}, "copies: group, source and destination must be integers"),
        ({"copies": (Copy("before", 0, 2**70, 2, "move"),)}, "copies: group, source and destination must be integers"),
        ({"copies": (Copy("before", 0, 1.5, 2, "move"),)}, "copies: group, source and destination must be integers"),  # type: ignore[arg-type]  # on purpose
        ({"new_rows": None}, "new_rows: must be a tuple, got NoneType"),
    ],
)
def test_a_step_that_is_none_is_not_sent(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=f"^step: {message}"):
        encode_step(example_step(**changes))


def forged(**values: object) -> SamplingParams:
    """Values that its own checks refuse, or take for others."""
    made = SamplingParams()
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": "\ud800"}, r"request_id: must be text that UTF-8 can hold"),
        ({"request_id": 5}, "request_id: must be text, got int"),
        ({"sampling": forged(temperature=Fraction(1, 3))}, "temperature: must be a number, got Fraction"),
        ({"sampling": forged(temperature=10**400)}, "temperature: must fit a 64-bit float"),
        ({"sampling": forged(temperature=2**53 + 1)}, "temperature: .*holds exactly"),
        ({"sampling": forged(ignore_eos=1)}, "ignore_eos: must be true or false, got int"),
        ({"sampling": forged(stop="x")}, "stop: must be a tuple, got str"),
        ({"encoder": EncoderRead("", 3, encodes=True)}, "encoder: digest: must be bytes or text that names something"),
        ({"encoder": EncoderRead(5, 3, encodes=True)}, "encoder: digest: must be text, got int"),  # type: ignore[arg-type]  # on purpose
        ({"num_prompt_tokens": 9}, "num_prompt_tokens is 9, but there are 4 tokens"),
        (
            {"sampling": SamplingParams(logits_processors=(divmod,))},
            "logits_processors: are functions, which no message",
        ),
        ({"sampling": SamplingParams(bad_words=((3,), "word"))}, "bad_words: must be token ids, and are text"),
        ({"held_ids": (2**31,)}, "held_ids: must be integers of 32 bits"),
    ],
)
def test_a_row_that_cannot_be_written_is_not_sent(changes: dict[str, Any], message: str) -> None:
    new = replace(example_step().new_rows[0], **changes)
    with pytest.raises(HybridKVError, match=rf"^step: new_rows: \[0\]: .*{message}"):
        encode_step(example_step(new_rows=(new,)))


def test_requests_that_ask_for_nothing_new_have_the_bytes_they_had() -> None:
    """A worker of before reads them. The digest is that of the code before the fields of Record.later."""
    plain = encode_step(example_step())
    digest = "6e41aaeda30afb9df55daa7b954246e7a67dc40c42714694f48cb3d5d8893946"
    assert (len(plain), sha256(plain).hexdigest()) == (780, digest)
    new = example_step().new_rows[0]
    asked = replace(new, sampling=replace(new.sampling, presence_penalty=1.0), held_ids=(4,))
    tree = cbor2.loads(encode_step(example_step(new_rows=(asked, new))))
    assert [set(row) - set(tree["new_rows"][1]) for row in tree["new_rows"]] == [{"held_ids"}, set()]
    first, second = (set(row["sampling"]) for row in tree["new_rows"])
    assert first - second == {"presence_penalty"}


def test_a_row_without_an_encoder_has_none_behind_the_wire() -> None:
    step = example_step(new_rows=(replace(example_step().new_rows[0], encoder=None),))
    assert same(decode_step(encode_step(step)), step)


def test_a_failure_says_what_happened_in_any_characters() -> None:
    failure = StepFailure.of(3, RuntimeError("lost \ud800"))
    assert decode_reply(encode_reply(failure)) == StepFailure(3, "RuntimeError", "lost \\ud800")
    assert str(failure) == "RuntimeError: lost \\ud800"
