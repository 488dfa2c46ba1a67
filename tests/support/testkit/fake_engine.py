"""A contract model of kvwarehouse.core in plain Python: pages in a dictionary, no shared memory,
no disk. For tests of what stands on the engine; it proves nothing about the engine itself.

    engine = FakeEngine()
    serve(config, engine=engine)

Thread-safe by one lock. `engine.core.fail` makes the next calls raise.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections import Counter
from typing import Any

import numpy as np

from kvwarehouse.errors import TransportError, UsageError, WarehouseError

SLAB_BYTES = 64 << 20


class FakeEngine:
    """Stands in for the module: the attributes that the daemon uses."""

    VERSION = "0.0.fake"

    def __init__(self) -> None:
        self.core: FakeCore | None = None
        self.loads_blocked = threading.Event()
        self.unblock_loads = threading.Event()
        self.unblock_loads.set()

    def check_options(self, options: FakeOptions) -> None:
        """It takes all."""

    def index_bytes(self, options: FakeOptions) -> int:
        return 1 << 20

    def table_bytes(self, options: FakeOptions) -> int:
        return 1 << 20

    def CoreOptions(self) -> FakeOptions:
        return FakeOptions()

    def Core(self, options: FakeOptions) -> FakeCore:
        self.core = FakeCore(options)
        return self.core

    def NativeClient(self, socket_path: str, verify_always: bool, timeout_s: float) -> FakeClient:
        assert self.core is not None
        assert self.core.started, "the daemon connects to a core that runs"
        return FakeClient(self, self.core)

    class Regions:
        def __init__(self, array: Any) -> None:
            self.array = array

        @staticmethod
        def pages(array: Any, writable: bool) -> FakeEngine.Regions:
            return FakeEngine.Regions(array)


class FakeOptions:
    def __init__(self) -> None:
        self.socket_path = ""
        self.dram_bytes = 0
        self.nvme_dir = ""
        self.warehouse_id = b""
        self.epoch = 0
        self.epoch_floor = 0
        self.log_end = 0


def _tier(name: str, **counts: int) -> dict[str, Any]:
    zeros = dict.fromkeys(("pages", "bytes", "bad", "dropped", "dropped_bytes"), 0)
    return {"tier": name, **zeros, **counts}


class FakeCore:
    def __init__(self, options: FakeOptions) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.started = self.draining = self.stopped = False
        self.dram_health = "ok"
        self.fail: WarehouseError | None = None
        self.spaces: dict[int, tuple[bytes, int, int, int]] = {}
        self.tombstones: dict[bytes, int] = {}
        self.clears: list[tuple[int, int]] = []
        self.epoch = options.epoch
        self.epoch_seen = 0
        self.end = 0  # of a log that it has none of
        self.slots: dict[tuple[int, bytes], dict[int, bytes]] = {}
        self.counts = dict.fromkeys(("hit", "missed", "loaded", "sealed"), 0)
        self.log: list[tuple[str, dict[str, str]]] = []
        self.graves: list[tuple[bytes, int]] = []
        self.remote_links: list[socket.socket] = []

    def add_namespace(
        self, ordinal: int, id: bytes, page_tokens: int, shards: int, shard_bytes: int, epoch: int
    ) -> int:
        if shards * shard_bytes > SLAB_BYTES:
            raise UsageError(f"pages of {shard_bytes} bytes fit no slab", code="page_too_large")
        for known, space in self.spaces.items():
            if space[0] == id:
                return known
        while ordinal in self.spaces:
            ordinal += 1
        self.spaces[ordinal] = (id, page_tokens, shards, shard_bytes)
        return ordinal

    def forget_namespace(self, ordinal: int) -> bytes:
        with self.lock:
            used = {place[0] for place in self.slots}
            idle = [each for each in self.spaces if each not in used and ordinal in (-1, each)]
        return self.spaces.pop(idle[0])[0] if idle else b""

    def add_tombstone(self, key: bytes, life: int) -> None:
        assert not self.started
        self.tombstones[key] = life

    def log_end(self) -> int:
        return self.end

    def start(self) -> dict[str, Any]:
        self.started = True
        return self.recover()

    def listen_again(self) -> None:
        raise AssertionError("a model has no socket that could be missed")

    def recover(self) -> dict[str, Any]:
        return {"pages_dram": 0, "pages_nvme": 0, "seconds": 0.0, "epoch_seen": self.epoch_seen}

    def clear(self, ordinals: list[int], epoch: int) -> int:
        self._check()
        self.raise_epoch(epoch)
        with self.lock:
            gone = [place for place in self.slots if place[0] in ordinals]
            for place in gone:
                del self.slots[place]
            self.clears += [(ordinal, epoch) for ordinal in ordinals]
        return len(gone)

    def raise_epoch(self, epoch: int) -> None:
        assert epoch > self.epoch
        self.epoch = epoch

    def evict(self, ordinal: int, pages: int, tiers: str) -> tuple[int, list[tuple[bytes, int]]]:
        self._check()
        if tiers == "hbm":
            raise UsageError("tiers is 'hbm', and this core has no HBM tier", code="bad_tiers")
        with self.lock:
            gone = [place for place in self.slots if ordinal in (-1, place[0])][:pages]
            for place in gone:
                del self.slots[place]
        graves = [(key, 7) for _, key in gone] if tiers != "dram" else []
        return len(gone), graves

    def flush(self, timeout_s: float) -> dict[str, int]:
        self._check()
        return {"flushed": len(self.slots), "not_admitted": 0, "pending": 0}

    def drain(self) -> None:
        self.draining = True

    def undrain(self) -> None:
        self.draining = False

    def sweep(self) -> int:
        return 0

    def pages(self, ordinal: int, after: int, limit: int) -> list[dict[str, Any]]:
        with self.lock:
            keys = [key for place, key in self.slots if place == ordinal]
        return [
            {
                "id": number,
                "key": keys[number],
                "parent": bytes(16),
                "position": number,
                "tiers": ["dram"],
                "bytes": 1,
                "sealed_at_ns": 1,
            }
            for number in range(after, min(after + limit, len(keys)))
        ]

    def check(self, ordinal: int, after: int, limit: int, repair: bool) -> dict[str, Any]:
        self._check()
        done = len(self.slots)
        bad = [{"key": bytes(16), "tier": "dram", "reason": "digest"}] if after == 0 else []
        dram = _tier("dram", pages=done, bytes=done, bad=len(bad), dropped=int(repair))
        return {"next": -1, "tiers": [dram, _tier("nvme")], "bad": bad}

    def keeps(self) -> list[dict[str, Any]]:
        self._check()
        return []

    def take_tombstones(self) -> list[tuple[bytes, int]]:
        self._check()
        graves, self.graves = self.graves, []
        return graves

    def events(self) -> list[tuple[str, dict[str, str]]]:
        self._check()
        events, self.log = self.log, []
        return events

    def attach_remote(self, fd: int) -> None:
        assert self.started
        assert not self.stopped
        self.remote_links.append(socket.socket(fileno=fd))

    def attach_remote_gets(self, fd: int) -> None:
        self.attach_remote(fd)

    def set_remote_epoch(self, id: bytes, fleet_epoch: int, clear_epoch: int) -> bool:
        return True

    def stop_remote(self, id: bytes) -> None:
        """It serves nothing of a store."""

    def stop(self) -> list[tuple[bytes, int]]:
        self.stopped = True
        for link in self.remote_links:
            link.close()
        graves, self.graves = self.graves, []
        return graves

    def status(self) -> dict[str, Any]:
        """What is not 0."""
        self._check()
        held = Counter(ordinal for ordinal, _ in self.slots)
        pages, capacity_bytes = len(self.slots), self.options.dram_bytes
        dram = {"health": self.dram_health, "capacity_bytes": capacity_bytes, "pages": pages}
        return {
            "warehouse_id": self.options.warehouse_id.hex(),
            "incarnation": 1,
            "uptime_s": 1.5,
            "draining": self.draining,
            "tiers": {
                "hbm": {"health": "off"},
                "dram": {**dram, "populated_bytes": capacity_bytes},
                "nvme": {"health": "off"},
            },
            "lookups": {
                "calls": 1,
                "pages_hit_dram": self.counts["hit"],
                "pages_missed": self.counts["missed"],
            },
            "loads": {"pages_loaded": self.counts["loaded"], "failed": {"of a newer core": 2}},
            "stores": {"pages_sealed": self.counts["sealed"]},
            "sessions": 1,
            "connections": 1,
            "index": {"pages": pages, "capacity": 1024},
            "page_bytes_max": SLAB_BYTES,
            "policy": "lru",
            "namespaces": [
                {
                    "ordinal": ordinal,
                    "id": space[0].hex(),
                    "pages": held[ordinal],
                    "dram_pages": held[ordinal],
                }
                for ordinal, space in self.spaces.items()
            ],
            "recovery": {"seconds": 0.25},
        }

    def _check(self) -> None:
        if self.fail is not None:
            raise self.fail


class FakeClient:
    """Shards of pages in the core's dictionary; keys are digests of the prefix."""

    def __init__(self, engine: FakeEngine, core: FakeCore) -> None:
        self._engine = engine
        self._core = core
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def refresh(self, timeout_s: float) -> bool:
        return True

    def clear_epoch(self, id: bytes) -> int | None:
        known = {space[0]: ordinal for ordinal, space in self._core.spaces.items()}
        if id not in known:
            return None
        return max((epoch for each, epoch in self._core.clears if each == known[id]), default=0)

    def lookup(self, id: bytes, tokens: Any, keys: Any) -> tuple[int, int, int, int]:
        ordinal, _, shards, _ = self._space(id)
        found = 0
        asked = self._keys(id, tokens, keys)
        with self._core.lock:
            for key in asked:
                if len(self._core.slots.get((ordinal, key), {})) < shards:
                    break
                found += 1
        self._core.counts["hit"] += found
        self._core.counts["missed"] += len(asked) - found
        return 0, found, 0, 0

    def load(  # noqa: PLR0913  as the native one
        self, id: bytes, tokens: Any, keys: Any, first: int, regions: Any, shard: int, wait: float
    ) -> tuple[int, dict[str, int]]:
        self._engine.loads_blocked.set()
        if not self._engine.unblock_loads.wait(wait or 60):
            return 0, {"timeout": len(regions.array)}
        ordinal, *_ = self._space(id)
        filled = 0
        for key in self._keys(id, tokens, keys)[first : first + len(regions.array)]:
            data = self._core.slots.get((ordinal, key), {}).get(shard)
            if data is None:
                break
            regions.array[filled] = np.frombuffer(data, dtype=np.uint8)
            filled += 1
        self._core.counts["loaded"] += filled
        left = len(regions.array) - filled
        return filled, {"missing": left} if left else {}

    def store(  # noqa: PLR0913  as the native one
        self,
        id: bytes,
        tokens: Any,
        keys: Any,
        first: int,
        regions: Any,
        shard: int,
        wait: float,
        since: int | None = None,
    ) -> tuple[int, int, dict[str, int]]:
        pages = len(regions.array)
        if self._core.draining:
            return 0, 0, {"draining": pages}
        ordinal, *_ = self._space(id)
        if since is not None and any(
            since < epoch for cleared, epoch in self._core.clears if cleared == ordinal
        ):
            return 0, 0, {"cleared": 1, "refused_tail": pages - 1}
        stored = already = 0
        for row, key in zip(regions.array, self._keys(id, tokens, keys)[first:], strict=False):
            slots = self._core.slots.setdefault((ordinal, key), {})
            if shard in slots:
                already += 1
            else:
                slots[shard] = row.tobytes()
                stored += 1
        return stored, already, {}

    def _space(self, id: bytes) -> tuple[int, int, int, int]:
        for ordinal, space in self._core.spaces.items():
            if space[0] == id:
                return ordinal, space[1], space[2], space[3]
        raise UsageError("unknown namespace", code="namespace_unknown")

    def _keys(self, id: bytes, tokens: Any, keys: Any) -> list[bytes]:
        if self._core.stopped or self.closed:
            raise TransportError("the session is closed")
        if keys is not None:
            return [hashlib.blake2b(key, digest_size=16).digest() for key in keys]
        page = self._space(id)[1]
        ends = range(page, len(tokens) + 1, page)
        return [
            hashlib.blake2b(np.asarray(tokens[:end], "<u4").tobytes(), digest_size=16).digest()
            for end in ends
        ]
