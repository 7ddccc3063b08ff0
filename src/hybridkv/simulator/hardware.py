"""Machines by name, or from a TOML file: peaks as data sheets say them, and what share of them is reached.

    like = "h100"                   # what is not said is that of this one; without it every field must be said
    name = "our H100s"
    memory_efficiency = 0.72

Links are NVLink of SXM boards, Infinity Fabric of the MI300X, else PCIe: half of what sheets say of both directions.
Peaks are of dense matrices: a data sheet that tells them with sparsity tells twice as much. Efficiencies and overheads
are round guesses, the same for all: they were measured on none of these.

Whether a machine holds one rank's weights and its cache:

    too_large(model, memory_bytes, H100, "bf16")          why it does not, None where it does
    machine_in_words(plan, H100, "bf16", 1.0)             4 x H100 SXM: 32.86 GiB of bf16 weights + 40 GiB of cache ...

No machine is asked for without times (``time_scale`` 0), nor one whose ``memory_bytes`` is 0.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

from hybridkv.arguments import check_fields, real, text
from hybridkv.errors import ConfigError
from hybridkv.models import Model
from hybridkv.planner import Plan
from hybridkv.regular_files import open_regular
from hybridkv.specs import AttentionSpec
from hybridkv.units import format_bytes, shown

FP32: Final = "fp32"
BF16: Final = "bf16"
FP8: Final = "fp8"
WEIGHT_BYTES: Final[Mapping[str, float]] = MappingProxyType({FP32: 4, BF16: 2, FP8: 1, "int4": 0.5})
"""Of one weight, by what weights are kept in."""
_SUFFIX: Final = ".toml"
_MOST: Final = 1e24


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator. Rates are peaks; the efficiencies say what share of them a forward reaches.

    flops_per_s: of bf16. overhead_s: seconds of a step that do not depend on its size (launches, scheduling,
    sampling). row_s: of each row of a step besides. fp8_flops_per_s: 0 where there is no faster fp8.
    attention_efficiency: of attention and recurrent states, 0 where it is that of the weights.
    link_bytes_per_s: to other ranks, in one direction; 0: nothing that passes there takes time. link_latency_s: of each
    sum over ranks besides. memory_bytes: what weights and cache must fit; 0: any fit. sheet: where the peaks stand.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    compute_efficiency: float
    memory_efficiency: float
    overhead_s: float
    fp8_flops_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    link_efficiency: float = 0.8
    link_latency_s: float = 0.0
    attention_efficiency: float = 0.0
    row_s: float = 0.0
    memory_bytes: float = 0.0
    sheet: str = ""

    def __post_init__(self) -> None:
        check_fields(self, text, "name")
        if not isinstance(self.sheet, str):
            raise ConfigError(f"sheet must be text, got {shown(self.sheet)}")
        rates = ("flops_per_s", "bytes_per_s", "compute_efficiency", "memory_efficiency", "link_efficiency")
        others = ("overhead_s", "row_s", "fp8_flops_per_s", "attention_efficiency", "memory_bytes")
        for name in (*rates, *others, "link_bytes_per_s", "link_latency_s"):
            value = real(name, getattr(self, name))
            if not 0 <= value <= _MOST or (not value and name in rates):
                raise ConfigError(f"{name} must be {'above 0' if name in rates else '0 or more'}, got {shown(value)}")


DEFAULT_HARDWARE: Final = "h100"
UNBOUNDED: Final = "h100-unbounded"
_GUESSED: Final = {"compute_efficiency": 0.5, "memory_efficiency": 0.8, "overhead_s": 0.001}
_SHEETS: Final = tomllib.loads(files(__package__).joinpath("hardware.toml").read_text("utf-8"))
HARDWARE: Final[Mapping[str, Hardware]] = MappingProxyType(
    {name: Hardware(**(_GUESSED | said)) for name, said in _SHEETS.items()}
)
"""By the name that options and prices use."""
H100: Final = HARDWARE[DEFAULT_HARDWARE]
H100_UNBOUNDED: Final = HARDWARE[UNBOUNDED]


def hardware_named(name: str) -> Hardware:
    """Return a machine of HARDWARE, or of a TOML file.

    Args:
        name: a name of HARDWARE, or a path that ends in .toml.

    Raises:
        ConfigError: for an unknown name, and for an invalid file.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    if not name.endswith(_SUFFIX):
        raise ConfigError(f"unknown hardware {shown(name)}: use one of {', '.join(HARDWARE)}, or a {_SUFFIX} file")
    try:
        with open_regular(name) as file:
            said = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{name} is no TOML: {error}") from None
    try:
        return _of(said)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _of(said: Mapping[str, Any]) -> Hardware:
    known = {field.name for field in fields(Hardware)}
    unknown = sorted(said.keys() - known - {"like"})
    if unknown:
        raise ConfigError(f"there is no field {shown(unknown[0])}: use like, {', '.join(sorted(known))}")
    base: dict[str, Any] = {}
    if "like" in said:
        if said["like"] not in HARDWARE:
            raise ConfigError(f"like = {shown(said['like'])}: use one of {', '.join(HARDWARE)}")
        base = asdict(HARDWARE[said["like"]])
    values = base | {name: value for name, value in said.items() if name != "like"}
    missing = [field.name for field in fields(Hardware) if field.default is MISSING and field.name not in values]
    if missing:
        raise ConfigError(f'{", ".join(missing)} missing: say them, or like = "{DEFAULT_HARDWARE}"')
    return Hardware(**values)


