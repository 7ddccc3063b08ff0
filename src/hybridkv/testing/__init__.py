"""Tools for testing what is built on hybridkv.

Scheduler --Step--> FakeWorker      a worker in plain Python: the KV of a token, and a recurrent state, is a digest
of all tokens so far; what a step reads is compared with its row's history
take_events() ----> EventFollower   believes what events say, and compares it with the cache

attention_config, model_config, natural_model_config    small configs, of specs made in one line
"""

from hybridkv.testing.configs import attention_config, model_config, natural_model_config
from hybridkv.testing.event_follower import DifferenceError, EventFollower
from hybridkv.testing.fake_worker import ContentError, FakeWorker, digest_model
from hybridkv.testing.model import DigestModel

__all__ = [
    "ContentError",
    "DifferenceError",
    "DigestModel",
    "EventFollower",
    "FakeWorker",
    "attention_config",
    "digest_model",
    "model_config",
    "natural_model_config",
]
