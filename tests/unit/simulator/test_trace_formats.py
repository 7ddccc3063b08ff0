"""Traces of other projects: each known by its content, each bad line named."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hybridkv.errors import ConfigError, TraceError
from hybridkv.simulator import FORMATS, TraceFile, TraceRequest
from hybridkv.simulator.formats.texts import TokenTree, encoder_named

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,7,2,9,API log
"""
CHAT = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi there"}]}


def file(folder: Path, content: str | Sequence[object], name: str = "trace") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, content)), "utf-8")
    return path


def shared(one: TraceRequest, other: TraceRequest) -> int:
    """Leading tokens of the prompts that are equal."""
    first, second = one.prompt.token_ids(), other.prompt.token_ids()
    most = min(len(first), len(second))
    different = np.flatnonzero(first[:most] != second[:most])
    return int(different[0]) if different.size else most


def lengths(trace: TraceFile) -> list[tuple[float, int, int]]:
    return [(one.timestamp_s, one.num_prompt_tokens, one.num_output_tokens) for one in trace]


# -- lengths alone


def test_azure_trace_is_read(tmp_path: Path) -> None:
    trace = TraceFile(file(tmp_path, AZURE))
    assert trace.format_name == "azure"
    assert lengths(trace) == [(0.0, 374, 44), (4.314579, 396, 109)]
    first, second = trace
    assert shared(first, second) == 0
    # the traces of 2024 have a zone, and columns may stand in any order, beside others
    rows = ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 01:00:00.509930+01:00")
    newer = "\ufeffGeneratedTokens,ContextTokens,x,TIMESTAMP\r\n" + "".join(f"1,2,?,{one}\r\n" for one in rows)
    assert lengths(TraceFile(file(tmp_path, newer))) == [(0.0, 2, 1), (0.5, 2, 1)]


def test_burstgpt_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "zipped"
    path.write_bytes(gzip.compress(BURST.encode()))
    trace = TraceFile(path)
    assert trace.format_name == "burstgpt"
    assert lengths(trace) == [(0.0, 472, 18), (40.0, 7, 2)]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (AZURE + "2023-11-16 18:16:00,5\n", "line 4: 2 columns, but the first line names 3"),
        (AZURE + "yesterday,5,5\n", "line 4: not a date and time: 'yesterday'"),
        (AZURE + "2023-11-16 18:16:00,5,x\n", r"line 4: Expected `int`, got `str` - at `\$\.GeneratedTokens`"),
        (AZURE + "2023-11-16 18:16:00,0,1\n", r"line 4: Expected `int` >= 1 - at `\$\.ContextTokens`"),
        (AZURE + "2023-11-16 18:15:47,5,1\n", "line 4: timestamp 319 ms is before the previous request's 4315 ms"),
        (AZURE + '"2023\n', "line 4: "),
        (BURST + "46,ChatGPT,5,0,5,API log\n", r"line 4: Expected `int` >= 1 - at `\$\.Response tokens`"),
        (BURST + "1e999,ChatGPT,5,1,5,API log\n", r"line 4: Number out of range - at `\$\.Timestamp`"),
        (BURST + "nan,ChatGPT,5,1,5,API log\n", r"line 4: Expected `float` >= 0\.0 - at `\$\.Timestamp`"),
        (BURST + "?,ChatGPT,5,1,5,API log\n", r"line 4: Expected `float`, got `str` - at `\$\.Timestamp`"),
    ],
)
def test_csv_trace_with_bad_row_names_it(tmp_path: Path, content: str, what: str) -> None:
    path = file(tmp_path, content, "t.csv")
    with pytest.raises(TraceError, match=rf"t\.csv, {what}"):
        list(TraceFile(path))
    kept = TraceFile(path, skip_bad_lines=True)
    assert (len(list(kept)), kept.summary().bad_lines) == (2, 1)


# -- text


