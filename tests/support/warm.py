"""Commands in processes of their own that need not import torch and transformers first: seconds of CPU for each.

One server for each process of tests has imported them. For each command it forks a monitor, which forks the command:

    tests -- argv, streams --> server --fork--> monitor --fork--> command
      ^------------- its pid, then its exit status ------|

The command has its own streams, signals, terminal, folder and environment. The seed of hashes is the server's, and so
is what Python and libraries read when they start (PYTHON*, OMP_NUM_THREADS): tests of these start new interpreters.
The same server forks the replicas, fronts and ranks that a command starts, unless the command is ``alone``.
"""

import asyncio
import atexit
import contextlib
import faulthandler
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
from importlib import import_module
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace
from typing import IO, Any, Self

PRELOADED = (
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "hybridkv.runner",
    "hybridkv.cli.app",
)
STARTERS = {
    "hybridkv.runner.tensor_parallel": "subprocess",
    "hybridkv.serve.replicas": "subprocess",
    "hybridkv.serve.fronts": "asyncio",
}
"""Modules that start processes, each with the module by which it does."""
_MOVED = 200  # descriptors of a message are moved to this number and above, and then to those that are asked for
_given: list[socket.socket] = []
"""In a command: the socket to its server."""


class Warm:
    """A running command, with the attributes and methods of `subprocess.Popen` that tests use.

    arguments: what the interpreter would get: `-m` and a module, `-c` and a text, or a script; then its arguments.
    stdin, stdout, stderr: a file descriptor, `subprocess.PIPE` or `subprocess.DEVNULL`.
    environment: variables in addition to those of this process.
    terminal: whether the command leads a session whose terminal is its standard input.
    alone: whether processes that it starts are new interpreters.
    passed: file descriptors that it gets by the same numbers, below 200.
    parent: the process that ``children`` gives as its parent.
    text: whether the pipes are of text.
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
        alone: bool = False,
        passed: Sequence[int] = (),
        parent: int | None = None,
        text: bool = True,
    ) -> None:
        assert all(one < _MOVED for one in passed)
        self.returncode: int | None = None
        self._reading = Lock()
        streams: list[IO[Any] | None] = []
        theirs = []
        kind = "" if text else "b"
        for given, writes in ((stdin, True), (stdout, False), (stderr, False)):
            if given == subprocess.PIPE:
                read, write = os.pipe()
                streams.append(os.fdopen(write, f"w{kind}") if writes else os.fdopen(read, f"r{kind}"))
                theirs.append(read if writes else write)
            else:
                streams.append(None)
                theirs.append(os.open(os.devnull, os.O_RDWR) if given == subprocess.DEVNULL else os.dup(given))
        self.stdin, self.stdout, self.stderr = streams
        read, write = os.pipe()
        asked = {
            "arguments": [str(one) for one in arguments],
            "environment": {**os.environ, **(environment or {})},
            "folder": str(Path.cwd()),
            "terminal": terminal,
            "alone": alone,
            "passed": list(passed),
            "parent": parent,
        }
        channel = _server()
        socket.send_fds(channel, [json.dumps(asked).encode()], [write, channel.fileno(), *theirs, *passed])
        for one in (*theirs, write):
            os.close(one)
        self._status = os.fdopen(read)
        self.pid = int(self._status.readline())

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; negative for a signal. Raises TimeoutExpired after ``timeout`` seconds."""
        with contextlib.suppress(ValueError):  # another thread has read the status, and closed it
            if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a warm command", timeout or 0)
        with self._reading:
            if self.returncode is None:
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
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the command at once."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask the command to end."""
        self.send_signal(signal.SIGTERM)

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


def children(process: int) -> list[int]:
    """Return the processes that ``process`` has started, oldest first."""
    found = {int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()}
    for one in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if one.read_bytes().strip() == _name(process):
                found.add(int(one.parent.name))
    return sorted(found, key=_started_at)


def _name(parent: int) -> bytes:
    """Return the name that a forked process takes, so that ``children`` finds it. Linux keeps 15 bytes."""
    return f"of {parent}".encode()


def _started_at(process: int) -> int:
    """Return when a process started; 0 for one that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return 0


class _Started:
    """A running command, with the attributes and methods of `asyncio.subprocess.Process` that fronts use."""

    def __init__(self, command: Warm) -> None:
        self._command = command
        self.stdin, self.send_signal, self.terminate = command.stdin, command.send_signal, command.terminate

    async def wait(self) -> int:
        """Return the exit status."""
        return await asyncio.to_thread(self._command.wait)


def starts(module: str) -> SimpleNamespace:
    """Return ``subprocess`` or ``asyncio`` with processes that the server forks."""

    def start(
        command: Sequence[str],
        *,
        stdin: int = 0,
        stdout: int = 1,
        stderr: int = 2,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Warm:
        assert command[0] == sys.executable
        return Warm(
            command[1:],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            environment=env,
            passed=pass_fds,
            parent=os.getpid(),
            text=False,
        )

    async def started(*command: str, start_new_session: bool, **more: Any) -> _Started:  # noqa: ANN401 - as asyncio's
        assert start_new_session  # monitors and what they fork have the session of the server
        return _Started(start(command, **more))

    changed: dict[str, Any] = {"Popen": start} if module == "subprocess" else {"create_subprocess_exec": started}
    return SimpleNamespace(**{**vars(import_module(module)), **changed})


@cache
def _server() -> socket.socket:
    """Return the socket to the server. Start the server of this process, which ends with it, if it has none."""
    if _given:
        return _given[0]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(theirs.fileno())]
    server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)  # noqa: S603 - this file
    theirs.close()
    atexit.register(server.wait)
    atexit.register(server.terminate)
    return ours


def _serve(channel: socket.socket) -> None:
    """Fork a monitor for each message, until the tests and all commands have closed the other end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # monitors leave no zombies
    for name in (*PRELOADED, *STARTERS):
        import_module(name)
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 20, 16)
        if not message:
            return
        if os.fork() == 0:
            channel.close()
            _monitor(json.loads(message), fds)
        for one in fds:
            os.close(one)


def _monitor(asked: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Fork the command, report its pid and its exit status, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status, *others = fds
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _command(asked, others)
    for one in others:
        os.close(one)
    os.write(status, f"{pid}\n".encode())
    os.write(status, f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


def _command(asked: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Become the command and end with its exit status. fds: to the server, its streams, and those passed."""
    code = 1  # as the interpreter ends after an error
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
        channel, *moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _MOVED) for one in fds]
        for one in fds:
            os.close(one)
        for target, one in zip((0, 1, 2, *asked["passed"]), moved, strict=True):
            os.dup2(one, target)
            os.close(one)
        _given.append(socket.socket(fileno=channel))
        if not asked["alone"]:
            for name, module in STARTERS.items():
                setattr(import_module(name), module, starts(module))
        if asked["parent"] is not None:
            Path("/proc/self/comm").write_bytes(_name(asked["parent"]))
        if asked["terminal"]:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.chdir(str(asked["folder"]))
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        code = _run(*asked["arguments"])
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
    """Run a module, a text or a script as the interpreter does, and return its exit status."""
    if (first, *rest[:1]) == ("-X", "faulthandler"):
        faulthandler.enable()
        return _run(*rest[1:])
    try:
        if first == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path[0] = ""
            exec(rest[0], {"__name__": "__main__"})  # noqa: S102 - as the interpreter does
        elif first == "-m":
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
