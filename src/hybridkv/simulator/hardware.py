"""Machines, known by name or read from a TOML file, and whether a machine holds a model and its cache.

    like = "h100"                   # all other fields are those of this machine; without it, the file needs every field
    name = "our H100s"
    memory_efficiency = 0.72

The known machines have the peak rates of their data sheets, for dense matrices. Sheets that state rates with sparsity
state twice as much. Links are NVLink on SXM boards, Infinity Fabric on the MI300X, and PCIe elsewhere. Host memory is
behind PCIe x16. A rate of a link is that of one direction, half of the sum that data sheets state. Efficiencies and
overheads are round guesses, equal for all known machines and measured on no machine; ``hybridkv calibrate`` measures
them.

    too_large(model, memory_bytes, H100, "bf16")          the reason why weights and cache do not fit, or ``None``
    machine_in_words(plan, H100, "bf16", 1.0)             4 x H100 SXM: 32.85 GiB of bf16 weights + 40 GiB of cache ...

A machine with ``memory_bytes`` 0 holds everything. A replay without times (``time_scale`` 0) uses no machine.
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
"""Bytes of one weight, by format."""
_SUFFIX: Final = ".toml"
_MOST: Final = 1e24
"""Largest value of a numeric field; chosen by hand, far above any machine."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator, the machine of one rank. Efficiencies are the share of a peak rate that a forward reaches.

    Attributes:
        name: name in reports.
        flops_per_s: peak bf16 operations per second.
        bytes_per_s: peak memory bandwidth, in bytes per second.
        compute_efficiency: reached share of the peak operations of weights.
        memory_efficiency: reached share of ``bytes_per_s``.
        overhead_s: seconds of each step that do not depend on its size: launches, scheduling, sampling.
        fp8_flops_per_s: peak fp8 operations per second; 0: fp8 is not faster than bf16.
        link_bytes_per_s: peak rate of the link to other ranks in one direction, in bytes per second; 0: sums over ranks
            take no time.
        link_efficiency: reached share of ``link_bytes_per_s``.
        link_latency_s: seconds of each sum over ranks that do not depend on its size; 0 if ``link_bytes_per_s`` is 0.
        attention_efficiency: reached share of ``flops_per_s`` in attention and recurrent states; 0: the same as
            ``compute_efficiency``.
        row_s: seconds that each row adds to a step.
        prompt_row_s: seconds that each row of several tokens adds besides; engines that run recurrent layers row by row
            have them.
        memory_bytes: bytes for weights and cache; 0: no limit.
        host_bytes_per_s: peak rate of copies to or from host memory, in bytes per second for each direction.
        host_efficiency: reached share of ``host_bytes_per_s``.
        sheet: data sheet of the peak rates.

    Raises:
        ConfigError: for values out of range, and for a link with a latency but no rate.
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
    prompt_row_s: float = 0.0
    memory_bytes: float = 0.0
    host_bytes_per_s: float = 32e9
    host_efficiency: float = 0.8
    sheet: str = ""

    def __post_init__(self) -> None:
        check_fields(self, text, "name")
        if not isinstance(self.sheet, str):
            raise ConfigError(f"sheet must be text, got {shown(self.sheet)}")
        rates = (
            *("flops_per_s", "bytes_per_s", "compute_efficiency", "memory_efficiency", "link_efficiency"),
            *("host_bytes_per_s", "host_efficiency"),
        )
        others = ("overhead_s", "row_s", "prompt_row_s", "fp8_flops_per_s", "attention_efficiency", "memory_bytes")
        for name in (*rates, *others, "link_bytes_per_s", "link_latency_s"):
            value = real(name, getattr(self, name))
            if not 0 <= value <= _MOST or (not value and name in rates):
                least = "above 0" if name in rates else "0 or more"
                raise ConfigError(f"{name} must be {least} and at most {_MOST:g}, got {shown(value)}")
        if self.link_latency_s and not self.link_bytes_per_s:
            raise ConfigError(
                f"link_latency_s is {self.link_latency_s:g}, but link_bytes_per_s 0 means that sums over ranks take no "
                "time: set link_bytes_per_s above 0, or link_latency_s to 0"
            )


DEFAULT_HARDWARE: Final = "h100"
UNBOUNDED: Final = "h100-unbounded"
_GUESSED: Final = {"compute_efficiency": 0.5, "memory_efficiency": 0.8, "overhead_s": 0.001}
_SHEETS: Final = tomllib.loads(files(__package__).joinpath("hardware.toml").read_text("utf-8"))
HARDWARE: Final[Mapping[str, Hardware]] = MappingProxyType(
    {name: Hardware(**(_GUESSED | said)) for name, said in _SHEETS.items()}
)
"""The known machines, by the name that options and prices use."""
H100: Final = HARDWARE[DEFAULT_HARDWARE]
H100_UNBOUNDED: Final = HARDWARE[UNBOUNDED]