def test_conversation_trace_turns_share_their_prefix(tmp_path: Path) -> None:
    turns = [*CHAT["conversations"], {"from": "human", "value": "and now?"}, {"from": "gpt", "value": "now this"}]
    trace = TraceFile(file(tmp_path, [{"conversations": turns}, CHAT]), tokenizer="bytes:1")
    assert trace.format_name == "sharegpt"
    first, other, second = sorted(trace, key=lambda one: (one.num_prompt_tokens, one.timestamp_s))
    assert (first.timestamp_s, second.timestamp_s, other.timestamp_s > 0) == (0.0, 30.0, True)
    assert first.num_prompt_tokens == len("<|user|>\nhello\n<|assistant|>\n")
    assert first.num_output_tokens == len("hi there")
    both = np.concatenate((first.prompt.token_ids(), first.output.token_ids()))
    assert second.prompt.token_ids()[: len(both)].tolist() == both.tolist()
    assert other.prompt.token_ids().tolist() == first.prompt.token_ids().tolist()
    assert [one.timestamp_s for one in trace] == sorted(one.timestamp_s for one in trace)


def test_conversation_trace_in_one_array_is_read(tmp_path: Path) -> None:
    pretty = json.dumps([CHAT, {"conversations": []}, CHAT], indent=2)
    trace = TraceFile(file(tmp_path, pretty), tokenizer="bytes:4")
    assert [one.origin for one in trace] == ["line 2", "line 17"]
    assert len(list(TraceFile(file(tmp_path, json.dumps([CHAT] * 3)), tokenizer="bytes:4"))) == 3
    # larger than what is read at once
    long = {"conversations": [{"from": "human", "value": "x" * 3_000_000}, {"from": "gpt", "value": "y"}]}
    assert len(list(TraceFile(file(tmp_path, json.dumps([CHAT, long, CHAT])), tokenizer="bytes:4"))) == 3
    broken = file(tmp_path, pretty.replace("[]", "oops"), "b")
    with pytest.raises(TraceError, match=r"b, line 14: not JSON: Expecting value"):
        list(TraceFile(broken, tokenizer="bytes:4", skip_bad_lines=True))
    with pytest.raises(TraceError, match=r"line 17: .*(ends too soon|not JSON)"):
        list(TraceFile(file(tmp_path, pretty[:-60]), tokenizer="bytes:4"))
    with pytest.raises(TraceError, match="line 1: an item must be a JSON object, not int"):
        list(TraceFile(file(tmp_path, "[1, 2]"), tokenizer="bytes:4"))


def test_trace_without_times_gets_arrivals(tmp_path: Path) -> None:
    path = file(tmp_path, [CHAT] * 400)
    times = [one.timestamp_s for one in TraceFile(path, tokenizer="bytes:4", arrivals_per_s=10)]
    assert times == [one.timestamp_s for one in TraceFile(path, tokenizer="bytes:4", arrivals_per_s=10)]
    assert 30 < times[-1] < 50
    with pytest.raises(ConfigError, match=r"arrivals \(--arrivals\) must be above 0"):
        TraceFile(path, arrivals_per_s=0)


def test_benchmark_prompt_trace_is_read(tmp_path: Path) -> None:
    trace = TraceFile(
        file(tmp_path, [{"prompt": "abcd" * 8, "output_tokens": 9}, {"prompt": "abcd" * 4 + "x"}]), tokenizer="bytes:4"
    )
    assert trace.format_name == "vllm-bench"
    first, second = trace
    assert (first.num_prompt_tokens, first.num_output_tokens) == (8, 9)
    assert (second.num_prompt_tokens, second.num_output_tokens, shared(first, second)) == (5, 256, 4)


def test_aiperf_trace_is_read(tmp_path: Path) -> None:
    lines: list[object] = [
        {"timestamp": 1000, "text_input": "abcdefgh", "output_length": 3},
        {"timestamp": 2000, "messages": [{"role": "user", "content": "abcd"}], "output_length": 4},
        {"timestamp": 3000, "input_length": 77, "output_length": 5},
    ]
    trace = TraceFile(file(tmp_path, lines), tokenizer="bytes:4")
    assert trace.format_name == "aiperf"
    assert lengths(trace) == [(1.0, 2, 3), (2.0, 3 + 1 + 1 + 4, 4), (3.0, 77, 5)]


