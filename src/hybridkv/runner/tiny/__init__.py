"""Tiny random models of real architectures, built on the spot, whose logits depend on the cache.

families: what is built; weights: why it matters what is cached; tokenizer: bytes
"""

from hybridkv.runner.tiny.build import TINY_ENCODER_DECODERS, TINY_MODELS, tiny_model
from hybridkv.runner.tiny.tokenizer import END, VOCAB_SIZE, byte_tokenizer

__all__ = ["END", "TINY_ENCODER_DECODERS", "TINY_MODELS", "VOCAB_SIZE", "byte_tokenizer", "tiny_model"]
