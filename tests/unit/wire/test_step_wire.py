"""Steps and replies as bytes: exact, one encoding each, and nothing else is taken."""

from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, msgpack

from hybridkv.errors import HybridKVError, SchemaError, WireError
from hybridkv.request import SamplingParams
from hybridkv.step import SCHEMA_VERSION, Cells, Copy, Csr, EncoderRead, Logprobs, NewRow, Step, StepResult, TierCopies
from hybridkv.wire import Reply, StepFailure, decode_reply, decode_step, encode_reply, encode_step, messages
from wire_support import example_step, failures, results, same, steps

MANY = settings(max_examples=2 * settings().max_examples)


# -- round trips


@MANY
@given(steps())
def test_step_message_round_trips(step: Step) -> None:
    assert same(decode_step(encode_step(step)), step)


@given(st.one_of(results(), failures()))
def test_reply_message_round_trips(reply: Reply) -> None:
    assert same(decode_reply(encode_reply(reply)), reply)


@pytest.mark.parametrize(
    ("message", "value", "more"),
    [
        (messages.StepMessage, Step, set()),
        (messages.NewRowMessage, NewRow, set()),
        (messages.EncoderMessage, EncoderRead, {"digest_is_text"}),
        (messages.SamplingMessage, SamplingParams, set()),
        (messages.CsrMessage, Csr, set()),
        (messages.CellsMessage, Cells, set()),
        (messages.CopyMessage, Copy, set()),
        (messages.TierCopiesMessage, TierCopies, set()),
        (messages.ResultMessage, StepResult, set()),
        (messages.LogprobsMessage, Logprobs, set()),
    ],
)
def test_message_fields_match_their_value(message: type[Struct], value: type, more: set[str]) -> None:
    """A new field needs its line in the message, in what the message becomes, and in the strategies of wire_support."""
    assert set(message.__struct_fields__) == {field.name for field in fields(value)} | more


LOGPROBS = Logprobs(
    row=np.array([0, 1], np.int32),
    position=np.array([4, 9], np.int32),
    token=np.array([5, 6], np.int32),
    logprob=np.array([-0.25, -1.5], np.float32),
    rank=np.array([1, 3], np.int32),
    best=Csr.from_lists([[5, 7], [8]]),
    best_logprobs=np.array([-0.25, -2, -0.5], np.float32),
)


# -- one encoding


def test_message_bytes_match_messagepack() -> None:
    """MessagePack, written by hand."""
    expected = "".join(
        (
            "89",  # a map of nine
            "a46b696e64" + "a6726573756c74",  # kind: result
            "a26964" + "07",  # id: 7
            "a773616d706c6564" + "82",  # sampled: a map of two
            "a6696e64707472" + "93" + "a5696e743634" + "9103",  # indptr: int64, [3], 24 bytes
            "c418" + "0000000000000000" + "0100000000000000" + "0100000000000000",
            "a676616c756573" + "93" + "a5696e743332" + "9101" + "c404" + "fe010000",  # values: int32, [1], 510
            "ac6e756d5f6163636570746564" + "c0",  # num_accepted: nil
            "a86c6f6770726f6273" + "c0",  # logprobs: nil
            "a761727269766564" + "93" + "a5696e743332" + "9102",  # arrived: int32, [2], 3 and 4
            "c408" + "0300000004000000",
            "a46c6f7374" + "93" + "a5696e743332" + "9100" + "c400",  # lost: int32, [0]
            "a9617272697665645f73" + "93" + "a7666c6f61743332" + "9102" + "c408" + "0000003f0000003e",  # arrived_s
            "ae736368656d615f76657273696f6e" + "06",  # schema_version: 6
        )
    )
    result = StepResult(
        7, Csr.from_lists([[510], []]), arrived=np.array([3, 4], np.int32), arrived_s=np.array([0.5, 0.125], np.float32)
    )
    assert encode_reply(result).hex() == expected


