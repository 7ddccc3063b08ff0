"""`hybridkv chat`: a conversation with a model; the cache keeps its earlier turns.

A turn is a request with the whole conversation so far, formatted by the chat template. Tokens of earlier turns are hit
tokens; their number is printed after each answer. A picture is read once, when the user adds it to a message.

``--save`` writes the messages and their cache to a file when the conversation ends; ``--resume`` goes on from it.
"""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hybridkv.cli.engine_options import (
    ModelOptions,
    SamplingOptions,
    StoredOptions,
    TierOptions,
    checking,
    system_option,
)
from hybridkv.cli.options import cache_option, require_writable
from hybridkv.cli.outcome import INTERRUPTED, printable, printable_lines
from hybridkv.errors import ConfigError
from hybridkv.units import format_count

if TYPE_CHECKING:  # these need torch, which is loaded once the command runs
    from hybridkv.request import SamplingParams
    from hybridkv.runner.chat import Message
    from hybridkv.runner.completion import Completion
    from hybridkv.runner.engine import Engine

EXIT: Final = "/exit"
FORGET: Final = "/new"
SHOW: Final = "/image"
HELP: Final = (
    f"{EXIT}, end of file or Ctrl-C ends the conversation, {FORGET} starts a new one, {SHOW} FILE adds a picture to "
    "your next message."
)


def chat_command(
    *,
    model: ModelOptions,
    system: str | None = system_option(),
    sampling: SamplingOptions = SamplingOptions(max_tokens=256),
    memory: str | None = cache_option("Cache memory: 64MiB, or a number of bytes.", show_default="1GiB"),
    tiers: TierOptions,
    stored: StoredOptions,
    save: Path | None = cache_option("Write the conversation and its cache to this file at the end."),
    resume: Path | None = cache_option("Go on with a conversation that --save wrote."),
) -> int:
    """Chat with a model: answers are streamed, each followed by its hit tokens."""
    params = sampling.params()
    if resume is not None and system is not None:
        raise ConfigError("the conversation of --resume has its system message: drop --system")
    require_writable("--save", save)
    loaded = model.load()
    from hybridkv.runner.chat import require_chat  # noqa: PLC0415  # torch takes seconds: only this command pays
    from hybridkv.runner.engine import Engine  # noqa: PLC0415  # same

    require_chat(loaded)
    with checking(loaded.name):
        opened = Engine(loaded, memory=memory, stored=stored.stored(), **tiers.behind())
    with opened as engine, _interruptible():
        talk = _Talk(system) if resume is None else _resumed(engine, resume)
        try:
            _talk(engine, params, talk, saves=save is not None)
        except KeyboardInterrupt:
            print(flush=True)
            return INTERRUPTED
        finally:
            if save is not None:
                _save(engine, talk, save)
    return 0


@dataclass(slots=True)
class _Talk:
    """A conversation: its system message, its messages, and its last turn (None before the first one)."""

    system: str | None
    said: list[Message] = field(default_factory=list)
    last: Completion | tuple[int, ...] | None = None


