"""Everything of LMCache that differs, or may come to differ, between its versions. Nothing else
here imports from LMCache.

Written against 0.5.6, the first version served (L2AdapterInterface of its l2_adapters/base.py).
Imported in LMCache's server only. Stateless.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

__all__ = ["VERSION", "L2AdapterInterface", "bitmap", "create_event_notifier", "store_result"]

VERSION = metadata.version("lmcache")


def bitmap(found: Sequence[bool]) -> Any:
    """LMCache's Bitmap, a bit a key."""
    bits = Bitmap(len(found))
    for place, one in enumerate(found):
        if one:
            bits.set(place)
    return bits


def store_result(stored: bool, size_bytes: int) -> Any:
    """stored: whether all chunks of a task are. size_bytes: what was written for it."""
    return L2StoreResult(stored, size_bytes)