def test_aiperf_trace_turns_follow_their_session(tmp_path: Path) -> None:
    hashed = [
        {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 50, "hash_ids": [1, 2]},
        {"session_id": "a", "delay": 2000, "input_length": 80, "output_length": 25, "hash_ids": [3]},
        {"session_id": "a", "delay": 500, "input_length": 7, "output_length": 1, "hash_ids": [4]},
        {"session_id": "b", "timestamp": 3500, "input_length": 512, "output_length": 100, "hash_ids": [1]},
        {"timestamp": 3500, "input_length": 512, "output_length": 1, "hash_ids": [1]},
        {"session_id": "b", "delay": 0, "input_length": 9, "output_length": 2, "hash_ids": [9]},
    ]
    # 50 tokens of an answer take a second, then the delay
    expected = [(0.0, 600, 50), (3.0, 730, 25), (3.5, 512, 100), (3.5, 512, 1), (4.0, 762, 1), (5.5, 621, 2)]
    trace = TraceFile(file(tmp_path, hashed))
    assert trace.format_name == "mooncake"
    assert lengths(trace) == expected
    first, second, other, alone, third, last = trace
    assert (shared(first, second), shared(second, third), shared(first, other)) == (600, 730, 512)
    assert second.prompt.token_ids()[600:650].tolist() == first.output.token_ids().tolist()
    assert third.prompt.token_ids()[730:755].tolist() == second.output.token_ids().tolist()
    assert (shared(other, last), shared(other, alone), shared(first, last)) == (512, 512, 512)

    plain = [{name: value for name, value in line.items() if name != "hash_ids"} for line in hashed]
    assert lengths(TraceFile(file(tmp_path, plain))) == expected
    one, two, *_ = TraceFile(file(tmp_path, plain))
    assert shared(one, two) == 600

    said = [
        {"session_id": "a", "timestamp": 0, "text_input": "abcdefgh", "output_length": 50},
        {"session_id": "a", "delay": 2000, "text_input": "x" * 40, "output_length": 4},
        {"session_id": "b", "timestamp": 9000, "messages": [{"role": "user", "content": "hi"}], "output_length": 4},
        {"session_id": "b", "delay": 20, "messages": [{"role": "user", "content": "hi"}] * 2, "output_length": 1},
    ]
    trace = TraceFile(file(tmp_path, said), tokenizer="bytes:4")
    assert lengths(trace) == [(0.0, 2, 50), (3.0, 62, 4), (9.0, 9, 4), (9.1, 14, 1)]  # messages are a whole prompt


@pytest.mark.parametrize(
    ("turn", "what"),
    [
        ({"session_id": "x", "delay": 5}, "the session 'x' has no turn before this one"),
        ({"session_id": "a", "delay": -5}, r"Expected `float` >= 0\.0 - at `\$\.delay`"),
        ({"session_id": "a", "delay": "5"}, r"Expected `float \| null`, got `str` - at `\$\.delay`"),
        ({"session_id": "a"}, "a line needs the field 'timestamp', or 'delay' and 'session_id'"),
        ({"delay": 5}, "a line needs the field 'timestamp', or 'delay' and 'session_id'"),
        ({"session_id": 7, "delay": 5}, r"Expected `str`, got `int` - at `\$\.session_id`"),
        ({"session_id": "a", "delay": 5, "input_length": 2**31 - 2}, "a request of 2147483662 tokens is longer"),
    ],
)
def test_aiperf_trace_with_invalid_turn_is_rejected(turn: dict[str, object], what: str, tmp_path: Path) -> None:
    first = {"session_id": "a", "timestamp": 0, "input_length": 6, "output_length": 5}
    later = {"timestamp": 9000, "input_length": 6, "output_length": 5}
    with pytest.raises(TraceError, match=f"line 2: {what}"):
        list(TraceFile(file(tmp_path, [first, {"input_length": 6, "output_length": 5, **turn}])))
    late = {"session_id": "a", "delay": 5, "input_length": 6, "output_length": 5}
    with pytest.raises(TraceError, match="line 3: timestamp 105 ms is before the previous request's 9000 ms"):
        list(TraceFile(file(tmp_path, [first, later, late])))


