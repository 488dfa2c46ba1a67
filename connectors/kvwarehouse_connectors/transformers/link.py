"""The namespace at a daemon, opened whenever that is possible.

An engine outlives daemons: it may start before the first and go on after the last. So the link is
made once and asked each time, and a daemon that is not there is asked for again only after a while.

Thread-safe.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable

import kvwarehouse as kvw

_CONNECT_TIMEOUT_S = 2.0
_RETRY_AFTER_S = 2.0


class Link:
    """client: a connected client, which stays the caller's, or an address to connect to."""

    def __init__(
        self,
        client: kvw.Client | str,
        space: kvw.Namespace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._address = client if isinstance(client, str) else None
        self._client = None if isinstance(client, str) else client
        self._space = space
        self._clock = clock
        self._opened: kvw.OpenNamespace | None = None
        self._refused: kvw.WarehouseError | None = None
        self._again_at = 0.0

    def opened(self) -> kvw.OpenNamespace:
        """The namespace, opened now if it was not. Raises what connecting and opening raise; for
        2 s after that, such an error again, at once."""
        with self._lock:
            if self._opened is not None:
                return self._opened
            if self._refused is not None and self._clock() < self._again_at:
                raise copy.copy(self._refused)
            try:
                if self._client is None:
                    self._client = kvw.connect(str(self._address), timeout_s=_CONNECT_TIMEOUT_S)
                self._opened = self._client.open(self._space)
            except kvw.WarehouseError as error:
                # A copy: what is raised holds its callers' frames, and with them the caches that
                # they were about to fill.
                self._refused = copy.copy(error)
                self._again_at = self._clock() + _RETRY_AFTER_S
                raise
            self._refused = None
            return self._opened

    def close(self) -> None:
        """Closes the client if the link connected it."""
        with self._lock:
            self._opened = None
            if self._address is not None and self._client is not None:
                self._client.close()
                self._client = None
