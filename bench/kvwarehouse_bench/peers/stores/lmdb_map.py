"""LMDB by py-lmdb: pages are values, written in transactions of 16 MiB, read out of the map into
the caller's memory. Ways: with and without writing through the map."""

from __future__ import annotations

import shutil
from typing import Any

import lmdb
import numpy as np

from kvwarehouse_bench.peers.store import Keyed, StampedPages, StoreRoom
from kvwarehouse_bench.peers.stores.files import forget

_TRANSACTION_BYTES = 16 << 20
_PLAIN, _WRITEMAP, _SYNCED = "nosync", "nosync, writemap", "sync"


class Lmdb(Keyed):
    def __init__(self, room: StoreRoom) -> None:
        super().__init__(room)
        self.ways = (_SYNCED,) if room.disk else (_PLAIN, _WRITEMAP)
        self._way = self.ways[0]
        # A page more for the header of each value, twice, and what freed pages wait for.
        self._map_bytes = 6 * room.moved_bytes + (1 << 30)
        self._open()

    def about(self) -> dict[str, str]:
        return {
            "version": "LMDB {}.{}.{}".format(*lmdb.version()) + f", py-lmdb {lmdb.__version__}",
            "layout": "in process, one file mapped into memory",
            "durability": "synced at each commit" if self.room.disk else "page cache, not synced",
            "lookup": "one get a key in one transaction; keys given",
            "start": "",
        }

    def use(self, way: str) -> None:
        super().use(way)
        if way != self._way:
            self._way = way
            self._environment.close()
            self._open()

    def store(self, names: Any, pages: StampedPages) -> None:
        each = max(1, _TRANSACTION_BYTES // pages.page_bytes)
        for first in range(0, pages.count, each):
            with self._environment.begin(write=True) as transaction:
                for at in range(first, min(pages.count, first + each)):
                    transaction.put(names[at], pages.source[at].data)

    def load(self, names: Any, pages: StampedPages) -> int:
        with self._environment.begin(buffers=True) as transaction:
            for at, (name, page) in enumerate(zip(names, pages.target, strict=True)):
                value = transaction.get(name)
                if value is None or len(value) != len(page):
                    return at
                page[:] = np.frombuffer(value, np.uint8)
        return len(names)

    def found(self, names: Any) -> int:
        with self._environment.begin(buffers=True) as transaction:
            get = transaction.get
            for at, name in enumerate(names):
                if get(name) is None:
                    return at
        return len(names)

    def clear(self) -> None:
        """A new file, as the others make: one that was emptied looks for room in what it freed."""
        self._environment.close()
        shutil.rmtree(self._folder)
        self._open()

    def settle(self) -> None:
        self._environment.sync(True)

    def drop_caches(self) -> None:
        self._environment.close()
        forget(str(self._folder / "data.mdb"))
        self._open()

    def close(self) -> None:
        self._environment.close()

    @property
    def _folder(self) -> Any:
        return self.room.folder / "lmdb"

    def _open(self) -> None:
        self._environment: Any = lmdb.open(
            str(self._folder),
            map_size=self._map_bytes,
            sync=self._way == _SYNCED,
            writemap=self._way == _WRITEMAP,
        )
