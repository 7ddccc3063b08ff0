"""Conversations on the command line: files of them through `generate`, and `chat` through pipes and a terminal."""

import json
import os
import pty
import select
import signal
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from cli_support import document, error, run
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, load
from warm import Warm

ASK = {"role": "user", "content": "What is a prefix cache?"}
GENERATE = ("generate", "--model", "tiny:llama")
SYSTEM = {"role": "system", "content": "Be brief."}


def conversations(tmp_path: Path, *lines: Any) -> Path:  # noqa: ANN401  # any JSON
    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    return path


def generated(prompt: str, sampling: SamplingParams) -> str:
    with Engine(load("tiny:llama"), memory="1MiB") as engine:
        (done,) = engine.generate([prompt], sampling)
    assert done.text is not None
    return done.text


# -- files


def test_chat_conversation_uses_the_chat_template(tmp_path: Path) -> None:
    file = conversations(tmp_path, [ASK], {"messages": [SYSTEM, ASK], "sampling": {"max_tokens": 5}}, [ASK])
    output = tmp_path / "out.jsonl"
    options = ("--temperature", "0.7", "--top-p", "0.9", "--seed", "3", "--stop", "a", "--stop", "e")
    files = ("--messages", file, "--system", "Rhyme.", "--output", output)
    printed = document(*GENERATE, *files, *options, "--max-new-tokens", "50", "--check")
    written = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=3, stop=("a", "e"), max_tokens=50)
    expected = generated("system: Rhyme.\nuser: What is a prefix cache?\nassistant: ", sampling)
    assert "a" not in expected
    assert [one["text"] for one in written] == [expected, written[1]["text"], expected]
    assert len(written[1]["token_ids"]) == 5
    assert written[1]["messages"] == [SYSTEM, ASK, {"role": "assistant", "content": written[1]["text"]}]
    assert written[0]["messages"][0] == {"role": "system", "content": "Rhyme."}
    assert [{**one, "messages": None} for one in written] == [{**one, "messages": None} for one in printed["requests"]]
    assert printed["check"]["ok"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["conversations.jsonl", "out.jsonl"]


def test_chat_whole_output_is_printed_on_request(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a prompt\n", "utf-8")
    arguments = (*GENERATE, "--prompts", prompts, "--max-new-tokens", "80")
    text = generated("a prompt", SamplingParams(max_tokens=80))
    whole = "\n".join(one if one.isprintable() else repr(one)[1:-1] for one in text.split("\n"))
    assert len(text) > 44
    assert whole in run(*arguments, "--whole").stdout
    assert whole not in run(*arguments).stdout


def test_chat_output_without_conversation_has_none(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("before", "utf-8")
    run(*GENERATE, "--max-new-tokens", "3", "--repeat", "2", "--output", output)
    written = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert [one["round"] for one in written] == [0] * 4 + [1] * 4
    assert all("messages" not in one and len(one["token_ids"]) == 3 for one in written)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "messages must be a list with at least one role and content, got"),
        ({"messages": "hello"}, "messages must be a list with at least one role and content"),
        ({"prompt": "hello"}, "unknown key 'prompt': known are messages, sampling, marks"),
        (["hello"], 'a message must have "role" and "content"'),
        ([{"role": "user"}], 'a message must have "role" and "content"'),
        ([{"role": "user", "content": 5}], "content of a message must be text or a list of parts, got 5"),
        ([{"role": "", "content": "a"}], "role of a message must be text, and not empty"),
        ([ASK, {"role": "assistant", "content": "It is"}], "there is nothing to answer"),
        (
            {"messages": [ASK], "sampling": {"logit_bias": {"900": 1}}},
            "token of logit_bias or bad_words 900 is outside",
        ),
        ({"messages": [ASK], "sampling": {"logits_processors": []}}, "unknown sampling key 'logits_processors'"),
        (5, "a line must be an object like"),
    ],
)
def test_chat_with_invalid_conversation_prints_one_line(line: Any, message: str, tmp_path: Path) -> None:  # noqa: ANN401  # same
    file = conversations(tmp_path, [ASK], line)
    said = error(*GENERATE, "--messages", file)
    assert message in said
    assert "line 2" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--messages", "a", "--prompts", "b"), "--prompts and --messages cannot be used together: give one of them"),
        (("--system", "a"), "give --messages FILE too"),
        (("--messages", "no/such/file"), "cannot read the prompts in no/such/file"),
        (("--output", "no/such/folder/file"), "--out no/such/folder/file cannot be written"),
        (("--temperature", "-1"), "temperature must be 0 (greedy) or more"),
        (("--top-p", "1.5"), "top_p must be above 0"),
        (("--stop", ""), "stop must be a list of strings that are not empty"),
    ],
)
def test_chat_with_invalid_option_prints_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in error(*GENERATE, *arguments)


def test_chat_without_template_is_rejected(tmp_path: Path) -> None:
    tiny = load("tiny:llama")
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.chat_template = None
    tiny.tokenizer.save_pretrained(tmp_path)
    for command in (("generate", "--messages", conversations(tmp_path, [ASK])), ("chat",)):
        assert "has no chat template: use a chat model" in error(*command, "--model", tmp_path)


# -- talking

CHAT = ("chat", "--model", "tiny:llama", "--memory", "2MiB", "--max-new-tokens", "12")


