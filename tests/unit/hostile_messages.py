"""Messages of any size that no end of a wire writes, made to cost their reader much."""

from collections.abc import Callable
from dataclasses import replace

import cbor2
import numpy as np
from wire_support import example_step

from hybridkv.request import SamplingParams
from hybridkv.step import Csr
from hybridkv.wire import encode_step

PRIME = (1 << 61) - 1  # Python's hash of an integer is what is left of it by this one
MINIMAL = example_step(new_rows=(), copies=())


def head(major: int, number: int) -> bytes:
    """A head, as short as it can be."""
    return bytes([cbor2.dumps(number)[0] | major << 5]) + cbor2.dumps(number)[1:]


def with_item(name: str, item: bytes) -> bytes:
    """The message of the example with ``item`` as its top-level field ``name``."""
    fields = {**cbor2.loads(encode_step(MINIMAL)), name: None}
    ordered = sorted(fields, key=cbor2.dumps)
    return bytes([0xA0 + len(ordered)]) + b"".join(
        cbor2.dumps(one) + (item if one == name else cbor2.dumps(fields[one], canonical=True)) for one in ordered
    )


def _colliding(size: int) -> bytes:
    keys = [b"\xc2\x4b" + (PRIME * (i + (1 << 20))).to_bytes(11, "big") + b"\0" for i in range(size // 14)]
    return with_item("id", head(5, len(keys)) + b"".join(keys))


def _rows(size: int, **sampling: tuple[int, ...] | tuple[str, ...]) -> bytes:
    new = replace(example_step().new_rows[0], sampling=SamplingParams(**sampling))  # type: ignore[arg-type]  # by name
    one = len(encode_step(replace(MINIMAL, new_rows=(new,)))) - len(encode_step(MINIMAL))
    return encode_step(replace(MINIMAL, new_rows=(new,) * (size // one)))


def large_step(size: int) -> bytes:
    """A Step that is valid, nearly all of it token ids."""
    rows = size // 128
    int32s = np.arange(rows, dtype=np.int32)
    return encode_step(
        replace(
            MINIMAL,
            rows=int32s,
            num_computed=int32s,
            num_scheduled=np.full(rows, 24, np.int32),
            samples=np.ones(rows, np.bool_),
            token_ids=Csr(np.arange(rows + 1, dtype=np.int64) * 24, np.arange(rows * 24, dtype=np.int32)),
            drafts=Csr.empty(rows),
            state_read=np.empty((0, 3), np.int32),
            state_writes=np.empty((0, 4), np.int32),
        )
    )


def _stop_ids(size: int) -> bytes:
    """One row with as many stop ids of one byte as there may be."""
    new = example_step().new_rows[0]
    one = replace(new, sampling=replace(new.sampling, stop_token_ids=(7,) * min(size, (1 << 19) - 2)))
    return encode_step(replace(MINIMAL, new_rows=(one,)))


VALID: dict[str, Callable[[int], bytes]] = {
    "a Step of token ids": large_step,
    "rows that begin": _rows,
    "stop ids": _stop_ids,
}
HOSTILE: dict[str, Callable[[int], bytes]] = {
    "a decimal fraction": lambda size: with_item("id", b"\xc4\x82\0\xc2" + head(2, size) + b"\xff" * size),
    "decimal fractions": lambda size: with_item("id", head(4, size // 8) + b"\xc4\x82\x1a\0\7\0\0\1" * (size // 8)),
    "a bigfloat": lambda size: with_item("id", b"\xc5\x82\0\xc2" + head(2, size) + b"\xff" * size),
    "bigfloats": lambda size: with_item("id", head(4, size // 8) + b"\xc5\x82\x1a\0\1\0\0\1" * (size // 8)),
    "a regex": lambda size: with_item("id", b"\xd8\x23" + head(3, size // 4 * 4) + b"a|b|" * (size // 4)),
    "regexes": lambda size: with_item(  # no two alike: Python remembers patterns
        "id", head(4, size // 28) + b"".join(b"\xd8\x23\x78\x18(?i)[\\x00-\\uffff]%07d" % i for i in range(size // 28))
    ),
    "a bignum": lambda size: with_item("id", b"\xc2" + head(2, size) + b"\xff" * size),
    "a date": lambda size: with_item("id", b"\xc0" + head(3, size) + b"2" * size),
    "rationals": lambda size: with_item("id", head(4, size // 5) + b"\xd8\x1e\x82\x02\x04" * (size // 5)),
    "shared lists": lambda size: with_item("id", head(4, size // 6) + b"\xd8\x1c\x81\xd8\x1d\0" * (size // 6)),
    "string references": lambda size: with_item(
        "id", b"\xd9\1\0" + head(4, size // 4) + b"\x63abc" + b"\xd8\x19\0\0" * (size // 4 - 1)
    ),
    "colliding names": _colliding,
    "deep lists": lambda size: with_item("id", b"\x81" * size + b"\0"),
    "deep tags": lambda size: with_item("id", b"\xc6" * size + b"\0"),
    "many tiny items": lambda size: with_item("id", head(4, size) + b"\0" * size),
    "many empty lists": lambda size: with_item("id", head(4, size) + b"\x80" * size),
    "many empty maps, behind": lambda size: with_item("z" * 20, head(4, size) + b"\xa0" * size),
    "empty lists as rows": lambda size: with_item("new_rows", head(4, size) + b"\x80" * size),
    "dimensions": lambda size: with_item("zero", b"\xd8\x28\x82" + head(4, size) + b"\0" * size + b"\xd8\x4e\x40"),
    "too many stop ids": lambda size: _stop_ids(1).replace(
        b"stop_token_ids\x81\7", b"stop_token_ids" + head(4, size) + bytes(size)
    ),
    "nothing behind lengths": lambda size: with_item(
        "rows", b"\xd8\x4e\x5b" + (1 << 62).to_bytes(8, "big") + bytes(size)
    ),
}
