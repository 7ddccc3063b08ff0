"""Naive models of what hybridkv does, written apart from it, and the rig that holds the two together.

    Oracle          scheduler in plain Python, over
    OracleCache     the manager in plain Python: lists of tokens, dicts of prefixes; OraclePool: a plain list of blocks
    Rig             drives library, oracle and FakeWorker, and compares everything after each action

``oracles.strategies`` has hypothesis strategies for requests, models and pools.
"""

from oracles.cache import OracleCache, OracleHit, OracleRequest
from oracles.pool import OraclePool
from oracles.random_models import random_limits, random_natural_options, random_options, random_specs
from oracles.random_run import random_run
from oracles.rig import Rig, RigOptions
from oracles.scheduler import Oracle

__all__ = [
    "Oracle",
    "OracleCache",
    "OracleHit",
    "OraclePool",
    "OracleRequest",
    "Rig",
    "RigOptions",
    "random_limits",
    "random_natural_options",
    "random_options",
    "random_run",
    "random_specs",
]
