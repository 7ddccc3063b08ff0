"""Unmodified Hugging Face models on paged caches, with continuous batching.

load -> LoadedModel -> plan_for -> Engine.generate -> Completions
                          Engine = Scheduler + ModelRunner; check_completions compares with plain transformers
"""

from hybridkv.runner.async_engine import AsyncEngine
from hybridkv.runner.completion import Completion, Increment, Stream
from hybridkv.runner.engine import Engine
from hybridkv.runner.handover import HandedOver
from hybridkv.runner.inputs import encode
from hybridkv.runner.load import LoadedModel, load, wrap
from hybridkv.runner.lockstep import follow, lead
from hybridkv.runner.options import EngineOptions
from hybridkv.runner.planning import plan_for, plan_within
from hybridkv.runner.pooling import Embedder, Pooling
from hybridkv.runner.probe import Stored
from hybridkv.runner.runner import ModelRunner, Observer
from hybridkv.runner.sampling.draws import TokenLogprob
from hybridkv.runner.sessions import Session
from hybridkv.runner.shares import ModelShare, join_sessions
from hybridkv.runner.tensor_parallel import Ranks
from hybridkv.runner.tiny import TINY_COMPRESSED, TINY_ENCODER_DECODERS, TINY_MODELS, byte_tokenizer, tiny_model

__all__ = [
    "TINY_COMPRESSED",
    "TINY_ENCODER_DECODERS",
    "TINY_MODELS",
    "AsyncEngine",
    "Completion",
    "Embedder",
    "Engine",
    "EngineOptions",
    "HandedOver",
    "Increment",
    "LoadedModel",
    "ModelRunner",
    "ModelShare",
    "Observer",
    "Pooling",
    "Ranks",
    "Session",
    "Stored",
    "Stream",
    "TokenLogprob",
    "byte_tokenizer",
    "encode",
    "follow",
    "join_sessions",
    "lead",
    "load",
    "plan_for",
    "plan_within",
    "tiny_model",
    "wrap",
]
