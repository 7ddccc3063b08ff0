"""What no end of a wire writes costs its reader little time and memory, whatever it was made to cost."""

import contextlib
import math
import struct
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import cbor2
import numpy as np
import pytest
from cbor2 import CBORTag
from hostile_messages import HOSTILE, VALID, head, large_step, with_item
from hypothesis import given
from hypothesis import strategies as st
from wire_support import example_step, results, same, steps

from hybridkv.errors import SchemaError, WireError
from hybridkv.step import Csr, StepResult
from hybridkv.wire import decode_reply, decode_step, encode_reply, encode_step
from hybridkv.wire.reader import MOST_LISTED

MEGABYTE = 1_000_000


def refused(data: bytes) -> str:
    """What is said of ``data``, which is no Step."""
    with pytest.raises((WireError, SchemaError)) as caught:
        decode_step(data)
    return str(caught.value)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_megabyte_that_is_no_message_is_refused_at_once(kind: str) -> None:
    """A tenth of a second, most of them; what runs tags, or compares colliding names, takes minutes."""
    data = HOSTILE[kind](MEGABYTE)
    begun = time.process_time()
    message = refused(data)
    assert time.process_time() - begun < 4
    assert len(message) < 200


@pytest.mark.parametrize("kind", VALID)
def test_a_megabyte_that_is_a_message_is_read_as_fast(kind: str) -> None:
    data = VALID[kind](MEGABYTE)
    begun = time.process_time()
    step = decode_step(data)
    assert time.process_time() - begun < 4
    assert encode_step(step) == data


def peak(data: bytes) -> int:
    """The most bytes that reading ``data`` held at once."""
    tracemalloc.start()
    try:
        decode_step(data)
    except (WireError, SchemaError):
        pass
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind != "too many stop ids"])  # few are a Step
def test_what_is_refused_takes_no_memory(kind: str) -> None:
    """Nothing is made of it."""
    assert peak(HOSTILE[kind](50_000)) < 30_000


def test_arrays_take_the_memory_of_their_bytes() -> None:
    data = large_step(MEGABYTE)
    assert peak(data) < 1.5 * len(data)


@pytest.mark.parametrize(
    ("claim", "behind"),
    [
        *((head(major, (1 << 32) - 1), 64) for major in (2, 3, 4, 5)),
        *((bytes([major << 5 | 27]) + (1 << 62).to_bytes(8, "big"), 64) for major in (2, 3, 4, 5)),
        (b"\xd8\x4e" + head(2, 1 << 31), 64),
        (b"\xd8\x28\x82\x82" + b"\x1a\x7f\xff\xff\xff" * 2 + b"\xd8\x4e\x58\x40", 64),
    ],
)
def test_claims_beyond_the_bytes_are_refused_before_anything_is_made(claim: bytes, behind: int) -> None:
    """In every field, whatever it would hold."""
    fields = cbor2.loads(encode_step(example_step()))
    for name in fields:
        if name != "kind":
            assert peak(with_item(name, claim + bytes(behind))) < 30_000
            refused(with_item(name, claim + bytes(behind)))


