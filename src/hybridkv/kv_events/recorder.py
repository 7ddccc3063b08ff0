"""Batches of a publisher as lines of a file, for `--format kv-events`: names of blocks and times, and no token ids.

    {"seq": number, "ts": seconds, "events": [BlockStored without token_ids, extra_keys and cache_salt, ...]}

Of what is published before somebody listens a replay endpoint is asked. Each line is on disk when it is written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from hybridkv.arguments import real
from hybridkv.errors import ConfigError
from hybridkv.kv_events.publisher import CLEARED, NUMBER_BYTES, STORED
from hybridkv.units import shown

_POLL_MS: Final = 200
_ANSWER_MS: Final = 5000
_FRAMES: Final = ("topic", "number", "batch")
_POSITIONS: Final = (
    *("type", "block_hashes", "parent_block_hash", None, "block_size", None, "medium", None, None),
    *("group_idx", "kv_cache_spec_kind"),
)
"""Of vLLM's arrays; None is not kept."""
_KEPT: Final = tuple(name for name in _POSITIONS if name is not None)

Numbered = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Recorded:
    """So far. batches: written. blocks: stored in them. lost: batches that nobody got, by their numbers."""

    batches: int = 0
    blocks: int = 0
    lost: int = 0


def record(
    endpoint: str,
    path: str | Path,
    *,
    replay_endpoint: str | None = None,
    topic: str = "",
    seconds: float | None = None,
    on_batch: Callable[[Recorded], None] = lambda _: None,
) -> Recorded:
    """Listen to ``endpoint``, as ZeroMQ names it, for ``seconds`` (None: until an exception), and write to ``path``.

    replay_endpoint: asked for all batches from the first on; without it the recording begins now. topic: of messages.
    Raises ConfigError for endpoints that are none, where nobody answers, and for messages of another schema,
    FileExistsError for a file that is there. A file of no batch is left behind only where nothing was wrong.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    told, last = Recorded(), -1
    try:
        with Path(path).open("x", encoding="utf-8") as file, closing(_connected(context, zmq.SUB, endpoint)) as socket:
            socket.setsockopt_string(zmq.SUBSCRIBE, topic)
            before = [] if replay_endpoint is None else _asked(context, replay_endpoint)
            known = _stands_for_others(before)
            for number, batch in _followed(before, _heard(socket, seconds)):
                gap = max(number - last - 1, 0) if told.batches else 0
                last = number
                line, blocks = line_of(number, batch, known=known and number <= before[-1][0])
                told = Recorded(told.batches + 1, told.blocks + blocks, told.lost + gap)
                file.write(line)
                file.flush()
                on_batch(told)
            return told
    except ConfigError:
        if not told.batches:
            Path(path).unlink()
        raise
    finally:
        context.destroy(linger=0)


def _connected(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)  # what is asked of nobody is not waited for
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen to {endpoint}: {error}") from error
    return socket


def _asked(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> list[Numbered]:
    """All batches that are kept, from number 0 on."""
    found: list[Numbered] = []
    with closing(_connected(context, zmq.DEALER, endpoint)) as socket:
        socket.send_multipart((b"", bytes(NUMBER_BYTES)))
        while socket.poll(_ANSWER_MS):
            *_, number, batch = socket.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                return found
            found.append((int.from_bytes(number, "big"), batch))
    raise ConfigError(f"nobody answers at {endpoint}: is a publisher's replay endpoint there?")


def _heard(socket: zmq.Socket[bytes], seconds: float | None) -> Iterator[Numbered]:
    """Messages, as they come."""
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        if socket.poll(_POLL_MS):
            frames = socket.recv_multipart()
            if len(frames) != len(_FRAMES):
                raise ConfigError(
                    f"a message has {len(frames)} frames, not {', '.join(_FRAMES)}: no KV events are there"
                )
            yield int.from_bytes(frames[1], "big"), frames[2]


def _followed(before: Sequence[Numbered], heard: Iterator[Numbered]) -> Iterator[Numbered]:
    """``before``, then what comes, but for what of ``before`` is heard again."""
    yield from before
    last, behind = before[-1][0] if before else -1, False
    for number, batch in heard:
        behind = behind or number > last
        if behind:  # from then on numbers that begin anew are another publisher's
            yield number, batch


def _stands_for_others(batches: Sequence[Numbered]) -> bool:
    """Whether they are all that is cached, in place of batches not kept: made at one time, behind a clearing."""
    if not batches:
        return False
    decoded = [_decoded(*one) for one in batches]
    _, first = decoded[0]
    cleared = bool(first) and first[0].get("type") == CLEARED
    return cleared and len({seconds for seconds, _ in decoded}) == 1


def line_of(number: int, batch: bytes, *, known: bool) -> tuple[str, int]:
    """What is kept of a batch, and how many blocks. ConfigError for what is no batch."""
    seconds, events = _decoded(number, batch)
    stored = [fields for fields in events if fields.get("type") == STORED]
    for one in stored:
        hashes, size = one.get("block_hashes"), one.get("block_size")
        if not isinstance(hashes, list) or not hashes or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"batch {number} is none of vLLM's schema: blocks {shown(hashes)} of {shown(size)} tokens"
            )
    kept = [{name: _written(one.get(name)) for name in _KEPT} for one in stored]
    line = {"seq": number, "ts": seconds, **({"known": True} if known else {}), "events": kept}
    return json.dumps(line, separators=(",", ":")) + "\n", sum(len(one["block_hashes"]) for one in stored)


def _decoded(number: int, batch: bytes) -> tuple[float, list[Mapping[str, Any]]]:
    """Its time, and the fields of its events. ConfigError for what is no batch."""
    try:
        seconds, events, *_ = msgspec.msgpack.decode(batch)
        return real("ts", seconds), [_fields(event) for event in events]
    except (msgspec.DecodeError, TypeError, ValueError, ConfigError) as error:
        raise ConfigError(f"batch {number} is none of vLLM's schema: {error}") from error


def _fields(event: Any) -> Mapping[str, Any]:  # noqa: ANN401 - whatever a message holds
    """By name, of either form."""
    if isinstance(event, Mapping):
        return event
    return {name: value for name, value in zip(_POSITIONS, event, strict=False) if name is not None}


def _written(value: object) -> object:
    """As JSON has it: whole hashes as hexadecimal digits."""
    if isinstance(value, bytes):
        return value.hex()
    return [_written(one) for one in value] if isinstance(value, list) else value
