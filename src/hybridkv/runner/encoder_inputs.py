"""What encoders read: token ids or features, named by a digest of their content, kept while a request may need them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.extra_keys import EncoderInput
from hybridkv.runner.encoder_decoder import is_encoder_decoder
from hybridkv.runner.inputs import encode
from hybridkv.runner.load import LoadedModel
from hybridkv.runner.probe import planner_model
from hybridkv.units import shown

Given = str | Sequence[int] | NDArray[np.generic] | torch.Tensor
"""An encoder's input as a caller has it: text, token ids, or features [bins, frames]."""


@dataclass(frozen=True, slots=True, eq=False)
class EncoderFeed:
    """values: token ids [1, tokens] or features [1, bins, frames], on the CPU. read: their digest and token count."""

    values: torch.Tensor
    read: EncoderInput


@dataclass(frozen=True, slots=True)
class InputName:
    """A caller's own name of an input, which means nothing to those of another salt."""

    digest: bytes | str
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.digest, bytes | str):
            raise ConfigError(f"encoder_digest must be bytes or text, got {shown(self.digest)}")
        EncoderInput(self.digest, 1)  # ConfigError for an empty one


def encoder_feed(loaded: LoadedModel, given: Given, name: InputName | None, most_tokens: int) -> EncoderFeed:
    """``given`` for the encoder of ``loaded``. Its digest is SHA-256 of what the caller calls it, or of the content.

    A name belongs to one number of tokens: one that comes again with another is another input.
    most_tokens: of the encoder's output, as planned. Raises ConfigError for a model without an encoder, text without a
    tokenizer, ids outside the vocabulary, features of another shape, and more tokens than planned. O(values).
    """
    if not is_encoder_decoder(loaded.model):
        raise ConfigError(f"{loaded.name} has no encoder: leave the encoder's input out")
    values: NDArray[Any]
    if loaded.model.main_input_name == "input_ids":
        values = np.array(encode(loaded, given, what="encoder input"), np.int64)
        tokens = len(values)
    else:
        values = _features(loaded, given)
        tokens = int(loaded.model.config.max_source_positions)
    if tokens > most_tokens:
        raise ConfigError(
            f"an encoder input of {tokens} tokens exceeds the {most_tokens} that the plan has room for: shorten it, or "
            "plan with a larger max_encoder_tokens"
        )
    digest = _sha256(values) if name is None else hashlib.sha256(repr((name, tokens)).encode()).digest()
    return EncoderFeed(torch.from_numpy(values)[None], EncoderInput(digest, tokens))


def _features(loaded: LoadedModel, given: Any) -> NDArray[np.floating[Any]]:  # noqa: ANN401  # arrays and tensors
    """A copy of [bins, frames], of the very shape that the encoder takes: it attends to all frames."""
    config = loaded.model.config
    # its two convolutions halve the frames once
    wanted = (int(config.num_mel_bins), 2 * int(config.max_source_positions))
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu().float().numpy()
    if not isinstance(given, np.ndarray) or given.shape != wanted or not np.issubdtype(given.dtype, np.floating):
        shape = getattr(given, "shape", type(given).__name__)
        raise ConfigError(
            f"{loaded.name} takes features of shape {wanted}, floats, got {shape}: pad them as its feature extractor "
            "does, one input at a time"
        )
    if not np.isfinite(given).all():
        raise ConfigError(f"{loaded.name} takes features that are numbers: there are NaN or infinite ones among them")
    return np.ascontiguousarray(given).copy()


def _sha256(values: NDArray[Any]) -> bytes:
    """Of dtype, shape and bytes."""
    digest = hashlib.sha256(f"{values.dtype.str} {values.shape}".encode())
    digest.update(np.ascontiguousarray(values).view(np.uint8).data)
    return digest.digest()


def read_encoder_input(loaded: LoadedModel, given: str | Sequence[int], folder: Path) -> EncoderFeed:
    """What a file of prompts says of an encoder's input: text or token ids, or the name of a .npy file of features.

    folder: where such a file is looked for. Raises ConfigError as ``encoder_feed``, and for a file that cannot be read.
    """
    most = planner_model(loaded.model, block_size=16, name=loaded.name).max_encoder_tokens
    if loaded.model.main_input_name == "input_ids":
        return encoder_feed(loaded, given, None, most)
    if not isinstance(given, str):
        raise ConfigError(f"the encoder of {loaded.name} reads features: name a .npy file of them")
    try:
        features = np.load(folder / given, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"cannot read the features in {folder / given}: {error}") from None
    return encoder_feed(loaded, features, None, most)


class EncoderInputs:
    """Values by digest, each as long as somebody holds it. Requests of one digest hold the values of the first."""

    def __init__(self) -> None:
        self._values: dict[bytes | str, torch.Tensor] = {}
        self._holders: dict[bytes | str, int] = {}

    def __contains__(self, digest: bytes | str) -> bool:
        return digest in self._values

    def __len__(self) -> int:
        """Distinct inputs."""
        return len(self._values)

    def __getitem__(self, digest: bytes | str) -> torch.Tensor:
        return self._values[digest]

    def hold(self, feed: EncoderFeed) -> None:
        """One more request needs ``feed``."""
        self._values.setdefault(feed.read.digest, feed.values)
        self.hold_again(feed.read.digest)

    def hold_again(self, digest: bytes | str) -> None:
        """One more needs what is here. An unknown digest is a no-op."""
        if digest in self._values:
            self._holders[digest] = self._holders.get(digest, 0) + 1

    def release(self, digest: bytes | str) -> None:
        """One less; the last takes it along. An unknown digest is a no-op."""
        left = self._holders.pop(digest, 0) - 1
        if left > 0:
            self._holders[digest] = left
        else:
            self._values.pop(digest, None)


def one_input_each(prompts: Sequence[object], encoders: Sequence[Given] | None) -> list[Given | None]:
    """What the encoder reads for each prompt, None where there is none. Raises ConfigError when the numbers differ."""
    if encoders is None:
        return [None] * len(prompts)
    given: object = encoders
    listed = isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)
    if not listed and not (isinstance(given, np.ndarray | torch.Tensor) and given.ndim):
        raise ConfigError(f"encoders must be a list of what the encoder reads for each prompt, got {shown(given)}")
    inputs: list[Given | None] = list(encoders)
    if len(inputs) != len(prompts):
        raise ConfigError(f"{len(inputs)} encoder inputs for {len(prompts)} prompts: give one for each")
    return inputs
