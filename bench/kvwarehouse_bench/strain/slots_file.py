"""The words and metadata of a daemon's slots, as another process has them mapped
(native/slots/slots.h), to be looked at and damaged while it runs. Stateless but for the mapping.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Final

import numpy as np

RESERVED: Final = 1
FILLING: Final = 2
LIVE: Final = 3

_HEADER: Final = struct.Struct("<QIIQQQQQQQQQ")
_CUTS_AT: Final = 4096
_KEY_AT: Final = 24


class SlotsFile:
    def __init__(self, path: Path) -> None:
        """Of a daemon that has been started."""
        self._bytes = np.memmap(path, np.uint8, "r+")
        header = _HEADER.unpack(self._bytes[: _HEADER.size].tobytes())
        slabs, self._per_slab, self._region, words, self._metas = header[2], *header[6:10]
        self._words = self._bytes[words : words + 8 * slabs * self._per_slab].view(np.uint64)
        self._cuts = self._bytes[_CUTS_AT : _CUTS_AT + 8 * slabs].view(np.uint64)

    def slots(self, *states: int) -> list[int]:
        """Those that are in one of the states now."""
        found: list[int] = np.flatnonzero(np.isin(self._words & np.uint64(0xFFFF), states)).tolist()
        return found

    def generation(self, slot: int) -> int:
        return int(self._words[slot]) >> 16

    def key(self, slot: int) -> bytes:
        at, _ = self._meta(slot)
        return bytes(self._bytes[at + _KEY_AT : at + _KEY_AT + 16])

    def flip(self, slot: int, rng: random.Random) -> None:
        """One bit of its metadata."""
        at, size_bytes = self._meta(slot)
        self._bytes[at + rng.randrange(size_bytes)] ^= np.uint8(1 << rng.randrange(8))

    def _meta(self, slot: int) -> tuple[int, int]:
        slab, place = divmod(slot, self._per_slab)
        size_bytes = 64 * (int(self._cuts[slab]) >> 32 & 0xFFFF)
        return self._metas + slab * self._region + place * size_bytes, size_bytes
