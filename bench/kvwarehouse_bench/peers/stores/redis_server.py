"""Redis over a unix socket, by a client that reads values straight into the caller's memory: what a
library would put between them costs more than Redis itself. Requests are pipelined.

The protocol: RESP2, https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvwarehouse_bench.peers.servers import Server
from kvwarehouse_bench.peers.store import CannotRunError, Keyed, StampedPages, StoreRoom, leading

_PROGRAMS = ("valkey-server", "redis-server")
_WAIT_S = 60.0
_MOST_BUFFERS = 512  # of one sendmsg; IOV_MAX is 1024
_BATCH_BYTES = 32 << 20
_READ_BYTES = 1 << 16


class Redis(Keyed):
    def __init__(self, room: StoreRoom) -> None:
        super().__init__(room)
        self._program, libraries = _program(room.options.get("unpacked", ""))
        self._version = _version(self._program, libraries)
        path = str(room.folder / "redis.sock")
        most = 2 * room.moved_bytes + (256 << 20)
        command = [
            self._program,
            *("--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"),
            *("--dir", str(room.folder), "--maxmemory", str(most)),
            *("--maxmemory-policy", "noeviction", "--daemonize", "no"),
        ]
        self._server = Server(command, room.folder, libraries)
        self._server.wait_ready(lambda: _connected(path) is not None)
        connection = _connected(path)
        if connection is None:
            raise CannotRunError(f"{self._program} does not answer: {self._server.tail()}")
        self._socket = connection
        self._input: Any = connection.makefile("rb", _READ_BYTES)

    def about(self) -> dict[str, str]:
        return {
            "version": self._version,
            "layout": "a server, unix socket, pipelined; a client that reads into place",
            "durability": "none (memory, no log)",
            "lookup": "one EXISTS of all keys, which counts them; keys given",
            "start": f"{Path(self._program).name} --port 0 --unixsocket SOCK --save ''",
        }

    def store(self, names: Any, pages: StampedPages) -> None:
        each = max(1, _BATCH_BYTES // pages.page_bytes)
        for first in range(0, pages.count, each):
            buffers: list[Any] = []
            batch = range(first, min(pages.count, first + each))
            for at in batch:
                head = _head(b"SET", [names[at]], pages.page_bytes)
                buffers += [head, pages.source[at].data, b"\r\n"]
            self._send(buffers)
            for _ in batch:
                self._expect(b"+OK")

    def load(self, names: Any, pages: StampedPages) -> int:
        each = max(1, _BATCH_BYTES // pages.page_bytes)
        filled = 0
        for first in range(0, pages.count, each):
            batch = range(first, min(pages.count, first + each))
            self._socket.sendall(b"".join(_command(b"GET", [names[at]]) for at in batch))
            come = [self._value(pages.target[at].data) for at in batch]
            filled += leading(come)
            if not all(come):
                break
        return filled

    def found(self, names: Any) -> int:
        self._socket.sendall(_command(b"EXISTS", names))
        there = int(self._line()[1:])
        if there == len(names):
            return there
        self._socket.sendall(b"".join(_command(b"EXISTS", [name]) for name in names))
        return leading([self._line() == b":1" for _ in names])

    def clear(self) -> None:
        self._socket.sendall(_command(b"FLUSHALL", [b"SYNC"]))
        self._expect(b"+OK")

    def close(self) -> None:
        self._input.close()
        self._socket.close()
        self._server.end()

    def _send(self, buffers: list[Any]) -> None:
        at = 0
        views = [memoryview(each).cast("B") for each in buffers]
        while at < len(views):
            sent = self._socket.sendmsg(views[at : at + _MOST_BUFFERS])
            while sent and sent >= len(views[at]):
                sent -= len(views[at])
                at += 1
            if sent:
                views[at] = views[at][sent:]

    def _value(self, into: memoryview) -> bool:
        line = self._line()
        if line == b"$-1":
            return False
        if line != b"$%d" % len(into):
            raise OSError(f"Redis answered {line!r} instead of {len(into)} bytes")
        if self._input.readinto(into) != len(into):
            raise OSError("Redis hung up")
        self._input.read(2)
        return True

    def _line(self) -> bytes:
        return bytes(self._input.readline()[:-2])

    def _expect(self, answer: bytes) -> None:
        line = self._line()
        if line != answer:
            raise OSError(f"Redis answered {line!r} instead of {answer!r}")


def _head(name: bytes, arguments: Sequence[bytes], value_bytes: int) -> bytes:
    """A command whose last argument follows, with its line's end."""
    parts = [b"*%d\r\n$%d\r\n%b\r\n" % (len(arguments) + 2, len(name), name)]
    parts += [b"$%d\r\n%b\r\n" % (len(each), each) for each in arguments]
    return b"".join([*parts, b"$%d\r\n" % value_bytes])


def _command(name: bytes, arguments: Sequence[bytes]) -> bytes:
    parts = [b"*%d\r\n$%d\r\n%b\r\n" % (len(arguments) + 1, len(name), name)]
    parts += [b"$%d\r\n%b\r\n" % (len(each), each) for each in arguments]
    return b"".join(parts)


def _program(unpacked: str) -> tuple[str, dict[str, str]]:
    """Of the system, or unpacked from the distribution's packages by scripts/setup_peers.sh."""
    for name in _PROGRAMS:
        found = shutil.which(name)
        if found:
            return found, {}
    for name in _PROGRAMS:
        path = Path(unpacked, "usr/bin", name)
        if path.is_file():
            folders = [str(each) for each in Path(unpacked, "usr/lib").glob("*-linux-gnu*")]
            return str(path), {"LD_LIBRARY_PATH": os.pathsep.join(folders)}
    raise CannotRunError(f"neither {' nor '.join(_PROGRAMS)} is on the PATH or in {unpacked}")


def _version(program: str, environment: dict[str, str]) -> str:
    try:
        said = subprocess.run(
            [program, "--version"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotRunError(f"{program} --version: {error}") from error
    words = dict(word.split("=", 1) for word in said.split() if "=" in word)
    return f"{Path(program).name} {words.get('v', said.strip())}"


def _connected(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_WAIT_S)
    try:
        connection.connect(path)
        connection.sendall(b"PING\r\n")
        if connection.recv(64) == b"+PONG\r\n":
            return connection
    except OSError:
        pass
    connection.close()
    return None
