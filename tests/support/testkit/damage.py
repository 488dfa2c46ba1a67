"""Damage to a warehouse's files, found by content: pages of harness/pages.py open every
4 KiB with who they are. Works on files that a daemon has mapped or open. Stateless.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvwarehouse_bench.harness.pages import Bytes

_BLOCK = 4096


@dataclass(frozen=True)
class Place:
    path: Path
    offset: int

    def read(self, size_bytes: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(size_bytes)

    def write(self, data: bytes) -> None:
        """In place: whoever has the file mapped sees it, and a direct read after it too."""
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            os.pwrite(descriptor, data, self.offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def flip(self, bit: int = 0, *, at: int = 0) -> None:
        """One bit of the byte `at` places further on."""
        place = Place(self.path, self.offset + at)
        place.write(bytes([place.read(1)[0] ^ 1 << bit]))

    def before(self, size_bytes: int) -> Place:
        return Place(self.path, self.offset - size_bytes)


def find(files: Iterable[Path], page: Bytes) -> list[Place]:
    """Every place where the page begins, whatever follows its first block."""
    needle = page[:_BLOCK].tobytes()
    places = []
    for path in files:
        data = path.read_bytes()
        at = data.find(needle)
        while at >= 0:
            places.append(Place(path, at))
            at = data.find(needle, at + 1)
    return places


def find_one(files: Iterable[Path], page: Bytes) -> Place:
    places = find(files, page)
    assert len(places) == 1, f"found the page at {places}"
    return places[0]


def swap(one: Place, other: Place, size_bytes: int) -> None:
    held = one.read(size_bytes)
    one.write(other.read(size_bytes))
    other.write(held)
