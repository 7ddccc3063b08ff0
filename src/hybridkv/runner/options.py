"""Options of engines and of their requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol, TypedDict

from hybridkv.arguments import Count, Positive, check_types, integer, or_none, text
from hybridkv.errors import ConfigError
from hybridkv.eviction import EVERYBODY, TenantShares, eviction_named
from hybridkv.request import Hints, Request
from hybridkv.runner.attention.formulas import AttentionBackend, attention_backend
from hybridkv.runner.decode_graphs import compile_option
from hybridkv.runner.images import Images
from hybridkv.runner.inputs import Given
from hybridkv.schedule.limits import short_share
from hybridkv.units import shown


def _known_eviction(name: str, value: object) -> str:
    known = text(name, value)
    eviction_named(known)
    return known


def _folders(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping of names to folders, got {shown(value)}")
    return {text(f"a name in {name}", one): text(f"{name}[{one!r}]", str(at)) for one, at in value.items()}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine runs.

    Attributes:
        max_running: requests that run at the same time.
        token_budget: tokens of a step, at most.
        in_flight: steps scheduled before their results, 1 or 2. With 2, forwards, observers and logits_processors run
            in a thread of their own while the next step is scheduled.
        prefix_caching: share the blocks of equal prefixes.
        self_check: first compare the model on pages with about 15 short plain forwards (hybridkv.runner.self_check).
        image_bytes: bytes of image features kept on the device. Beyond it, the features read longest ago are dropped,
            and computed again when they are read.
        attention: how attention over pages runs (AttentionBackend).
        compile: "decode" runs steps that only decode as CUDA graphs. It needs attention="triton" and a model that
            allows it; else steps run as usual, and the log says why.
        kv_events: the cache reports stored and removed blocks, for the ``events`` of AsyncEngine.
        eviction: name of the eviction policy; None for the plan's own.
        shares: memory shares of tenants.
        remembered_losses: as in CacheOptions.
        block_times: as in CacheOptions.
        short_share: as in SchedulerLimits.
        lora_modules: folders of LoRA adapters in peft's format, by the names that requests choose them by.

    Raises:
        ConfigError: a number is out of range, or a name is unknown.
    """

    max_running: Positive = 64
    token_budget: Positive = 2048
    in_flight: Annotated[int, partial(integer, least=1, most=2)] = 1
    prefix_caching: bool = True
    self_check: bool = True
    image_bytes: Count = 256 << 20
    attention: Annotated[AttentionBackend | str, attention_backend] = AttentionBackend.GATHER
    compile: Annotated[str | None, compile_option] = None
    kv_events: bool = False
    eviction: Annotated[str | None, or_none(_known_eviction)] = None
    shares: TenantShares = EVERYBODY
    remembered_losses: Count = 0
    block_times: bool = False
    short_share: Annotated[float | None, or_none(short_share)] = None
    lora_modules: Annotated[Mapping[str, str | Path], _folders] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)


class RequestSink(Protocol):
    """Receives requests as they end. RequestPublisher is one."""

    def ended(self, request: Request, arrival_s: float, oldest_s: float) -> None:
        """Take a request that ended. This call must not block; it runs between steps.

        Args:
            request: the request, with all its tokens.
            arrival_s: when it was added, on the clock of ``time.monotonic``.
            oldest_s: when the oldest request that has not ended was added; infinite without one.
        """
        ...


class RequestOptions(TypedDict, total=False):
    """Optional fields of a request, besides its prompt and its sampling.

    Attributes:
        request_id: the caller's id; None for a number.
        cache_salt: requests share blocks only if their salts are equal.
        tenant: the tenant to which its cached blocks are charged.
        marks: token counts where later requests are likely to resume.
        hints: when its prefix is needed again.
        encoder: for an encoder-decoder, the encoder input: text, token ids, or features [bins, frames]. The prompt is
            then the decoder's, with its start token; an empty prompt is that token alone.
        encoder_digest: the caller's own name of the encoder input, valid for one salt and the life of the engine. Its
            cached result is found by this name. Without one, the content is hashed.
        images: for a multimodal model, in the order of their placeholders. Either pictures, with a prompt of text, for
            the model's processor; or the processor's output by name (``pixel_values``, ``image_grid_thw``), with its
            token ids. Blocks with images are shared by content.
        lora: name of the adapter in ``lora_modules``; None for the model itself. They share no blocks.
    """

    request_id: str | None
    cache_salt: str | None
    tenant: str | None
    marks: Sequence[int]
    hints: Hints | None
    encoder: Given | None
    encoder_digest: bytes | str | None
    images: Images | None
    lora: str | None
