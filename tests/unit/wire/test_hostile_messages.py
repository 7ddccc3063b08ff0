"""What no end of a wire writes costs its reader little time and memory, whatever it was made to cost."""

import math
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from msgspec import Raw, msgpack

from hostile_messages import HOSTILE, LONGEST, VALID, head, large_step, with_item
from hybridkv.errors import SchemaError, WireError
from hybridkv.step import SCHEMA_VERSION, Csr, StepResult
from hybridkv.wire import decode_reply, decode_step, encode_reply, encode_step, messages
from wire_support import example_step, same

MEGABYTE = 1_000_000


def refused(data: bytes) -> str:
    """What is said of ``data``, which is no Step."""
    with pytest.raises((WireError, SchemaError)) as caught:
        decode_step(data)
    return str(caught.value)


@pytest.mark.parametrize("kind", HOSTILE)
def test_invalid_megabyte_is_rejected_fast(kind: str) -> None:
    """A tenth of a second, most of them; comparing colliding names takes minutes."""
    data = HOSTILE[kind](MEGABYTE)
    begun = time.process_time()
    message = refused(data)
    assert time.process_time() - begun < 4
    assert len(message) < 500


@pytest.mark.parametrize("kind", VALID)
def test_valid_megabyte_is_read_fast(kind: str) -> None:
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
def test_rejected_message_takes_no_memory(kind: str) -> None:
    """Nothing is made of it."""
    size = 50_000
    most = 4 * size if "long" in kind else 30_000  # the name itself, and in an error of msgspec
    assert peak(HOSTILE[kind](size)) < most


def test_message_arrays_take_the_memory_of_their_bytes() -> None:
    data = large_step(MEGABYTE)
    assert peak(data) < 1.5 * len(data)


@pytest.mark.parametrize(
    "claim",
    [
        *(head(kind, (1 << 32) - 1) for kind in LONGEST),
        b"\x93\xa5int32\x91\x02" + head("bin", 1 << 31),
        b"\x93\xa5int32\x92" + b"\xce\x7f\xff\xff\xff" * 2 + b"\xc4\x40",
    ],
)
def test_message_length_beyond_its_bytes_is_rejected_early(claim: bytes) -> None:
    """In every field, whatever it would hold."""
    for name in msgpack.decode(encode_step(example_step())):
        message = with_item(name, claim + bytes(64))
        assert peak(message) < 30_000
        refused(message)


def test_message_with_too_many_items_is_rejected_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """2**19 items, here 2**12: two rows, and stop ids."""
    assert messages.MOST_LISTED == 1 << 19
    monkeypatch.setattr(messages, "MOST_LISTED", 1 << 12)
    step = example_step(spills=(), fetches=())
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
        data_of_lists = encode_step(replace(step, new_rows=(replace(new, sampling=sampling, held_ids=held), few)))
        assert decode_step(data_of_lists).new_rows[0].sampling == sampling
        with pytest.raises(WireError, match=r"may have 4,096 items together, not 4,097"):
            encode_step(replace(step, new_rows=(replace(new, sampling=sampling, held_ids=(*held, 3)), few)))
    length = b"stop_token_ids\xdc" + most.to_bytes(2, "big")
    one_more = data.replace(length, b"stop_token_ids\xdc" + (most + 1).to_bytes(2, "big") + b"\3")
    assert len(one_more) == len(data) + 1
    with pytest.raises(WireError, match=r"may have 4,096 items together, not 4,097"):
        decode_step(one_more)


def test_message_error_about_a_huge_value_is_short() -> None:
    new = example_step().new_rows[0]
    step = example_step(new_rows=(replace(new, sampling=replace(new.sampling, stop_token_ids=(7,) * 9999)),))
    data = encode_step(step)
    message = refused(data.replace(b"stop_token_ids\xdc\x27\x0f\7", b"stop_token_ids\xdc\x27\x0f\xff"))
    assert "stop_token_ids must lie in 0 .. 2**31 - 1" in message
    assert len(message) < 500


# -- one encoding


def heads(data: bytes) -> Iterator[tuple[int, int, str, int]]:
    """Of each head of a message: where it begins, its bytes, its kind and its number."""
    kinds = {0xC4: "bin", 0xCC: "uint", 0xD0: "int", 0xD9: "str"}
    at = 0
    while at < len(data):
        first = data[at]
        length, kind, number = 1, "", first & 0x0F
        if first < 0x80 or first >= 0xE0:
            kind, number = "uint" if first < 0x80 else "int", first if first < 0x80 else first - 256
        elif first < 0xA0:
            kind = "map" if first < 0x90 else "array"
        elif first < 0xC0:
            kind, number = "str", first & 0x1F
        elif first in (0xDC, 0xDE):
            length, kind = 3, "array" if first == 0xDC else "map"
        elif first == 0xCB:
            length = 9
        elif first not in (0xC0, 0xC2, 0xC3):
            base = max(one for one in kinds if one <= first)
            length, kind = 1 + (1 << first - base), kinds[base]
        if length > 1:
            number = int.from_bytes(data[at + 1 : at + length], "big", signed=kind == "int")
        if kind:
            yield at, length, kind, number
        at += length + (number if kind in ("str", "bin") else 0)