def test_chat_conversation_hits_its_earlier_turns() -> None:
    done = run(*CHAT, "--system", "Rhyme.", stdin="hello\n\n  and \udcff again \n/new\nhello\n/exit\nunread\n")
    assert done.stderr == ""
    answers, summaries = done.stdout.splitlines()[::2], done.stdout.splitlines()[1::2]
    sampling = SamplingParams(max_tokens=12)
    first = "system: Rhyme.\nuser: hello\nassistant: "
    second = f"{first}{generated(first, sampling)}\nuser: and \ufffd again\nassistant: "
    assert answers == [repr(generated(one, sampling))[1:-1].replace("\\'", "'") for one in (first, second, first)]
    tokens = [len(one.encode()) for one in (first, second)]
    # all of the turn before, but for the last token of its answer, which nobody computed
    hits = [0, tokens[0] + 11, tokens[0] - 1]
    for hit, prompt, summary in zip(hits, [*tokens, tokens[0]], summaries, strict=True):
        assert summary.startswith(f"[hit tokens: {hit} of {prompt} prompt tokens; 12 output tokens in ")


def test_chat_with_too_long_message_continues() -> None:
    done = run(*CHAT, stdin=f"{'x' * 5000}\nhello\n")
    assert done.stderr.startswith("error: ")
    assert "/new starts a new conversation" in done.stderr
    assert "[hit tokens: 0 of 23 prompt tokens" in done.stdout


def test_chat_goes_on_in_another_process(tmp_path: Path) -> None:
    file = tmp_path / "talk"
    whole = run(*CHAT, "--system", "Rhyme.", stdin="hello\nand again\n").stdout.splitlines()
    first = run(*CHAT, "--system", "Rhyme.", "--save", file, stdin="hello\n").stdout.splitlines()
    then = run(*CHAT, "--resume", file, "--save", file, stdin="and again\n").stdout.splitlines()
    assert first[0] == whole[0]
    assert then[1] == whole[2]
    hits = "[hit tokens: 49 of 78 prompt tokens; "
    assert whole[3].startswith(hits)
    assert then[2].startswith(hits)
    assert first[2] == f"[49 tokens are saved in {file}]"
    assert then[0] == f"[49 tokens of {file} are in the cache]"
    assert then[3] == f"[89 tokens are saved in {file}]"
    assert [one.name for one in tmp_path.iterdir()] == ["talk"]


def test_chat_with_invalid_file_prints_one_line(tmp_path: Path) -> None:
    file, other = tmp_path / "talk", tmp_path / "other"
    with Engine(load("tiny:llama"), memory="1MiB") as engine:
        (done,) = engine.generate(["hello"], SamplingParams(max_tokens=3))
        engine.export(done, other)
    file.write_text("no session", "utf-8")
    assert "is no whole safetensors file" in error(*CHAT, "--resume", file)
    assert "holds no messages of a chat" in error(*CHAT, "--resume", other)
    assert "drop --system" in error(*CHAT, "--resume", other, "--system", "Rhyme.")
    assert "No such file" in error(*CHAT, "--resume", tmp_path / "none")
    assert "cannot be written" in error(*CHAT, "--save", tmp_path / "no" / "talk")
    said = run(*CHAT, "--save", file, stdin="hello\n/new\n/image a.png\n")
    assert "[there is no answer to save]" in said.stdout
    assert "files hold no pictures: leave --save out" in said.stderr
    assert file.read_text("utf-8") == "no session"


class Terminal:
    """`hybridkv chat` behind a pseudo terminal."""

    def __init__(self, *arguments: str) -> None:
        self._ours, self.theirs = pty.openpty()
        self.before = termios.tcgetattr(self.theirs)
        command = ["-m", "hybridkv", *CHAT, *arguments]
        self.process = Warm(command, stdin=self.theirs, stdout=self.theirs, stderr=self.theirs, terminal=True)
        self.said, self._read = "", 0

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, text: str, timeout_s: float = 120) -> None:
        """Read on, until it has said ``text`` behind what was read before."""
        end = time.monotonic() + timeout_s
        while (at := self.said.find(text, self._read)) < 0:
            assert time.monotonic() < end, self.said
            if select.select([self._ours], [], [], 0.2)[0]:
                self.said += os.read(self._ours, 4096).decode(errors="replace")
        self._read = at + len(text)

    def ends_by(self, key: str) -> int:
        """Its exit status. The key is pressed again where it came before the line editor listened for signals."""
        for _ in range(6):
            self.type(key)
            try:
                return self.process.wait(10)  # a second signal at the interpreter's own end would kill it
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError(self.said)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.theirs)


@pytest.mark.parametrize("leaves", ["prompt", "answer"])
def test_chat_restores_the_terminal(leaves: str) -> None:
    """By Ctrl-C at the prompt, and inside of an answer."""
    terminal = Terminal(*(("--max-new-tokens", "400") if leaves == "answer" else ()))
    try:
        terminal.until("> ")
        terminal.type("hello\n")
        if leaves == "prompt":
            terminal.until("prompt tokens; ")
            terminal.until("> ")
        else:
            terminal.until("hello\r\n")
            terminal.until("hRG")
        assert terminal.ends_by("\x03") == 128 + signal.SIGINT
        assert termios.tcgetattr(terminal.theirs) == terminal.before
        assert "Traceback" not in terminal.said
    finally:
        terminal.close()


def test_chat_on_a_terminal_says_that_it_loads_and_checks_the_model() -> None:
    terminal = Terminal("--threads", "1")
    try:
        terminal.until("loading tiny:llama ...")
        terminal.until("loaded tiny:llama: ")
        terminal.until("of weights, 1 thread\r\n")
        terminal.until("checking tiny:llama on pages against plain transformers ...")
        terminal.until("> ")
        assert terminal.ends_by("\x04") == 0
    finally:
        terminal.close()