def test_openai_log_trace_is_read(tmp_path: Path) -> None:
    ask = [{"role": "user", "content": "what is a cache?"}]
    answer = {"choices": [{"message": {"role": "assistant", "content": "a place"}}]}
    more = [
        *ask,
        {"role": "assistant", "content": "a place"},
        {"role": "user", "content": [{"type": "text", "text": "of what?"}]},
    ]
    lines: list[object] = [
        {
            "time": "2026-01-01T00:00:00Z",
            "body": {"messages": ask, "max_tokens": 50},
            "response": {"status_code": 200, "body": answer},
        },
        {
            "time": "2026-01-01T00:00:01.5Z",
            "request": {"messages": more},
            "response": {"usage": {"completion_tokens": 12}},
        },
        {"timestamp": 1767225603, "messages": more, "max_tokens": 7},
        {"created": 1767225604250, "prompt": "what", "max_tokens": 3},
        {"created": 1767225605, "prompt": "what", "max_tokens": 3, "cache_salt": "other"},
        {"created": 1767225606, "body": {"prompt": [5, 6, 7], "max_tokens": 3, "tools": 1}},
    ]
    trace = TraceFile(file(tmp_path, lines), tokenizer="bytes:1")
    assert trace.format_name == "openai"
    first, second, third, fourth, fifth, sixth = trace
    assert [one.timestamp_s for one in trace] == [0.0, 1.5, 3.0, 4.25, 5.0, 6.0]
    assert [one.num_output_tokens for one in trace] == [len("a place"), 12, 7, 3, 3, 3]
    both = np.concatenate((first.prompt.token_ids(), first.output.token_ids()))
    assert second.prompt.token_ids()[: len(both)].tolist() == both.tolist()
    assert third.prompt == second.prompt
    assert third.output != second.output  # nobody knows what it was
    assert (fourth.num_prompt_tokens, shared(fourth, fifth), sixth.num_prompt_tokens) == (4, 0, 3)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"body": {"prompt": "x", "max_tokens": 1}}, "no time: one of time, timestamp, created_at, created must be"),
        ({"time": "noon", "body": {"prompt": "x", "max_tokens": 1}}, "not a date and time: 'noon'"),
        ({"time": -1, "body": {"prompt": "x", "max_tokens": 1}}, r"time must lie in 0 \.\. 1e\+15, got -1"),
        ({"time": 5, "body": {"prompt": "x"}}, "the output's length is unknown: give a text in response"),
        ({"time": 5, "body": {"prompt": "", "max_tokens": 1}}, "the prompt must have at least 1 token"),
        (
            {"time": 5, "body": {"prompt": 5, "max_tokens": 1}},
            r"Expected `str \| array \| null`, got `int` - at `\$\.prompt`",
        ),
        ({"time": 5, "body": {"prompt": ["x"], "max_tokens": 1}}, r"Expected `int`, got `str` - at `\$\.prompt\[0\]`"),
        ({"time": 5, "body": {"max_tokens": 1}}, "a body needs one of the fields 'messages' and 'prompt'"),
        ({"time": 5, "body": {"prompt": "x", "max_tokens": 0}}, r"Expected `int` >= 1 - at `\$\.max_tokens`"),
        ({"time": 5, "messages": [1], "max_tokens": 1}, r"Expected `object`, got `int` - at `\$\.messages\[0\]`"),
        (
            {"time": 5, "messages": [{"content": "x"}], "max_tokens": 1},
            r"Object missing required field `role` - at `\$\.messages\[0\]`",
        ),
        (
            {"time": 5, "messages": [{"role": "user", "content": 5}], "max_tokens": 1},
            r"Expected `str \| array \| null`, got `int` - at `\$\.messages\[0\]\.content`",
        ),
        ({"conversations": 5}, r"Expected `array`, got `int` - at `\$\.conversations`"),
        ({"conversations": [5]}, r"Expected `object`, got `int` - at `\$\.conversations\[0\]`"),
        ({"conversations": [{"from": "gpt"}]}, r"Object missing required field `value` - at `\$\.conversations\[0\]`"),
        ({"prompt": "", "output_tokens": 5}, "the prompt must have at least 1 token"),
        ({"prompt": "x", "output_tokens": "5"}, r"Expected `int`, got `str` - at `\$\.output_tokens`"),
    ],
)
def test_text_trace_with_bad_line_names_it(tmp_path: Path, line: object, what: str) -> None:
    path = file(tmp_path, ["", line], "t.jsonl")
    path.write_text("\n" + json.dumps(line), "utf-8")
    with pytest.raises(TraceError, match=rf"t\.jsonl, line 2: {what}"):
        list(TraceFile(path, tokenizer="bytes:4"))


