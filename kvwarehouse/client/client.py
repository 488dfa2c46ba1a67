"""A connected client: opens namespaces, and asks the daemon to do things.

Thread-safe. After a fork the child must connect anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from kvwarehouse.client.admin import Admin, StoredNamespace, StoredPage
from kvwarehouse.client.channel import Channel
from kvwarehouse.client.opened import OpenNamespace
from kvwarehouse.client.path import DataPath
from kvwarehouse.client.prefix import checked_timeout
from kvwarehouse.client.watching import Changes, watch
from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.miss_ratio import MissRatio
from kvwarehouse.types import CheckProgress, Control, FlushResult, Namespace


class Client:
    """Made by `kvwarehouse.connect` or `kvwarehouse.embedded`; also a context manager."""

    def __init__(self, channel: Channel, path: DataPath) -> None:
        self._channel = channel
        self._admin = Admin(channel)
        self._path = path
        self._lock = threading.Lock()
        self._closed = False
        self._reopened: dict[bytes, Namespace] = {}  # at a new daemon, by refresh

    @property
    def address(self) -> str:
        return str(self._channel.address)

    @property
    def local(self) -> bool:
        """Whether pages move through shared memory, with pins."""
        return self._path.shares_memory

    def open(self, space: Namespace, *, reopen: bool = True) -> OpenNamespace:
        """`space`, ready for lookup, load and store; the daemon registers it if it is new.

        A daemon that took another's place without its ledger does not know `space` any more. It is
        registered anew by the next call that needs it, or by refresh; with reopen=False by neither:
        those calls raise UsageError (code "namespace_unknown"), and the caller opens it again.

        Raises UsageError where its pages fit no slab of this daemon, TransportError without one."""
        if not isinstance(space, Namespace):
            raise UsageError(
                f"open takes a kvwarehouse.Namespace, not a {type(space).__name__}",
                code="bad_namespace",
            )
        self._check_open()
        if not self._path.opened(space):
            self._register(space)
        if not reopen:
            return OpenNamespace(space, self._path, None)
        with self._lock:
            self._reopened[space.id] = space
        return OpenNamespace(space, self._path, self._register)

    def refresh(self, timeout_s: float = 1.0) -> bool:
        """Finds the daemon again if it was replaced: maps its memory and registers the namespaces
        that it does not know. Quick where nothing changed. For clients without patience, from a
        thread that may wait: at most timeout_s, while lookups of other threads go on.

        Returns whether the client is connected to the daemon that is there now; False where none
        answers in time. Raises UsageError (code "unsupported") on a remote client."""
        timeout_s = checked_timeout(timeout_s)
        end_s = time.monotonic() + timeout_s
        self._check_open()
        if not self._path.refresh(timeout_s):
            return False
        with self._lock:
            spaces = list(self._reopened.values())
        try:
            for space in spaces:
                if not self._path.sees(space):
                    self._admin.open_namespace(space, max(0.0, end_s - time.monotonic()))
        except TransportError:
            return False
        return True

    def control(self) -> Control:
        """What the daemon publishes about itself: rates, queues, limits, a heartbeat. Reads shared
        memory, no call. Raises UsageError (code "unsupported") on a remote client."""
        self._check_open()
        return self._path.control()

    def status(self) -> dict[str, Any]:
        """One snapshot of the warehouse: nested dicts of plain values, as
        proto/kvwarehouse/v1/status.proto names them."""
        return self._admin.status()

    def flush(self, timeout_s: float = 30.0) -> FlushResult:
        """Waits until what was stored before the call is durable on NVMe, at most timeout_s. Says
        how many pages are, were not admitted, or are pending still."""
        return self._admin.flush(checked_timeout(timeout_s))

    def clear(self, space: Namespace | None) -> int:
        """Removes every page of `space` (None: of all namespaces) from all tiers, for good: no
        restart brings them back. Returns the pages removed."""
        return self._admin.clear(space)

    def evict(self, space: Namespace | None, pages: int, tiers: str = "dram") -> int:
        """Takes the coldest `pages` pages (at most 100,000) of `space` (None: of all) out of
        "dram", "nvme" or "all" tiers. Returns how many were."""
        return self._admin.evict(space, pages, tiers)

    def drain(self, timeout_s: float = 30.0) -> FlushResult:
        """Makes the daemon refuse stores until it ends, and flushes. Loads go on."""
        return self._admin.drain(checked_timeout(timeout_s))

    def sweep(self) -> int:
        """Drops pages whose ancestors are in no tier. Returns how many."""
        return self._admin.sweep()

    def namespaces(self) -> list[StoredNamespace]:
        """The namespaces that the warehouse keeps."""
        return self._admin.namespaces()

    def pages(self, space: Namespace) -> Iterator[StoredPage]:
        """The pages of a namespace, in all tiers, in the order of the index."""
        return self._admin.pages(space)

    def watch(self, space: Namespace | None = None) -> Iterator[Changes]:
        """What enters and leaves the tiers, of `space` (None: of all namespaces): all that is
        stored, then every change as it happens, a message every few seconds at least. Blocks
        between them; closing the iterator ends it, and so does a day. Raises CapacityError: code
        "watcher_too_slow" when this reader lags too far behind, "too_many_watchers" at the
        daemon's bound; TransportError when the daemon ends. After any of them, watch again."""
        self._check_open()
        return watch(self._channel, space)

    def miss_ratio(self, space: Namespace | None = None) -> MissRatio:
        """What tiers of other sizes would have hit, of `space` (None: of all)."""
        return self._admin.miss_ratio(space)

    def check(
        self, space: Namespace | None = None, *, repair: bool = False
    ) -> Iterator[CheckProgress]:
        """Verifies stored pages of `space` (None: of all) in both tiers; `repair` quarantines what
        is bad, in its tier alone. Yields totals so far, the last with done=True."""
        return self._admin.check(space, repair=repair)

    def close(self) -> None:
        """Ends the session: pins go, calls under way fail. More than once is once."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._path.close()
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _register(self, space: Namespace) -> None:
        self._check_open()
        self._admin.open_namespace(space)
        if self.local and not self._path.opened(space):
            raise TransportError(
                f"{self.address} registered the namespace, but its shared memory does not show it;"
                " the daemon may have been restarted in between: try again",
                code="namespace_not_shared",
            )

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the client is closed; connect again", code="closed")
