"""Hugging Face configs -> layers and their specs, in plain dictionaries: no torch, no transformers.

    name | config.json | folder | dict  ->  read_model  ->  Model(layers=(Layer(name, spec), ...), facts)

Families by name are in ``decoders`` and ``hybrids``; ``general`` reads every other model type by fields that configs
share, ``reading`` notes what came from where; ``catalog`` holds the public models known by name, one JSON file each
in ``published`` with its source.
"""

from hybridkv.models.catalog import KnownModel, known_model, known_models
from hybridkv.models.fields import DTYPE_NAMES
from hybridkv.models.model import Layer, Model, ReadFact
from hybridkv.models.reader import read_model

__all__ = ["DTYPE_NAMES", "KnownModel", "Layer", "Model", "ReadFact", "known_model", "known_models", "read_model"]
