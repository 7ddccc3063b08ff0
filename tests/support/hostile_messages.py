"""Messages of any size that no end of a wire writes, made to cost their reader much."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from msgspec import Raw, msgpack

from hybridkv.request import SamplingParams
from hybridkv.step import Csr
from hybridkv.wire import encode_step
from wire_support import example_step

LONGEST: Final = {"str": 0xDB, "bin": 0xC6, "array": 0xDD, "map": 0xDF, "ext": 0xC9}
"""Of each kind of item: the first byte of its head with a length of 32 bits."""
MINIMAL = example_step(new_rows=(), copies=(), tier_copies=(), spills=(), fetches=())


def head(kind: str, length: int) -> bytes:
    """A head in its longest form."""
    return bytes([LONGEST[kind]]) + length.to_bytes(4, "big")


def with_item(name: str, item: bytes) -> bytes:
    """The message of the example with ``item`` as its top-level field ``name``."""
    return msgpack.encode({**msgpack.decode(encode_step(MINIMAL)), name: Raw(item)})


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
    "an extension": lambda size: with_item("id", head("ext", size) + b"\5" + bytes(size)),
    "extensions": lambda size: with_item("id", head("array", size // 3) + b"\xd4\5\0" * (size // 3)),
    "times": lambda size: with_item("id", head("array", size // 6) + b"\xd6\xff\0\0\0\0" * (size // 6)),
    "a long name": lambda size: with_item("id", head("str", size) + b"x" * size),
    "an unknown field of a long name": lambda size: with_item("x" * size, b"\0"),
    "another kind of a long name": lambda size: with_item("kind", head("str", size) + b"x" * size),
    "colliding names": lambda size: with_item(  # Python's hash of an integer is what is left of it by 2**61 - 1
        "id",
        head("map", size // 10)
        + b"".join(b"\xcf" + (((1 << 61) - 1) * (i % 8) + i).to_bytes(8, "big") + b"\0" for i in range(size // 10)),
    ),
    "deep lists": lambda size: with_item("id", b"\x91" * size + b"\0"),
    "deep maps behind": lambda size: with_item("z" * 20, b"\x81\xa0" * (size // 2) + b"\0"),
    "many tiny items": lambda size: with_item("id", head("array", size) + b"\0" * size),
    "many empty lists": lambda size: with_item("id", head("array", size) + b"\x90" * size),
    "many empty maps, behind": lambda size: with_item("z" * 20, head("array", size) + b"\x80" * size),
    "empty lists as rows": lambda size: with_item("new_rows", head("array", size) + b"\x90" * size),
    "empty maps as copies": lambda size: with_item("copies", head("array", size) + b"\x80" * size),
    "dimensions": lambda size: with_item("zero", b"\x93\xa5int32" + head("array", size) + b"\0" * size + b"\xc4\0"),
    "a long dtype": lambda size: with_item("zero", b"\x93" + head("str", size) + b"x" * size + b"\x91\0\xc4\0"),
    "too many stop ids": lambda size: _stop_ids(1).replace(
        b"stop_token_ids\x91\7", b"stop_token_ids" + head("array", size) + bytes(size)
    ),
    "nothing behind lengths": lambda size: with_item(
        "rows", b"\x93\xa5int32\x91" + b"\xce" + bytes(4) + head("bin", (1 << 32) - 1) + bytes(size)
    ),
}