def test_a_message_lists_so_much_and_no_more_on_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """2**19 items, here 2**12: two rows, and stop ids."""
    assert MOST_LISTED == 1 << 19
    for module in ("reader", "records"):
        monkeypatch.setattr(f"hybridkv.wire.{module}.MOST_LISTED", 1 << 12)
    step = example_step()
    new = step.new_rows[0]  # it has one stop string
    few = replace(new, sampling=replace(new.sampling, stop=(), stop_token_ids=()))

    def with_ids(count: int) -> bytes:
        many = replace(new, sampling=replace(new.sampling, stop_token_ids=(3,) * count))
        return encode_step(replace(step, new_rows=(many, few)))

    most = (1 << 12) - 3
    data = with_ids(most)
    assert len(decode_step(data).new_rows[0].sampling.stop_token_ids) == most
    with pytest.raises(WireError, match=r"may have 4,096 items together, not 4,097"):
        with_ids(most + 1)
    rest = most + 1  # no stop string
    words = ((5,),) * (rest // 2)  # a word and its token
    for sampling, held in (
        (replace(few.sampling, logit_bias=tuple((token, 1.0) for token in range(rest))), ()),
        (replace(few.sampling, bad_words=words), ()),
        (few.sampling, (3,) * rest),
    ):
        data_of_arrays = encode_step(replace(step, new_rows=(replace(new, sampling=sampling, held_ids=held), few)))
        assert decode_step(data_of_arrays).new_rows[0].sampling == sampling
        with pytest.raises(WireError, match=r"may have 4,096 items together, not 4,097"):
            encode_step(replace(step, new_rows=(replace(new, sampling=sampling, held_ids=(*held, 3)), few)))
    one_more = data.replace(b"stop_token_ids" + head(4, most), b"stop_token_ids" + head(4, most + 1) + b"\3")
    assert len(one_more) == len(data) + 1
    with pytest.raises(WireError, match=r"lists of a message may have 4,096 items together, not 4,097"):
        decode_step(one_more)


def test_what_a_class_says_of_a_huge_value_is_cut_short() -> None:
    new = example_step().new_rows[0]
    step = example_step(new_rows=(replace(new, sampling=replace(new.sampling, stop_token_ids=(7,) * 9999)),))
    data = encode_step(step)
    message = refused(data[: data.index(b"stop_token_ids") + 17] + b"\x20" + data[data.index(b"stop_token_ids") + 18 :])
    assert "stop_token_ids must lie in 0 .. 2**31 - 1" in message
    assert len(message) < 500


# -- one encoding, without a second one to compare


def heads(data: bytes, at: int = 0) -> Iterator[tuple[int, int]]:
    """Where each head of a canonical message begins, and its length."""
    while at < len(data):
        major, low = data[at] >> 5, data[at] & 31
        long = 1 if low < 24 else 1 + (1 << low - 24)
        yield at, long
        size = int.from_bytes(data[at + 1 : at + long], "big") if long > 1 else low
        at += long + (size if major in (2, 3) else 0)


def longer(data: bytes, at: int, long: int) -> Iterator[bytes]:
    """The message with one head in each longer form; floats as well."""
    if data[at] in (0xF9, 0xFA):
        value = cbor2.loads(data[at : at + long])
        yield data[:at] + b"\xfb" + np.array(value, ">f8").tobytes() + data[at + long :]
        return
    if data[at] >= 0xE0:
        return
    number = int.from_bytes(data[at + 1 : at + long], "big") if long > 1 else data[at] & 31
    for power in range(4):
        if 1 + (1 << power) > long:
            yield (
                data[:at]
                + bytes([data[at] & 0xE0 | 24 + power])
                + number.to_bytes(1 << power, "big")
                + data[at + long :]
            )


def test_every_head_in_a_longer_form_is_refused() -> None:
    data = encode_step(example_step())
    tried = 0
    for at, long in heads(data):
        for other in longer(data, at, long):
            assert other != data
            assert cbor2.loads(other) == cbor2.loads(data)
            assert "canonical" in (said := refused(other)) or "as tag" in said
            tried += 1
    assert tried > 400


@given(st.floats() | st.floats(width=16) | st.floats(width=32))
def test_floats_have_the_bytes_of_cbor2_and_no_others(value: float) -> None:
    data = encode_step(example_step())
    at = data.index(b"\x65min_p") + 6
    wanted = cbor2.dumps(value, canonical=True)
    forms = {wanted}
    for first, name in ((0xF9, ">e"), (0xFA, ">f"), (0xFB, ">d")):
        with contextlib.suppress(OverflowError):
            form = struct.pack(name, value)
            if struct.unpack(name, form)[0] == value or math.isnan(value):
                forms.add(bytes([first]) + form)
    for form in forms:
        try:
            decode_step(data[:at] + form + data[at + 3 :])
            said = "taken"
        except WireError as error:
            said = str(error)
        assert ("canonical" in said) == (form != wanted), (value, form.hex(), said)


@pytest.mark.parametrize("bits", [0, 1, 5, 8, 16, 32, 63, 64, 65, 72, 128, 254, 255])
def test_integers_of_up_to_256_bits_in_the_bytes_of_cbor2_and_no_others(bits: int) -> None:
    new = example_step().new_rows[0]
    for magnitude in {(1 << bits) - 1, 1 << bits >> 1}:  # a seed has 255 bits
        for seed in (magnitude, -magnitude):
            step = example_step(new_rows=(replace(new, sampling=replace(new.sampling, seed=seed)),))
            data = encode_step(step)
            assert same(decode_step(data), step)
            plain, big = cbor2.dumps(seed), max(0, seed if seed >= 0 else -1 - seed).to_bytes(33, "big")
            for length in range(1, 34):
                item = bytes([0xC2 + (seed < 0)]) + cbor2.dumps(big[-length:])
                other = data.replace(b"\x64seed" + plain, b"\x64seed" + item)
                if item != plain and len(big.lstrip(b"\0")) <= length:
                    assert "canonical" in (said := refused(other)) or "at most 256 bits" in said


@pytest.mark.parametrize("number", [1 << 256, -1 - (1 << 256), -(1 << 256)])
def test_integers_of_257_bits(number: int) -> None:
    assert number.bit_length() == 257
    assert "seed: must be an integer of at most 256 bits" in refused(
        encode_step(example_step()).replace(b"\x64seed\5", b"\x64seed" + cbor2.dumps(number))
    )
    most = example_step(id=(1 << 256) - 1)
    assert same(decode_step(encode_step(most)), most)


@pytest.mark.parametrize(
    "form", [b"\x5f\x44abcd\xff", b"\x7f\x61a\xff", b"\x9f\xff", b"\xbf\xff", b"\xff", b"\x1c", b"\xfc"]
)
def test_lengths_that_are_not_definite_and_reserved_heads(form: bytes) -> None:
    for name in cbor2.loads(encode_step(example_step())):
        if name != "kind":
            refused(with_item(name, form))
    refused(b"\xbf" + encode_step(example_step())[1:] + b"\xff")


@pytest.mark.parametrize(
    ("text", "says"), [(b"\x62\xc3\x28", "UTF-8"), (b"\x63\xed\xa0\x80", "UTF-8"), (b"\x62\xc0\x80", "UTF-8")]
)
def test_text_that_is_not_utf_8(text: bytes, says: str) -> None:
    data = encode_step(example_step())
    assert b"\x62r2" in data
    assert says in refused(data.replace(b"\x62r2", text))


# -- another schema


def test_the_version_is_found_behind_whatever_another_schema_has() -> None:
    """Tags, lists in lists and maps of another kind are passed over; nothing is made of them."""
    tree = cbor2.loads(encode_step(example_step())) | {
        "schema_version": 3,
        "kind": ["a", {"b": [CBORTag(4, [1, 2]), 1.5, None, b"x" * 300, "y" * 300]}],
        "id": CBORTag(35, "(a*)*"),
        "a longer name than any other here": {1: 2, "x": [[[]]]},
    }
    assert "schema version 3" in refused(cbor2.dumps(tree, canonical=True))
    tree["id"] = [0] * 300_000  # too much to look through
    assert "id: must be an integer, got list" in refused(cbor2.dumps(tree, canonical=True))


def test_several_names_that_are_wrong() -> None:
    tree = cbor2.loads(encode_step(example_step()))
    del tree["rows"], tree["zero"]
    tree |= {"other": 1, "y" * 200: 2}
    said = refused(cbor2.dumps(tree, canonical=True))
    assert "lacks 'rows', lacks 'zero', has an unknown field 'other'" in said
    tree = cbor2.loads(encode_step(example_step()))
    tree["cells"][7] = 1
    assert "cells: has a field whose name is no text" in refused(cbor2.dumps(tree, canonical=True))


# -- fuzzing


def test_mutated_messages_are_refused_or_are_what_they_encode_to() -> None:
    """Seeded: bytes replaced, inserted, taken out, doubled, and heads put in from other kinds."""
    random = Random("mutations")
    plain = [encode_step(example_step()), encode_step(example_step(new_rows=()))]
    plain += [encode_reply(StepResult(1, Csr.from_lists([[5], []]), np.array([1, 0], np.int32)))]
    starts = [bytes([first]) for first in range(256)] + [
        b"\xd8\x4e",
        b"\xd8\x28",
        b"\xc4\x82",
        b"\xd8\x23",
        b"\xc2\x49",
    ]
    taken = 0
    for _ in range(3000):
        data = bytearray(random.choice(plain))
        for _ in range(random.randint(1, 3)):
            at, length = random.randrange(len(data)), random.randrange(12)
            piece = random.choice(
                (random.randbytes(length), random.choice(starts), data[at : at + length] * 2, bytes([data[at] ^ 1]))
            )
            data[at : at + random.choice((0, 1, len(piece)))] = piece
        message = bytes(data)
        for decode, encode in ((decode_step, encode_step), (decode_reply, encode_reply)):
            try:
                value = decode(message)
            except (WireError, SchemaError) as error:
                assert len(str(error)) < 1000  # noqa: PT017  # any of them
            else:
                assert encode(value) == message  # type: ignore[arg-type]  # its own kind
                taken += 1
    assert 50 < taken < 1500


@given(st.one_of(steps().map(encode_step), results().map(encode_reply)), st.integers(0), st.binary(max_size=3))
def test_cut_and_lengthened_messages(data: bytes, cut: int, behind: bytes) -> None:
    decode = decode_step if b"\x64kind\x64step" in data else decode_reply
    for other in (data[: cut % len(data)], data[: cut % len(data)] + behind + data[cut % len(data) :], data + b"\0"):
        if other != data:
            try:
                value = decode(other)
            except (WireError, SchemaError):
                continue
            assert other == (encode_step if decode is decode_step else encode_reply)(value)  # type: ignore[arg-type]  # same
            assert behind
