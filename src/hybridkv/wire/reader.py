"""The bytes of a message, head by head: what stands next, and how far it goes. Nothing is made of what nobody asks for.

RFC 8949, 4.2.1, core deterministic: every head as short as it can be, lengths definite. Anything else is a WireError,
and so is a length that goes beyond the end, before anything of that length is made. No tag runs anything here: those
of typed arrays and of integers beyond 64 bits are named by the codecs that want them, and no other is taken.
"""

from __future__ import annotations

from typing import Final

from hybridkv.errors import WireError

UNSIGNED: Final = 0
NEGATIVE: Final = 1
BYTES: Final = 2
TEXT: Final = 3
LIST: Final = 4
MAP: Final = 5
TAG: Final = 6

MOST_LISTED: Final = 1 << 19
"""Items of all lists of a message together: rows that begin, and what their sampling lists. An item of a list costs
its reader a hundred times what one of an array does. A thousand rows may begin with 500 stop ids each."""
MOST_SKIPPED: Final = 1 << 18
"""Items of a message that are only passed over, to say what is wrong with it."""
MOST_NESTED: Final = 16
"""How deep these may be. A Step is 6 deep."""

_KINDS: Final = ("int", "int", "bytes", "str", "list", "dict", "CBORTag")
_SIMPLE: Final = {0xF4: "bool", 0xF5: "bool", 0xF6: "NoneType", 0xF9: "float", 0xFA: "float", 0xFB: "float"}
_ONE_BYTE, _INDEFINITE = 24, 31  # the low bits of a head with one more byte, and of one without a length


def not_canonical(why: str) -> WireError:
    """The error for bytes that another encoding of the same value would have."""
    return WireError(f"the message is not in canonical form (RFC 8949, 4.2.1): {why}")


class Reader:
    """A place in ``data``, which goes on with what is taken. at: the next byte."""

    __slots__ = ("_listed", "_skipped", "at", "data")

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self._listed = self._skipped = 0

    def take(self, major: int) -> int:
        """The argument of the next head if that is of type ``major`` (not 7), and passed; else -1, nothing passed."""
        at = self.at
        try:
            first = self.data[at]
        except IndexError:
            raise self.cut() from None
        if first >> 5 != major:
            return -1
        low = first & 31
        if low < _ONE_BYTE:
            self.at = at + 1
            return low
        return self._long(low)

    def take_bytes(self, major: int) -> bytes | None:
        """What the next item holds if it is BYTES or TEXT as asked, and passed; else None."""
        size = self.take(major)
        return None if size < 0 else self.data[self.pass_over(size) : self.at]

    def take_list(self) -> int:
        """The length of the list that is next, -1 if that is none. WireError for more than all lists may have."""
        length = self.take(LIST)
        if length > len(self.data) - self.at:
            raise self.cut()
        self.count_listed(max(0, length))
        return length

    def count_listed(self, items: int) -> None:
        """``items`` more that are made one by one. WireError for more than all lists may have."""
        self._listed += items
        if self._listed > MOST_LISTED:
            raise WireError(f"the lists of a message may have {MOST_LISTED:,} items together, not {self._listed:,}")

    def pass_over(self, size: int) -> int:
        """Go on by ``size`` bytes, which must be there; where they begin."""
        begin = self.at
        if size > len(self.data) - begin:
            raise self.cut()
        self.at = begin + size
        return begin

    def skip(self) -> None:
        """Pass one item of any kind, its lengths alone looked at: for what is refused anyhow, to say why. O(items).

        WireError for more items than MOST_SKIPPED since the reader was made, nested deeper than MOST_NESTED.
        """
        data, at, left = self.data, self.at, 1
        outer: list[int] = []  # items to come in the lists, maps and tags around
        for _ in range(MOST_SKIPPED - self._skipped):
            size = _SIZES[data[at]] if at < len(data) else 0
            left -= 1
            at += size
            if not size:
                self.at = at
                inner, at = self._skip_head(), self.at
                if inner:
                    outer.append(left)
                    left = inner
                    if len(outer) > MOST_NESTED:
                        raise WireError(f"the message has items nested more than {MOST_NESTED} deep: no message has")
            self._skipped += 1
            while outer and not left:
                left = outer.pop()
            if not left:
                self.at = at
                self.pass_over(0)
                return
        raise WireError(f"the message has more than {MOST_SKIPPED:,} items that no message has")

    def kind(self) -> str:
        """What stands next, by the name of Python's type for it."""
        first = self._first()
        if first >> 5 > TAG:
            return _SIMPLE.get(first, "a simple value")
        if first >> 5 == TAG:
            begin, number = self.at, self.take(TAG)
            self.at = begin
            return f"CBORTag {number}"
        return _KINDS[first >> 5]

    def cut(self) -> WireError:
        """The error for an item that goes beyond the end."""
        return WireError(f"the message is cut short: something goes on behind its {len(self.data)} bytes")

    def _first(self) -> int:
        """The first byte of the next head, not passed."""
        if self.at >= len(self.data):
            raise self.cut()
        return self.data[self.at]

    def _long(self, low: int) -> int:
        """The argument of a head with low bits ``low`` that is longer than one byte."""
        if low > _ONE_BYTE + 3:
            raise not_canonical("a length that is not definite" if low == _INDEFINITE else "a reserved head")
        size = 1 << (low - _ONE_BYTE)
        self.at += 1
        number = int.from_bytes(self.data[self.pass_over(size) : self.at], "big")
        # what fits half of these bytes, or the first one
        if number < (_ONE_BYTE if size == 1 else 1 << 4 * size):
            raise not_canonical("a head longer than its number")
        return number

    def _skip_head(self) -> int:
        """Pass a head that _SIZES has not, and the bytes or text behind it; how many items are in it."""
        major = self._first() >> 5
        if major > TAG:
            raise not_canonical("a simple value that no message has")
        number = self.take(major)
        if major in (BYTES, TEXT):
            self.pass_over(number)
        if major < LIST:
            return 0
        items = number if major == LIST else 2 * number if major == MAP else 1
        if items > len(self.data) - self.at:
            raise self.cut()
        return items


def _sizes() -> bytes:
    """Bytes of the item that begins with each byte, 0 where that does not tell or nothing may begin with it."""
    sizes = bytearray(256)
    for major in (UNSIGNED, NEGATIVE, BYTES, TEXT, LIST, MAP):
        for low in range(_ONE_BYTE):
            known = 1 if major <= NEGATIVE else 1 + low if major <= TEXT else int(not low)
            sizes[major << 5 | low] = known
    for first in range(0xE0, 0xF8):
        sizes[first] = 1
    sizes[0xF9:0xFC] = bytes((3, 5, 9))
    return bytes(sizes)


_SIZES: Final = _sizes()
