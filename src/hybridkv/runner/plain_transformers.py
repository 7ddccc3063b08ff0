"""What a model raises by itself, before anything of this library has touched it, as a named error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from hybridkv.errors import HybridKVError, UnsupportedModelError


@contextmanager
def plain_transformers(model: PreTrainedModel) -> Iterator[None]:
    """Run ``model`` inside as transformers alone runs it. Raises UnsupportedModelError, in one line, if it fails.

    Passes on named errors of this library, and torch.OutOfMemoryError.
    """
    try:
        yield
    except (HybridKVError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model's code raises anything
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedModelError(
            f"{type(model).__name__} fails in plain transformers, without pages: {said}: mend the model or its config, "
            "or install the version of transformers that it was written for"
        ) from error
