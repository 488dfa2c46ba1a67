"""Which bytes make up a page of a cache that keeps, per layer, a tensor of keys and one of values.

A *plane* is one such tensor: [heads, tokens, head]. The bytes of a page are, plane by plane and
head by head, those of its consecutive tokens. So a page is a list of pieces, one for each head of
each plane, and each piece is contiguous both in the page and in the plane's memory: a load writes
straight into the tensors, and a store reads straight from them.

Immutable; thread-safe. Knows addresses and sizes, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvwarehouse as kvw


@dataclass(frozen=True)
class Plane:
    """Keys or values of one layer."""

    heads: int
    head_bytes: int
    """Bytes of one token in one head."""

    def __post_init__(self) -> None:
        _check_positive("heads", self.heads)
        _check_positive("head_bytes", self.head_bytes)

    @property
    def token_bytes(self) -> int:
        return self.heads * self.head_bytes


@dataclass(frozen=True)
class PlaneMemory:
    """Where a plane lies, in host memory or a device's: token t of head h starts at
    address + h * head_stride_bytes + t * head_bytes."""

    address: int
    head_stride_bytes: int


@dataclass(frozen=True)
class PageGeometry:
    """Planes in the order in which a page has them, and the tokens of a page."""

    planes: tuple[Plane, ...]
    page_tokens: int

    def __post_init__(self) -> None:
        _check_positive("page_tokens", self.page_tokens)
        _check_positive("the number of planes", len(self.planes))

    @property
    def token_bytes(self) -> int:
        return sum(plane.token_bytes for plane in self.planes)

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_tokens

    def regions(
        self, owners: Sequence[Any], memory: Sequence[PlaneMemory], *, first: int, pages: int
    ) -> kvw.Regions:
        """Pages first .. first + pages - 1 of a cache, page p being its tokens
        p * page_tokens and on. For load and store; on_device() where they are on a GPU.

        memory: one a plane, in the same order, each with room for all those tokens: addresses
        cannot be checked here. owners: what keeps that memory alive."""
        if len(memory) != len(self.planes):
            raise kvw.UsageError(
                f"{len(memory)} places for {len(self.planes)} planes; give one for each",
                code="bad_geometry",
            )
        bases: list[int] = []
        piece_bytes: list[int] = []
        for plane, place in zip(self.planes, memory, strict=True):
            bases += [place.address + head * place.head_stride_bytes for head in range(plane.heads)]
            piece_bytes += [plane.head_bytes * self.page_tokens] * plane.heads
        blocks = np.arange(first, first + pages, dtype=np.int64).reshape(pages, 1)
        return kvw.Regions.strided(
            list(owners), np.array(bases, np.uint64), piece_bytes, piece_bytes, blocks
        )


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise kvw.UsageError(f"geometry: {name} = {value} is not positive", code="bad_geometry")
