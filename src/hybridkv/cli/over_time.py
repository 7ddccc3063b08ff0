"""A replay over time, in small: what was found, who ran and waited, how much memory was held."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from hybridkv.cli.output import console, share
from hybridkv.cli.pictures import sparkline
from hybridkv.simulator import Progress
from hybridkv.units import format_count

_WIDTH: Final = 46
_FEWEST: Final = 8
"""Looks that make a picture."""
_MOST: Final = 4096
_NAME_COLUMNS: Final = 17


class OverTime:
    """What replays told of their progress, the last few thousand looks evenly thinned. hits: whether they are known."""

    def __init__(self, *, hits: bool = True) -> None:
        self._hits = hits
        self._kept: list[Progress] = []
        self._newest: Progress | None = None
        self._every, self._skipped = 1, 0

    def see(self, now: Progress) -> None:
        """One more look."""
        self._newest = now
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._kept.append(now)
        if len(self._kept) == _MOST:
            self._kept = self._kept[::2]
            self._every *= 2

    def show(self) -> None:
        """Lines of pictures; nothing of what was over at once."""
        seen = self._seen()
        if len(seen) < _FEWEST or not seen[-1].time_s:
            return
        out = console()
        for line in self.lines():
            out.print(line, soft_wrap=True)

    def lines(self) -> Iterator[str]:
        """Each a name, a character for each part of the time, and what is worth a number."""
        seen = self._seen()
        last = seen[-1]
        seconds = last.time_s
        parts = _parts(seen, seconds)
        yield f"{'over time':<{_NAME_COLUMNS}} 0 .. {seconds:,.1f} s"
        found = [_found(before[-1], part[-1]) for before, part in pairwise(parts)]
        whole = last.hit_tokens / last.prompt_tokens if last.prompt_tokens else 0.0
        if self._hits:
            yield _line("hit rate", sparkline(found, 1.0), f"{share(whole)} of all")
        for name, counts in (
            ("running", [max(one.running for one in part) for part in parts[1:]]),
            ("waiting", [max(one.waiting for one in part) for part in parts[1:]]),
        ):
            yield _line(name, sparkline(counts), f"█ is {format_count(max(counts))}" if any(counts) else "none")
        usage = [max(one.usage for one in part) for part in parts[1:]]
        yield _line("memory in use", sparkline(usage, 1.0), "█ is all of it")

    def _seen(self) -> list[Progress]:
        """The looks that are kept, and the newest, which says how it ended."""
        if self._newest is None or (self._kept and self._kept[-1] is self._newest):
            return self._kept
        return [*self._kept, self._newest]


def _parts(seen: list[Progress], seconds: float) -> list[list[Progress]]:
    """The looks before the first, then those of each part of the time; one without any has the last before it."""
    parts = [[Progress(0, 0, 0, 0, 0.0, 0, 0, 0.0, 0)], *([] for _ in range(_WIDTH))]
    for one in seen:
        parts[min(int(one.time_s / seconds * _WIDTH), _WIDTH - 1) + 1].append(one)
    for before, part in pairwise(parts):
        if not part:
            part.append(before[-1])
    return parts


def _found(before: Progress, now: Progress) -> float:
    """Of what began in between."""
    prompts = now.prompt_tokens - before.prompt_tokens
    return (now.hit_tokens - before.hit_tokens) / prompts if prompts else 0.0


def _line(name: str, drawn: str, said: str) -> str:
    return f"{name:<{_NAME_COLUMNS}} {drawn:<{_WIDTH}} {said}"
