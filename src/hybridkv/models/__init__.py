"""Read Hugging Face configs into layers and their specs, without torch or transformers.

    name | config.json | folder | dict  ->  read_model  ->  Model(layers=(Layer(name, spec), ...), facts)

``decoders``, ``hybrids`` and ``other_states`` read families of model types. ``general`` reads every other model type
by the fields that configs share, and ``reading`` notes the source of each value. ``catalog`` holds the public models
that are known by name, one JSON file each in ``published`` with its source.
"""

from hybridkv.models.catalog import KnownModel, known_model, known_models
from hybridkv.models.fields import DTYPE_NAMES
from hybridkv.models.model import Layer, Model, ReadFact
from hybridkv.models.reader import read_model

__all__ = ["DTYPE_NAMES", "KnownModel", "Layer", "Model", "ReadFact", "known_model", "known_models", "read_model"]
