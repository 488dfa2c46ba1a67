"""KV events: what this engine stored, through vLLM's own publisher.

An event follows the fact: a block is announced when every rank has stored it. Blocks that leave the
warehouse are not announced here, since an engine does not see that; the daemon does.

Off unless the engine publishes events. Runs in the scheduler's thread alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvwarehouse_connectors.core.groups import CacheGroup
from kvwarehouse_connectors.vllm import compat

# Orders that were not confirmed: bounded, the oldest given up first; not waited for beyond this.
_MOST_WAITING = 65_536
_WAIT_S = 2.0


@dataclass
class _Waiting:
    event: Any
    ranks: int = 0


class StoreEvents:
    """fields: what an event says of its cache group, by the group's index in vLLM."""

    def __init__(
        self,
        vllm_config: Any,
        groups: Sequence[CacheGroup],
        ranks: int,
        fields: Mapping[int, Mapping[str, Any]],
    ) -> None:
        self._fields = fields
        self.wanted = compat.publishes_events(vllm_config)
        self._groups = groups
        self._ranks = ranks
        self._waiting: dict[tuple[int, bytes], _Waiting] = {}
        self._ready: list[Any] = []
        self._last_order_s = 0.0

    def ordered(
        self, request: Any, group: CacheGroup, blocks: Sequence[int], keys: Sequence[bytes]
    ) -> None:
        """Blocks of a request were given to be stored under `keys`."""
        if not self.wanted:
            return
        self._last_order_s = time.monotonic()
        place = self._groups.index(group)
        hashes, each = request.block_hashes, group.block_hashes
        lora = request.lora_request
        for block, key in zip(blocks, keys, strict=True):
            begin = block * group.block_tokens
            parent = hashes[block * each - 1] if block else None
            event = compat.BlockStored(
                block_hashes=[compat.event_hash(hashes[(block + 1) * each - 1])],
                parent_block_hash=compat.event_hash(parent) if parent is not None else None,
                token_ids=list(request.all_token_ids[begin : begin + group.block_tokens]),
                block_size=group.block_tokens,
                lora_id=lora.lora_int_id if lora is not None else None,
                medium=compat.MEDIUM_CPU,
                lora_name=lora.lora_name if lora is not None else None,
                group_idx=group.index,
                session_id=request.session_id,
                **self._fields[group.index],
            )
            self._waiting.pop((place, key), None)  # behind the others: its time begins again
            self._waiting[place, key] = _Waiting(event)
            if len(self._waiting) > _MOST_WAITING:  # a worker drops stores without a word
                del self._waiting[next(iter(self._waiting))]

    def stored(self, counts: Counter[tuple[int, bytes]]) -> None:
        """Ranks stored these: (group, key) to how many of them."""
        for name, ranks in counts.items():
            waiting = self._waiting.get(name)
            if waiting is None:
                continue
            waiting.ranks += ranks
            if waiting.ranks >= self._ranks:
                self._ready.append(waiting.event)
                del self._waiting[name]

    def cleared(self) -> None:
        """What was stored is not loaded any more."""
        if self.wanted:
            self._waiting.clear()
            self._ready = [compat.AllBlocksCleared()]

    def take(self) -> Iterable[Any]:
        ready, self._ready = self._ready, []
        return ready

    def pending(self) -> bool:
        """Whether the engine should step on to hear of stores, for a moment after the last."""
        if not self._waiting:
            return False
        if time.monotonic() - self._last_order_s < _WAIT_S:
            return True
        self._waiting.clear()  # dropped, or told too late
        return False
