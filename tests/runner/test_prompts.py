"""Prompt files: JSON lines, plain text and rejected lines."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from runner_support import loaded_model

from hybridkv.errors import ConfigError, TraceError
from hybridkv.request import SamplingParams
from hybridkv.runner import encode
from hybridkv.runner.prompts import BUILT_IN, Prompts, plain_prompts, read_prompts

DEFAULTS = SamplingParams(max_tokens=9)


def checked(prompt: str | Sequence[int]) -> list[int]:
    return encode(loaded_model("llama"), prompt)


def read(tmp_path: Path, text: str, *, skip: bool = False, name: str = "prompts.jsonl") -> Prompts:
    path = tmp_path / name
    path.write_text(text, "utf-8")
    return read_prompts(path, checked, DEFAULTS, vocab_size=257, skip_bad_lines=skip)


def test_json_lines_are_read_as_prompts_and_sampling(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        '{"prompt": "Hi"}\n\n{"prompt": [1, 2], "sampling": {"temperature": 1, "top_k": 3, "top_p": 0.5, "min_p": 0, '
        '"repetition_penalty": 1.1, "seed": -4, "max_tokens": 5, "stop": "x", "stop_token_ids": [7], '
        '"ignore_eos": true}}\n',
    )
    assert [one.token_ids for one in found.prompts] == [(72, 105), (1, 2)]
    assert found.prompts[0].sampling == DEFAULTS
    assert found.prompts[1].sampling == SamplingParams(1.0, 3, 0.5, 0.0, 1.1, -4, 5, (7,), ("x",), ignore_eos=True)
    assert found.bad_lines == 0


def test_resume_marks_of_json_lines_are_sorted(tmp_path: Path) -> None:
    found = read(tmp_path, '{"prompt": "Hi", "marks": [70, 1]}\n{"prompt": "Hi", "marks": []}\n{"prompt": "Hi"}\n')
    # 70 lies in the output, or behind its end, where it does nothing
    assert [one.marks for one in found.prompts] == [(1, 70), (), ()]


def test_prompts_file_format_is_detected(tmp_path: Path) -> None:
    found = read(tmp_path, "One\r\n\n Two {}\n", name="prompts.txt")
    assert [bytes(one.token_ids).decode() for one in found.prompts] == ["One", " Two {}"]
    found = read(tmp_path, '\n{"prompt": "A"}\n', name="prompts.txt")
    assert found.prompts[0].token_ids == (65,)
    assert len(plain_prompts(BUILT_IN, checked, DEFAULTS).prompts) == len(BUILT_IN)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("plain", "not JSON"),
        ("[1]", "must be an object"),
        ("{}", "prompt is missing"),
        ('{"prompt": 5}', "string or a list"),
        ('{"prompt": [1, true]}', "string or a list"),
        ('{"prompt": [1.5]}', "string or a list"),
        ('{"prompt": ""}', "empty"),
        ('{"prompt": []}', "empty"),
        ('{"prompt": [257]}', "token id 257 is outside the vocabulary of tiny:llama"),
        ('{"prompt": [-1]}', "token id -1 is outside"),
        ('{"prompt": "x", "text": 1}', "unknown key 'text'"),
        ('{"prompt": "x", "mark": [1]}', "unknown key 'mark': known are prompt, sampling, marks"),
        ('{"prompt": "x", "marks": 1}', "marks must be a list of token counts, got 1"),
        ('{"prompt": "x", "marks": null}', "marks must be a list of token counts, got None"),
        ('{"prompt": "x", "marks": "12"}', "marks must be a list of token counts, got '12'"),
        ('{"prompt": "x", "marks": {"1": 2}}', "marks must be token counts"),
        ('{"prompt": "x", "marks": [1, 0]}', r"marks must be token counts, 1 \.\. 2\*\*31 - 1, got 0"),
        ('{"prompt": "x", "marks": [1.0]}', r"marks must be token counts, .* got 1\.0"),
        ('{"prompt": "x", "marks": [true]}', "marks must be token counts, .* got True"),
        ('{"prompt": "x", "marks": [4, 9, 4]}', "marks must be distinct, got 4 twice"),
        ('{"prompt": "x", "sampling": []}', "sampling must be an object"),
        ('{"prompt": "x", "sampling": {"temprature": 1}}', "unknown sampling key 'temprature'.*temperature"),
        ('{"prompt": "x", "sampling": {"temperature": "hot"}}', "temperature must be a number"),
        ('{"prompt": "x", "sampling": {"temperature": NaN}}', "temperature must be a number"),
        ('{"prompt": "x", "sampling": {"temperature": -1}}', "temperature must be 0"),
        ('{"prompt": "x", "sampling": {"top_p": 0}}', "top_p must be above 0"),
        ('{"prompt": "x", "sampling": {"top_k": 1.5}}', "top_k must be an integer"),
        ('{"prompt": "x", "sampling": {"logprobs": [3]}}', "logprobs must be an integer"),
        ('{"prompt": "x", "sampling": {"prompt_logprobs": -1}}', "prompt_logprobs must be 0 or more"),
        ('{"prompt": "x", "sampling": {"max_tokens": null}}', "max_tokens must be an integer"),
        ('{"prompt": "x", "sampling": {"max_tokens": 0}}', "max_tokens must be at least 1"),
        ('{"prompt": "x", "sampling": {"ignore_eos": 1}}', "true or false"),
        ('{"prompt": "x", "sampling": {"stop": [""]}}', "strings that are not empty"),
        ('{"prompt": "x", "sampling": {"stop_token_ids": ["a"]}}', "list of token ids"),
        ('{"prompt": "x", "sampling": {"stop_token_ids": [900]}}', "stop token id 900"),
    ],
)
def test_malformed_lines_are_rejected_or_counted(line: str, message: str, tmp_path: Path) -> None:
    text = f'{{"prompt": "good"}}\n{line}\n{{"prompt": "also good"}}\n'
    with pytest.raises(TraceError, match=rf"prompts\.jsonl, line 2: .*{message}"):
        read(tmp_path, text)
    found = read(tmp_path, text, skip=True)
    assert (len(found.prompts), found.bad_lines) == (2, 1)
    assert found.first_bad is not None
    assert "line 2" in found.first_bad


def test_logprobs_of_json_lines_are_numbers_or_null(tmp_path: Path) -> None:
    lines = ('{"logprobs": 3}', '{"prompt_logprobs": 0}', '{"logprobs": null, "prompt_logprobs": null}')
    found = read(tmp_path, "".join(f'{{"prompt": "x", "sampling": {one}}}\n' for one in lines))
    asked = [(one.sampling.logprobs, one.sampling.prompt_logprobs) for one in found.prompts]
    assert asked == [(3, None), (None, 0), (None, None)]


def test_files_without_prompts_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no prompt: the file is empty"):
        read(tmp_path, "\n\n")
    with pytest.raises(TraceError, match=r"holds no prompt: 1 bad lines, the first: .*line 1"):
        read(tmp_path, "{", skip=True)
    with pytest.raises(ConfigError, match="cannot read the prompts"):
        read_prompts(tmp_path / "none", checked, DEFAULTS, vocab_size=257)
    path = tmp_path / "latin.txt"
    path.write_bytes(b"good\n\xff\xfe\n")
    with pytest.raises(TraceError, match="line 2"):
        read_prompts(path, checked, DEFAULTS, vocab_size=257)
