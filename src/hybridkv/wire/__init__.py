"""Steps between processes: one message a Step, one reply each, as bytes without pickle.

    Scheduler --Step--> RemoteWorker.send ~~~bytes~~~> serve --Step--> worker.execute
        ^---- reply --- RemoteWorker.receive <~~bytes~~ serve <--StepResult, or what it raised

Needs numpy and cbor2 only. A message is checked against itself before anything is made of it; numbers that depend on
sizes (rows, blocks, token ids), and the order of Steps, are the worker's and the scheduler's to check, as in process.
"""

from hybridkv.wire.messages import decode_reply, decode_step, encode_reply, encode_step
from hybridkv.wire.records import Reply, StepFailure, Unreadable
from hybridkv.wire.remote import Channel, Executor, RemoteStatistics, RemoteWorker, serve

__all__ = [
    "Channel",
    "Executor",
    "RemoteStatistics",
    "RemoteWorker",
    "Reply",
    "StepFailure",
    "Unreadable",
    "decode_reply",
    "decode_step",
    "encode_reply",
    "encode_step",
    "serve",
]
