"""Real servers on loopback, as child processes that end with the test."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Self


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Server:
    """A process that listens on a port, and can be killed, started again and stopped for a while."""

    def __init__(self, command: Sequence[str], port: int, log: Path, *, seconds: float = 20) -> None:
        self.port = port
        self._seconds = seconds
        self._command = command
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)  # noqa: S603 - of this file
        end = time.monotonic() + self._seconds
        while not is_listening(self.port):
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"{self._command[0]} did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def hang(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def redis_server(folder: Path, *options: str) -> Server:
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise RuntimeError("redis-server is not installed: run apt-get install redis-server")
    port = free_port()
    command = [found, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    return Server(command, port, folder / "redis.log")


def mooncake_master(folder: Path, *options: str) -> Server:
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("mooncake is not installed: run make test-stores")
    (package,) = spec.submodule_search_locations
    port = free_port()
    ports = [f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    return Server([str(Path(package) / "mooncake_master"), *ports, *options], port, folder / "mooncake.log")


class Child:
    """A process of Python that opens a store, then does what each line of its input says."""

    SCRIPT = (
        "import sys; from hybridkv.stores import open_store; from store_contract import block, get, put\n"
        "store = open_store(sys.argv[1])\n"
        "for line in sys.stdin: print(repr(eval(line)), flush=True)"
    )

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, "-c", self.SCRIPT, url],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def do(self, line: str) -> str:
        """Evaluate an expression there, and return its value as text."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()
