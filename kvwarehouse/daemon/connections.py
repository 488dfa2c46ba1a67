"""How many connections the TCP address of gRPC has, which gRPC itself does not tell.

Looked at by one thread; `count` may be read by any.
"""

from __future__ import annotations

import os
import socket
from typing import Final

from kvwarehouse.daemon.logs import Event, Log

CONNECTIONS_MAX: Final = 256
"""What is beyond it is closed unheard. They come before any token, so anybody can fill them: the
warning is what tells."""

_NEAR: Final = 0.8
_RELAXED: Final = 0.5


class Connections:
    """Those taken at `port` by this process."""

    def __init__(self, port: int, log: Log) -> None:
        self._port = port
        self._log = log
        self._near = False
        self.count = 0
        self.bound = CONNECTIONS_MAX

    def look(self) -> None:
        """Counts them, and says once when they come near the bound. A call to the kernel for each
        descriptor of this process: a millisecond for a thousand."""
        self.count = sum(_is_taken_at(self._port, int(fd)) for fd in os.listdir("/proc/self/fd"))
        share = self.count / self.bound
        if share >= _NEAR and not self._near:
            self._log.event(Event.CONNECTIONS_NEAR_BOUND, count=self.count, bound=self.bound)
        self._near = share >= (_RELAXED if self._near else _NEAR)


def _is_taken_at(port: int, fd: int) -> bool:
    # Another thread may close it, and open another, at any time: that is counted a second later.
    try:
        peek = socket.socket(fileno=fd)
    except OSError:
        return False  # no socket, or gone
    try:
        here, _there = peek.getsockname(), peek.getpeername()
        return isinstance(here, tuple) and here[1] == port
    except OSError:
        return False  # a listener, or gone
    finally:
        peek.detach()
