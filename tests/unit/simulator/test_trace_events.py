"""KV events as a trace: requests guessed from blocks by the rule that formats/events.py says."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli_support import run
from hybridkv.errors import TraceError
from hybridkv.simulator import TraceFile, TraceRequest, convert, describe

Batch = tuple[float, list[Any]]


def stored(parent: int | str | None, *hashes: float | str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - as JSON has it
    return {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "block_size": 16, **more}


def recording(folder: Path, *batches: Batch, known: int = 0) -> TraceFile:
    """Batches at seconds; the first ``known`` of them tell what was there before."""
    path = folder / "events.jsonl"
    lines = [
        json.dumps({"ts": 1.7e9 + seconds, "events": events, **({"known": True} if at < known else {})})
        for at, (seconds, events) in enumerate(batches)
    ]
    path.write_text("\n".join(lines), "utf-8")
    trace = TraceFile(path)
    assert trace.format_name == "kv-events"
    return trace


def lengths(trace: TraceFile) -> list[tuple[float, int, int]]:
    return [(one.timestamp_s, one.num_prompt_tokens, one.num_output_tokens) for one in trace]


def ids(request: TraceRequest) -> list[int]:
    return [*request.prompt.token_ids().tolist(), *request.output.token_ids().tolist()]


def test_event_trace_joins_chunks_and_output(tmp_path: Path) -> None:
    trace = recording(
        tmp_path,
        (0.0, [stored(None, 1, 2)]),
        (0.5, [stored(2, 3), stored(3, 4)]),  # in a row: one chain, however many events tell it
        (1.0, [stored(4, 5)]),
        (9.0, [stored(5, 6)]),
    )
    (one,) = trace
    assert lengths(trace) == [(0.0, 64, 32)]
    assert one.origin == "line 1"
    assert len(one.prompt.pieces) == len(one.output.pieces) == 1


def test_event_trace_later_continuation_is_another_request(tmp_path: Path) -> None:
    trace = recording(
        tmp_path,
        (0.0, [stored(None, 1, 2)]),
        (0.5, [stored(2, 3)]),
        (0.9, [stored(3, 4, 5)]),  # behind an output: the next turn
        (20.0, [stored(5, 6)]),  # too late for an output
        (30.0, [stored(None, 7, 8)]),
        (31.5, [stored(8, 9, 10)]),  # too late for a prompt's next chunk
    )
    assert lengths(trace) == [(0.0, 32, 16), (0.9, 80, 1), (20.0, 96, 1), (30.0, 32, 1), (31.5, 64, 1)]
    first, second, third, *_ = trace
    assert ids(second)[:48] == ids(first)
    assert ids(third)[:80] == ids(second)[:80]
    assert describe(trace).shared_tokens == 47 + 80 + 32  # the last one said never ran


def test_event_trace_separates_forks_and_duplicates(tmp_path: Path) -> None:
    trace = recording(
        tmp_path,
        (0.0, [stored(None, 1, 2, 3, 4)]),
        (5.0, [stored(2, 5, 6)]),
        (6.0, [stored(None, 1, 2, 7), stored(None, 8, 9), stored(None, 8, 9)]),
        (6.2, [stored(9, 10)]),
        (6.4, [stored(9, 11)]),  # each of the two says something else
    )
    assert lengths(trace) == [(0.0, 64, 1), (5.0, 64, 1), (6.0, 48, 1), (6.0, 32, 16), (6.0, 32, 16)]
    first, second, third, one, other = trace
    assert ids(first)[:32] == ids(second)[:32] == ids(third)[:32]
    assert len({tuple(ids(each)[32:48]) for each in (first, second, third)}) == 3
    assert ids(one)[:32] == ids(other)[:32]
    assert ids(one)[32:] != ids(other)[32:]


def test_event_trace_reads_one_group_and_tier(tmp_path: Path) -> None:
    states = {"group_idx": 0, "kv_cache_spec_kind": "mamba"}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    again = {"group_idx": 2, "kv_cache_spec_kind": "full_attention"}
    trace = recording(
        tmp_path,
        (0.0, [stored(None, 1, 2, **states), stored(None, 1, 2, **full), stored(None, 1, 2, **again)]),
        (1.0, [stored(None, 3, 4, **full, medium="CPU"), stored(None, 5, **full, medium="GPU")]),
        (2.0, [{"type": "BlockRemoved", "block_hashes": [1]}, {"type": "AllBlocksCleared"}]),
    )
    assert lengths(trace) == [(0.0, 32, 1), (1.0, 16, 1)]


def test_event_trace_reads_arrays_and_text_hashes(tmp_path: Path) -> None:
    array = ["BlockStored", ["ab", "cd"], None, [7] * 32, 16, None, "GPU", None, None, 0, "full_attention", None]
    trace = recording(
        tmp_path,
        (0.0, [array]),
        (0.5, [["BlockStored", ["ef"], "cd", [8] * 16, 16, None, "GPU"], ["AllBlocksCleared"]]),
    )
    assert lengths(trace) == [(0.0, 32, 16)]


def test_event_trace_ignores_blocks_stored_earlier(tmp_path: Path) -> None:
    trace = recording(
        tmp_path,
        (0.0, [stored(None, 1, 2, 3)]),
        (60.0, [stored(3, 4, 5)]),
        (90.0, [stored(77, 6, 7)]),  # nobody told of what leads there
        known=1,
    )
    assert lengths(trace) == [(60.0, 80, 1), (90.0, 32, 1)]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"events": [stored(None, 1)]}, "Object missing required field `ts`"),
        ({"ts": "now", "events": []}, r"Expected `float`, got `str` - at `\$\.ts`"),
        ({"ts": 1, "events": [7]}, "an event must be an object or an array"),
        ({"ts": 1, "events": [stored(None)]}, r"Expected `array` of length >= 1 - at `\$\.block_hashes`"),
        ({"ts": 1, "events": [stored(None, 1.5)]}, r"Expected `int \| str`, got `float` - at `\$\.block_hashes\[0\]`"),
        ({"ts": 1, "events": [{**stored(None, 1), "block_size": 0}]}, r"Expected `int` >= 1 - at `\$\.block_size`"),
        ({"ts": 1, "events": [{**stored(None, 1, 2), "block_size": 2**31 - 1}]}, "is longer than"),
    ],
)
def test_event_trace_with_bad_line_names_it(line: object, what: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = {"ts": 0, "events": [stored(None, 90, 91)]}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(line)}\n", "utf-8")
    with pytest.raises(TraceError, match=f"line 2: .*{what}"):
        list(TraceFile(path, format_name="kv-events"))
    left = TraceFile(path, format_name="kv-events", skip_bad_lines=True)
    assert lengths(left) == [(0.0, 32, 1)]
    assert left.summary().bad_lines == 1


def test_event_trace_commands_report_unknown_values(tmp_path: Path) -> None:
    trace = recording(tmp_path, (0.0, [stored(None, 1, 2)]), (3.0, [stored(None, 3)]))
    asked = ("replay", trace.path, "--model", "llama-3-8b", "--memory", "1GiB")
    for command in (("trace", "describe", trace.path), ("trace", "convert", trace.path, tmp_path / "out.jsonl"), asked):
        text = " ".join(run(*command).stdout.split())
        assert "requests are inferred from stored blocks" in text
    assert "inferred from stored blocks" not in run("trace", "describe", tmp_path / "out.jsonl").stdout
    assert lengths(TraceFile(tmp_path / "out.jsonl")) == lengths(trace)
    assert convert(trace, tmp_path / "again.jsonl") == 2
