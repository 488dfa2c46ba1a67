"""kvwarehouse: a daemon of the bench's own, its client here. A prompt's tokens are given, so what
is timed includes hashing them.

Ways: every page verified (the default), `boundary` (in DRAM nothing is verified that this daemon
was given by a client), and verified by two threads, each with half of the pages.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import kvwarehouse as kvw
from kvwarehouse import core
from kvwarehouse_bench.peers.store import CannotRunError, Keyed, StampedPages, StoreRoom, digests

VERIFIED, BOUNDARY, TWO_THREADS = "verified", "boundary", "verified, 2 threads"
_PAGE_TOKENS = 16
_WAIT_S = 60.0
_POLL_S = 0.01
_LEAST_DRAM_BYTES = 256 << 20
_EVICTED_AT_ONCE = 100_000


class WarehouseStore(Keyed):
    def __init__(self, room: StoreRoom) -> None:
        super().__init__(room)
        # Whatever comes from the disk is verified in any case.
        self.ways = (VERIFIED,) if room.disk else (VERIFIED, BOUNDARY, TWO_THREADS)
        self._way = VERIFIED
        self._threads = ThreadPoolExecutor(2)
        self._stack = contextlib.ExitStack()
        self._page_bytes = 0
        self._start()

    def _start(self) -> None:
        """A daemon; for every size of pages another, as an engine's pages have one size."""
        self._stack.close()
        settings: dict[str, Any] = {"dram": max(3 * self.room.moved_bytes, _LEAST_DRAM_BYTES)}
        if self.room.disk:
            settings["nvme_dir"] = str(self.room.folder / f"tier-{self._page_bytes}")
            settings["nvme_capacity"] = max(6 * self.room.moved_bytes, 4 << 30)
            settings["write_queue"] = 2 * self.room.moved_bytes
        enter = self._stack.enter_context
        address = enter(kvw.PrivateDaemon(settings)).address
        self._client = enter(kvw.connect(address))
        self._trusting = enter(kvw.connect(address, verify="boundary"))
        self._opened: dict[str, kvw.OpenNamespace] = {}
        self._until(lambda: self._tier("dram")["health"] != "populating", "taken its memory")

    def about(self) -> dict[str, str]:
        direct = self.room.disk and self._tier("nvme")["direct_io"]
        disk = f", log on disk ({'direct I/O' if direct else 'page cache'})"
        return {
            "version": f"kvwarehouse {core.VERSION}, copies with {core.copy_path()}",
            "layout": "a daemon, shared memory" + disk * self.room.disk,
            "durability": "synced to disk by flush" if self.room.disk else "survives the daemon",
            "lookup": "hashes the tokens, finds the longest prefix, says which tier",
            "start": "kvwarehouse serve --dram SIZE",
        }

    def use(self, way: str) -> None:
        super().use(way)
        self._way = way

    def names(self, label: str, count: int) -> Any:
        seed = int.from_bytes(digests(label, 1)[0].digest()[:8], "little")
        numbers = np.random.default_rng(seed)
        return numbers.integers(0, 150_000, count * _PAGE_TOKENS, dtype=np.uint32)

    def store(self, names: Any, pages: StampedPages) -> None:
        done = self._ns(VERIFIED).store(names, pages.source, timeout_s=_WAIT_S)
        if done.stored != pages.count:
            raise kvw.CapacityError(f"not all were stored: {done}", code="bench_room")

    def load(self, names: Any, pages: StampedPages) -> int:
        ns = self._ns(BOUNDARY if self._way == BOUNDARY else VERIFIED)
        half = pages.count // 2
        if self._way != TWO_THREADS or not half:
            return ns.load(names, pages.target, timeout_s=_WAIT_S)
        tail = self._threads.submit(
            ns.load, names, pages.target[half:], timeout_s=_WAIT_S, first=half
        )
        head = ns.load(names, pages.target[:half], timeout_s=_WAIT_S)
        return head + tail.result() if head == half else head

    def found(self, names: Any) -> int:
        match = self._ns(VERIFIED).lookup(names)
        if sum(match.by_tier.values()) != match.pages:
            raise kvw.InternalError(f"tiers do not add up: {match}", code="bench")
        return match.pages

    def memory(self, page_bytes: int) -> StampedPages:
        if page_bytes != self._page_bytes:
            self._page_bytes = page_bytes
            self._start()
        return super().memory(page_bytes)

    def clear(self) -> None:
        if self._page_bytes:
            self._client.clear(self._ns(VERIFIED).space)

    def settle(self) -> None:
        left = self._client.flush(_WAIT_S).pending
        if left:
            raise kvw.CapacityError(f"{left} pages were not durable", code="bench_room")

    def drop_caches(self) -> None:
        def gone() -> bool:
            self._client.evict(self._ns(VERIFIED).space, _EVICTED_AT_ONCE, "dram")
            return bool(self._tier("dram")["pages"] == 0)

        self._until(gone, "let go of its pages in DRAM")

    def close(self) -> None:
        self._threads.shutdown()
        self._stack.close()

    def _ns(self, verify: str) -> kvw.OpenNamespace:
        if verify not in self._opened:
            client = self._trusting if verify == BOUNDARY else self._client
            self._opened[verify] = client.open(_space(self._page_bytes))
        return self._opened[verify]

    def _tier(self, name: str) -> Any:
        return self._client.status()["core"]["tiers"][name]

    def _until(self, met: Any, what: str) -> None:
        end = time.monotonic() + _WAIT_S
        while not met():
            if time.monotonic() > end:
                raise CannotRunError(f"the daemon has not {what} in {_WAIT_S:.0f} s")
            time.sleep(_POLL_S)


def _space(page_bytes: int) -> kvw.Namespace:
    return kvw.Namespace(
        model="bench-peers",
        weights="noise",
        dtype="uint8",
        layout="bench/1",
        page_tokens=_PAGE_TOKENS,
        page_bytes=page_bytes,
    )
