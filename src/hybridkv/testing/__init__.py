"""Tools for testing what is built on hybridkv, and hybridkv itself.

    Scheduler --Step--> FakeWorker      a worker in plain Python: the KV of a token, and a recurrent state, is a digest
        |                   |           of all tokens so far; what a step reads is compared with its row's history
        +------ Rig --------+           drives both and an Oracle, and compares everything after each action
                 |
              Oracle                    scheduler in plain Python, over
              OracleCache               the manager in plain Python: lists of tokens, dicts of prefixes

hybridkv.testing.strategies offers hypothesis strategies for requests, models and pools; it needs hypothesis.
"""

from hybridkv.testing.comparison import OracleError
from hybridkv.testing.configs import attention_config, model_config
from hybridkv.testing.fake_worker import ContentError, FakeWorker
from hybridkv.testing.model import DigestModel
from hybridkv.testing.oracle import Oracle
from hybridkv.testing.oracle_cache import OracleCache, OracleHit, OracleRequest
from hybridkv.testing.oracle_pool import OraclePool
from hybridkv.testing.random_models import random_limits, random_natural_options, random_options, random_specs
from hybridkv.testing.random_run import random_run
from hybridkv.testing.rig import Rig
from hybridkv.testing.rig_options import RigOptions
from hybridkv.testing.worker_layers import digest_model

__all__ = [
    "ContentError",
    "DigestModel",
    "FakeWorker",
    "Oracle",
    "OracleCache",
    "OracleError",
    "OracleHit",
    "OraclePool",
    "OracleRequest",
    "Rig",
    "RigOptions",
    "attention_config",
    "digest_model",
    "model_config",
    "random_limits",
    "random_natural_options",
    "random_options",
    "random_run",
    "random_specs",
]