def test_message_arrays_are_little_endian_in_row_order() -> None:
    tree = msgpack.decode(encode_reply(StepResult(1, Csr.from_lists([[5], []]), logprobs=LOGPROBS)))
    assert tree["logprobs"]["logprob"] == ["float32", [2], bytes.fromhex("000080be" + "0000c0bf")]
    tree = msgpack.decode(encode_step(example_step()))
    assert (tree["kind"], tree["schema_version"]) == ("step", SCHEMA_VERSION)
    assert tree["samples"] == ["bool", [2], b"\1\0"]
    assert tree["state_read"] == ["int32", [2, 3], np.array([-1, 3, 5, -1, 4, 6], "<i4").tobytes()]


def test_equal_steps_give_equal_messages() -> None:
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


def test_decoded_arrays_are_writable_copies() -> None:
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
    """The example's message with its tree changed."""
    tree = msgpack.decode(encode_step(example_step()) if message is None else message)
    change(tree)
    return msgpack.encode(tree)


def put(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Set, or leave out, what stands at ``path``."""

    def change(tree: Any) -> None:  # noqa: ANN401  # MessagePack
        *before, last = path.split(".")
        for name in before:
            tree = tree[int(name) if name.isdigit() else name]
        if value is LEFT_OUT:
            del tree[last]
        else:
            tree[last] = value

    return change


def int32(*values: int) -> list[object]:
    return ["int32", [len(values)], np.array(values, "<i4").tobytes()]


def int64(*values: int) -> list[object]:
    return ["int64", [len(values)], np.array(values, "<i8").tobytes()]


def table(rows: object, columns: object, *values: int) -> list[object]:
    return ["int32", [rows, columns], np.array(values, "<i4").tobytes()]


SPILL = msgpack.decode(encode_step(example_step()))["spills"][0]
COPY = {"stage": "before", "group": 0, "source": 0, "destination": 0, "kind": "move"}
WRONG: list[tuple[str, object, str]] = [
    # fields
    ("id", LEFT_OUT, "missing required field `id`"),
    ("extra", 1, "unknown field `extra`"),
    ("new_rows.0.row", LEFT_OUT, r"\.new_rows\[0\]: .*missing required field `row`"),
    ("new_rows.0.sampling.extra", 1, r"\.new_rows\[0\]\.sampling: .*unknown field `extra`"),
    ("new_rows.0.held_ids", LEFT_OUT, "missing required field `held_ids`"),
    ("new_rows.0.lora", LEFT_OUT, "missing required field `lora`"),
    ("cells.group", LEFT_OUT, r"\.cells: .*missing required field `group`"),
    ("cells", {7: 1}, r"Expected `str`, got `int` - at `key` in `\$\.cells`"),
    ("token_ids.indptr", LEFT_OUT, r"\.token_ids: .*missing required field `indptr`"),
    ("schema_version", LEFT_OUT, "missing required field `schema_version`"),
    # types
    ("id", 7.0, r"\.id: Expected `int`, got `float`"),
    ("id", True, r"\.id: Expected `int`, got `bool`"),
    ("after", None, r"\.after: Expected `int`, got `None`"),
    ("rows", [4, 2], r"\.rows"),
    ("rows", b"\4\0\0\0\2\0\0\0", r"\.rows: Expected `array`, got `bytes`"),
    ("rows", ["int16", [2], b"\4\0\2\0"], r"\.rows\[0\]: Invalid enum value 'int16'"),
    ("rows", ["int32", [2], [4, 2]], r"\.rows\[2\]: Expected `bytes`, got `array`"),
    ("rows", ["int32", [2], b"\4\0\0\0\2\0"], r"\.rows: int32\[2\] has 8 bytes, got 6"),
    ("rows", [*int32(4, 2), 1], r"\.rows: Expected `array` of .*length 3"),
    ("samples", ["bool", [2], b"\1\2"], r"\.samples: bool must be of bytes 0 and 1"),
    ("token_ids", [[1], [2]], r"\.token_ids: Expected `object`, got `array`"),
    ("token_ids.indptr", int32(0, 1, 4), r"\.indptr\[0\]: Invalid enum value 'int32'"),
    ("cells", None, r"\.cells: Expected `object`"),
    ("new_rows", {}, r"\.new_rows: Expected `array`, got `object`"),
    ("new_rows", [5], r"\.new_rows\[0\]: Expected `object`, got `int`"),
    ("new_rows.0.request_id", b"r2", r"\.request_id: Expected `str`, got `bytes`"),
    ("new_rows.0.row", "2", r"\.row: Expected `int`, got `str`"),
    ("new_rows.0.row", -1, r"\.row: Expected `int` >= 0"),
    ("new_rows.0.held_ids", [1 << 31], r"\.held_ids\[0\]: Expected `int` <= 2147483647"),
    ("new_rows.0.sampling.stop", "x", r"\.stop: Expected `array`, got `str`"),
    ("new_rows.0.sampling.stop", [1], r"\.stop\[0\]: Expected `str`, got `int`"),
    ("new_rows.0.sampling.ignore_eos", 1, r"\.ignore_eos: Expected `bool`"),
    ("new_rows.0.sampling.temperature", 1, "in another form"),
    ("new_rows.0.sampling.seed", 1.5, r"\.seed: Expected `bytes`, got `float`"),
    ("new_rows.0.sampling.logprobs", "none", r"\.logprobs: Expected `int | null`, got `str`"),
    ("new_rows.0.sampling.bad_words", [["word"]], r"\.bad_words\[0\]\[0\]: Expected `int`, got `str`"),
    ("new_rows.0.sampling.logit_bias", {3: 1.0}, r"\.logit_bias: Expected `array`, got `object`"),
    ("new_rows.0.sampling.logit_bias", [[4]], r"\.logit_bias\[0\]: Expected `array` of length 2, got 1"),
    ("new_rows.0.sampling.logits_processors", [1], r"\.logits_processors: Expected `array` of length 0"),
    ("new_rows.0.sampling.structured", {"kind": "yaml", "text": ""}, r"\.kind: Invalid enum value 'yaml'"),
    ("new_rows.0.encoder", [b"audio", 30, True], r"\.encoder: Expected `object \| null`, got `array`"),
    ("new_rows.0.encoder.digest", 5, r"\.encoder\.digest: Expected `bytes`, got `int`"),
    ("new_rows.0.encoder.digest", b"", r"\.encoder\.digest: Expected `bytes` of length >= 1"),
    ("new_rows.0.encoder", {"digest": b"\xff", "num_tokens": 1, "encodes": True, "digest_is_text": True}, "utf-8"),
    ("new_rows.0.encoder.num_tokens", 0, r"\.encoder\.num_tokens: Expected `int` >= 1"),
    ("new_rows.0.encoder.encodes", 1, r"\.encoder\.encodes: Expected `bool`"),
    # values that the classes refuse
    ("new_rows.0.sampling.temperature", float("nan"), r"\.new_rows\[0\]\.sampling: temperature must be a number"),
    ("new_rows.0.sampling.top_p", float("nan"), "sampling: top_p must be a number"),
    ("new_rows.0.sampling.repetition_penalty", float("nan"), "sampling: repetition_penalty must be a number"),
    ("new_rows.0.sampling.min_p", -0.5, "sampling: min_p must be between"),
    ("new_rows.0.sampling.max_tokens", 0, "sampling: max_tokens must be at least 1"),
    ("new_rows.0.sampling.stop_token_ids", [-1], "sampling: stop_token_ids must lie in"),
    ("new_rows.0.sampling.presence_penalty", 2.5, "sampling: presence_penalty must be between -2 and 2"),
    ("new_rows.0.sampling.min_tokens", 17, "sampling: min_tokens must be at most max_tokens, 16, got 17"),
    ("new_rows.0.sampling.bad_words", [[]], "each of bad_words must be text or"),
    ("new_rows.0.sampling.logit_bias", [[3, 1.0], [3, 2.0]], "sampling: token ids of logit_bias must ascend"),
    ("new_rows.0.sampling.logit_bias", [[4, 1.0], [3, 2.0]], "sampling: token ids of logit_bias must ascend"),
    ("new_rows.0.sampling.logit_bias", [[-4, 1.0]], "token ids of logit_bias must lie in 0"),
    ("new_rows.0.sampling.logit_bias", [[4, float("nan")]], "logit_bias of token 4 must be a number"),
    (
        "new_rows.0.sampling.structured",
        {"kind": "choice", "text": "[]", "frame": ""},
        "sampling: choice must be a list of texts",
    ),
    # what one field says of another
    ("id", -1, r"\.id: Expected `int` >= 0"),
    ("after", -2, r"\.after: Expected `int` >= -1"),
    ("after", 7, "after must lie below id 7, got 7"),
    ("rows", int32(4), "num_computed is for 2 rows, but there are 1"),
    ("num_computed", int32(16, 0, 0), "num_computed is for 3 rows"),
    ("num_computed", int32(16, -1), "num_computed must be 0 or more"),
    ("num_scheduled", int32(1), "num_scheduled is for 1 rows"),
    ("num_scheduled", int32(2, 2), "token_ids must hold as many tokens of each row as num_scheduled"),
    ("samples", ["bool", [1], b"\1"], "samples is for 1 rows"),
    ("token_ids", {"indptr": int64(0, 4), "values": int32(1, 2, 3, 4)}, "token_ids is for 1 rows"),
    ("drafts", {"indptr": int64(0, 0), "values": int32()}, "drafts is for 1 rows"),
    ("drafts", {"indptr": int64(0, 2, 2), "values": int32(1, 2)}, "drafts must be the last of token_ids"),
    ("token_ids.indptr", int64(), r"\.token_ids: indptr must rise from 0 to the 4 values"),
    ("token_ids.indptr", int64(1, 1, 4), r"\.token_ids: indptr must rise from 0 to the 4 values"),
    ("token_ids.indptr", int64(0, 1, 3), r"\.token_ids: indptr must rise from 0 to the 4 values"),
    ("token_ids.indptr", int64(0, 5, 4), r"\.token_ids: indptr must rise .* never fall"),
    ("token_ids.indptr", int64(0, -(2**63), 4), r"\.token_ids: indptr must rise .* never fall"),
    ("cells.block", int32(9), r"\.cells: group, row, column and block must have one length"),
    ("new_rows.0.num_prompt_tokens", 5, "num_prompt_tokens is 5, but there are 4 tokens"),
    ("state_read", table(1, 3, 1, 2, 3), "state_read is for 1 rows, but there are 2"),
    ("state_writes", table(1, 4, 2, 2, 19, 8), r"state_writes must begin with places in rows, 0 \.\. 1"),
    ("state_writes", table(1, 4, -1, 2, 19, 8), "state_writes must begin with places in rows"),
    # dimensions
    ("zero", int32(1, 3), r"\.zero\[1\]: Expected `array` of length 2, got 1"),
    ("zero", ["int32", 2, b""], r"\.zero\[1\]: Expected `array`, got `int`"),
    ("zero", table(2, 1, 1, 3), r"\.zero\[1\]\[1\]: Invalid enum value 1"),
    ("zero", table(2, 2, 1, 3), r"\.zero: int32\[2, 2\] has 16 bytes, got 8"),
    ("zero", table(-1, 2, 1, 3), r"\.zero\[1\]\[0\]: Expected `int` >= 0"),
    ("zero", table(1.0, 2, 1, 3), r"\.zero\[1\]\[0\]: Expected `int`, got `float`"),
    ("state_read", table(2**40, 0), r"\.state_read\[1\]\[0\]: Expected `int` <= "),
    ("state_read", ["int32", [2, 1, 3], bytes(24)], r"\.state_read\[1\]: Expected `array` of length 2, got 3"),
    ("copies", [COPY | {"stage": "during"}], r"\.copies\[0\]\.stage: Invalid enum value 'during'"),
    ("copies", [COPY | {"kind": 3}], r"\.copies\[0\]\.kind: Expected `str`, got `int`"),
    ("copies", [COPY | {"source": 1 << 31}], r"\.copies\[0\]\.source: Expected `int` <= "),
    ("copies", [["before", 0, 0, 0, "move"]], r"\.copies\[0\]: Expected `object`, got `array`"),
    # transfers
    ("stores", LEFT_OUT, "missing required field `stores`"),
    ("loads", None, r"\.loads: Expected `object`"),
    ("loads.transfer", int64(5), r"\.loads\.transfer\[0\]: Invalid enum value 'int64'"),
    ("loads.extra", 1, r"\.loads: .*unknown field `extra`"),
    ("stores.block", int32(1), r"\.stores: .*unknown field `block`"),
    ("stores.group", int32(1), r"\.stores: transfer, group, source and destination must have one length"),
    ("stores.transfer", int32(4, 6, 4), r"\.stores: the copies of a transfer must be next to each other"),
    ("loads.transfer", int32(6), "a transfer must be in stores or in loads, not in both"),
    ("tier_copies", [COPY | {"stage": "during"}], r"\.tier_copies\[0\]\.stage: Invalid enum value 'during'"),
    ("tier_copies", LEFT_OUT, "missing required field `tier_copies`"),
    ("spills", LEFT_OUT, "missing required field `spills`"),
    ("spills", [SPILL | {"group": int32(1)}], r"\.spills\[0\]: group, block and keys must have one length"),
    ("spills", [SPILL | {"keys": [b"", b"b"]}], r"\.spills\[0\]\.keys\[0\]: Expected `bytes` of length >= 1"),
    ("spills", [SPILL | {"keys": [b"x" * 65, b"b"]}], r"\.spills\[0\]\.keys\[0\]: Expected `bytes` of length <= 64"),
    ("spills", [SPILL | {"number": -1}], r"\.spills\[0\]\.number: Expected `int` >= 0"),
    ("spills", [SPILL, SPILL], "each transfer of spills and fetches must have a number of its own"),
    ("fetches", [SPILL | {"number": 4}], "each transfer of spills and fetches must have a number of its own"),
    ("fetches", [SPILL], "each transfer of spills and fetches must have a number of its own"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_message_with_wrong_field_names_it(path: str, value: object, message: str) -> None:
    with pytest.raises(WireError, match=f"^step.*{message}"):
        decode_step(edited(put(path, value)))


def test_reply_with_wrong_field_is_rejected() -> None:
    result = encode_reply(StepResult(1, Csr.from_lists([[5], []]), np.array([1, 0], np.int32)))
    ended = encode_reply(StepResult(1, Csr.empty(0), arrived=np.array([5], np.int32)))
    failure = encode_reply(StepFailure(1, "E", "m"))
    probable = encode_reply(StepResult(1, Csr.from_lists([[5], []]), logprobs=LOGPROBS))
    for data, path, value, message in (
        (probable, "logprobs.row", int32(0, 2), r"reply: logprobs must be of places in rows, 0 \.\. 1"),
        (probable, "logprobs.row", int32(-1, 1), "logprobs must be of places in rows"),
        (probable, "logprobs.rank", int32(1), "logprobs: row, position, .* must have one length"),
        (probable, "logprobs.best.indptr", int64(0, 3), "must have one length"),
        (probable, "logprobs.best_logprobs", ["float32", [2], bytes(8)], "best_logprobs must be one for each of the 3"),
        (probable, "logprobs.logprob", int32(1, 2), r"\.logprob\[0\]: Invalid enum value 'int32'"),
        (result, "arrived", LEFT_OUT, "missing required field `arrived`"),
        (result, "lost", int64(1), r"\.lost\[0\]: Invalid enum value 'int64'"),
        (result, "lost", int32(3, 3), "reply: arrived and lost must name a transfer once"),
        (ended, "lost", int32(5), "reply: arrived and lost must name a transfer once"),
        (ended, "arrived_s", ["float32", [2], bytes(8)], "arrived_s must be seconds, 0 or more, for each"),
        (ended, "arrived_s", ["float32", [1], bytes.fromhex("000080bf")], "arrived_s must be seconds, 0 or more"),
        (ended, "arrived_s", ["float32", [1], bytes.fromhex("0000c07f")], "arrived_s must be seconds, 0 or more"),
        (ended, "arrived_s", ["float32", [1], bytes.fromhex("0000807f")], "arrived_s must be seconds, 0 or more"),
        (result, "num_accepted", int32(1), "reply: num_accepted is for 1 rows, sampled for 2"),
        (result, "sampled.values", int32(), r"reply\.sampled: indptr must rise from 0 to the 0 values"),
        (failure, "id", -1, r"reply\.id: Expected `int` >= 0"),
        (failure, "error", None, r"reply\.error: Expected `str`, got `None`"),
    ):
        with pytest.raises(WireError, match=message):
            decode_reply(edited(put(path, value), data))


def test_message_of_newer_schema_names_the_version() -> None:
    """Whatever else it holds: fields and kinds of another schema are not even looked at."""
    newer = edited(lambda tree: tree.update(schema_version=SCHEMA_VERSION + 1, kind="bulletin", id="seven"))
    with pytest.raises(SchemaError, match=r"schema version 7, this hybridkv reads version 6: update.*on this side"):
        decode_step(newer)
    with pytest.raises(SchemaError, match="update hybridkv on the other side"):
        decode_step(edited(put("schema_version", 0)))
    for version, got in (("1", "str"), (True, "bool")):
        with pytest.raises(WireError, match=rf"\.schema_version: Expected `int`, got `{got}`"):
            decode_step(edited(put("schema_version", version)))
    with pytest.raises(SchemaError, match="a step of schema version 2 cannot be written"):
        encode_step(replace(example_step(), schema_version=2))


def test_message_of_another_kind_is_rejected() -> None:
    with pytest.raises(WireError, match=r"step\.kind: Invalid value 'result'"):
        decode_step(encode_reply(StepResult(0, Csr.empty(0))))
    with pytest.raises(WireError, match=r"reply\.kind: Invalid value 'step'"):
        decode_reply(encode_step(example_step()))
    for kind, said in (("telegram", "Invalid value 'telegram'"), (5, "got `int`"), (None, "got `null`")):
        with pytest.raises(WireError, match=rf"step\.kind: .*{said}"):
            decode_step(edited(put("kind", kind)))


def test_message_with_missing_extra_or_reordered_bytes_is_rejected() -> None:
    data = encode_step(example_step())
    for length in range(len(data)):
        with pytest.raises(WireError, match="truncated"):
            decode_step(data[:length])
    with pytest.raises(WireError, match="trailing characters"):
        decode_step(data + b"abc")
    with pytest.raises(WireError, match="out of order"):
        decode_step(msgpack.encode(dict(reversed(msgpack.decode(data).items()))))
    for strange in (b"\xff", b"\x90", b"\x05", b"\x80", b"\xdd" + b"\xff" * 4, b"\x91" * 9999, b"\xc1"):
        with pytest.raises(WireError):
            decode_step(strange)


def test_message_with_repeated_field_is_rejected() -> None:
    data = encode_reply(StepFailure(1, "E", "m"))
    assert data.count(b"\xa2id\1") == 1
    twice = bytes([data[0] + 1]) + data[1:].replace(b"\xa2id\1", b"\xa2id\2\xa2id\1")
    with pytest.raises(WireError, match="a field twice"):
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


def test_message_with_flipped_bit_is_rejected_or_another_step() -> None:
    data, accepted = encode_step(example_step()), 0
    for place in range(len(data)):
        for bit in range(8):
            accepted += settle(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
    assert 0 < accepted < 8 * len(data)  # a token id may be any other one


# -- Steps that cannot be messages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": np.array([4, 2])}, r"\.rows\[0\]: Invalid enum value 'int64'"),
        ({"rows": [4, 2]}, r"\.rows: Expected `array` of at least length 3, got 2"),
        ({"rows": np.array([[4, 2]], np.int32)}, r"\.rows\[1\]: Expected `array` of length 1, got 2"),
        ({"zero": np.empty((1, 3), np.int32)}, r"\.zero\[1\]\[1\]: Invalid enum value 3"),
        ({"samples": np.array([1, 0], np.uint8)}, r"\.samples: no array of a message is uint8\[2\]"),
        ({"id": 7.0}, r"\.id: Expected `int`, got `float`"),
        ({"id": "7"}, r"\.id: Expected `int`, got `str`"),
        ({"id": 1 << 64}, r"\.id: can't serialize ints"),
        ({"after": 7}, ": after must lie below id 7"),
        ({"num_scheduled": np.array([2, 2], np.int32)}, ": token_ids must hold as many"),
        ({"token_ids": Csr(np.array([0, 3, 1]), np.empty(1, np.int32))}, r"\.token_ids: indptr must rise"),
        ({"copies": (Copy("during", 0, 1, 2, "move"),)}, r"\.copies\[0\]\.stage: Invalid enum value 'during'"),
        ({"copies": (Copy("before", 0, 1, 2, "swap"),)}, r"\.copies\[0\]\.kind: Invalid enum value 'swap'"),
        ({"copies": (Copy("before", 0, 2**31, 2, "move"),)}, r"\.copies\[0\]\.source: Expected `int` <= 2147483647"),
        ({"copies": (Copy("before", 0, 2**70, 2, "move"),)}, r"\.copies\[0\]\.source: can't serialize ints"),
        ({"copies": (Copy("before", 0, 1.5, 2, "move"),)}, r"\.copies\[0\]\.source: Expected `int`, got `float`"),  # type: ignore[arg-type]  # on purpose
        ({"new_rows": None}, ": 'NoneType' object is not iterable"),
    ],
)
def test_invalid_step_is_not_sent(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=f"^step{message}"):
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
        ({"request_id": "\ud800"}, r"\.request_id: 'utf-8' codec can't encode"),
        ({"request_id": 5}, r"\.request_id: Expected `str`, got `int`"),
        ({"sampling": forged(temperature=Fraction(1, 3))}, r"\.sampling\.temperature: no message holds a Fraction"),
        ({"sampling": forged(temperature=10**400)}, r"\.sampling\.temperature: can't serialize ints"),
        ({"sampling": forged(seed=1 << 255)}, r"\.sampling\.seed: Expected `bytes` of length <= 32"),
        ({"sampling": forged(ignore_eos=1)}, r"\.ignore_eos: Expected `bool`, got `int`"),
        ({"sampling": forged(stop="x")}, r"\.stop: Expected `array`, got `str`"),
        ({"encoder": EncoderRead("", 3, encodes=True)}, r"\.encoder\.digest: Expected `bytes` of length >= 1"),
        ({"encoder": EncoderRead(5, 3, encodes=True)}, r"\.encoder\.digest: Expected `bytes`, got `int`"),  # type: ignore[arg-type]  # on purpose
        ({"num_prompt_tokens": 9}, ": num_prompt_tokens is 9, but there are 4 tokens"),
        (
            {"sampling": SamplingParams(logits_processors=(divmod,))},
            r"\.sampling\.logits_processors\[0\]: are functions, which no message",
        ),
        ({"held_ids": (2**31,)}, r"\.held_ids\[0\]: Expected `int` <= 2147483647"),
    ],
)
def test_step_with_unencodable_row_is_not_sent(changes: dict[str, Any], message: str) -> None:
    new = replace(example_step().new_rows[0], **changes)
    with pytest.raises(HybridKVError, match=rf"^step\.new_rows\[0\]{message}|^step\.new_rows\[0\]\.sampling{message}"):
        encode_step(example_step(new_rows=(new,)))


def test_step_with_text_bad_words_is_not_sent() -> None:
    new = replace(example_step().new_rows[0], sampling=SamplingParams(bad_words=((3,), "word")))
    with pytest.raises(WireError, match="step: bad_words of 'r2' must be token ids, and are text"):
        encode_step(example_step(new_rows=(new,)))


def test_step_with_inexact_float_is_not_sent() -> None:
    new = replace(example_step().new_rows[0], sampling=forged(temperature=2**53 + 1))
    with pytest.raises(WireError, match=r"step: .* a number in another form"):
        encode_step(example_step(new_rows=(new,)))


def test_failure_message_keeps_any_characters() -> None:
    failure = StepFailure.of(3, RuntimeError("lost \ud800"))
    assert decode_reply(encode_reply(failure)) == StepFailure(3, "RuntimeError", "lost \\ud800")
    assert str(failure) == "RuntimeError: lost \\ud800"
