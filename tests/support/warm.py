"""Commands in processes of their own that need not import torch and transformers first: seconds of CPU for each.

One server for each process of tests has imported them. For each command it forks a monitor, which forks the command:

    tests -- argv, streams --> server --fork--> monitor --fork--> command
      ^------------- its pid, then its exit status ------|

The command has its own streams, signals, terminal, folder and environment. Python's own variables (PYTHON*) are those
of the server, so a test of these starts a new interpreter.
"""

import atexit
import contextlib
import fcntl
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Thread
from typing import IO, Self

PRELOADED = (
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "hybridkv.runner",
    "hybridkv.cli.app",
)


class Warm:
    """A running command, with the attributes and methods of `subprocess.Popen` that tests use.

    arguments: `-m`, a module and its arguments, or a script and its arguments.
    stdin, stdout, stderr: a file descriptor or `subprocess.PIPE`; text.
    environment: variables in addition to those of this process.
    terminal: whether the command leads a session whose terminal is its standard input.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        stdin: int = subprocess.PIPE,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        environment: Mapping[str, str] | None = None,
        terminal: bool = False,
    ) -> None:
        self.returncode: int | None = None
        streams: list[IO[str] | None] = []
        theirs = []
        for given, writes in ((stdin, True), (stdout, False), (stderr, False)):
            if given == subprocess.PIPE:
                read, write = os.pipe()
                streams.append(os.fdopen(write, "w") if writes else os.fdopen(read))
                theirs.append(read if writes else write)
            else:
                streams.append(None)
                theirs.append(os.dup(given))
        self.stdin, self.stdout, self.stderr = streams
        read, write = os.pipe()
        asked = {
            "arguments": [str(one) for one in arguments],
            "environment": {**os.environ, **(environment or {})},
            "folder": str(Path.cwd()),
            "terminal": terminal,
        }
        message = json.dumps(asked).encode()
        channel = _server()
        socket.send_fds(channel, [len(message).to_bytes(4, "big")], [*theirs, write])
        channel.sendall(message)
        for one in (*theirs, write):
            os.close(one)
        self._status = os.fdopen(read)
        self.pid = int(self._status.readline())

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; negative for a signal. Raises TimeoutExpired after ``timeout`` seconds."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a warm command", timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(int(self._status.readline()))
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit status, None while the command runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the command at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Write ``text``, and return all that the command writes until it ends."""
        read: dict[str, str] = {}
        readers = [
            Thread(target=lambda name=name, stream=stream: read.update({name: stream.read()}), daemon=True)
            for name, stream in (("stdout", self.stdout), ("stderr", self.stderr))
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                self.stdin.write(text)
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return read.get("stdout", ""), read.get("stderr", "")

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the streams and wait."""
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.wait()


def run(
    arguments: Sequence[str | Path],
    *,
    text: str = "",
    environment: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run` does with captured text; end it after ``timeout`` seconds."""
    with Warm(arguments, environment=environment) as command:
        try:
            out, err = command.communicate(text, timeout)
        finally:
            command.kill()
        assert command.returncode is not None
        return subprocess.CompletedProcess(list(map(str, arguments)), command.returncode, out, err)


@cache
def _server() -> socket.socket:
    """Start the server of this process; it ends with it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno())]
    server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)  # noqa: S603 - this file
    theirs.close()
    atexit.register(server.wait)  # after the socket is closed, which ends the server
    atexit.register(ours.close)
    return ours


def _serve(channel: socket.socket) -> None:
    """Fork a monitor for each message, until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # monitors leave no zombies
    for name in PRELOADED:
        __import__(name)
    while True:
        head, fds, _, _ = socket.recv_fds(channel, 4, 4)
        if not head:
            return
        message = b""
        while len(message) < int.from_bytes(head, "big"):
            message += channel.recv(1 << 16)
        if os.fork() == 0:
            channel.close()
            _monitor(json.loads(message), fds)
        for one in fds:
            os.close(one)


def _monitor(asked: Mapping[str, object], fds: Sequence[int]) -> None:
    """Fork the command, report its pid and its exit status, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, status = fds
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _command(asked, streams)
    for one in streams:
        os.close(one)
    os.write(status, f"{pid}\n".encode())
    os.write(status, f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


def _command(asked: Mapping[str, object], streams: Sequence[int]) -> None:
    """Become the command and end with its exit status."""
    code = 1  # as the interpreter ends after an error
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
        for target, one in enumerate(streams):
            os.dup2(one, target)
            os.close(one)
        if asked["terminal"]:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.chdir(str(asked["folder"]))
        os.environ.clear()
        os.environ.update(asked["environment"])  # type: ignore[call-overload]
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        code = _run(*asked["arguments"])  # type: ignore[misc]
    except BaseException:  # noqa: BLE001 - as the interpreter does at its top
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run(first: str, *rest: str) -> int:
    """Run a module or a script as the interpreter does, and return its exit status."""
    try:
        if first == "-m":
            sys.argv = list(rest)
            sys.path[0] = str(Path.cwd())
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [first, *rest]
            sys.path[0] = str(Path(first).parent)
            runpy.run_path(first, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
