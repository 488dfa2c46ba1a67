"""The two ends that a client talks to, and the flows about the namespaces that a daemon knows.

Thread-safe as the ends are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvwarehouse.client import admin
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.client.flow import Flow
from kvwarehouse.client.prompt import checked_timeout
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.types import Namespace


@dataclass(frozen=True)
class Ends:
    """What flows ask: a Channel and a Transport, or those of asyncio."""

    channel: Any
    path: Any


def opening(ends: Ends, space: Namespace) -> Flow[None]:
    if not isinstance(space, Namespace):
        raise UsageError(
            f"open takes a kvwarehouse.Namespace, not a {type(space).__name__}",
            code="bad_namespace",
        )
    if not (yield ends.path.opened(space)):
        yield from registering(ends, space)


def registering(ends: Ends, space: Namespace) -> Flow[None]:
    address = ends.channel.address
    yield ends.channel.ask(admin.open_namespace(space, address))
    if ends.path.shares_memory and not (yield ends.path.opened(space)):
        raise TransportError(
            f"{address} registered the namespace, but its shared memory does not show it;"
            " the daemon may have been restarted in between: try again",
            code="namespace_not_shared",
        )


def listing(ends: Ends) -> Flow[list[StoredNamespace]]:
    known: list[StoredNamespace] = []
    after, further = -1, 0
    while further > after:
        after = further
        listed, further = yield ends.channel.ask(admin.namespaces(after))
        known += listed
    return known


def refreshing(ends: Ends, spaces: Callable[[], list[Namespace]], timeout_s: float) -> Flow[bool]:
    """`spaces`: those that a new daemon is told of, asked for once it was found."""
    timeout_s = checked_timeout(timeout_s)
    end_s = time.monotonic() + timeout_s
    if not (yield ends.path.refresh(timeout_s)):
        return False
    address = ends.channel.address
    try:
        for space in spaces():
            if not ends.path.sees(space):
                left_s = max(0.0, end_s - time.monotonic())
                yield ends.channel.ask(admin.open_namespace(space, address, left_s))
    except TransportError:
        return False
    return True
