"""Pages of one request in one cache group: their keys, and the engine's blocks that hold them.

Plain values: engines pickle them from their scheduler to their workers. Immutable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import kvwarehouse as kvw


@dataclass(frozen=True)
class PageRun:
    """Consecutive blocks of a request in one group, or single ones that stand alone."""

    group: int
    """Place in the engine's list of cache groups, which is also that of its namespaces."""
    keys: Sequence[bytes]
    blocks: Sequence[int]
    """The engine's block ids, one a key."""
    chained: bool
    position: int = 0
    """Of the first in its request, where chained."""
    parent: bytes | None = None

    def cut(self, begin: int, end: int) -> PageRun:
        """Places begin to end - 1 of it."""
        keys, blocks = self.keys[begin:end], self.blocks[begin:end]
        if not self.chained:
            return PageRun(self.group, keys, blocks, False)
        parent = self.keys[begin - 1] if begin else self.parent
        return PageRun(self.group, keys, blocks, True, self.position + begin, parent)

    def key_runs(self, begin: int = 0) -> list[kvw.KeyRun]:
        """From place `begin` of it on."""
        if not self.chained:
            return [kvw.KeyRun([key]) for key in self.keys[begin:]]
        rest = self.cut(begin, len(self.keys)) if begin else self
        return [kvw.KeyRun(rest.keys, rest.position, rest.parent)]
