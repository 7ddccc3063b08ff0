"""The formats of trace records. A format is detected from the fields of a record, or chosen by name.

numbers   Mooncake, token-exact, Azure, BurstGPT
events    KV events of an engine
texts     ShareGPT, `vllm bench`, aiperf, OpenAI-style logs; their texts are not kept
request   a request of any format, and code that formats share
"""

from __future__ import annotations

from typing import Final, NoReturn

from hybridkv.errors import ConfigError
from hybridkv.simulator.formats.events import KV_EVENTS
from hybridkv.simulator.formats.numbers import AZURE, BURSTGPT, TOKEN_EXACT, mooncake
from hybridkv.simulator.formats.request import Format, MalformedLineError, Record, TraceRequest
from hybridkv.simulator.formats.texts import Encoder, aiperf, openai, sharegpt, vllm_bench
from hybridkv.units import shown

__all__ = ["FORMATS", "Format", "MalformedLineError", "Record", "TraceRequest", "format_named", "formats"]


def formats(trace_block_size: int, encode: Encoder | None, *, salts: bool = True) -> tuple[Format, ...]:
    """Return all formats. The first one that owns a record reads it.

    Args:
        trace_block_size: tokens that one hash id of a Mooncake trace stands for.
        encode: encoder of text; without it, a record of text is an error.
        salts: whether requests with different salts share nothing.
    """
    text = encode or _no_encoder
    numbers = (mooncake(trace_block_size), TOKEN_EXACT, AZURE, BURSTGPT)
    return (*numbers, KV_EVENTS, aiperf(text), sharegpt(text), openai(text, salts=salts), vllm_bench(text))


def _no_encoder(_text: str) -> NoReturn:
    raise ConfigError(
        "this trace holds text: name a tokenizer (--tokenizer), which is a tokenizer.json, its folder, or bytes:4 for "
        "tokens of four bytes"
    )


FORMATS: Final = tuple(one.name for one in formats(1, None))
"""Names of all formats."""


def format_named(name: str, among: tuple[Format, ...]) -> Format:
    """Return a format by its name.

    Args:
        name: the name, one of FORMATS.
        among: the formats, as ``formats`` returns them.

    Raises:
        ConfigError: for an unknown name.
    """
    for one in among:
        if one.name == name:
            return one
    raise ConfigError(f"unknown trace format {shown(name)}: use one of {', '.join(FORMATS)}")
