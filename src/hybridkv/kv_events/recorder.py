"""Record the batches of a publisher in a file, for ``--format kv-events``: block hashes and times, no token ids.

    {"seq": number, "ts": seconds, "events": [BlockStored without token_ids, extra_keys and cache_salt, ...]}

Batches that were published before the recording come from the replay endpoint. Each line is flushed at once.
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
_RESTARTED: Final = 1_000_000
"""A gap of a second of the clock that numbers begin with: another process, not lost batches."""
_FRAMES: Final = ("topic", "number", "batch")
_POSITIONS: Final = (
    *("type", "block_hashes", "parent_block_hash", None, "block_size", None, "medium", None, None),
    *("group_idx", "kv_cache_spec_kind"),
)
"""Fields of vLLM's arrays by position; the recorder drops the fields without a name here."""
_KEPT: Final = tuple(name for name in _POSITIONS if name is not None)
_CHECK: Final = "record a publisher of KV events in this schema"

Numbered = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Recorded:
    """The progress of a recording.

    Attributes:
        batches: batches written.
        blocks: stored blocks in these batches.
        lost: batches that never arrived, by the gaps in their numbers.
    """

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
    """Record the batches that a publisher sends. After an error before the first batch, the file is removed.

    Args:
        endpoint: address of the publisher's PUB socket, as ZeroMQ writes it.
        path: the file to create.
        replay_endpoint: address of its ROUTER socket, for the batches before the recording; without it, the recording
            begins with the next batch.
        topic: record messages whose topic begins with this text.
        seconds: duration of the recording; without it, it lasts until an exception such as KeyboardInterrupt.
        on_batch: called with the progress after each batch.

    Returns:
        The final counts.

    Raises:
        ConfigError: an endpoint is invalid, the replay endpoint does not answer, or a message has another schema.
        FileExistsError: the file exists.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    recorded, last = Recorded(), -1
    try:
        with Path(path).open("x", encoding="utf-8") as file, closing(_connect(context, zmq.SUB, endpoint)) as socket:
            socket.setsockopt_string(zmq.SUBSCRIBE, topic)
            before = [] if replay_endpoint is None else _replay(context, replay_endpoint)
            known, stored = _is_snapshot(before), set[int | bytes]()
            for number, batch in _joined(before, _received(socket, seconds)):
                gap = max(number - last - 1, 0) if recorded.batches else 0
                gap, last = 0 if gap >= _RESTARTED else gap, number
                is_known = (known and number <= before[-1][0]) or _tells_all(number, batch, stored)
                line, blocks = line_of(number, batch, known=is_known)
                recorded = Recorded(recorded.batches + 1, recorded.blocks + blocks, recorded.lost + gap)
                file.write(line)
                file.flush()
                on_batch(recorded)
            return recorded
    except ConfigError:
        if not recorded.batches:
            Path(path).unlink()
        raise
    finally:
        context.destroy(linger=0)


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)  # close without waiting for requests that no publisher will read
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot listen to {endpoint}: {error}; give the publisher's address, like tcp://127.0.0.1:5557"
        ) from error
    return socket


def _replay(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> list[Numbered]:
    """Return the batches that the publisher keeps, from number 0 on."""
    found: list[Numbered] = []
    with closing(_connect(context, zmq.DEALER, endpoint)) as socket:
        socket.send_multipart((b"", bytes(NUMBER_BYTES)))
        while socket.poll(_ANSWER_MS):
            *_, number, batch = socket.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                return found
            found.append((int.from_bytes(number, "big"), batch))
    raise ConfigError(
        f"no answer from {endpoint} within {_ANSWER_MS // 1000} s: check that it is a publisher's replay endpoint"
    )


def _received(socket: zmq.Socket[bytes], seconds: float | None) -> Iterator[Numbered]:
    """Yield messages as they arrive, for ``seconds``."""
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        if socket.poll(_POLL_MS):
            frames = socket.recv_multipart()
            if len(frames) != len(_FRAMES):
                raise ConfigError(
                    f"a message has {len(frames)} frames, but KV events have {len(_FRAMES)} ({', '.join(_FRAMES)}): "
                    "give the PUB endpoint of a publisher of KV events"
                )
            yield int.from_bytes(frames[1], "big"), frames[2]


def _joined(before: Sequence[Numbered], received: Iterator[Numbered]) -> Iterator[Numbered]:
    """Yield ``before``, then the received batches, without the ones that ``before`` already has."""
    yield from before
    last, has_new = before[-1][0] if before else -1, False
    for number, batch in received:
        has_new = has_new or number > last
        if has_new:  # lower numbers after the first new one come from a restarted publisher
            yield number, batch


def _is_snapshot(batches: Sequence[Numbered]) -> bool:
    """Return whether ``batches`` are a snapshot: they have one time, and begin with a clearing."""
    if not batches:
        return False
    decoded = [_decoded(*one) for one in batches]
    _, first = decoded[0]
    cleared = bool(first) and first[0].get("type") == CLEARED
    return cleared and len({seconds for seconds, _ in decoded}) == 1


def _tells_all(number: int, batch: bytes, stored: set[int | bytes]) -> bool:
    """Add the blocks of a batch to ``stored``, and return whether the batch only replaces them after a clearing.

    A publisher sends such a batch after each new subscription. It is the first one with blocks if nothing was replayed.
    """
    _, events = _decoded(number, batch)
    hashes = [event.get("block_hashes") for event in events if event.get("type") == STORED]
    blocks = {key for one in hashes if isinstance(one, list) for key in one if isinstance(key, int | bytes)}
    is_known = bool(events) and events[0].get("type") == CLEARED and (not stored or blocks <= stored)
    stored |= blocks
    return is_known


def line_of(number: int, batch: bytes, *, known: bool) -> tuple[str, int]:
    """Return the line for a batch, and how many blocks it stores.

    Args:
        number: sequence number of the batch.
        batch: the message.
        known: whether the batch is part of a snapshot; a replay makes no requests from it.

    Raises:
        ConfigError: the message has another schema.
    """
    seconds, events = _decoded(number, batch)
    stored = [fields for fields in events if fields.get("type") == STORED]
    for one in stored:
        hashes, size = one.get("block_hashes"), one.get("block_size")
        if not isinstance(hashes, list) or not hashes or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"batch {number} is not in vLLM's schema, with blocks {shown(hashes)} of {shown(size)} tokens: {_CHECK}"
            )
    kept = [{name: _written(one.get(name)) for name in _KEPT} for one in stored]
    line = {"seq": number, "ts": seconds, **({"known": True} if known else {}), "events": kept}
    return json.dumps(line, separators=(",", ":")) + "\n", sum(len(one["block_hashes"]) for one in stored)


def _decoded(number: int, batch: bytes) -> tuple[float, list[Mapping[str, Any]]]:
    """Return the time of a batch, and the fields of its events. ConfigError if it has another schema."""
    try:
        seconds, events, *_ = msgspec.msgpack.decode(batch)
        return real("ts", seconds), [_fields(event) for event in events]
    except (msgspec.DecodeError, TypeError, ValueError, ConfigError) as error:
        raise ConfigError(f"batch {number} is not in vLLM's schema ({error}): {_CHECK}") from error


def _fields(event: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any value that a message holds
    """Return the fields of an event by name, from a map or an array."""
    if isinstance(event, Mapping):
        return event
    return {name: value for name, value in zip(_POSITIONS, event, strict=False) if name is not None}


def _written(value: object) -> object:
    """Return a value for JSON, with whole hashes as hexadecimal digits."""
    if isinstance(value, bytes):
        return value.hex()
    return [_written(one) for one in value] if isinstance(value, list) else value