FORMS = {
    "uint": (0xCC, 0xCD, 0xCE, 0xCF),
    "int": (0xD0, 0xD1, 0xD2, 0xD3),
    "str": (0xD9, 0xDA, 0xDB),
    "bin": (0xC4, 0xC5, 0xC6),
    "array": (0xDC, 0xDD),
    "map": (0xDE, 0xDF),
}


def test_message_head_in_a_longer_form_is_rejected() -> None:
    data, tried = encode_step(example_step()), 0
    for at, length, kind, number in heads(data):
        for power, first in enumerate(FORMS[kind], start=kind in ("array", "map")):
            if 1 + (1 << power) > length:
                form = bytes([first]) + number.to_bytes(1 << power, "big", signed=kind == "int")
                other = data[:at] + form + data[at + length :]
                assert msgpack.decode(other) == msgpack.decode(data)
                assert "in another form" in refused(other)
                tried += 1
    assert tried > 400


def test_message_float_of_other_width_is_rejected() -> None:
    data = encode_step(example_step())
    float64 = b"\xcb" + bytes(8)
    assert data.count(b"min_p" + float64) == 1
    for form in (b"\xca" + bytes(4), b"\0"):
        assert "in another form" in refused(data.replace(b"min_p" + float64, b"min_p" + form))
    for value in (math.nan, math.inf, -1.0):
        assert "min_p" in refused(data.replace(b"min_p" + float64, b"min_p" + msgpack.encode(value)))


@pytest.mark.parametrize("bits", [0, 1, 5, 7, 8, 16, 32, 63, 64, 65, 72, 128, 254, 255])
def test_message_seed_has_at_most_255_bits_and_one_form(bits: int) -> None:
    new = example_step().new_rows[0]
    for magnitude in {(1 << bits) - 1, 1 << bits >> 1}:
        for seed in (magnitude, -magnitude):
            step = example_step(new_rows=(replace(new, sampling=replace(new.sampling, seed=seed)),))
            data = encode_step(step)
            assert same(decode_step(data), step)
            name, sign = b"\xa4seed\xc4", b"\xff" if seed < 0 else b"\0"
            at = data.index(name) + len(name)
            own = data[at + 1 : at + 1 + data[at]]
            longer = data[:at] + bytes([len(own) + 1]) + own + sign + data[at + 1 + len(own) :]
            assert "as short as it can be" in (said := refused(longer)) or "length <= 32" in said


@pytest.mark.parametrize("form", [b"\xc1", b"\xc7\0\1", b"\xd4\1\0", b"\xd7\xff" + bytes(8)])
def test_message_head_of_unknown_kind_is_rejected(form: bytes) -> None:
    for name in msgpack.decode(encode_step(example_step())):
        refused(with_item(name, form))


@pytest.mark.parametrize("text", [b"\xa2\xc3\x28", b"\xa3\xed\xa0\x80", b"\xa2\xc0\x80"])
def test_message_text_that_is_not_utf8_is_rejected(text: bytes) -> None:
    data = encode_step(example_step())
    assert data.count(b"\xa2r2") == 1
    assert "utf-8" in refused(data.replace(b"\xa2r2", text))


# -- another schema


def test_message_version_is_found_after_unknown_fields() -> None:
    """Extensions, lists in lists and maps of another kind are passed over; nothing is made of them."""
    tree = msgpack.decode(encode_step(example_step())) | {
        "schema_version": SCHEMA_VERSION + 1,
        "kind": ["a", {"b": [msgpack.Ext(4, b"x"), 1.5, None, b"x" * 300, "y" * 300]}],
        "id": Raw(b"\xd7\xff" + bytes(8)),
        "a longer name than any other here": {1: 2, "x": [[[]]]},
    }
    assert f"schema version {SCHEMA_VERSION + 1}" in refused(msgpack.encode(tree))


# -- fuzzing


def test_mutated_message_is_rejected_or_canonical() -> None:
    """Seeded: bytes replaced, inserted, taken out, doubled, and heads put in from other kinds."""
    random = Random("mutations")
    plain = [encode_step(example_step()), encode_step(example_step(new_rows=()))]
    plain += [encode_reply(StepResult(1, Csr.from_lists([[5], []]), np.array([1, 0], np.int32)))]
    starts = [bytes([first]) for first in range(256)] + [b"\xa5int64", b"\xd4\5", b"\xcf\xff", b"\xc4\0"]
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
