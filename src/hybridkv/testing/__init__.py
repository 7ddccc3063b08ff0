"""Tools for testing what is built on hybridkv, and hybridkv itself.

    Scheduler --Step--> FakeWorker      a worker in plain Python: the KV of a token is a digest of all tokens so far,
        |                   |           and every token that a step reads is compared with its row's history
        +------ Rig --------+           drives both and an Oracle, and compares everything after each action
                 |
              Oracle                    manager and scheduler in plain Python: lists of tokens, dicts of prefixes

hybridkv.testing.strategies offers hypothesis strategies for requests and pools; it needs hypothesis.
"""

from hybridkv.testing.configs import attention_config
from hybridkv.testing.fake_worker import ContentError, FakeWorker
from hybridkv.testing.model import DigestModel
from hybridkv.testing.oracle import Oracle, OracleRequest
from hybridkv.testing.oracle_pool import OraclePool
from hybridkv.testing.random_run import random_options, random_run
from hybridkv.testing.rig import OracleError, Rig, RigOptions

__all__ = [
    "ContentError",
    "DigestModel",
    "FakeWorker",
    "Oracle",
    "OracleError",
    "OraclePool",
    "OracleRequest",
    "Rig",
    "RigOptions",
    "attention_config",
    "random_options",
    "random_run",
]
