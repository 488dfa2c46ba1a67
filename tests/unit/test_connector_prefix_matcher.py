"""Questions of a matcher end where objects of the remote store do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup, Rule
from kvwarehouse_connectors.core.prefix_matcher import PrefixMatcher


class Keys:
    def __init__(self, blocks: int) -> None:
        self._blocks = blocks

    def count(self, block_hashes: int) -> int:
        return self._blocks

    def keys(self, begin: int, end: int, block_hashes: int) -> Sequence[bytes]:
        return [b"%d" % block for block in range(begin, end)]


class Store:
    """A namespace whose pages are all in the remote store, in objects of so many."""

    def __init__(self, object_pages: int) -> None:
        self._object_pages = object_pages
        self.asked = 0

    def tiers(self, *, keys: Sequence[kvw.KeyRun], counted: bool = True) -> NDArray[np.uint8]:
        (run,) = keys
        self.asked += len(run.keys)
        end = run.position + len(run.keys)
        whole = max(0, end // self._object_pages * self._object_pages - run.position)
        found = np.full(len(run.keys), kvw.Tier.MISSING, np.uint8)
        found[:whole] = kvw.Tier.REMOTE
        return found


@pytest.mark.parametrize(("block_tokens", "object_pages"), [(16, 16), (16, 4), (1, 256), (24, 8)])
@pytest.mark.parametrize("local_blocks", [0, 3])
def test_hit_goes_as_far_as_whole_objects_do(
    block_tokens: int, object_pages: int, local_blocks: int
) -> None:
    blocks = 5 * object_pages + 3
    store: Any = Store(object_pages)
    group = CacheGroup(0, Rule.PREFIX, block_tokens, 0, block_tokens, ("layer",))
    matcher = PrefixMatcher([group], [store], block_tokens)
    local = local_blocks * block_tokens
    hit = matcher.find(Keys(blocks), local, blocks * block_tokens)
    assert hit is not None
    assert hit.tokens == 5 * object_pages * block_tokens
    assert hit.remote_share == 1
    assert hit.dram_share == 0


def test_block_that_only_the_remote_store_has_is_stored_here_too() -> None:
    store: Any = Store(16)
    group = CacheGroup(0, Rule.PREFIX, 16, 0, 16, ("layer",))
    matcher = PrefixMatcher([group], [store], 16)
    assert matcher.missing(0, Keys(20), range(20)) == list(range(20))


def test_miss_pays_for_no_more_than_one_object() -> None:
    store: Any = Store(1 << 20)
    group = CacheGroup(0, Rule.PREFIX, 16, 0, 16, ("layer",))
    assert PrefixMatcher([group], [store], 16).find(Keys(10_000), 0, 160_000) is None
    assert store.asked == 16
