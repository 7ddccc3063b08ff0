"""Stream: an output read while it grows, by whoever also drives the engine.

A stream keeps no increments: it knows how far its output was read, and an increment is everything behind that. So a
slow reader costs no memory beyond the output itself (at most ``max_tokens``), and finds all that is new in one piece.
The engine runs only while somebody asks for what is not there yet: ``next`` drives it, for all requests at once, until
its own has something new. Nothing runs ahead of every reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Self

from hybridkv.runner.completion import Cursor, Increment, Progress


class Stream(Iterator[Increment]):
    """Increments of a request's output; with ``n`` outputs, of all of them, told apart by ``output``.

    outputs: of one request. run: runs one step of the engine. abort: ends a request by its id.
    A reader that is done early calls ``close`` (or leaves a ``with``): else the request goes on with the others.
    """

    def __init__(self, outputs: Sequence[Progress], run: Callable[[], None], abort: Callable[[str], bool]) -> None:
        self._cursors = [Cursor(one, number) for number, one in enumerate(outputs)]
        self._run, self._abort = run, abort
        self.request_id = self._cursors[0].request_id

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return not self._cursors

    def __next__(self) -> Increment:
        """The next increment, run for if need be. An error of the forward passes through as from ``Engine.step``.

        Raises as ``take``, and CacheError once the engine is closed.
        """
        while not self.ended:
            if (new := self.take()) is not None:
                return new
            self._run()
        raise StopIteration

    def take(self) -> Increment | None:
        """An increment if one is there; nothing is run. O(outputs).

        Raises what ended an output, such as an error of the tokenizer; other outputs can be read on.
        """
        for place, cursor in enumerate(self._cursors):
            if cursor.error is not None:
                del self._cursors[place]
                raise cursor.error
            if (new := cursor.take()) is not None:
                # outputs take turns
                self._cursors = self._cursors[place + 1 :] + self._cursors[: place + 1]
                self._cursors = [one for one in self._cursors if not one.ended]
                return new
        return None

    def close(self) -> None:
        """Read no further; outputs that are not finished are aborted."""
        for cursor in self._cursors:
            self._abort(cursor.request_id)
        self._cursors = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
