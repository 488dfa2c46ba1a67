"""Where rank 0's worker tells the scheduler what it saw of the cache.

TensorRT-LLM makes both in one process, at the same time and unknown to each other, with the same
arguments object: they meet by it. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup

# Engines of one process that were not closed; each entry keeps its arguments alive.
_MOST = 16
_lock = threading.Lock()
_published: OrderedDict[int, tuple[Any, TrtllmCacheInfo]] = OrderedDict()


@dataclass(frozen=True)
class TrtllmCacheInfo:
    """groups, spaces: of the cache's parts, in their order. pool: whether the cache is one tensor,
    and the engine takes every offer whole."""

    groups: tuple[CacheGroup, ...]
    spaces: tuple[kvw.Namespace, ...]
    barrier: kvw.Namespace
    block_tokens: int
    pool: bool


def publish(llm_args: Any, cache_info: TrtllmCacheInfo) -> None:
    with _lock:
        _published.pop(id(llm_args), None)
        _published[id(llm_args)] = (llm_args, cache_info)
        while len(_published) > _MOST:
            _published.popitem(last=False)


def read(llm_args: Any) -> TrtllmCacheInfo | None:
    with _lock:
        found = _published.get(id(llm_args))
    return found[1] if found is not None else None