def hardware_named(name: str) -> Hardware:
    """Return a known machine, or read one from a TOML file.

    Args:
        name: a name of HARDWARE, or the path of a file that ends in .toml.

    Raises:
        ConfigError: for an unknown name, and for an invalid file.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    if not name.endswith(_SUFFIX):
        raise ConfigError(f"unknown hardware {shown(name)}: use one of {', '.join(HARDWARE)}, or a {_SUFFIX} file")
    try:
        with open_regular(name) as file:
            fields_of_file = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from None
    try:
        return _from_fields(fields_of_file)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _from_fields(given: Mapping[str, Any]) -> Hardware:
    """Return the machine that the fields of a file describe."""
    known = {field.name for field in fields(Hardware)}
    unknown = sorted(given.keys() - known - {"like"})
    if unknown:
        raise ConfigError(f"unknown field {shown(unknown[0])}: use like, {', '.join(sorted(known))}")
    base: dict[str, Any] = {}
    if "like" in given:
        if given["like"] not in HARDWARE:
            raise ConfigError(f"unknown hardware like = {shown(given['like'])}: use one of {', '.join(HARDWARE)}")
        base = asdict(HARDWARE[given["like"]])
    values = base | {name: value for name, value in given.items() if name != "like"}
    missing = [field.name for field in fields(Hardware) if field.default is MISSING and field.name not in values]
    if missing:
        raise ConfigError(f'fields {", ".join(missing)} are missing: add them, or like = "{DEFAULT_HARDWARE}"')
    return Hardware(**values)


_MOST_RANKS: Final = 1024
"""Most ranks that an error message suggests; chosen by hand."""


def weights_named(name: str) -> str:
    """Return ``name`` if it is a format of weights.

    Args:
        name: a name of WEIGHT_BYTES.

    Raises:
        ConfigError: for an unknown format.
    """
    if name not in WEIGHT_BYTES:
        raise ConfigError(f"weights (--weights) must be one of {', '.join(WEIGHT_BYTES)}, got {shown(name)}")
    return name


def too_large(model: Model, memory_bytes: int, hardware: Hardware, weights: str) -> str | None:
    """Check whether one machine holds one rank's weights and cache.

    Args:
        model: the model; its ``tp`` is the number of tensor parallel ranks.
        memory_bytes: cache bytes of one rank.
        hardware: the machine of one rank.
        weights: format of the weights, a name of WEIGHT_BYTES.

    Returns:
        The reason why they do not fit and the options to change, as the text of an error. ``None`` if they fit, or if
        ``room_for_cache`` is unknown.
    """
    room = room_for_cache(model, hardware, weights)
    if room is None or memory_bytes <= room:
        return None
    enough = next((ranks for ranks in _ranks(model) if memory_bytes <= _room(model, hardware, weights, ranks)), None)
    held = f"{format_bytes(round(_weight_bytes(model, weights)))} of {weights} weights"
    use = "" if enough is None else f"use --tp {enough}, or "
    narrow = _format_of_checkpoint(model)
    if narrow is not None and memory_bytes <= _room(model, hardware, narrow, model.tp):
        use += f"--weights {narrow} as in its checkpoint, or "
    return (
        f"{model.name} does not fit: {held} and {format_bytes(memory_bytes)} of cache are more than the "
        f"{format_bytes(round(hardware.memory_bytes))} of one {hardware.name}: {use}lower --memory; for hit "
        f"rates without a real machine use --hardware {UNBOUNDED}"
    )


def room_for_cache(model: Model, hardware: Hardware, weights: str) -> int | None:
    """Return the bytes that one rank's weights leave on one machine; below 0 if the weights do not fit.

    Args:
        model: the model; its ``tp`` is the number of tensor parallel ranks.
        hardware: the machine of one rank.
        weights: format of the weights, a name of WEIGHT_BYTES.

    Returns:
        Bytes. ``None`` if the machine's memory has no limit, or if the model's number of weights is unknown.
    """
    if not model.parameters or not hardware.memory_bytes:
        return None
    return _room(model, hardware, weights, model.tp)


def _format_of_checkpoint(model: Model) -> str | None:
    """Return the format closest to the bytes per weight of the model's checkpoint, or ``None`` if these are unknown."""
    if not (model.parameters and model.weight_bytes):
        return None
    each = model.weight_bytes / model.parameters
    return min(WEIGHT_BYTES, key=lambda name: abs(WEIGHT_BYTES[name] - each))


def _room(model: Model, hardware: Hardware, weights: str, ranks: int) -> int:
    """Return ``room_for_cache`` with ``ranks`` tensor parallel ranks."""
    return math.floor(hardware.memory_bytes - _weight_bytes(model, weights) * model.tp / ranks)


def _weight_bytes(model: Model, weights: str) -> float:
    """Return the bytes of one rank's weights: of the checkpoint, with its scales, if ``weights`` is its format."""
    if weights == _format_of_checkpoint(model):
        return model.weight_bytes / model.tp
    return (model.parameters or 0) / model.tp * WEIGHT_BYTES[weights]


def machine_in_words(plan: Plan, hardware: Hardware, weights: str, time_scale: float) -> str:
    """Describe the machines of one replica, and the weights and the cache on each of them, for reports.

    Args:
        plan: the plan of model and cache.
        hardware: the machine of one rank.
        weights: format of the weights, a name of WEIGHT_BYTES.
        time_scale: factor of the modelled durations; 0: the replay uses no machine.
    """
    model = plan.model
    if not time_scale:
        return "no machine: steps take no time"
    known = format_bytes(round(_weight_bytes(model, weights)))
    held = f"{known} of {weights} weights" if model.parameters else f"{weights} weights of unknown size"
    memory = f" in {format_bytes(round(hardware.memory_bytes))}" if hardware.memory_bytes else ""
    each = " each" if model.tp > 1 else ""
    return f"{model.tp} x {hardware.name}: {held} + {format_bytes(plan.memory_bytes)} of cache{memory}{each}"


def _ranks(model: Model) -> Iterator[int]:
    """Yield the powers of two above the model's ranks over which its query and KV heads can be split."""
    specs = [layer.spec for layer in model.layers]
    kv_heads = {spec.num_kv_heads * model.tp for spec in specs if isinstance(spec, AttentionSpec)}
    for ranks in (1 << power for power in range(_MOST_RANKS.bit_length())):
        shared = all(heads % ranks == 0 or ranks % heads == 0 for heads in kv_heads)
        if ranks > model.tp and model.query_heads % ranks == 0 and shared:
            yield ranks
