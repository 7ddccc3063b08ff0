"""What a trace's records look like: each format by its content, or by name.

hashed    Mooncake, token-exact            texts     ShareGPT, `vllm bench`, aiperf, OpenAI-style logs
lengths   Azure, BurstGPT                  events    KV events of an engine

Text needs an encoder (encoders); what it was is forgotten at once (token_tree).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.simulator.formats.encoders import Encoder
from hybridkv.simulator.formats.events import KvEventsFormat
from hybridkv.simulator.formats.fields import MalformedLineError, Record
from hybridkv.simulator.formats.hashed import MooncakeFormat, PieceFormat
from hybridkv.simulator.formats.lengths import ROW_FORMATS
from hybridkv.simulator.formats.request import Format, TraceRequest
from hybridkv.simulator.formats.texts import AiperfFormat, BenchFormat, OpenAiFormat, ShareGptFormat
from hybridkv.units import shown

__all__ = ["FORMATS", "Format", "MalformedLineError", "Record", "TraceRequest", "format_named", "formats"]


def formats(trace_block_size: int, encode: Encoder | None, *, salts: bool = True) -> tuple[Format, ...]:
    """All of them; the first that owns a record has it. encode: of text, None where none was named.

    salts: whether requests of different ones share nothing.
    """
    text = encode or _no_encoder
    hashed = (MooncakeFormat(trace_block_size), PieceFormat())
    return (
        *hashed,
        *ROW_FORMATS,
        KvEventsFormat(),
        AiperfFormat(text),
        ShareGptFormat(text),
        OpenAiFormat(text, salts),
        BenchFormat(text),
    )


def _no_encoder(_text: str) -> NDArray[np.int32]:
    raise ConfigError(
        "this trace holds text: name a tokenizer (--tokenizer), as a tokenizer.json, its folder, or bytes:4 for four "
        "bytes a token"
    )


FORMATS: Final = tuple(one.name for one in formats(1, None))
"""Names."""


def format_named(name: str, among: tuple[Format, ...]) -> Format:
    """That format. ConfigError for another name."""
    for one in among:
        if one.name == name:
            return one
    raise ConfigError(f"unknown trace format {shown(name)}: use one of {', '.join(FORMATS)}")
