"""Pages scattered over a cache on a device, for the lanes that load and store them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_bench.gpu.cards import Memory

PATIENCE_S = 120.0
_PAGE_TOKENS = 16


class DevicePages:
    """All of a device's cache as pages, in an order without neighbours."""

    def __init__(self, client: kvw.Client, memory: Memory, page_bytes: int) -> None:
        self.space = kvw.Namespace(
            model="bench-gpu",
            weights="none",
            dtype="uint8",
            layout=f"bench/{page_bytes}",
            page_tokens=_PAGE_TOKENS,
            page_bytes=page_bytes,
        )
        self.client = client
        self.count = memory.size_bytes // page_bytes
        self.order = np.random.default_rng(page_bytes).permutation(self.count)
        self._opened = client.open(self.space)
        self._regions = memory.blocks(page_bytes, self.order)
        self._prompts = 0
        self._tokens = self._next()

    @property
    def native(self) -> Any:
        """The native client, which nobody but benches asks."""
        path: Any = self.client._path
        return path.native

    def store(self) -> float:
        """Seconds for pages that no tier has; those of the store before are cleared first."""
        self.client.clear(self.space)
        self._tokens = self._next()
        start = time.perf_counter()
        stored = self._opened.store(self._tokens, self._regions, timeout_s=PATIENCE_S)
        took = time.perf_counter() - start
        if stored.stored != self.count:
            raise RuntimeError(f"{stored} of {self.count} pages from the device")
        return took

    def load(self) -> float:
        start = time.perf_counter()
        loaded = self._opened.load(self._tokens, self._regions, timeout_s=PATIENCE_S)
        took = time.perf_counter() - start
        if loaded != self.count:
            raise RuntimeError(f"{loaded!r} of {self.count} pages to the device: {loaded.missed}")
        return took

    def _next(self) -> Any:
        self._prompts += 1
        tokens = np.arange(self.count * _PAGE_TOKENS, dtype=np.uint32)
        tokens[:_PAGE_TOKENS] = self._prompts
        return tokens