def _resumed(engine: Engine, path: Path) -> _Talk:
    """Return the conversation in the file ``path``, whose cache is in the engine then."""
    session = engine.import_(path)
    try:
        note = json.loads(session.note)
        talk = _Talk(note["system"], note["messages"], session.token_ids)
        whole = all(one.keys() == {"role", "content"} and {*map(type, one.values())} == {str} for one in talk.said)
    except (ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise ConfigError(f"{path} holds no messages of a chat: resume a file that chat --save wrote")
    print(f"[{format_count(session.resume_tokens)} tokens of {printable(str(path))} are in the cache]", flush=True)
    return talk


def _save(engine: Engine, talk: _Talk, path: Path) -> None:
    """Write the conversation to the file ``path``."""
    if talk.last is None:
        print("[there is no answer to save]", flush=True)
        return
    note = json.dumps({"system": talk.system, "messages": talk.said})
    session = engine.export(talk.last, path, note=note)
    print(f"[{format_count(session.resume_tokens)} tokens are saved in {printable(str(path))}]", flush=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt, so that the terminal is restored, instead of exiting at once."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _talk(engine: Engine, sampling: SamplingParams, talk: _Talk, *, saves: bool) -> None:
    """Run turns until the user ends the conversation."""
    pictures: list[dict[str, Any]] = []
    for line in _lines():
        command, _, rest = line.partition(" ")
        if line == EXIT:
            return
        if line == FORGET:
            talk.said, talk.last, pictures = [], None, []
        elif command == SHOW and saves:
            _complain(ConfigError("files hold no pictures: leave --save out"))
        elif command == SHOW:
            pictures += _shown(engine, rest.strip())
        else:
            content = [*pictures, {"type": "text", "text": line}] if pictures else line
            pictures = []
            try:
                _turn(engine, sampling, talk, {"role": "user", "content": content})
            except ConfigError as error:  # for example a conversation that is too long; it is left unchanged
                _complain(error, f" ({FORGET} starts a new conversation)")


def _shown(engine: Engine, name: str) -> list[dict[str, Any]]:
    """Return the picture in the file ``name`` as parts of a message; print an error and return none if it cannot be."""
    from hybridkv.runner.chat import require_pictures  # noqa: PLC0415  # see chat_command
    from hybridkv.runner.picture_files import open_picture  # noqa: PLC0415  # same

    try:
        require_pictures(engine.loaded)
        picture = open_picture(name, Path())
    except ConfigError as error:
        _complain(error)
        return []
    print(f"[{printable(name)}, {picture.width} x {picture.height}, is added to your next message]", flush=True)
    return [{"type": "image", "image": picture}]


def _complain(error: ConfigError, hint: str = "") -> None:
    print(f"error: {printable(str(error))}{hint}", file=sys.stderr, flush=True)


def _lines() -> Iterator[str]:
    """Yield the lines that the user enters; a terminal gets a prompt and, if available, a line editor."""
    if sys.stdin is None:
        return
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if asks:
        with suppress(ImportError):
            import readline  # noqa: F401, PLC0415  # importing it gives input() a line editor
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            line = input("> ") if asks else sys.stdin.readline()
        except EOFError:
            print(flush=True)
            return
        if not (asks or line):
            return
        if line.strip():
            yield line.strip()


def _turn(engine: Engine, sampling: SamplingParams, talk: _Talk, message: Message) -> None:
    """Stream the answer to a message, and add both to the conversation.

    Raises:
        ConfigError: before anything runs, for a message that the model cannot take.
    """
    from hybridkv.runner.chat import ASSISTANT, chat_prompt, checked_messages  # noqa: PLC0415  # see chat_command

    said = [*talk.said, message]
    ids, images = chat_prompt(engine.loaded, checked_messages(said, talk.system))
    begun, done, encoded = time.perf_counter(), None, _encoded(engine)
    with engine.stream(ids, sampling, images=images) as stream:
        for part in stream:
            print(printable_lines(part.text or ""), end="", flush=True)
            done = part.completion or done
    if done is None:
        return
    pictures = sum(
        part["type"] == "image" for one in said if isinstance(one["content"], list) for part in one["content"]
    )
    seen = f"vision ran {_encoded(engine) - encoded} times for {pictures} pictures; " if pictures else ""
    print(f"\n{_summary(done, time.perf_counter() - begun, seen)}", flush=True)
    talk.said, talk.last = [*said, {"role": ASSISTANT, "content": done.text or ""}], done


def _encoded(engine: Engine) -> int:
    """Return how often the model's vision encoder ran so far."""
    return 0 if engine.runner.images is None else engine.runner.images.store.encoded


def _summary(done: Completion, seconds: float, seen: str) -> str:
    """Return the summary of a turn. seen: text about its pictures."""
    hit, prompt, made = done.hit_tokens, len(done.prompt_token_ids), len(done.token_ids)
    cut = "" if done.finish_reason == "stop" else f", ended by {done.finish_reason}"
    return (
        f"[hit tokens: {format_count(hit)} of {format_count(prompt)} prompt tokens; {seen}"
        f"{format_count(made)} output tokens in {seconds:.1f} s{cut}]"
    )
