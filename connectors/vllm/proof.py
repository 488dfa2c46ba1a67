"""The connector proves itself before it serves: known bytes go through the engine's own tensors and
come back the same.

At registration, when no block is in use yet, the geometry is proven: what torch wrote into blocks
is what is gathered from them, and what is scattered is what torch reads, with the blocks beside
them untouched. Then the way through the warehouse; where there is no daemon yet, with the first
load, in the blocks that the engine gave for it.

Thread-safe after registration.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import kvwarehouse as kvw
from kvwarehouse_connectors.common.upkeep import Upkeep
from kvwarehouse_connectors.vllm.groups import unsupported
from kvwarehouse_connectors.vllm.memory import BlockMemory
from kvwarehouse_connectors.vllm.messages import PageRun

_log = logging.getLogger(__name__)

_TIMEOUT_S = 0.5
_BLOCKS = 2
# Where it could not be made: a daemon that is full or gone must not cost every load another try.
_MOST_TRIES = 3


class Proof:
    """stores: whether this engine may store; without it the way cannot be proven, only checked by
    the digests of each load."""

    def __init__(self, upkeep: Upkeep, *, stores: bool) -> None:
        self._upkeep = upkeep
        self._stores = stores
        self._lock = threading.Lock()
        self._verdicts: dict[int, bool] = {}
        self._tries: dict[int, int] = {}

    def check(self, memory: BlockMemory, views: Sequence[Any], num_blocks: int) -> None:
        """Raises UsageError (code "unsupported") where a block does not keep its bytes."""
        middle = max(1, num_blocks // 2)
        blocks = sorted({min(1, num_blocks - 1), middle, num_blocks - 1})
        beside = sorted({b + d for b in blocks for d in (-1, 1) if 0 <= b + d < num_blocks})
        beside = [b for b in beside if b not in blocks]
        saved = [[_bytes(view[b]) for b in blocks] for view in views]
        around = [[_bytes(view[b]) for b in beside] for view in views]
        try:
            patterns = [[_random_like(view[b]) for b in blocks] for view in views]
            _write(views, blocks, patterns)
            rows = np.zeros((len(blocks), memory.block_bytes), np.uint8)
            memory.gather(blocks, rows)
            memory.settle()
            _write(views, blocks, [[torch.zeros_like(p) for p in row] for row in patterns])
            memory.scatter(blocks, rows)
            good = _same(views, blocks, patterns) and _same(views, beside, around)
        finally:
            _write(views, blocks, saved)
        if not good:
            raise unsupported(
                f"a cache of {len(views)} tensors like {tuple(views[0].shape)}, strides"
                f" {views[0].stride()}",
                "does not give back the bytes that were put into a block",
            )

    def of_the_way(self, memory: BlockMemory, blocks: Sequence[int]) -> bool:
        """Whether bytes of these blocks, which hold nothing yet, survive being stored and loaded.
        Asked once for each group; where it cannot be tried now, it counts as not asked."""
        if not self._stores:
            return True
        with self._lock:
            verdict = self._verdicts.get(id(memory))
            tries = self._tries.get(id(memory), 0)
            if verdict is None and tries < _MOST_TRIES:
                self._tries[id(memory)] = tries + 1
                verdict = self._try(memory, list(blocks[:_BLOCKS]))
                if verdict is not None:
                    self._verdicts[id(memory)] = verdict
        return verdict is not False

    def _try(self, memory: BlockMemory, blocks: list[int]) -> bool | None:
        client = self._upkeep.client
        if client is None or self._upkeep.control() is None:
            return None
        shape = (len(blocks), memory.block_bytes)
        before = np.zeros(shape, np.uint8)
        memory.gather(blocks, before)
        memory.settle()
        rows = np.frombuffer(os.urandom(shape[0] * shape[1]), np.uint8).reshape(shape)
        try:
            space = client.open(_space(memory.block_bytes), reopen=False)
            run = PageRun(0, [os.urandom(32) for _ in blocks], blocks, False)
            memory.scatter(blocks, rows)
            back = np.zeros(shape, np.uint8)
            memory.gather(blocks, back)
            memory.settle()
            stored = space.store(keys=run.key_runs(), pages=back, timeout_s=_TIMEOUT_S)
            memory.scatter(blocks, np.zeros(shape, np.uint8))
            loaded = memory.load(space, run, 0, 0, _TIMEOUT_S)
            memory.gather(blocks, back)
            memory.settle()
        except kvw.WarehouseError as error:
            _log.debug("the self-test could not be made: %s", error)
            return None
        finally:
            # Random bytes may be NaN, and attention reads a block's unused end: 0 * NaN is NaN.
            memory.scatter(blocks, before)
        if stored.stored < len(blocks) or int(loaded) < len(blocks):
            return None  # no room, or evicted at once: it says nothing
        if np.array_equal(rows, back):
            return True
        _log.error(
            "the self-test of %d-byte blocks came back with other bytes: nothing is loaded. Please"
            " report this with the engine's version, device and layout",
            memory.block_bytes,
        )
        return False


def _space(page_bytes: int) -> kvw.Namespace:
    return kvw.Namespace(
        model="kvwarehouse/self-test",
        weights="none",
        dtype="uint8",
        layout="vllm/1",
        page_tokens=1,
        page_bytes=page_bytes,
        hash_scheme="random",
    )


def _bytes(block: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a block, as bytes."""
    return block.detach().contiguous().clone().reshape(-1).view(torch.uint8)


def _random_like(block: torch.Tensor) -> torch.Tensor:
    size = block.numel() * block.element_size()
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=block.device)


def _write(
    views: Sequence[torch.Tensor], blocks: Sequence[int], data: Sequence[Sequence[torch.Tensor]]
) -> None:
    for view, row in zip(views, data, strict=True):
        for block, content in zip(blocks, row, strict=True):
            view[block].copy_(content.view(view.dtype).view(view.shape[1:]))


def _same(
    views: Sequence[torch.Tensor], blocks: Sequence[int], data: Sequence[Sequence[torch.Tensor]]
) -> bool:
    return all(
        torch.equal(_bytes(view[block]), content)
        for view, row in zip(views, data, strict=True)
        for block, content in zip(blocks, row, strict=True)
    )
