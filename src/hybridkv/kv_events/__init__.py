"""Cache events on the wire, for routers and stores: the messages of vLLM's schema, over ZeroMQ.

    manager.take_events() -> KVEventPublisher.publish      whoever steps: puts them in a queue that never blocks
                                  |  one thread
                                  v
              Told (what can be hit) -> messages with sequence numbers -> PUB; replay and snapshot -> ROUTER

    record(endpoint, file)                                 a publisher's batches as lines, for replays

Needs pyzmq (extra ``events``), and nothing of a model.
"""

from hybridkv.kv_events.publisher import SNAPSHOT, EventForm, KVEventPublisher
from hybridkv.kv_events.recorder import Recorded, record

__all__ = ["SNAPSHOT", "EventForm", "KVEventPublisher", "Recorded", "record"]
