"""LoRA adapters: low-rank products beside the linear layers of a model, chosen for each token of a step.

    y = W x + B A x scale     of the request's adapter (arXiv 2106.09685); requests of the base model add nothing

The adapters of a layer lie side by side, and a mask keeps the part of each token's own adapter:

    A [ranks, in]     [ first | second ]
    A x, masked       token of first [ h h | 0 0 ]    token of second [ 0 0 | h h ]    base [ 0 0 | 0 0 ]
    B [ranks, out]    one product adds the rest to the layer's output

So a step of any adapters takes two products for each layer, and no weight is merged or exchanged. Rows of a step are
flattened, and recurrent mixers see parts of them: the StepContext says which tokens a layer sees.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.extra_keys import LoraAdapter
from hybridkv.models.json_text import DocumentError, parse_json
from hybridkv.regular_files import open_regular
from hybridkv.runner.load import LoadedModel
from hybridkv.runner.model_call import is_encoder_decoder, plain_transformers
from hybridkv.runner.options import EngineOptions
from hybridkv.runner.step_context import StepContext, on_device, require_free
from hybridkv.step import NewRow
from hybridkv.units import shown

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_TENSOR: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_READ: Final = frozenset(
    {"alpha_pattern", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "use_rslora"}
)
_WITHOUT_EFFECT: Final = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules"),
        *("fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core"),
        *("peft_version", "qalora_group_size", "revision", "target_modules", "task_type"),
    }
)
"""Fields of the config that a trained adapter does not depend on, or that its tensors show."""
_OFF: Final[tuple[object, ...]] = (None, False, "none", [], {})
"""Values of every other field that ask for nothing."""
_PLAIN_STARTS: Final = (True, False, "gaussian", "eva", "orthogonal")
"""Beginnings of a training that leave the weights of the model as they are."""
_PROBED: Final = 5
"""Tokens of the forward that shows which layers see every token; chosen by hand."""

Part = tuple[torch.Tensor, torch.Tensor]
"""A [rank, in] and B [out, rank] of one layer; B has the scale in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter as it was read.

    Attributes:
        key: its name, and a digest of its files in place of a path: new weights in an old folder share no blocks.
        parts: its products, by the name of the layer.
    """

    key: LoraAdapter
    parts: Mapping[str, Part]

    @classmethod
    def read(cls, name: str, folder: str | Path, number: int) -> Self:
        """Read an adapter that peft saved. O(bytes).

        Args:
            name: its name.
            folder: its folder, with adapter_config.json and adapter_model.safetensors.
            number: its number in events.

        Raises:
            ConfigError: the files cannot be read, contradict each other, or need more than low-rank products.
        """
        said = f"adapter {name!r} in {folder}"
        written, weights = (_content(Path(folder) / file, said) for file in (_CONFIG, _WEIGHTS))
        try:
            config, tensors = parse_json(written), parse_tensors(weights)
        except (DocumentError, SafetensorError, ValueError) as error:
            raise ConfigError(f"{said} cannot be read: {error}: save it again with save_pretrained") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{said}: {_CONFIG} must be a JSON object, got {shown(config)}")
        _require_plain(config, said)
        digest = hashlib.sha256(written + b"\0" + weights).hexdigest()
        return cls(LoraAdapter(name, f"sha256:{digest}", number), _parts(config, tensors, said))


def _content(path: Path, said: str) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise ConfigError(
            f"{said} cannot be read: {error}: give a folder of peft with {_CONFIG} and {_WEIGHTS}"
        ) from error


def _require_plain(config: Mapping[str, Any], said: str) -> None:
    """Raise ConfigError if an adapter is more than low-rank products of linear layers."""
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{said} is of peft_type {shown(config.get('peft_type'))}: only LORA is supported")
    if (start := config.get("init_lora_weights", True)) not in _PLAIN_STARTS:
        raise ConfigError(
            f"{said} has init_lora_weights={shown(start)}, which changes the model's own weights: convert it to a "
            "plain adapter (path_initial_model_for_weight_conversion of peft)"
        )
    asked = {name: value for name, value in config.items() if name not in _READ | _WITHOUT_EFFECT}
    for name, value in asked.items():
        if value not in _OFF:
            raise ConfigError(
                f"{said} has {name}={shown(value)}, which is not supported: only low-rank products of linear layers "
                "are, so merge this adapter into its model"
            )


def _parts(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], said: str) -> dict[str, Part]:
    """Return the products of an adapter by the name of the layer."""
    found = dict[str, dict[str, torch.Tensor]]()
    for key, tensor in tensors.items():
        match = _TENSOR.fullmatch(key)
        if match is None or tensor.dim() != 2:
            raise ConfigError(
                f"{said} holds {key} of shape {tuple(tensor.shape)}, which is no low-rank product of a linear layer: "
                "train it without embeddings, convolutions and modules_to_save, or merge it into its model"
            )
        found.setdefault(match[1], {})[match[2]] = tensor
    if not found:
        raise ConfigError(f"{said} holds no tensors: save it again with save_pretrained")
    return {layer: _part(config, layer, pair, said) for layer, pair in found.items()}


def _part(config: Mapping[str, Any], layer: str, pair: Mapping[str, torch.Tensor], said: str) -> Part:
    """Return A and the scaled B of a layer. Scales are peft's: alpha / r, or alpha / sqrt(r) for use_rslora."""
    rank = _of_layer(config, layer, "r", "rank_pattern", said)
    alpha = _of_layer(config, layer, "lora_alpha", "alpha_pattern", said)
    if len(pair) != 2 or pair["A"].shape[0] != rank or pair["B"].shape[1] != rank:
        shapes = " and ".join(f"{one} {tuple(tensor.shape)}" for one, tensor in sorted(pair.items()))
        raise ConfigError(
            f"{said}: {layer} has {shapes}, but {_CONFIG} says rank {rank:g}: save config and weights of one training"
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return pair["A"].float(), pair["B"].float() * scale


def _of_layer(config: Mapping[str, Any], layer: str, name: str, pattern: str, said: str) -> float:
    """Return a number of a layer: that of the first pattern that matches its name, as in peft, or the common one."""
    patterns = dict[str, Any]()
    try:
        patterns |= config.get(pattern) or {}
        match = next((one for one in patterns if re.match(rf"(.*\.)?({one})$", layer)), None)
        value = config.get(name) if match is None else patterns[match]
    except (re.error, TypeError, ValueError) as error:
        given = shown(config[pattern])
        raise ConfigError(f"{said}: {pattern} must map expressions to numbers, got {given}") from error
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{said}: {name} of {layer} must be a number above 0, got {shown(value)}")
    return value


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The products of all adapters for one layer.

    Attributes:
        layer: the linear layer.
        a: [ranks, in].
        b: [ranks, out].
        owners: int64[ranks], the adapter of each rank, from 1. Layers with the same ranks share it.
    """

    layer: torch.nn.Module
    a: torch.Tensor
    b: torch.Tensor
    owners: torch.Tensor


class Adapters:
    """The adapters of a model.

    Args:
        model: the model; unused without adapters.
        adapters: the adapters, which get the numbers 1, 2 and so on.

    Attributes:
        sides: the products by layer.

    Raises:
        ConfigError: the model lacks a layer, or not every token passes it.
    """

    def __init__(self, model: PreTrainedModel | None = None, adapters: Sequence[Adapter] = ()) -> None:
        self._keys = {one.key.name: one.key for one in adapters}
        self.sides = () if model is None else _sides(model, adapters)

    @classmethod
    def load(cls, loaded: LoadedModel, options: EngineOptions) -> Self:
        """Read the adapters of ``options``, and check in a short forward that the model can have them.

        Args:
            loaded: the model.
            options: options of its engine.

        Raises:
            ConfigError: as ``require_combinable``, ``Adapter.read`` and Adapters.
        """
        if not options.lora_modules:
            return cls()
        require_combinable(options, ranks=1 if loaded.share is None else loaded.share.ranks)
        if is_encoder_decoder(loaded.model):
            raise ConfigError(f"{loaded.name} is an encoder-decoder, which cannot have adapters: leave them out")
        require_free(loaded.model)
        read = [Adapter.read(*one, number) for number, one in enumerate(options.lora_modules.items(), 1)]
        made = cls(loaded.model, read)
        _require_tokens(loaded, made.sides)
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters, in their order."""
        return tuple(self._keys)

    def key(self, name: str | None) -> LoraAdapter | None:
        """Return the key of an adapter for blocks; None for the base model.

        Args:
            name: its name; None for the base model.

        Raises:
            ConfigError: no such adapter is loaded.
        """
        if name is None:
            return None
        if not isinstance(name, str) or name not in self._keys:
            known = ", ".join(map(repr, self._keys)) or "none"
            raise ConfigError(f"adapter {shown(name)} is not loaded: choose one of lora_modules ({known})")
        return self._keys[name]

    def require_none(self, what: str) -> None:
        """Raise ConfigError if there are adapters, with which ``what`` cannot work."""
        if self._keys:
            raise ConfigError(f"{what} do not say which adapter a conversation is of: use an engine without adapters")


def require_combinable(options: EngineOptions, *, ranks: int) -> None:
    """Raise ConfigError if adapters cannot be combined with ranks or CUDA graphs.

    Args:
        options: options of an engine.
        ranks: tensor parallel ranks.
    """
    other = "tensor parallel ranks" if ranks > 1 else "compiled steps" if options.compile is not None else None
    if options.lora_modules and other is not None:
        raise ConfigError(f"adapters do not run with {other}: leave out lora_modules or the other")


def _sides(model: PreTrainedModel, adapters: Sequence[Adapter]) -> tuple[Side, ...]:
    """Return the products of all adapters by layer, on the layer's device and in its dtype."""
    layers = dict(model.named_modules(remove_duplicate=False))  # a shared layer has several names
    found = dict[torch.nn.Linear | Conv1D, dict[int, Part]]()
    for number, one in enumerate(adapters, 1):
        for name, part in one.parts.items():
            said, layer = f"adapter {one.key.name!r} changes {name}", layers.get(name)
            if not isinstance(layer, torch.nn.Linear | Conv1D) or layer is model.get_output_embeddings():
                there = "nothing" if layer is None else f"a {type(layer).__name__}"
                raise ConfigError(
                    f"{said}, where {type(model).__name__} has {there}: only linear layers below the output head can "
                    "have adapters"
                )
            found.setdefault(layer, {})[number] = _fitting(layer, part, said)
    owners = dict[tuple[int, ...], torch.Tensor]()
    made = list[Side]()
    for layer, parts in found.items():
        ranks = tuple(number for number, (a, _) in parts.items() for _ in range(len(a)))
        owners.setdefault(ranks, torch.tensor(ranks, device=layer.weight.device))
        a, b = torch.cat([a for a, _ in parts.values()]), torch.cat([b.T for _, b in parts.values()])
        made.append(Side(layer, a, b.contiguous(), owners[ranks]))
    return tuple(made)


def _fitting(layer: torch.nn.Linear | Conv1D, part: Part, said: str) -> Part:
    """Return A and B on the device and in the dtype of ``layer``. Raises ConfigError if they do not fit it."""
    a, b = part
    width = tuple(layer.weight.shape if isinstance(layer, Conv1D) else layer.weight.shape[::-1])
    if (a.shape[1], b.shape[0]) != width:
        raise ConfigError(
            f"{said} and maps {a.shape[1]} to {b.shape[0]} values, where the layer maps {width[0]} to {width[1]}: give "
            "an adapter of this model"
        )
    a, b = a.to(layer.weight), b.to(layer.weight)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ConfigError(
            f"{said} by values that are NaN or beyond {a.dtype}: save an earlier checkpoint of its training"
        )
    return a, b


def _require_tokens(loaded: LoadedModel, sides: Sequence[Side]) -> None:
    """Raise ConfigError unless each layer sees every token: experts see some, parts for images none.

    A layer sees none either if the model reads its weight instead, as it does with dt_proj of Mamba.
    """
    names, rows = {module: name for name, module in loaded.model.named_modules()}, dict[torch.nn.Module, set[int]]()

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        rows.setdefault(module, set()).add(inputs[0].numel() // inputs[0].shape[-1])

    hooks = [one.layer.register_forward_pre_hook(note) for one in sides]
    ids = torch.arange(_PROBED, device=loaded.model.device)[None] % loaded.vocab_size
    try:
        with torch.inference_mode(), plain_transformers(loaded.model):
            loaded.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for one in sides:
        if (seen := rows.get(one.layer, {0})) != {_PROBED}:
            raise ConfigError(
                f"{names[one.layer]} of {loaded.name} sees {min(seen)} of {_PROBED} tokens, and only layers that see "
                "all can have adapters: train them without it"
            )


# -- in the runner


class LoraTokens:
    """The adapters of the tokens that a layer sees: int64[tokens], or int64[1] if one request has all of them."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers
        self._masks = dict[torch.Tensor, torch.Tensor]()

    def at(self, places: slice | torch.Tensor) -> LoraTokens:
        """Return those of the tokens at ``places``."""
        return LoraTokens(self._numbers[places])

    def foreign(self, owners: torch.Tensor, rows: int) -> torch.Tensor:
        """Return which ranks belong to another adapter, bool[tokens or 1, ranks].

        Raises WorkerError for a layer that sees another number of ``rows``.
        """
        if len(self._numbers) not in (1, rows):
            raise WorkerError(
                f"a layer with adapters got {rows} rows for {len(self._numbers)} tokens: train the adapters without it"
            )
        if owners not in self._masks:
            self._masks[owners] = self._numbers[:, None] != owners
        return self._masks[owners]


class LoraRows:
    """The adapter of each row of a runner, and the hooks of the model's layers from ``install`` to ``remove``."""

    def __init__(self, adapters: Adapters, context: StepContext, max_running: int) -> None:
        self._adapters, self._context = adapters, context
        self._numbers = np.zeros(max_running, np.int64)
        self._hooks = list[RemovableHandle]()

    def check(self, new_rows: Sequence[NewRow]) -> None:
        """Raise WorkerError for a row of an adapter that is not loaded here."""
        for new in new_rows:
            if new.lora is not None and new.lora not in self._adapters.names:
                raise WorkerError(
                    f"row {new.row} needs adapter {new.lora!r}, which this runner lacks: make it with the same adapters"
                )

    def end(self, rows: NDArray[np.int32]) -> None:
        """Forget rows that ended."""
        self._numbers[rows] = 0

    def begin(self, new: NewRow) -> None:
        """Note the adapter of a row."""
        self._numbers[new.row] = 0 if new.lora is None else self._adapters.names.index(new.lora) + 1

    def of(self, owners: NDArray[np.int64], device: torch.device) -> LoraTokens | None:
        """Return the adapters of tokens by their rows, int64[tokens]; None if all are of the base model."""
        numbers = self._numbers[owners]
        return LoraTokens(on_device(numbers, device)) if numbers.any() else None

    def install(self) -> None:
        """Let the layers add the products of adapters."""
        self._hooks = [one.layer.register_forward_hook(self._adding(one)) for one in self._adapters.sides]

    def remove(self) -> None:
        """Restore the layers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _adding(self, side: Side) -> Callable[..., torch.Tensor | None]:
        context = self._context

        def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
            if context.lora is None:
                return None
            rows = inputs[0].reshape(-1, inputs[0].shape[-1])
            # filled, not multiplied: half precision may overflow in another adapter, and infinity times 0 is NaN
            inner = functional.linear(rows, side.a).masked_fill(context.lora.foreign(side.owners, len(rows)), 0)
            return torch.addmm(output.reshape(len(rows), -1), inner, side.b).view_as(output)

        return add
