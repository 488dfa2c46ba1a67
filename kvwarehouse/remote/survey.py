"""What a fleet has in its store, counted, and a sample of it verified as if a stranger had sent it.

All of a listing is counted, and of its objects each is as likely to be in the sample as any other.
An object is verified by its name and the fleet's secret alone (core.check_object): headers, place,
chain of keys, and the digest of each shard.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvwarehouse import core
from kvwarehouse.fleet import FleetSecret
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.object_store import ObjectStore
from kvwarehouse.remote.totals import StoredTotals
from kvwarehouse.remote.walk import Found, PagesWalk

_LOOK_S = 0.5


@dataclass(frozen=True)
class Judged:
    name: PagesName
    size_bytes: int
    fault: str
    """"": all its pages are good. "gone": it was deleted meanwhile, which is no damage. Else why
    the first page that is not good is not, as in docs/format.md."""
    pages: int
    """That are good, before that one."""

    @property
    def is_damaged(self) -> bool:
        return self.fault not in ("", "gone")


class Survey:
    """`sample`: how many objects are verified. Not to be used twice."""

    def __init__(
        self,
        store: ObjectStore,
        names: FleetNames,
        secret: FleetSecret,
        sample: int,
        rng: random.Random | None = None,
    ) -> None:
        self._store, self._names, self._secret = store, names, secret
        self._size, self._rng = sample, rng or random.Random()
        self._sample: list[tuple[PagesName, int]] = []
        self._seen = 0
        self._lock = threading.Lock()
        self._walk = PagesWalk(store, names, self._found)
        self.totals = StoredTotals()

    @property
    def unknown(self) -> int:
        """Objects among those of pages whose names are none of ours."""
        return self._walk.unknown

    def count(self) -> Iterator[int]:
        """Lists all, and says now and then how many objects were found. Raises TransportError."""
        self._walk.start()
        try:
            while not self._walk.join(_LOOK_S):
                yield self._seen
        finally:
            self._walk.stop()
        if self._walk.failure is not None:
            raise self._walk.failure
        yield self._seen

    def verify(self) -> Iterator[Judged]:
        """The sample, in the order of names. Raises TransportError."""
        for name, size_bytes in sorted(self._sample, key=lambda item: self._names.pages(item[0])):
            yield self._judge(name, size_bytes)

    def _found(self, found: Found) -> None:
        self.totals.add(found)
        with self._lock:
            for item in found:
                self._seen += 1
                if len(self._sample) < self._size:
                    self._sample.append(item)
                elif (at := self._rng.randrange(self._seen)) < self._size:
                    self._sample[at] = item

    def _judge(self, name: PagesName, size_bytes: int) -> Judged:
        data = self._store.get(self._names.pages(name), 0, size_bytes) if size_bytes else b""
        if data is None:
            return Judged(name, size_bytes, "gone", 0)
        fault, pages, _ = core.check_object(
            self._names.fleet,
            self._secret.secret,
            name.namespace,
            name.epoch,
            name.key,
            np.frombuffer(data, np.uint8),
        )
        return Judged(name, size_bytes, fault, pages)
