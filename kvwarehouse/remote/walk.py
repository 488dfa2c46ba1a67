"""All objects of pages of a fleet, found by several listings side by side.

A walk goes down by the parts of names: namespaces, epochs, days. A day is one listing, or 256 (one
for each first byte of the keys) once it turns out to be large. What waits to be listed is taken
from its end, so that it stays short: the parts of one day for each thread, and no list of objects
ever. Threads are this walk's own and end with it. A part that fails is tried again behind the last
object that it had, RETRIES times in a row. Then it ends the walk; what was found until then was
told.

An answer that is no listing, such as a proxy's page of HTML, looks like one of nothing. So where
there is something that the fleet's root has for certain, whatever turns out to be empty is believed
only where the root still lists that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from kvwarehouse.errors import TransportError
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.object_store import ObjectStore, StoredObject

STREAMS: Final = 16
BATCH: Final = 1000
"""Objects are told in batches of so many at most, or of SPLIT."""
SPLIT: Final = 4000
"""A day that has so many is listed in parts: that is four requests of a store over HTTP, and each
part has 16 objects then."""

RETRIES: Final = 3
FIRST_PAUSE_S: Final = 1.0
"""Before the first of them; then twice as long each time."""

Found = Sequence[tuple[PagesName, int]]
"""Objects with their bytes."""


class PagesWalk:
    """`found` is called by several threads at a time, once for each object. `certain`: a prefix
    that is directly below the root; None: none is for certain. Thread-safe."""

    def __init__(
        self,
        store: ObjectStore,
        names: FleetNames,
        found: Callable[[Found], None],
        streams: int = STREAMS,
        certain: str | None = None,
    ) -> None:
        self._certain = certain
        self._store, self._names, self._found = store, names, found
        self._changed = threading.Condition()
        self._waiting = [names.root]
        self._listing = 0  # prefixes that a thread is at
        self._stopped = False
        self._failure: Exception | None = None
        self._unknown = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"listing-{number}", daemon=True)
            for number in range(streams)
        ]

    @property
    def has_ended(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def failure(self) -> Exception | None:
        """What ended it early."""
        with self._changed:
            return self._failure

    @property
    def unknown(self) -> int:
        """Objects among those of pages whose names are none of ours. Nobody touches them."""
        with self._changed:
            return self._unknown

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Threads end with the part that they are at."""
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float | None = None) -> bool:
        """True: it has ended."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))
        return self.has_ended

    def _work(self) -> None:
        while (prefix := self._next()) is not None:
            below: Sequence[str] = ()
            try:
                below = self._list(prefix)
            except Exception as error:  # noqa: BLE001, a thread's edge: who began it looks at it
                self._fail(error)
            self._done(below)

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._listing or self._stopped)
            if not self._waiting or self._stopped:
                return None
            self._listing += 1
            return self._waiting.pop()

    def _done(self, below: Sequence[str]) -> None:
        with self._changed:
            self._listing -= 1
            if not self._stopped:
                self._waiting.extend(below)
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if not self._stopped:
                self._failure = error
        self.stop()

    def _list(self, prefix: str) -> Sequence[str]:
        """The prefixes below that are to be listed too."""
        of = self._names.pages_prefix_of(prefix)
        if of is None:
            return ()
        if of.day is None:
            parts = self._parts(prefix)
            if prefix == self._names.root:
                self._believe(parts)
            elif not parts:
                self._believe_that_it_is_empty()
            return parts
        if of.first_byte is None:
            return self._list_day(prefix)
        self._list_part(prefix)
        return ()

    def _parts(self, prefix: str) -> Sequence[str]:
        failures = 0
        while True:
            try:
                return self._store.parts(prefix)
            except TransportError as error:
                failures += 1
                self._pause(failures, error)

    def _pause(self, failures: int, error: TransportError) -> None:
        """Before what failed so often in a row is tried again. Raises the error, if it is not."""
        if failures <= RETRIES and error.retryable:
            pause_s = FIRST_PAUSE_S * 2 ** (failures - 1)
            with self._changed:
                if not self._changed.wait_for(lambda: self._stopped, pause_s):
                    return
        raise error

    def _believe_that_it_is_empty(self) -> None:
        if self._certain is not None:
            self._believe(self._parts(self._names.root))

    def _believe(self, parts: Sequence[str]) -> None:
        if self._certain is not None and self._certain not in parts:
            raise TransportError(
                f"the store does not list {self._certain}, which is there: its listings are not "
                "believed. See whether something else answers in its place, such as a proxy",
                code="remote_failed",
            )

    def _list_day(self, prefix: str) -> Sequence[str]:
        """All of a small day, or the parts of a large one: what was seen of it is forgotten."""
        some = list(islice(self._pages_below(prefix), SPLIT))
        if len(some) == SPLIT:
            return [f"{prefix}{byte:02x}/" for byte in range(256)]
        if some:
            self._found(some)
        else:
            self._believe_that_it_is_empty()
        return ()

    def _list_part(self, prefix: str) -> None:
        pages, count = self._pages_below(prefix), 0
        while some := list(islice(pages, BATCH)):
            self._found(some)
            count += len(some)
        if not count:
            self._believe_that_it_is_empty()

    def _pages_below(self, prefix: str) -> Iterator[tuple[PagesName, int]]:
        """With their bytes; no more once it is stopped. Other names count when all were seen."""
        unknown = 0
        for item in self._below(prefix):
            if self._stopped:
                return
            name = self._names.pages_of(item.name)
            if name is None:
                unknown += 1
            else:
                yield name, item.size_bytes
        with self._changed:
            self._unknown += unknown

    def _below(self, prefix: str) -> Iterator[StoredObject]:
        last, failures = "", 0
        while True:
            try:
                for item in self._store.list(prefix, last):
                    last, failures = item.name, 0
                    yield item
            except TransportError as error:
                if last and not self._store.lists_in_order:
                    raise  # nobody knows what is left
                failures += 1
                self._pause(failures, error)
            else:
                return
