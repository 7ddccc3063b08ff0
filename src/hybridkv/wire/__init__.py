"""Steps between processes: one message a Step, one reply each, as bytes without pickle.

    Scheduler --Step--> RemoteWorker.send ~~~bytes~~~> serve --Step--> worker.execute
        ^---- reply --- RemoteWorker.receive <~~bytes~~ serve <--StepResult, or what it raised

A worker runs every Step that its connection brings. A pipe connects parent and child. A Unix socket is open to
everybody who may write to its file. On TCP both ends must show one key (``Listener``, ``connect``); other TCP
connections are refused. Messages are bounded all the same: one of another kind, of any size up to ``MOST_BYTES``,
costs time and memory in proportion to its bytes, and raises a named error.

Needs numpy and msgspec only. Both ends check each message against itself. The worker and the scheduler check the rest,
as in process: numbers that depend on sizes (rows, blocks, token ids), and the order of Steps.
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