_MOST_RANKS: Final = 1024
"""That a message suggests."""


def weights_named(name: str) -> str:
    """Return ``name``. Raises ConfigError for an unknown format of weights."""
    if name not in WEIGHT_BYTES:
        raise ConfigError(f"weights (--weights) must be one of {', '.join(WEIGHT_BYTES)}, got {shown(name)}")
    return name


def too_large(model: Model, memory_bytes: int, hardware: Hardware, weights: str) -> str | None:
    """Say why one ``hardware`` does not hold one rank's weights and cache, and what to change.

    memory_bytes: of the cache of one rank. Others as room_for_cache has them. Returns None where both fit, and where
    nobody knows.
    """
    room = room_for_cache(model, hardware, weights)
    if room is None or memory_bytes <= room:
        return None
    enough = next((ranks for ranks in _ranks(model) if memory_bytes <= _room(model, hardware, weights, ranks)), None)
    held = f"{format_bytes(round(_weight_bytes(model, weights)))} of {weights} weights"
    use = "" if enough is None else f"use --tp {enough}, or "
    narrow = _of_checkpoint(model)
    if narrow is not None and memory_bytes <= _room(model, hardware, narrow, model.tp):
        use += f"--weights {narrow} as its checkpoint, or "
    return (
        f"{model.name} does not fit: {held} and {format_bytes(memory_bytes)} of cache are more than the "
        f"{format_bytes(round(hardware.memory_bytes))} of one {hardware.name}: {use}lower --memory; for hits alone say "
        f"--hardware {UNBOUNDED}"
    )


def room_for_cache(model: Model, hardware: Hardware, weights: str) -> int | None:
    """Bytes that the weights of one rank leave on one ``hardware``, below 0 where they do not fit.

    model: read for its tensor parallel ranks. weights: a name of WEIGHT_BYTES. Returns None where the machine's memory
    has no bound (0), and where nobody counted the weights.
    """
    if not model.parameters or not hardware.memory_bytes:
        return None
    return _room(model, hardware, weights, model.tp)


def _of_checkpoint(model: Model) -> str | None:
    """Return the name of WEIGHT_BYTES closest to the bytes per weight of the model's checkpoint; None if unknown."""
    if not (model.parameters and model.weight_bytes):
        return None
    each = model.weight_bytes / model.parameters
    return min(WEIGHT_BYTES, key=lambda name: abs(WEIGHT_BYTES[name] - each))


def _room(model: Model, hardware: Hardware, weights: str, ranks: int) -> int:
    return math.floor(hardware.memory_bytes - _weight_bytes(model, weights) * model.tp / ranks)


def _weight_bytes(model: Model, weights: str) -> float:
    """Return the bytes of the weights of one rank."""
    return (model.parameters or 0) / model.tp * WEIGHT_BYTES[weights]


def machine_in_words(plan: Plan, hardware: Hardware, weights: str, time_scale: float) -> str:
    """Name the machines of one replica, whose times a replay tells, and what each of them holds."""
    model = plan.model
    if not time_scale:
        return "no machine: steps take no time"
    known = format_bytes(round(_weight_bytes(model, weights)))
    held = f"{known} of {weights} weights" if model.parameters else f"{weights} weights of unknown size"
    memory = f" in {format_bytes(round(hardware.memory_bytes))}" if hardware.memory_bytes else ""
    each = " each" if model.tp > 1 else ""
    return f"{model.tp} x {hardware.name}: {held} + {format_bytes(plan.memory_bytes)} of cache{memory}{each}"


def _ranks(model: Model) -> Iterator[int]:
    """Yield larger numbers of ranks over which the model's heads can be split: powers of two, as machines come."""
    specs = [layer.spec for layer in model.layers]
    kv_heads = {spec.num_kv_heads * model.tp for spec in specs if isinstance(spec, AttentionSpec)}
    for ranks in (1 << power for power in range(_MOST_RANKS.bit_length())):
        shared = all(heads % ranks == 0 or ranks % heads == 0 for heads in kv_heads)
        if ranks > model.tp and model.query_heads % ranks == 0 and shared:
            yield ranks
