"""Which pages were seen before, as far as a table of a fixed size tells: 512 KiB for 65,536 pages.

A page's tag has one place in it, and the page that comes last has the place: one that was pushed
out is new again. Not thread-safe.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_PLACES = 1 << 16


class KnownPages:
    def __init__(self, places: int = _PLACES) -> None:
        """places: a power of two."""
        self._tags = np.zeros(places, np.uint64)
        self._mask = np.uint64(places - 1)

    def among(self, tags: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of these are known. tags: Moves.tags_of."""
        found: NDArray[np.bool_] = self._tags[tags & self._mask] == tags
        return found

    def add(self, tags: NDArray[np.uint64]) -> None:
        self._tags[tags & self._mask] = tags
