"""TCP ports for servers that are told their port before they start.

A port that the kernel gave to port 0 and that was closed again may be anybody's before the server
binds it: the next connection's of this host, or another test's. So ports are none that the kernel
gives away by itself (ip_local_port_range, ip(7)), and no two processes of a run get the same: each
holds the abstract unix socket of its ports' names until it ends.

Thread-safe.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

_LOWEST: Final = 10_000
_DRAWS: Final = 1000
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")

# Never taken out: what was given is this process's until it ends.
_held: list[socket.socket] = []


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at, and that no other caller of this is given while
    this process lives. OSError where there is none."""
    low, high = map(int, _RANGE.read_text().split())
    below, above = range(_LOWEST, low), range(high + 1, 1 << 16)
    draw = random.SystemRandom().randrange
    for _ in range(_DRAWS):
        drawn = draw(len(below) + len(above))
        port = below[drawn] if drawn < len(below) else above[drawn - len(below)]
        if _reserve(port):
            return port
    raise OSError(f"of {_DRAWS} ports from {_LOWEST} on, beside {low} to {high}, none is free")


def _reserve(port: int) -> bool:
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0kvwarehouse-test-port-{port}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        name.close()
        return False
    _held.append(name)
    return True
