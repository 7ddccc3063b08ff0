"""Write docs/data/models-by-name.csv: the models known by name, their caches, and the sources of their configs.

python tests/runner/published_table.py docs/data/models-by-name.csv
"""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from csv_table import Row, write

from hybridkv.models import Model, known_models, read_model
from hybridkv.specs import AttentionSpec, ChunkedLocalAttentionSpec, Keeps, SlidingWindowSpec

HEADER = (
    "name",
    "model type",
    "KiB a token",
    "KiB a token in windows",
    "KiB of state",
    "parameters, 10^9",
    "hub",
    "read in",
)


def table() -> Iterator[Row]:
    """Yield a row for each model."""
    for known in known_models():
        model = read_model(known.name)
        read_in = known.read_in if known.verified else f"in part: {known.read_in}"
        sizes = (tokens(model), windows(model), _kib(model.state_bytes), weights(model))
        yield (known.name, model.model_type, *sizes, known.hub, read_in)


def tokens(model: Model) -> str:
    """Of the request, and of the encoder."""
    encoder = f" + {_kib(int(model.encoder_bytes_per_token))} of the encoder" if model.max_encoder_tokens else ""
    return _kib(int(model.kv_bytes_per_token)) + encoder


def windows(model: Model) -> str:
    """What a token takes while it is read, and how long that is."""
    sizes = sorted({_window(one.spec) for one in model.layers if one.spec.keeps is Keeps.WINDOW})
    if not sizes:
        return "-"
    return f"{_kib(int(model.window_bytes_per_token))} for {', '.join(f'{one:,}' for one in sizes)}"


def _window(spec: object) -> int:
    assert isinstance(spec, AttentionSpec)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return spec.attention_chunk_size
    assert isinstance(spec, SlidingWindowSpec)
    return spec.sliding_window


def weights(model: Model) -> str:
    """All, and those that a token uses where these are fewer by more than the embedding."""
    every, active = map(_billions, (model.parameters, model.active_parameters))
    return every if model.active_parameters > model.parameters / 2 else f"{every}, {active} active"


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g}" if count < 1e11 else f"{count / 1e9:.0f}"


def _kib(count: int) -> str:
    return f"{count / 1024:,.0f}" if count >= 1 << 20 else f"{count / 1024:g}" if count else "-"


def main(path: str) -> None:
    """Write the table to ``path``."""
    logging.disable()
    write(Path(path), HEADER, table())


if __name__ == "__main__":
    main(*sys.argv[1:])
