"""Single requests of a replay: how many tokens of each prompt were missed for which reason, as values and as files.

    {"request": 7, "origin": "line 8", ..., "prompt_tokens": 900, "hit_tokens": 512, "misses": [{"first": 512, ...}]}

Hit tokens and those of the misses are the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hybridkv.cache import Miss, MissReason
from hybridkv.errors import ConfigError
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.written import written_whole

AT_MOST: Final = "at_most"
ESTIMATE: Final = "estimate"
_ROWS_AT_ONCE: Final = 4096
_PARQUET: Final = ".parquet"


@dataclass(frozen=True, slots=True)
class Explained:
    """Request ``number`` of a trace, the first being 0, as it began. misses: of its prompt, in order."""

    number: int
    trace: TraceRequest
    begun_s: float
    hit_tokens: int
    misses: tuple[Miss, ...]

    def to_dict(self, *, in_order: bool) -> dict[str, object]:
        """As a line has it. in_order: KVCacheManager.evicts_in_order, which makes ``more_bytes`` a bound."""
        return {
            "request": self.number,
            "origin": self.trace.origin,
            "arrival_s": self.trace.timestamp_s,
            "begun_s": round(self.begun_s, 6),
            "prompt_tokens": self.trace.num_prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "misses": [_said(miss, AT_MOST if in_order else ESTIMATE) for miss in self.misses],
        }


def _said(miss: Miss, bound: str) -> dict[str, object]:
    """What there is to say of it."""
    said = {name: value for name, value in asdict(miss).items() if value is not None}
    interval = said.pop("interval", None)
    if "more_bytes" in said:
        said["more_bytes_is"] = bound
    if interval is not None:
        said |= {"placement": f"interval:{interval}", "state_at": miss.interval_state}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in said.items()}


@contextmanager
def explained_file(path: Path, *, in_order: bool) -> Iterator[Callable[[Explained], None]]:
    """What to call with each request; the file is there at the end, whole, or not at all.

    A line of JSON each, or columns where ``path`` ends in .parquet. in_order: as Explained.to_dict. ConfigError for
    Parquet without pyarrow, and where the file cannot be written.
    """
    rows: list[dict[str, object]] = []
    form = _parquet if path.suffix == _PARQUET else _lines
    try:
        with written_whole(path) as file, form(file) as write:

            def add(explained: Explained) -> None:
                rows.append(explained.to_dict(in_order=in_order))
                if len(rows) == _ROWS_AT_ONCE:
                    write(rows)
                    rows.clear()

            yield add
            write(rows)
    except OSError as error:
        raise ConfigError(f"{path} could not be written: {error.strerror or error}") from error


@contextmanager
def _lines(file: Any) -> Iterator[Callable[[list[dict[str, object]]], None]]:  # noqa: ANN401 - a binary file
    yield lambda rows: file.writelines((json.dumps(row) + "\n").encode() for row in rows)


@contextmanager
def _parquet(file: Any) -> Iterator[Callable[[list[dict[str, object]]], None]]:  # noqa: ANN401 - as above
    """Tokens by reason are columns besides, so that they are summed up without unnesting."""
    try:
        import pyarrow as pa  # noqa: PLC0415  # an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow: pip install 'hybridkv[parquet]', or name a .jsonl file") from error
    whole, seconds, text = pa.int64(), pa.float64(), pa.string()
    one = {"first": whole, "tokens": whole, "reason": text, "group": whole, "ago_s": seconds, "more_bytes": whole}
    one |= {"more_bytes_is": text, "idle_s": seconds, "by": text, "nearest_state": whole, "placement": text}
    columns = {"request": whole, "origin": text, "arrival_s": seconds, "begun_s": seconds, "prompt_tokens": whole}
    columns |= {"hit_tokens": whole, **{reason.value: whole for reason in MissReason}}
    misses = pa.list_(pa.struct([*one.items(), ("state_at", whole)]))
    schema = pa.schema([*columns.items(), ("misses", misses)])

    def write(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row |= {reason.value: 0 for reason in MissReason}
            for miss in row["misses"]:
                row[miss["reason"]] += miss["tokens"]
        writer.write_table(pa.Table.from_pylist(rows, schema))

    with parquet.ParquetWriter(file, schema) as writer:
        yield write
