"""LMCache's chunks of one call, by the namespaces that they belong to.

Thread-safe.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.lmcache.chunks import (
    LEAST_HASH_BYTES,
    ChunkLayout,
    ObjectKey,
    chunk_of,
    page_key,
)
from kvwarehouse_connectors.lmcache.identity import Spaces

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Chunks of one namespace. places: of each in LMCache's call. addresses: where each lies, in
    memory that stays until the call is reported; none in a lookup."""

    space: kvw.Namespace
    places: NDArray[np.int64]
    keys: Sequence[bytes]
    addresses: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, rows: NDArray[np.int64]) -> Batch:
        return Batch(
            self.space,
            self.places[rows],
            [self.keys[row] for row in rows],
            [self.addresses[row] for row in rows] if self.addresses else (),
        )

    def runs(self) -> list[kvw.KeyRun]:
        return [kvw.KeyRun([key]) for key in self.keys]

    def regions(self) -> kvw.Regions:
        addresses = np.array(self.addresses, np.int64).reshape(-1, 1)
        return kvw.Regions.strided((), [0], [1], [self.space.page_bytes], addresses)


class ChunkFilter:
    """Leaves out chunks that cannot be served, and logs once why."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces
        self._warned: set[str] = set()

    def with_memory(self, keys: Sequence[ObjectKey], memory: Sequence[Any]) -> list[Batch]:
        """memory: LMCache's objects."""
        chunks = [chunk_of(one) for one in memory]
        if None in chunks:
            self._warn_once(
                "kvwarehouse: chunks come packed by a serde, of other sizes than their layout says;"
                " they are not stored. Take `serde` out of this --l2-adapter"
            )
        return self.batches(
            keys,
            [chunk.layout if chunk else None for chunk in chunks],
            [chunk.address if chunk else 0 for chunk in chunks],
        )

    def batches(
        self,
        keys: Sequence[ObjectKey],
        layouts: Sequence[ChunkLayout | None],
        addresses: Sequence[int] = (),
    ) -> list[Batch]:
        """layouts, addresses: of each key's chunk; None where it is left out."""
        places: dict[bytes, list[int]] = defaultdict(list)
        spaces: dict[bytes, kvw.Namespace] = {}
        names: dict[int, bytes] = {}
        for place, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            name = self._name(key)
            space = self._spaces.space(key, layout) if layout and name else None
            if space is not None and name is not None:
                names[place] = name
                spaces[space.id] = space
                places[space.id].append(place)
        return [
            Batch(
                spaces[id_],
                np.array(mine, np.int64),
                [names[place] for place in mine],
                [addresses[place] for place in mine] if addresses else (),
            )
            for id_, mine in places.items()
        ]

    def _name(self, key: ObjectKey) -> bytes | None:
        name = page_key(key)
        if name is None:
            self._warn_once(
                f"kvwarehouse: LMCache's chunk hashes have fewer than {LEAST_HASH_BYTES} bytes,"
                " which may be the same for other tokens; nothing is stored or loaded. Start it"
                " with --hash-algorithm blake3"
            )
        return name

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)
