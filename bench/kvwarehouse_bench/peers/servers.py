"""Programs that a store's client starts: on loopback alone, each with a deadline, ended with it.

They stay in the client's process group, so that the bench ends them even where the client cannot.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvwarehouse_bench.peers.store import CannotRunError

START_S = 60.0
_END_S = 10.0
_POLL_S = 0.02
_TAIL_BYTES = 400


class Server:
    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._name = Path(command[0]).name
        self._log = folder / f"{self._name}.log"
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env={**os.environ, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            except OSError as error:
                raise CannotRunError(f"{command[0]} does not start: {error}") from error

    def wait_ready(self, ready: Callable[[], bool]) -> None:
        """Raises CannotRunError when it ends or is not ready in time; it is then ended."""
        end = time.monotonic() + START_S
        while not ready():
            if self._process.poll() is not None:
                raise CannotRunError(
                    f"{self._name} ended with {self._process.returncode}: {self.tail()}"
                )
            if time.monotonic() > end:
                self.end()
                raise CannotRunError(f"{self._name} not ready in {START_S:.0f} s: {self.tail()}")
            time.sleep(_POLL_S)

    def tail(self) -> str:
        data = self._log.read_bytes() if self._log.exists() else b""
        return " ".join(data[-_TAIL_BYTES:].decode("utf-8", "replace").split())

    def end(self) -> None:
        """SIGTERM, then SIGKILL. More than once is once."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


# unshare(2), netdevice(7).
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


def leave_network() -> None:
    """This process and all that it starts see a network of their own with nothing but loopback. To
    be called while there is one thread. Raises CannotRunError where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        error = os.strerror(ctypes.get_errno())
        raise CannotRunError(
            "it listens on all addresses whatever it is told, and this user may make no network"
            f" namespace to shut it in ({error})"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
