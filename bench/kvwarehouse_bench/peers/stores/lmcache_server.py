"""LMCache's server (its multiprocess mode) by LMCache's own client, as its `bench server` drives
it on a CPU: the client's KV tensor lies in shared memory and the server copies. The tensor has one
layer whose blocks are whole pages, so that nothing is gathered. In a network namespace, like all
that listens.

A retrieve needs a lookup before it, which holds the pages: that one is not counted as loading.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from importlib import metadata
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
)

_RPC, _HTTP = 15555, 18081
_PAGE_TOKENS = 16
_WAIT_S = 20.0
_POLL_S = 0.001
_GIB = 1 << 30
_LEAST_GIB = 1


class LMCacheServer(Keyed):
    def __init__(self, room: StoreRoom) -> None:
        super().__init__(room)
        leave_network()
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
        self._server = _server(room)
        self._server.wait_ready(lambda: listening(_RPC) and listening(_HTTP))
        self._requests = itertools.count()
        self._client: Any = None
        self._page_bytes = 0
        self._held = ""

    def about(self) -> dict[str, str]:
        return {
            "version": f"LMCache {metadata.version('lmcache')}",
            "layout": "a server, shared memory, ZMQ; one copy by the server",
            "durability": "none (memory)",
            "lookup": "tokens given: the server hashes them and holds the pages",
            "start": "lmcache server --chunk-size 16 --no-l1-use-lazy",
        }

    def memory(self, page_bytes: int) -> StampedPages:
        if page_bytes != self._page_bytes:
            if self._client is not None:
                self._client.close()
            self._client = _client(self.room.moved_bytes // page_bytes, page_bytes)
            self._page_bytes = page_bytes
            worker = self._client._workers[0]
            (tensor,) = worker.kv_caches.values()
            memory = tensor.view(-1).numpy()
            self._begin = memory.ctypes.data
            memory = memory[page_bytes:]
            half = len(memory) // 2
            self._halves = memory[:half], memory[half:]
            fill(self._halves[0])
            self._halves[1][:] = 1
        return StampedPages.over(*self._halves, page_bytes)

    def names(self, label: str, count: int) -> Any:
        seed = int.from_bytes(digests(label, 1)[0].digest()[:8], "little")
        drawn = np.random.default_rng(seed).integers(0, 150_000, count * _PAGE_TOKENS)
        return tuple(drawn.tolist())

    def store(self, names: Any, pages: StampedPages) -> None:
        request = self._request(names, pages.source)
        done = self._client.store(request, 0, request.num_full_tokens)
        if not done.succeeded:
            raise OSError("LMCache's server says that a store failed; see the log")

    def ready(self, names: Any) -> None:
        """Until the server finds what it has acknowledged; holds it for the retrieve."""
        end = time.monotonic() + _WAIT_S
        while True:
            self._held = f"held-{next(self._requests)}"
            if self._looked_up(names, self._held) * _PAGE_TOKENS == len(names):
                return
            self._client._req_client.end_session(self._held)
            if time.monotonic() > end:
                raise TimeoutError(f"LMCache's server does not find its pages in {_WAIT_S:.0f} s")
            time.sleep(_POLL_S)

    def load(self, names: Any, pages: StampedPages) -> int:
        request = self._request(names, pages.target, self._held)
        done = self._client.retrieve(request, 0, request.num_full_tokens)
        self._client._req_client.end_session(request.request_id)
        return pages.count if done.succeeded else 0

    def found(self, names: Any) -> int:
        session = f"found-{next(self._requests)}"
        pages = self._looked_up(names, session)
        self._client._req_client.end_session(session)
        return pages

    def clear(self) -> None:
        if self._client is not None:
            self._client._req_client.clear(True).result(timeout=_WAIT_S)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._server.end()

    def _looked_up(self, names: Any, session: str) -> int:
        from lmcache.cli.commands.bench.server_bench.helpers import _make_key

        client = self._client._req_client
        key = _make_key(names, session, start=0, end=len(names))
        client.lookup(key, 1).result(timeout=_WAIT_S)
        end = time.monotonic() + _WAIT_S
        while True:
            pages = client.query_prefetch_status(session).result(timeout=_WAIT_S)
            if pages is not None:
                return int(pages)
            if time.monotonic() > end:
                raise TimeoutError(f"LMCache's server has not looked up in {_WAIT_S:.0f} s")

    def _request(self, names: Any, rows: Any, session: str = "") -> Any:
        from lmcache.cli.commands.bench.server_bench.client import RequestContext

        return RequestContext(
            sequence_id=0,
            request_id=session or f"store-{next(self._requests)}",
            request_kind="bench",
            token_ids=names,
            num_full_tokens=len(names),
            total_chunks=len(rows),
            chunk_size=_PAGE_TOKENS,
            block_offset=(rows.ctypes.data - self._begin) // self._page_bytes,
            num_blocks=len(rows),
        )


def _server(room: StoreRoom) -> Server:
    program = Path(sys.executable).with_name("lmcache")
    if not program.is_file():
        raise CannotRunError(f"{program} is missing")
    size_gib = max(_LEAST_GIB, -(-3 * room.moved_bytes // _GIB))
    return Server(
        [
            str(program),
            "server",
            *("--host", "127.0.0.1", "--port", str(_RPC)),
            *("--http-host", "127.0.0.1", "--http-port", str(_HTTP)),
            *("--l1-size-gb", str(size_gib), "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            *("--disable-observability", "--chunk-size", str(_PAGE_TOKENS)),
        ],
        room.folder,
    )


def _client(count: int, page_bytes: int) -> Any:
    """Connected and registered, with a tensor of twice `count` blocks. And one before them: an
    engine's block 0 holds nothing, and LMCache stores no page from there."""
    from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
    from lmcache.cli.commands.bench.server_bench.config import BenchConfig

    blocks = 1 + 2 * count
    shape = f"(1,{blocks},{_PAGE_TOKENS},1,{page_bytes // _PAGE_TOKENS}):uint8:1"
    config = BenchConfig(
        rpc_url=f"tcp://127.0.0.1:{_RPC}",
        http_url=f"http://127.0.0.1:{_HTTP}",
        mode="cpu",
        transfer_mode="lmcache_driven",
        tp_size=1,
        use_mla=True,
        num_tokens=count * _PAGE_TOKENS,
        kvcache_shape_spec=shape,
        num_blocks=blocks,
        block_size=_PAGE_TOKENS,
    )
    client = ServerBenchClient(config, lambda text: None)
    client.start()
    return client
