"""Send cache events to routers and stores: messages in vLLM's schema, over ZeroMQ.

    manager.take_events() -> KVEventPublisher.publish      puts a batch in a queue; the engine's step never waits
                                  |  one thread
                                  v
              ExactEvents, if asked for -> messages with sequence numbers -> PUB; replays and snapshots -> ROUTER

    engine: request ended -> RequestPublisher -> PUB       another socket, for recordings alone

    record(endpoint, file)                                 writes a publisher's batches to a file, for replays

Needs pyzmq (extra ``events``). It needs no model and no torch.
"""

from hybridkv.kv_events.publisher import SNAPSHOT, EventForm, KVEventPublisher
from hybridkv.kv_events.recorder import Recorded, record
from hybridkv.kv_events.requests import EndedRequest, RequestPublisher, ended_requests

__all__ = [
    "SNAPSHOT",
    "EndedRequest",
    "EventForm",
    "KVEventPublisher",
    "Recorded",
    "RequestPublisher",
    "ended_requests",
    "record",
]