def test_trace_format_by_name_is_used(tmp_path: Path) -> None:
    path = file(tmp_path, [{"timestamp": 5, "prompt": "abcd", "max_tokens": 3, "output_tokens": 4}])
    assert TraceFile(path, tokenizer="bytes:4").format_name == "openai"
    assert TraceFile(path, tokenizer="bytes:4", format_name="vllm-bench").format_name == "vllm-bench"
    assert [one.num_output_tokens for one in TraceFile(path, tokenizer="bytes:4", format_name="vllm-bench")] == [4]
    with pytest.raises(ConfigError, match="unknown trace format 'x': use one of mooncake"):
        TraceFile(path, format_name="x")
    with pytest.raises(TraceError, match="line 1: it must name the columns TIMESTAMP, ContextTokens, GeneratedTokens"):
        list(TraceFile(path, format_name="azure"))
    assert len(FORMATS) == len(set(FORMATS)) == 9


def test_text_trace_without_tokenizer_is_rejected(tmp_path: Path) -> None:
    path = file(tmp_path, [CHAT])
    with pytest.raises(ConfigError, match="this trace holds text: name a tokenizer"):
        list(TraceFile(path))
    with pytest.raises(ConfigError, match=r"no tokenizer at .*nowhere"):
        TraceFile(path, tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="use bytes:1 to bytes:4"):
        TraceFile(path, tokenizer="bytes:9")
    with pytest.raises(ConfigError, match="is not a readable tokenizer"):
        TraceFile(path, tokenizer=str(path))


def test_tokenizer_from_a_folder_is_used(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"hello": 7, "?": 0}, unk_token="?")  # noqa: S106  # no password
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    assert encoder_named(str(tmp_path))("hello you hello").tolist() == [7, 0, 7]


def test_tokenizer_of_bytes_splits_evenly() -> None:
    encode = encoder_named("bytes:4")
    assert len(encode("")) == 0
    assert len(encode("abcde")) == 2
    assert encode("abcdefgh")[:1].tolist() == encode("abcd").tolist()
    assert len(encoder_named("bytes:3")("abcdefg")) == 3
    assert encoder_named("bytes:1")("ab").tolist() == [97, 98]


def test_text_trace_equal_prefixes_have_equal_pieces() -> None:
    tree = TokenTree(iter(range(1000)))
    rng = np.random.default_rng(5)
    runs = [rng.integers(0, 2, rng.integers(1, 40)).astype(np.int32) for _ in range(300)]
    flat = [[(s, o + k) for s, o, n in tree.pieces(run) for k in range(n)] for run in runs]
    for run, tokens in zip(runs, flat, strict=True):
        assert len(tokens) == len(run)
    for one, its in zip(runs, flat, strict=True):
        for other, theirs in zip(runs, flat, strict=True):
            alike = next((k for k in range(min(len(one), len(other))) if one[k] != other[k]), min(len(one), len(other)))
            same = next(
                (k for k in range(min(len(its), len(theirs))) if its[k] != theirs[k]), min(len(its), len(theirs))
            )
            assert alike == same
