"""Trace files: both formats, plain and gzip, and every way in which a line can be wrong."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hybridkv.errors import ConfigError, TraceError
from hybridkv.request import NO_HINTS, Hints
from hybridkv.simulator import Pieces, TraceFile, TraceRequest
from hybridkv.simulator.tokens import HASHED_BLOCK, NEW_OUTPUT, PROMPT_SEGMENT

Record = dict[str, object]
Write = Callable[..., Path]

PIECES: Record = {"timestamp": 1500, "prompt": [[120, 0, 40], [4, 10, 2]], "output": [[5, 0, 3]]}
MOONCAKE: Record = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [0, 9, 11]}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def lines(*records: Record | str | bytes, name: str = "trace.jsonl") -> Path:
        raw = [
            one if isinstance(one, bytes) else (one if isinstance(one, str) else json.dumps(one)).encode()
            for one in records
        ]
        path = tmp_path / name
        path.write_bytes(b"\n".join(raw) + b"\n")
        return path

    return lines


def changed(record: Record, **fields: object) -> Record:
    return {**record, **fields}


def without(record: Record, name: str) -> Record:
    return {key: value for key, value in record.items() if key != name}


# -- what is read


def test_trace_line_with_pieces_is_read(write: Write) -> None:
    (request,) = TraceFile(write(PIECES))
    assert request == TraceRequest(
        1.5, Pieces(PROMPT_SEGMENT, ((120, 0, 40), (4, 10, 2))), Pieces(PROMPT_SEGMENT, ((5, 0, 3),)), origin="line 1"
    )
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (42, 3, 45)
    # a later prompt that repeats the output has its very ids
    again = Pieces(PROMPT_SEGMENT, ((120, 0, 40), (5, 0, 3))).token_ids()
    assert again[:40].tolist() == request.prompt.token_ids()[:40].tolist()
    assert again[40:].tolist() == request.output.token_ids().tolist()


def test_trace_resume_marks_are_read(write: Write) -> None:
    # 42 tokens of prompt and 3 of output; in any order, and twice is once
    marked, empty, plain = TraceFile(write(changed(PIECES, marks=[16, 45, 1, 16]), changed(PIECES, marks=[]), PIECES))
    assert (marked.marks, empty.marks, plain.marks) == ((1, 16, 45), (), ())
    assert replace(marked, marks=(), origin="line 3") == plain
    # the other format has no such field
    (other,) = TraceFile(write(changed(MOONCAKE, marks=["x"])))
    assert other.marks == ()


@pytest.mark.parametrize("record", [PIECES, MOONCAKE])
def test_trace_tenants_and_hints_are_read(write: Write, record: Record) -> None:
    hints = {"within_s": 30, "shared_tokens": 16}
    told, empty, plain = TraceFile(write(changed(record, tenant="a", hints=hints), changed(record, hints={}), record))
    assert (told.tenant, told.hints) == ("a", Hints(within_s=30.0, goes_on=True, shared_tokens=16))
    assert [(one.tenant, one.hints) for one in (empty, plain)] == [(None, NO_HINTS)] * 2


def test_trace_empty_pieces_are_dropped(write: Write) -> None:
    (request,) = TraceFile(write(changed(PIECES, prompt=[[1, 0, 0], [2, 5, 1], [3, 0, 0]])))
    assert request.prompt.pieces == ((2, 5, 1),)


def test_trace_mooncake_line_is_read(write: Write) -> None:
    first, second = TraceFile(write(MOONCAKE, changed(MOONCAKE, input_length=1024, hash_ids=[0, 9])))
    assert first.prompt == Pieces(HASHED_BLOCK, ((0, 0, 512), (9, 0, 512), (11, 0, 6)))
    assert second.prompt == Pieces(HASHED_BLOCK, ((0, 0, 512), (9, 0, 512)))
    assert first.prompt.token_ids()[:1024].tolist() == second.prompt.token_ids().tolist()
    # outputs are new: each line has a segment of its own
    assert first.output == Pieces(NEW_OUTPUT, ((1, 0, 7),))
    assert second.output == Pieces(NEW_OUTPUT, ((2, 0, 7),))


def test_trace_mooncake_block_size_is_applied(write: Write) -> None:
    path = write(changed(MOONCAKE, input_length=33, hash_ids=[5, 6, 7]))
    (request,) = TraceFile(path, trace_block_size=16)
    assert request.prompt.pieces == ((5, 0, 16), (6, 0, 16), (7, 0, 1))
    with pytest.raises(TraceError, match=r"line 1: hash_ids has 3 ids, .* makes 1 blocks .*: check --trace-block-size"):
        list(TraceFile(path))


def test_trace_gzip_is_detected_by_its_first_bytes(write: Write, tmp_path: Path) -> None:
    plain = write(PIECES, PIECES)
    disguised, honest = tmp_path / "zipped.jsonl", tmp_path / "trace.jsonl.gz"
    for path in (disguised, honest):
        path.write_bytes(gzip.compress(plain.read_bytes()))
    misnamed = tmp_path / "plain.gz"
    misnamed.write_bytes(plain.read_bytes())
    wanted = list(TraceFile(plain))
    for path in (disguised, honest, misnamed):
        assert list(TraceFile(path)) == wanted


def test_trace_blank_lines_and_extra_fields_are_ignored(write: Write) -> None:
    path = write("", changed(PIECES, chat_id="x", type=3), "   ", PIECES, name="t.jsonl")
    assert [request.origin for request in TraceFile(path)] == ["line 2", "line 4"]


def test_trace_windows_line_ends_are_read(write: Write) -> None:
    assert len(list(TraceFile(write(json.dumps(PIECES) + "\r", json.dumps(PIECES) + "\r")))) == 2


def test_trace_summary_has_its_counts(write: Write) -> None:
    path = write(PIECES, changed(PIECES, output=[[5, 0, 30]]), PIECES)
    summary = TraceFile(path).summary()
    assert (summary.requests, summary.prompt_tokens, summary.output_tokens) == (3, 126, 36)
    assert (summary.longest_tokens, summary.longest_at) == (72, "line 2")
    assert (summary.bad_lines, summary.first_bad) == (0, None)


def test_trace_limit_reads_no_further(write: Write) -> None:
    path = write(PIECES, PIECES, "broken")
    assert len(list(TraceFile(path, limit=2))) == 2
    assert TraceFile(path, limit=2).summary().requests == 2
    with pytest.raises(TraceError, match="line 3"):
        list(TraceFile(path, limit=3))


def test_trace_requests_are_streamed(write: Write) -> None:
    requests = iter(TraceFile(write(PIECES, "broken")))
    assert next(requests).num_prompt_tokens == 42
    with pytest.raises(TraceError, match="line 2"):
        next(requests)


def test_trace_iteration_starts_again(write: Write) -> None:
    trace = TraceFile(write(PIECES, PIECES))
    assert list(trace) == list(trace)


# -- what is wrong

MALFORMED = [
    ("{", "not JSON: Expecting property name"),
    ("not json", "not JSON: Expecting value at column 1"),
    (b"\xff\xfe{}", "not "),
    (b'{"timestamp": "\xff"}', "not UTF-8 text"),
    ("[" * 100_000, "not JSON"),
    ('{"timestamp": ' + "9" * 5000 + "}", "not JSON that can be read"),
    ("[1, 2]", "a line must be a JSON object, not list"),
    ("{}", r"no format is recognised by the fields \[\]: name it \(--format\), one of mooncake, token-exact, azure, "),
    (without(PIECES, "timestamp"), "Object missing required field `timestamp`"),
    (without(PIECES, "output"), "Object missing required field `output`"),
    (without(PIECES, "prompt"), "Object missing required field `prompt`"),
    (without(MOONCAKE, "hash_ids"), "Object missing required field `hash_ids`"),
    (changed(PIECES, timestamp="1"), r"Expected `float`, got `str` - at `\$\.timestamp`"),
    (changed(PIECES, timestamp=True), r"Expected `float`, got `bool` - at `\$\.timestamp`"),
    (changed(PIECES, timestamp=-1), r"Expected `float` >= 0\.0 - at `\$\.timestamp`"),
    (json.dumps(PIECES).replace("1500", "NaN"), r"Expected `float` >= 0\.0 - at `\$\.timestamp`"),
    (json.dumps(PIECES).replace("1500", "1e999"), r"Expected `float` < 10+\.0 - at `\$\.timestamp`"),
    (changed(PIECES, timestamp=10**400), r"Number out of range - at `\$\.timestamp`"),
    (changed(PIECES, prompt={}), r"Expected `int \| array`, got `object` - at `\$\.prompt`"),
    (changed(PIECES, prompt=[]), "prompt must have at least 1 token"),
    (changed(PIECES, prompt=[[1, 0, 0]]), "prompt must have at least 1 token"),
    (changed(PIECES, output=[]), "output must have at least 1 token"),
    (changed(PIECES, prompt=[[1, 0]]), r"Expected `array` of length 3, got 2 - at `\$\.prompt\[0\]`"),
    (changed(PIECES, prompt=[7]), r"Expected `array`, got `int` - at `\$\.prompt\[0\]`"),
    (changed(PIECES, prompt=[[1, -1, 4]]), r"Expected `int` >= 0 - at `\$\.prompt\[0\]\[1\]`"),
    (changed(PIECES, output=[[-1, 0, 4]]), r"Expected `int` >= 0 - at `\$\.output\[0\]\[0\]`"),
    (changed(PIECES, prompt=[[1.0, 0, 4]]), r"Expected `int`, got `float` - at `\$\.prompt\[0\]\[0\]`"),
    (changed(PIECES, prompt=[[1, 0, 2**31]]), r"Expected `int` <= 2147483647 - at `\$\.prompt\[0\]\[2\]`"),
    (changed(PIECES, prompt=[[1, 0, 2**31 - 1]]), "a request of 2147483650 tokens is longer than 2147483647"),
    (changed(PIECES, prompt=[[2**64, 0, 1]]), "a segment or hash id must be at most 18446744073709551615"),
    (changed(PIECES, tenant=""), "tenant must be text"),
    (changed(MOONCAKE, tenant=5), "tenant must be text"),
    (changed(PIECES, hints=["over"]), "hints must be an object"),
    (changed(PIECES, hints={"open": True}), "hints have no field 'open': use over, goes_on"),
    (changed(MOONCAKE, hints={"over": 1}), "over must be true or false"),
    (changed(PIECES, hints={"over": True, "within_s": 1}), "hints say that a session goes on, and that it is over"),
    (changed(PIECES, marks=5), r"Expected `array`, got `int` - at `\$\.marks`"),
    (changed(PIECES, marks=[0]), r"Expected `int` >= 1 - at `\$\.marks\[0\]`"),
    (changed(PIECES, marks=[46]), r"a mark must lie in 1 \.\. 45, got 46"),
    (changed(PIECES, marks=[3, 4.0]), r"Expected `int`, got `float` - at `\$\.marks\[1\]`"),
    (changed(MOONCAKE, input_length=0, hash_ids=[]), r"Expected `int` >= 1 - at `\$\.input_length`"),
    (changed(MOONCAKE, output_length=0), r"Expected `int` >= 1 - at `\$\.output_length`"),
    (changed(MOONCAKE, output_length="3"), r"Expected `int`, got `str` - at `\$\.output_length`"),
    (changed(MOONCAKE, hash_ids=[1, 2]), "hash_ids has 2 ids, but input_length 1030 makes 3 blocks of 512 tokens"),
    (changed(MOONCAKE, hash_ids="abc"), r"Expected `array`, got `str` - at `\$\.hash_ids`"),
    (changed(MOONCAKE, hash_ids=[1, None, 3]), r"Expected `int`, got `null` - at `\$\.hash_ids\[1\]`"),
    (changed(MOONCAKE, hash_ids=[1, -2, 3]), r"Expected `int` >= 0 - at `\$\.hash_ids\[1\]`"),
]


@pytest.mark.parametrize(("line", "what"), MALFORMED, ids=[str(at) for at in range(len(MALFORMED))])
def test_trace_malformed_line_is_named(write: Write, line: Record | str | bytes, what: str) -> None:
    # the line before fixes the format, except where it is of the other one
    good = MOONCAKE if isinstance(line, dict) and ("hash_ids" in line or "input_length" in line) else PIECES
    good = changed(good, timestamp=0)
    fixed = line != "{}"
    lines = [good, line, good] if fixed else [line, good, good]
    path = write(*lines)
    number = 2 if fixed else 1
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line {number}: {what}") as caught:
        TraceFile(path).summary()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    trace = TraceFile(path, skip_bad_lines=True)
    kept = [request.origin for request in trace]
    assert kept == (["line 1", "line 3"] if fixed else ["line 2", "line 3"])
    summary = trace.summary()
    assert (summary.requests, summary.bad_lines) == (2, 1)
    assert f"{summary.first_bad}; --skip-bad-lines skips it" == str(caught.value)


def test_trace_with_mixed_formats_is_rejected(write: Write) -> None:
    with pytest.raises(TraceError, match="line 2: Object missing required field `prompt`"):
        list(TraceFile(write(PIECES, MOONCAKE)))


def test_trace_format_is_set_by_the_first_good_line(write: Write) -> None:
    path = write(changed(MOONCAKE, output_length=0), PIECES, MOONCAKE, PIECES)
    trace = TraceFile(path, skip_bad_lines=True)
    assert [request.origin for request in trace] == ["line 2", "line 4"]
    assert trace.summary().bad_lines == 2


def test_trace_with_decreasing_time_is_rejected(write: Write) -> None:
    path = write(PIECES, PIECES, changed(PIECES, timestamp=1499), PIECES)
    with pytest.raises(TraceError, match=r"line 3: timestamp 1499 ms is before .* 1500 ms: sort the lines"):
        list(TraceFile(path))
    assert [request.origin for request in TraceFile(path, skip_bad_lines=True)] == ["line 1", "line 2", "line 4"]


def test_trace_file_that_cannot_be_read_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read .*none\.jsonl: No such file"):
        TraceFile(tmp_path / "none.jsonl").summary()
    with pytest.raises(TraceError, match="Is a directory"):
        list(TraceFile(tmp_path))
    broken = tmp_path / "broken.gz"
    many = gzip.compress("\n".join(json.dumps(changed(PIECES, timestamp=k)) for k in range(3000)).encode())
    broken.write_bytes(many[: len(many) // 2])
    with pytest.raises(TraceError, match=r"broken\.gz, after line \d+: the gzip data is damaged"):
        list(TraceFile(broken, skip_bad_lines=True))
    broken.write_bytes(many[:40] + bytes(40) + many[80:])
    with pytest.raises(TraceError, match="the gzip data is damaged"):
        list(TraceFile(broken))


def test_trace_without_requests_is_rejected(write: Write) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl holds no requests, at least 1 is needed$"):
        TraceFile(write("", " ")).summary()
    with pytest.raises(
        TraceError, match=r"holds no requests, .*: 2 bad lines were skipped, the first is .*line 1: not JSON"
    ):
        TraceFile(write("x", "y"), skip_bad_lines=True).summary()


def test_trace_option_that_is_invalid_is_rejected(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"block size \(--trace-block-size\) must be at least 1 token, got 0"):
        TraceFile(write(PIECES), trace_block_size=0)
    with pytest.raises(ConfigError, match=r"limit \(--limit\) must be at least 1 request, got 0"):
        TraceFile(write(PIECES), limit=0)
