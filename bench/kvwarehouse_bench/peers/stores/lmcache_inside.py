"""LMCache inside the client's process: its backend for CPU memory, and its backend for a local disk
behind that. Driven as its engine drives them; torch copies. Ways: torch with one thread, and two.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from importlib import metadata
from typing import Any

from kvwarehouse_bench.peers.store import Keyed, StampedPages, StoreRoom, digests, leading
from kvwarehouse_bench.peers.stores.files import forget

_ONE, _TWO = "1 thread", "2 threads"
_CHUNK_TOKENS = 16
_SETTLE_S = 120.0
_POLL_S = 0.001
_KEY_BITS = 63
_GIB = 1 << 30
_BATCH_BYTES = 64 << 20


class LMCacheInside(Keyed):
    def __init__(self, room: StoreRoom) -> None:
        super().__init__(room)
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        import torch

        self.ways = (_ONE,) if room.disk else (_ONE, _TWO)
        self._torch = torch
        torch.set_num_threads(1)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._folder = room.folder / "lmcache"
        self._folder.mkdir()
        self._cpu: Any = None
        self._disk: Any = None
        self._page_bytes = 0
        self._stored: list[Any] = []

    def about(self) -> dict[str, str]:
        direct = "; use_odirect" if self.room.disk else ""
        return {
            "version": f"LMCache {metadata.version('lmcache')}, torch {self._torch.__version__}",
            "layout": f"in process, torch copies{direct}",
            "durability": "written, not synced; its index is in memory" * self.room.disk or "none",
            "lookup": "contains() a key; keys given",
            "start": "LocalCPUBackend" + ", LocalDiskBackend" * self.room.disk,
        }

    def use(self, way: str) -> None:
        super().use(way)
        self._torch.set_num_threads(2 if way == _TWO else 1)

    def memory(self, page_bytes: int) -> StampedPages:
        pages = super().memory(page_bytes)
        if page_bytes != self._page_bytes:
            self._close_backends()
            self._open_backends(page_bytes)
        return pages

    def names(self, label: str, count: int) -> Any:
        from lmcache.utils import CacheEngineKey

        ids = [int.from_bytes(each.digest()[:8], "little") for each in digests(label, count)]
        return [
            CacheEngineKey("m", 1, 0, number & ((1 << _KEY_BITS) - 1), self._torch.uint8)
            for number in ids
        ]

    def store(self, names: Any, pages: StampedPages) -> None:
        from lmcache.v1.memory_management import MemoryFormat

        source = self._torch.from_numpy(pages.source)
        held = []
        for name, page in zip(names, source, strict=True):
            room = self._cpu.allocate(self._shape, self._torch.uint8, MemoryFormat.KV_2LTD)
            if room is None:
                raise MemoryError("LMCache has no room")
            room.tensor.view(-1).copy_(page)
            self._cpu.submit_put_task(name, room)
            held.append(room)
        if self._disk is not None:
            self._disk.batched_submit_put_task(names, held)
            self._stored += names
        for room in held:
            room.ref_count_down()

    def load(self, names: Any, pages: StampedPages) -> int:
        target = self._torch.from_numpy(pages.target)
        if self._disk is not None:
            return self._load_from_disk(names, target, pages.page_bytes)
        for at, (name, page) in enumerate(zip(names, target, strict=True)):
            held = self._cpu.get_blocking(name)
            if held is None:
                return at
            page.copy_(held.tensor.view(-1))
            held.ref_count_down()
        return len(names)

    def found(self, names: Any) -> int:
        contains = (self._disk or self._cpu).contains
        return leading([contains(name) for name in names])

    def clear(self) -> None:
        if self._cpu is None:
            return
        self._settle_tasks()
        if self._disk is not None:
            for name in self._stored:
                self._disk.remove(name)
            self._stored = []
        self._cpu.clear()

    def settle(self) -> None:
        """LMCache syncs nothing."""
        self._settle_tasks()

    def drop_caches(self) -> None:
        self._settle_tasks()
        self._cpu.clear()
        for path in self._folder.rglob("*"):
            if path.is_file():
                forget(str(path))

    def close(self) -> None:
        self._close_backends()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _load_from_disk(self, names: Any, target: Any, page_bytes: int) -> int:
        each = max(1, _BATCH_BYTES // page_bytes)
        for first in range(0, len(names), each):
            batch = self._disk.batched_get_blocking(names[first : first + each])
            for at, held in enumerate(batch):
                if held is None:
                    return first + at
                target[first + at].copy_(held.tensor.view(-1))
                held.ref_count_down()
        return len(names)

    def _settle_tasks(self) -> None:
        """Until its writer threads are through."""
        end = time.monotonic() + _SETTLE_S
        while self._disk is not None and (
            self._disk.disk_worker.put_tasks
            or any(not self._disk.contains(name) for name in self._stored)
        ):
            if time.monotonic() > end:
                raise TimeoutError(f"LMCache has not written its pages in {_SETTLE_S:.0f} s")
            time.sleep(_POLL_S)

    def _open_backends(self, page_bytes: int) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        self._page_bytes = page_bytes
        hidden = page_bytes // _CHUNK_TOKENS // 2
        self._shape = self._torch.Size([2, 1, _CHUNK_TOKENS, hidden])
        room_gib = (3 * self.room.moved_bytes) / _GIB + 0.1
        on_disk = {
            "local_disk": str(self._folder),
            "max_local_disk_size": 2 * room_gib,
            "extra_config": {"use_odirect": True},
        }
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=_CHUNK_TOKENS,
            local_cpu=True,
            max_local_cpu_size=room_gib,
            **(on_disk if self.room.disk else {}),
        )
        described = LMCacheMetadata(
            "m",
            1,
            1,
            0,
            0,
            self._torch.uint8,
            (1, 2, _CHUNK_TOKENS, 1, hidden),
            chunk_size=_CHUNK_TOKENS,
        )
        self._cpu = LocalCPUBackend(config, described, "cpu")
        if self.room.disk:
            self._disk = LocalDiskBackend(config, self._loop, self._cpu, "cpu")

    def _close_backends(self) -> None:
        if self._disk is not None:
            self._disk.close()
        if self._cpu is not None:
            self._cpu.clear()
            self._cpu.close()
        self._cpu = self._disk = None
        self._stored = []
