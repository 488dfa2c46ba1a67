"""What systemd is told of the daemon, by the protocol of sd_notify(3): that it serves, ends, is
alive, or needs longer. Where no service manager asked for it, nothing.

Thread-safe. Never raises and never waits: a manager that does not listen costs nothing.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Final, Self

from kvwarehouse.daemon.health import DaemonState

_START_MORE_S: Final = 30.0
"""So long a start may be silent, once TimeoutStartSec= is over."""

_STOP_MORE_S: Final = 15.0
"""Beyond the flush: what a stop takes to close everything."""

_START_SAYS_EVERY_S: Final = 1.0


class ServiceManager:
    """address: of the manager's datagram socket, "@" first in the abstract namespace; "" is none.
    watchdog: whether it wants to hear that the daemon is alive. clock: in seconds."""

    def __init__(
        self,
        address: str = "",
        *,
        watchdog: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog = watchdog
        self._clock = clock
        self._lock = threading.Lock()
        self._start_said_at = -math.inf

    @classmethod
    def of_environment(cls, environ: MutableMapping[str, str]) -> Self:
        """Takes its variables out of `environ`: no child is to speak for the daemon. The interval
        of the watchdog is not looked at: `alive` is called every second."""
        address = environ.pop("NOTIFY_SOCKET", "")
        wanted = environ.pop("WATCHDOG_USEC", "").strip("0").isdigit()
        of_process = environ.pop("WATCHDOG_PID", "")
        return cls(address, watchdog=wanted and of_process in ("", str(os.getpid())))

    def follow(self, state: DaemonState) -> None:
        """A listener of Lifecycle."""
        ready = {"READY": 1} if state is DaemonState.SERVING else {}
        self._say(**ready, STATUS=state.value)

    def start_goes_on(self) -> None:
        """For whoever looks at it more often than is worth a message."""
        now_s = self._clock()
        with self._lock:
            if now_s - self._start_said_at < _START_SAYS_EVERY_S:
                return
            self._start_said_at = now_s
        self._say(
            STATUS=DaemonState.RECOVERING.value, EXTEND_TIMEOUT_USEC=_microseconds(_START_MORE_S)
        )

    def reloading(self) -> None:
        """`reloaded` follows."""
        self._say(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)

    def reloaded(self) -> None:
        self._say(READY=1)

    def alive(self) -> None:
        if self._watchdog:
            self._say(WATCHDOG=1)

    def stopping(self, flush_s: float) -> None:
        """The end has begun; a flush takes flush_s at most."""
        self._say(STOPPING=1, EXTEND_TIMEOUT_USEC=_microseconds(flush_s + _STOP_MORE_S))

    def _say(self, **fields: object) -> None:
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in fields.items())
        flags = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with suppress(OSError), socket.socket(socket.AF_UNIX, flags) as line:
            line.sendto(text.encode(), self._address)


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
