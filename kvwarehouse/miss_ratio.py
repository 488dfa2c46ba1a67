"""A miss-ratio curve as the daemon keeps it. Immutable; thread-safe."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(frozen=True)
class MissRatio:
    """What caches of other sizes would have hit since the daemon's start.

    A use is a load of a page, or a store of one that no tier had; those of one page within a second
    are one. `hits[i]`: uses that a cache of `sizes_bytes[i]` would have had; both rise, and sizes
    are 4.4 % apart. `share`: the part of all pages that is followed (1: exact). `uses_lost`: came
    too fast to be counted. Source of the method: native/eviction/miss_ratio.h."""

    uses: int
    uses_lost: int
    since_s: float
    share: float
    sizes_bytes: tuple[int, ...]
    hits: tuple[float, ...]

    def hits_at(self, size_bytes: float) -> float:
        place = bisect.bisect_right(self.sizes_bytes, size_bytes)
        return self.hits[place - 1] if place else 0.0

    def hit_rate(self, size_bytes: float) -> float:
        """0 to 1."""
        return self.hits_at(size_bytes) / self.uses if self.uses else 0.0
