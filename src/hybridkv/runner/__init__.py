"""Unmodified Hugging Face models on paged caches, with continuous batching.

load -> LoadedModel -> plan_for -> Engine.generate -> Completions
                          Engine = Scheduler + ModelRunner; check_completions compares with plain transformers
"""

from hybridkv.runner.completion import Completion
from hybridkv.runner.engine import Engine, EngineOptions, encode, plan_for
from hybridkv.runner.load import LoadedModel, load, wrap
from hybridkv.runner.runner import ModelRunner, Observer
from hybridkv.runner.tiny import TINY_MODELS, byte_tokenizer, tiny_model

__all__ = [
    "TINY_MODELS",
    "Completion",
    "Engine",
    "EngineOptions",
    "LoadedModel",
    "ModelRunner",
    "Observer",
    "byte_tokenizer",
    "encode",
    "load",
    "plan_for",
    "tiny_model",
    "wrap",
]
