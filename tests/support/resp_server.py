"""A server that speaks as much of Redis's protocol as a store needs, and has the faults that tests choose."""

import socket
import socketserver
import threading
import time
from io import BufferedIOBase
from typing import Self


class RespServer:
    """Listens on a free port of loopback, on threads of this process.

    values: what is kept. lifetimes: milliseconds of those that end. commands: names of all commands that came.
    fault: "hangs", "drips", "garbage" or "rejects" for each answer; "dies in an answer" or "dies before an answer";
    "ends the connection" after each answer; "" for none.
    """

    def __init__(self, port: int = 0) -> None:
        self.values: dict[bytes, bytes] = {}
        self.lifetimes: dict[bytes, int] = {}
        self.fault = ""
        self.commands: list[str] = []
        self._open = set[socket.socket]()
        self._start(port)

    def _start(self, port: int) -> None:
        served = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                served._open.add(self.connection)
                try:
                    while (command := read_command(self.rfile)) and served._answer(command, self.connection):
                        pass
                except (OSError, ValueError):
                    pass  # the connection has ended

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            block_on_close = False

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End as a process that is killed: no more connections, and those that are open end."""
        self._server.shutdown()
        self._server.server_close()
        for one in self._open:
            with_no_error(one)
        self._open.clear()

    def start_empty(self) -> None:
        self.values.clear()
        self._start(self.port)

    def _answer(self, command: list[bytes], connection: socket.socket) -> bool:
        """Answer one command as the fault has it. Return whether the connection goes on."""
        name = command[0].decode().upper()
        self.commands.append(name)
        answer, fault = self._reply(name, command[1:]), self.fault
        if name == "CLIENT":  # at the begin of a connection
            fault = ""
        if fault in ("", "ends the connection"):
            connection.sendall(answer)
        elif fault == "hangs":
            time.sleep(60)
        elif fault == "drips":
            for byte in answer:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        elif fault == "dies in an answer":
            connection.sendall(answer[: len(answer) // 2])
        elif fault == "garbage":
            connection.sendall(b"?" + answer)
        elif fault == "rejects":
            connection.sendall(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")
        if fault.startswith(("dies", "ends")):
            with_no_error(connection)
            return False
        return True

    def _reply(self, name: str, arguments: list[bytes]) -> bytes:
        if name == "SET":
            self.values[arguments[0]] = arguments[1]
            if len(arguments) == 4 and arguments[2].upper() == b"PX":
                self.lifetimes[arguments[0]] = int(arguments[3])
            return b"+OK\r\n"
        if name == "EXISTS":
            return b":%d\r\n" % sum(key in self.values for key in arguments)
        if name == "DEL":
            return b":%d\r\n" % sum(self.values.pop(key, None) is not None for key in arguments)
        if name == "MGET":
            return b"*%d\r\n" % len(arguments) + b"".join(bulk(self.values.get(key)) for key in arguments)
        if name in ("CLIENT", "SELECT"):
            return b"+OK\r\n"
        return b"-ERR unknown command\r\n"


def bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)


def read_command(stream: BufferedIOBase) -> list[bytes]:
    """Read one command; nothing at the end."""
    head = stream.readline()
    if not head:
        return []
    command = []
    for _ in range(int(head[1:])):
        length = int(stream.readline()[1:])
        command.append(stream.read(length))
        stream.read(2)
    return command


def with_no_error(connection: socket.socket) -> None:
    """Close a connection that may be closed."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    except OSError:
        pass
