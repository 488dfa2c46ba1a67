"""Namespaces for cache groups at a real daemon, and prompts of which some blocks are stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup
from kvwarehouse_connectors.core.prefix_matcher import page_run
from kvwarehouse_connectors.vllm.keys import RequestKeys

PAGE_BYTES = 1024


def space_of(place: int, group: CacheGroup, page_bytes: int = PAGE_BYTES) -> kvw.Namespace:
    return kvw.Namespace(
        model="parts",
        weights="w",
        dtype="uint8",
        layout="vllm/1",
        page_tokens=group.block_tokens,
        page_bytes=page_bytes,
        cache_group=f"{place}/{group.rule.value}/{group.reach_tokens}",
        hash_scheme="test",
    )


def open_all(client: kvw.Client, groups: Sequence[CacheGroup]) -> list[kvw.OpenNamespace]:
    return [client.open(space_of(place, group), reopen=False) for place, group in enumerate(groups)]


def content(keys: Sequence[bytes]) -> np.ndarray:
    """Pages that follow from their keys."""
    rows = [np.frombuffer((key * PAGE_BYTES)[:PAGE_BYTES], np.uint8) for key in keys]
    return np.stack(rows) if rows else np.empty((0, PAGE_BYTES), np.uint8)


def store(
    opened: kvw.OpenNamespace,
    place: int,
    group: CacheGroup,
    keys: RequestKeys,
    blocks: Sequence[int],
) -> None:
    run = page_run(place, group, keys, blocks, None)
    if not blocks:
        return
    result = opened.store(keys=run.key_runs(), pages=content(run.keys), timeout_s=10.0)
    assert result.stored + result.already == len(blocks), result
