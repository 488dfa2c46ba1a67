"""The memory of a GPU as an engine has it, by torch, and pages scattered over a cache there, for
the lanes that load and store them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

import kvwarehouse as kvw
from kvwarehouse.client.transport import shared_memory_of

if TYPE_CHECKING:
    from kvwarehouse import core

PATIENCE_S = 120.0
_PAGE_TOKENS = 16


@dataclass(frozen=True)
class Memory:
    """owner: what keeps it alive."""

    owner: Any
    address: int
    size_bytes: int

    def blocks(self, block_bytes: int, order: Any) -> kvw.Regions:
        """Pages of one block each, of a cache that is all of this memory."""
        rows = order.reshape(-1, 1)
        return kvw.Regions.strided(
            [self.owner], [self.address], [block_bytes], [block_bytes], rows
        ).on_device()


class Card(Protocol):
    """A GPU that a bench moves bytes to and from."""

    def memory(self, size_bytes: int) -> Memory:
        """On the device; what it holds is not zero."""
        ...

    def pinned(self, size_bytes: int) -> Any:
        """Page-locked memory of the host."""
        ...

    def copy(self, memory: Memory, pinned: Any, *, to_device: bool) -> None:
        """All of it, in one copy; returns when it has ended."""
        ...

    def copy_within(self, to: Memory, source: Memory) -> None:
        """All of it, in one copy in the device; returns when it has ended."""
        ...

    def scatter_within(self, to: Memory, source: Memory, block_bytes: int, order: Any) -> None:
        """Block i of `source` to block order[i] of `to`; returns when it has ended."""
        ...


class TorchCard:
    """The current device."""

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def memory(self, size_bytes: int) -> Memory:
        made = self._torch.randint(0, 256, (size_bytes,), dtype=self._torch.uint8, device="cuda")
        self._torch.cuda.synchronize()
        return Memory(made, int(made.data_ptr()), size_bytes)

    def pinned(self, size_bytes: int) -> Any:
        # Written once: pages that nobody has touched would be faster than any copy.
        return self._torch.ones(size_bytes, dtype=self._torch.uint8).pin_memory()

    def copy(self, memory: Memory, pinned: Any, *, to_device: bool) -> None:
        source, target = (pinned, memory.owner) if to_device else (memory.owner, pinned)
        target.copy_(source, non_blocking=True)
        self._torch.cuda.synchronize()

    def copy_within(self, to: Memory, source: Memory) -> None:
        to.owner.copy_(source.owner, non_blocking=True)
        self._torch.cuda.synchronize()

    def scatter_within(self, to: Memory, source: Memory, block_bytes: int, order: Any) -> None:
        blocks = self._torch.from_numpy(order).cuda()
        shape = (-1, block_bytes // 8)  # words: by bytes the copy would be slower than it can be
        words = [each.owner.view(self._torch.int64).view(shape) for each in (to, source)]
        words[0].index_copy_(0, blocks, words[1][: len(order)])
        self._torch.cuda.synchronize()


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
    def native(self) -> core.NativeClient:
        """The native client, which nobody but benches asks."""
        return shared_memory_of(self.client).native

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
