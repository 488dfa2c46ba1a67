"""The self-test of tensors' layout, at registration, when no block is in use yet: that blocks keep
their bytes, that the blocks beside them are untouched, and that both are where the layout's
addresses say. Stateless; needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core.layout import BlockLayout
from kvwarehouse_connectors.core.memory import BlockMemory
from kvwarehouse_connectors.core.self_test import layout_keeps_bytes


def check_tensors(memory: BlockMemory, views: Sequence[Any], num_blocks: int) -> None:
    """Raises UsageError (code "unsupported") where a block does not keep its bytes."""
    middle = max(1, num_blocks // 2)
    blocks = sorted({min(1, num_blocks - 1), middle, num_blocks - 1})

    def gather() -> NDArray[np.uint8]:
        rows = np.zeros((len(blocks), memory.block_bytes), np.uint8)
        memory.gather(blocks, rows)
        memory.settle()
        return rows

    def scatter(rows: NDArray[np.uint8]) -> None:
        memory.after_engine()  # else what cleared the blocks may be written over what is scattered
        memory.scatter(blocks, rows)

    good = layout_keeps_bytes(_TensorBlocks(views, blocks, num_blocks), gather, scatter)
    if not good:
        raise kvw.UsageError(
            f"kvwarehouse cannot serve a cache of {len(views)} tensors like"
            f" {tuple(views[0].shape)}, strides {views[0].stride()}: it does not give back the"
            " bytes that were put into a block. Start the engine without the connector",
            code="unsupported",
        )


class _TensorBlocks:
    """Blocks as torch reads and writes them."""

    def __init__(self, views: Sequence[Any], blocks: Sequence[int], num_blocks: int) -> None:
        self._views = views
        self._blocks = blocks
        beside = sorted({b + d for b in blocks for d in (-1, 1) if 0 <= b + d < num_blocks})
        self._beside = [b for b in beside if b not in blocks]
        self._saved = [[_bytes(view[b]) for b in blocks] for view in views]
        self._around = [[_bytes(view[b]) for b in self._beside] for view in views]
        self._noise: list[list[torch.Tensor]] = []

    def write_noise(self) -> None:
        self._noise = [[_random_like(view[b]) for b in self._blocks] for view in self._views]
        _write(self._views, self._blocks, self._noise)

    def clear(self) -> None:
        zeros = [[torch.zeros_like(part) for part in row] for row in self._noise]
        _write(self._views, self._blocks, zeros)

    def hold_noise(self) -> bool:
        return _same(self._views, self._blocks, self._noise) and _same(
            self._views, self._beside, self._around
        )

    def restore(self) -> None:
        _write(self._views, self._blocks, self._saved)


def addresses_fit(layout: BlockLayout, memory: BlockMemory, num_blocks: int) -> bool:
    """Whether what is scattered to blocks through their tensors lies where the layout says, in
    memory that the host may not be able to read. The blocks are as before."""
    if layout.block_bytes != memory.block_bytes:
        return False
    blocks = sorted({0, num_blocks // 2, num_blocks - 1})
    shape = (len(blocks), memory.block_bytes)
    before = np.zeros(shape, np.uint8)
    memory.gather(blocks, before)
    memory.settle()
    rows = np.frombuffer(bytearray(os.urandom(shape[0] * shape[1])), np.uint8).reshape(shape)
    try:
        memory.scatter(blocks, rows)
        return all(
            np.array_equal(row, found)
            for row, found in zip(rows, map(partial(_read, layout), blocks), strict=True)
        )
    finally:
        memory.scatter(blocks, before)


def _read(layout: BlockLayout, block: int) -> NDArray[np.uint8]:
    """A block by its addresses; what lies in none of the tensors is left out."""
    memories = [(t.untyped_storage().data_ptr(), _whole(t)) for t in layout.tensors]
    parts = []
    for base, stride, size in zip(layout.bases, layout.strides, layout.piece_bytes, strict=True):
        begin = int(base) + block * int(stride)
        for start, whole in memories:
            if start <= begin and begin + int(size) <= start + len(whole):
                parts.append(whole[begin - start : begin - start + int(size)])
                break
    return torch.cat(parts).cpu().numpy() if parts else np.zeros(0, np.uint8)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor is a part of, as bytes."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


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
