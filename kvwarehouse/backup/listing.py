"""What a namespace has when its turn comes: all that a watch says up to `synced`. Stateless.

gRPC waits for a message for as long as the call may last, which for a watch is a day, and a daemon
that is stopped says nothing. So a thread of its own waits, and who lists goes on without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import cast

from kvwarehouse.backup.chains import Chains
from kvwarehouse.client import Client
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.client.watch import Changes
from kvwarehouse.errors import TransportError


def add_listed(client: Client, space: StoredNamespace, chains: Chains, timeout_s: float) -> None:
    """Adds its pages to `chains`. Raises TransportError (code "deadline") where the daemon says
    nothing of them for timeout_s; then the thread ends with the client's connection at last."""
    told = cast(Generator[Changes, None, None], client.watch(space))
    waiting = ThreadPoolExecutor(1, "kvw-listing")
    try:
        _add(chains, lambda most_s: waiting.submit(next, told, None).result(most_s), timeout_s)
    finally:
        closing = waiting.submit(told.close)
        waiting.shutdown(wait=False)
    wait([closing], timeout_s)  # what is watched cannot be forgotten


def _add(chains: Chains, take: Callable[[float], Changes | None], timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            message = take(left_s)
        except TimeoutError:
            break
        if message is None:
            break
        chains.add(message.changes)
        if message.synced:
            return
        if message.changes:  # an empty one says no more than that the daemon is there
            until_s = time.monotonic() + timeout_s
    raise TransportError(
        f"the daemon did not say within {timeout_s:g} s what it has stored; look at it with"
        " `kvwarehouse status`, and export again, or with a larger --timeout",
        code="deadline",
    )
