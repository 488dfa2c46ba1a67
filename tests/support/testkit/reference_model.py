"""The warehouse as a dictionary: what a namespace may hold, and what it must.

Prompts are paths of a growing tree; a node is a page and its tokens follow from its number. A page
may be there once every shard of it was offered since the last clear (`possible`), and must be
there, or be counted as gone, once every shard was reported stored or already there (`owed`). Not
thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvwarehouse import core
from kvwarehouse.types import Namespace
from kvwarehouse_bench.harness.pages import Bytes, check_pages, pages_of


class ReferenceModel:
    def __init__(self, space: Namespace, secret: bytes) -> None:
        self.space = space
        self.version = 0  # rises with every clear: what was stored before must not come back
        self._secret = secret
        self._parents: list[int] = []  # by node; -1: a root
        self._paths: list[tuple[int, ...]] = []
        self._offered: dict[int, set[int]] = {}
        self._reported: dict[int, set[int]] = {}
        self._node_of: dict[bytes, int] = {}

    # --- prompts

    @property
    def nodes(self) -> int:
        return len(self._parents)

    def grow(self, parent: int, count: int) -> int:
        """A chain of `count` new pages below `parent` (-1: a new root). Returns its last node."""
        for _ in range(count):
            node = len(self._parents)
            self._parents.append(parent)
            self._paths.append((*(self._paths[parent] if parent >= 0 else ()), node))
            parent = node
        path = self._paths[parent]
        keys = core.chain_keys(
            self._secret, self.space.id, self.tokens(path), self.space.page_tokens
        )
        for node, key in zip(path, keys, strict=True):
            self._node_of[key.tobytes()] = node
        return parent

    def path(self, node: int) -> tuple[int, ...]:
        """From the root, the node itself last."""
        return self._paths[node]

    def tokens(self, path: Sequence[int]) -> NDArray[np.uint32]:
        width = self.space.page_tokens
        starts = np.asarray(path, np.uint32)[:, None] * np.uint32(width)
        return np.ravel(starts + np.arange(width, dtype=np.uint32)).astype(np.uint32)

    def node_of(self, key: bytes) -> int:
        """KeyError: no page of this namespace."""
        return self._node_of[key]

    def is_node(self, key: bytes, node: int) -> bool:
        return self._node_of.get(key) == node

    # --- bytes

    def pages(self, nodes: Sequence[int], shard: int) -> Bytes:
        return pages_of(nodes, shard, self.version, self.space.page_bytes)

    def check(self, loaded: Bytes, nodes: Sequence[int], shard: int) -> None:
        check_pages(loaded, nodes, shard, self.version)

    # --- what happened

    def offer(self, nodes: Iterable[int], shard: int) -> None:
        for node in nodes:
            self._offered.setdefault(node, set()).add(shard)

    def report(self, nodes: Iterable[int], shard: int) -> None:
        for node in nodes:
            self._reported.setdefault(node, set()).add(shard)

    def clear(self) -> None:
        self.version += 1
        self._offered.clear()
        self._reported.clear()

    def restart(self) -> None:
        """A page that was not complete is not sealed, and may go with its daemon."""
        for shards in (self._offered, self._reported):
            for node in [node for node, some in shards.items() if not self._whole(some)]:
                del shards[node]

    def gone(self, nodes: Iterable[int]) -> None:
        """They have left and were counted. Their bytes may come back until the next clear."""
        for node in nodes:
            self._reported.pop(node, None)

    # --- what follows

    def possible(self, node: int) -> bool:
        return self._whole(self._offered.get(node, ()))

    def owed(self) -> set[int]:
        return {node for node, shards in self._reported.items() if self._whole(shards)}

    def unfinished(self) -> int:
        return sum(not self._whole(shards) for shards in self._offered.values())

    def longest(self, path: Sequence[int]) -> int:
        """Pages of the longest prefix that may be stored."""
        for place, node in enumerate(path):
            if not self.possible(node):
                return place
        return len(path)

    def _whole(self, shards: Iterable[int]) -> bool:
        return len(set(shards)) == self.space.shards
