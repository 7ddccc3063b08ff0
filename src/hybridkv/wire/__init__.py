"""Steps between processes: one message for each Step and one for each reply, as bytes without pickle.

    Scheduler --Step--> RemoteWorker.send ~~~bytes~~~> serve --Step--> worker.execute
        ^---- reply --- RemoteWorker.receive <~~bytes~~ serve <--StepResult, or the error that it raised

A worker runs every Step that arrives on its connection. A pipe connects parent and child. A Unix socket is open to
every process that may write to its file. On TCP both ends must show the same key (``Listener``, ``connect``); other TCP
connections are refused. Messages are limited in any case. An invalid message of at most ``MOST_BYTES`` costs time and
memory in proportion to its bytes, and raises a named error.

This package needs numpy and msgspec only. Both ends check each message for consistency. The worker and the scheduler
check the rest, as in one process: numbers that depend on sizes (rows, blocks, token ids), and the order of Steps.
"""

from hybridkv.wire.connection import (
    MOST_BYTES,
    Channel,
    Executor,
    Link,
    Listener,
    RemoteStatistics,
    RemoteWorker,
    connect,
    serve,
)
from hybridkv.wire.messages import Reply, StepFailure, Unreadable, decode_reply, decode_step, encode_reply, encode_step

__all__ = [
    "MOST_BYTES",
    "Channel",
    "Executor",
    "Link",
    "Listener",
    "RemoteStatistics",
    "RemoteWorker",
    "Reply",
    "StepFailure",
    "Unreadable",
    "connect",
    "decode_reply",
    "decode_step",
    "encode_reply",
    "encode_step",
    "serve",
]
