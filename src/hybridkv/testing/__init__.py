"""Tools to test code that is built on hybridkv.

    Scheduler --Step--> FakeWorker        a worker in plain Python that checks every token and state that a step reads
    take_events() ----> EventFollower     follows the events of a cache and compares them with the cache

    attention_config, model_config, natural_model_config     small configs for both

In a FakeWorker the keys and values of a token, and a recurrent state, are a digest of all tokens so far (DigestModel).
"""

from hybridkv.testing.configs import attention_config, model_config, natural_model_config
from hybridkv.testing.event_follower import DifferenceError, EventFollower
from hybridkv.testing.fake_tier import ContentError, TierFaults
from hybridkv.testing.fake_worker import FakeWorker, digest_model
from hybridkv.testing.model import DigestModel

__all__ = [
    "ContentError",
    "DifferenceError",
    "DigestModel",
    "EventFollower",
    "FakeWorker",
    "TierFaults",
    "attention_config",
    "digest_model",
    "model_config",
    "natural_model_config",
]
