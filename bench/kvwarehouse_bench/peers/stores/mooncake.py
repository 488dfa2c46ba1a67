"""Mooncake Store: its master, a `mooncake_client` daemon that owns the memory, and a client of that
daemon: the layout nearest to the warehouse's. Pages lie in the pool that client and daemon share,
so nothing is staged. All of it in a network namespace: it listens on every address, whatever it is
told.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvwarehouse_bench.peers.servers import Server, leave_network, listening
from kvwarehouse_bench.peers.store import (
    CannotRunError,
    Keyed,
    StampedPages,
    StoreRoom,
    digests,
    fill,
    leading,
)

_MASTER, _CLIENT, _METRICS = 50051, 50052, 19003
_LOCAL_BUFFER_BYTES = 64 << 20
_SPARE_BYTES = 64 << 20
# Of the batches that were tried here, 32 MiB was the quickest or as quick.
_BATCH_BYTES = 32 << 20
_CLEAR_S = 20.0
_POLL_S = 0.02


class Mooncake(Keyed):
    def __init__(self, room: StoreRoom) -> None:
        super().__init__(room)
        leave_network()
        from importlib import metadata

        import mooncake.store

        self._version = metadata.version("mooncake-transfer-engine-non-cuda")
        programs = Path(mooncake.store.__file__).parent
        self._servers = [_master(programs, room)]
        self._servers[0].wait_ready(lambda: listening(_MASTER))
        self._servers.append(_daemon(programs, room))
        self._servers[1].wait_ready(lambda: listening(_CLIENT))
        self._store = mooncake.store.MooncakeDistributedStore()
        pool_bytes = 2 * room.moved_bytes + _SPARE_BYTES
        status = self._store.setup_dummy(pool_bytes, _LOCAL_BUFFER_BYTES, f"127.0.0.1:{_CLIENT}")
        if status:
            raise CannotRunError(f"setup_dummy answered {status}: {self._servers[1].tail()}")

    def about(self) -> dict[str, str]:
        return {
            "version": f"Mooncake {self._version}",
            "layout": "a daemon, shared memory, and a master over TCP; pages in the shared pool",
            "durability": "none (memory)",
            "lookup": "batch_is_exist of all keys; keys given",
            "start": "mooncake_master; mooncake_client --protocol=tcp --threads=2; setup_dummy()",
        }

    def memory(self, page_bytes: int) -> StampedPages:
        if self._memory is None:
            self._memory = self._pooled(), self._pooled()
            fill(self._memory[0])
            self._memory[1][:] = 1
        return StampedPages.over(*self._memory, page_bytes)

    def names(self, label: str, count: int) -> Any:
        return [digest.hexdigest() for digest in digests(label, count)]

    def store(self, names: Any, pages: StampedPages) -> None:
        answers = self._batched(self._store.batch_put_from, names, pages.source)
        if any(answers):
            raise OSError(f"batch_put_from answered {next(filter(None, answers))}")

    def load(self, names: Any, pages: StampedPages) -> int:
        answers = self._batched(self._store.batch_get_into, names, pages.target)
        return leading([answer == pages.page_bytes for answer in answers])

    def found(self, names: Any) -> int:
        return leading([answer == 1 for answer in self._store.batch_is_exist(names)])

    def clear(self) -> None:
        """Objects that were just read are leased for a moment."""
        end = time.monotonic() + _CLEAR_S
        while self._store.remove_all(True) < 0:
            if time.monotonic() > end:
                raise OSError(f"remove_all failed for {_CLEAR_S:.0f} s")
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._store.close()
        for server in reversed(self._servers):
            server.end()

    def _batched(self, call: Any, names: Any, rows: Any) -> list[int]:
        page_bytes = rows.shape[1]
        each = max(1, _BATCH_BYTES // page_bytes)
        answers: list[int] = []
        begin = rows.ctypes.data
        for first in range(0, len(rows), each):
            batch = names[first : first + each]
            places = [begin + (first + at) * page_bytes for at in range(len(batch))]
            answers += call(batch, places, [page_bytes] * len(batch))
        return answers

    def _pooled(self) -> Any:
        size_bytes = self.room.moved_bytes
        at = self._store.alloc_from_mem_pool(size_bytes)
        if not at:
            raise CannotRunError(
                f"its memory pool has no {size_bytes} bytes: {self._servers[1].tail()}"
            )
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(at))
        status = self._store.register_buffer(at, size_bytes)
        if status:
            raise CannotRunError(f"register_buffer answered {status}")
        return memory


def _master(programs: Path, room: StoreRoom) -> Server:
    return Server(
        [
            str(programs / "mooncake_master"),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={_MASTER}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={_METRICS}",
            "--default_kv_lease_ttl=100",
            "--eviction_high_watermark_ratio=0.98",
        ],
        room.folder,
    )


def _daemon(programs: Path, room: StoreRoom) -> Server:
    segment_mib = (3 * room.moved_bytes + _SPARE_BYTES) >> 20
    return Server(
        [
            str(programs / "mooncake_client"),
            "--host=127.0.0.1",
            f"--port={_CLIENT}",
            f"--global_segment_size={segment_mib}MB",
            f"--master_server_address=127.0.0.1:{_MASTER}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            "--threads=2",
        ],
        room.folder,
    )
