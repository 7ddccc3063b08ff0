"""Publish each request that ended, so that `hybridkv trace record` can record the traffic of a running engine.

    engine: request ended -> RequestPublisher -> PUB -> ended_requests -> lines of a token-exact trace

A message has the tokens of a request and when it arrived. Sending never blocks; without a subscriber it costs nothing
but the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Final, Self

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from hybridkv.arguments import text
from hybridkv.errors import ConfigError
from hybridkv.request import Request

_TOPIC: Final = b"hybridkv.requests"
_MOST_UNSENT: Final = 10_000
"""Messages that wait for a slow subscriber; later ones are lost and leave a gap in the numbers. Chosen by hand."""
_POLL_MS: Final = 200


class EndedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended.

    Attributes:
        arrival_s: when it arrived, in seconds on the engine's clock, as the next two.
        ended_s: when it ended.
        oldest_s: when the oldest request that still waits or runs arrived; infinite without one.
        num_prompt_tokens: tokens of its prompt.
        tokens: token ids of prompt and output, little-endian int32.
        space: digest of salt, adapter, images and encoder input; requests of different spaces share no tokens.
        tenant: tenant that pays for its blocks.
        marks: its resume marks.
        hints: its hints, by name.
    """

    arrival_s: float
    ended_s: float
    oldest_s: float
    num_prompt_tokens: int
    tokens: bytes
    space: str = ""
    tenant: str | None = None
    marks: tuple[int, ...] = ()
    hints: dict[str, object] = {}

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Token ids of prompt and output."""
        return np.frombuffer(self.tokens, "<i4").astype(np.int32)


def space_of(*parts: object) -> str:
    """Return a name for the salt, adapter and inputs of a request that does not reveal them; empty if all are unset.

    Args:
        parts: what distinguishes requests of equal tokens.
    """
    return sha256(repr(parts).encode()).hexdigest()[:16] if any(parts) else ""


class RequestPublisher:
    """Publishes requests as they end.

    Args:
        endpoint: address of the PUB socket, such as ``tcp://127.0.0.1:5559``; port ``*`` chooses a free one.
        clock: the clock of the engine's arrival times, in seconds.

    Attributes:
        endpoint: the address, with its real port.

    Raises:
        ConfigError: the endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, _MOST_UNSENT)
        self._socket.setsockopt(zmq.LINGER, 1000)  # a reader that is gone does not keep the process
        try:
            self._socket.bind(text("endpoint", endpoint))
        except (ConfigError, zmq.ZMQError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cannot publish requests at {endpoint}: {error}; give a free address like tcp://127.0.0.1:5559"
            ) from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._encoder, self._number = msgspec.msgpack.Encoder(), 0
        self._clock = clock

    def ended(self, request: Request, arrival_s: float, oldest_s: float) -> None:
        """Publish a request. Only one thread may publish. It never blocks. O(tokens).

        Args:
            request: the request, with all its tokens.
            arrival_s: when it arrived, on ``clock``.
            oldest_s: when the oldest request that has not ended arrived, on ``clock``; infinite without one.
        """
        ended = EndedRequest(
            arrival_s=arrival_s,
            ended_s=self._clock(),
            oldest_s=oldest_s,
            num_prompt_tokens=request.num_prompt_tokens,
            tokens=tokens_of(request.token_ids(0, request.num_tokens)),
            space=space_of(request.cache_salt, request.lora, request.multimodal, request.encoder),
            tenant=request.tenant,
            marks=request.marks,
            hints=request.hints.given(),
        )
        frames = _TOPIC, self._number.to_bytes(8, "big"), self._encoder.encode(ended)
        self._number += 1
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """Send what waits, for a second at most, and close the socket. A second call does nothing."""
        self._context.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tokens_of(ids: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Return token ids as ``EndedRequest`` keeps them."""
    return np.asarray(ids, "<i4").tobytes()


def ended_requests(
    endpoint: str, seconds: float | None = None, on_lost: Callable[[int], None] = lambda _: None
) -> Iterator[EndedRequest]:
    """Yield the requests that an engine publishes, as they end.

    Args:
        endpoint: address of a RequestPublisher.
        seconds: duration; without it, it lasts until an exception such as KeyboardInterrupt.
        on_lost: called with the number of lost requests at each gap.

    Raises:
        ConfigError: the endpoint is invalid, or sends something else.
    """
    end = None if seconds is None else time.monotonic() + seconds
    decoder, following = msgspec.msgpack.Decoder(EndedRequest), None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.subscribe(b"")
        try:
            socket.connect(text("endpoint", endpoint))
        except (ConfigError, zmq.ZMQError) as error:
            raise ConfigError(
                f"cannot listen to {endpoint}: {error}; give the address of --requests, like tcp://127.0.0.1:5559"
            ) from error
        while end is None or time.monotonic() < end:
            if not socket.poll(_POLL_MS):
                continue
            topic, *rest = socket.recv_multipart()
            if topic != _TOPIC:
                raise ConfigError(f"{endpoint} publishes no requests: give the address of --requests")
            number = int.from_bytes(rest[0], "big")
            if following is not None and number > following:
                on_lost(number - following)
            following = number + 1
            yield decoder.decode(rest[1])
    finally:
        context.destroy(linger=0)
