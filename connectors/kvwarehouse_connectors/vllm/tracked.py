"""What the scheduler's half remembers of a request. One per request; not thread-safe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvwarehouse_connectors.core.prefix_matcher import PrefixHit
from kvwarehouse_connectors.vllm.handoff import Handoff
from kvwarehouse_connectors.vllm.keys import BlockKeys

LOAD = "kvwarehouse.load"
STORE = "kvwarehouse.store"
"""Names in a request's kv_transfer_params: two switches."""


@dataclass
class Tracked:
    request: Any
    keys: BlockKeys
    loads: bool
    """Turned off for good by the first load that fails."""
    stores: bool
    epoch: int
    """Of the engine when the request came; it stores into no later one."""
    handoff: Handoff | None = None
    """What another engine said it stores of this prompt; until that is there, or given up."""
    ask_again_s: float = 0.0
    """While it waits for that, on the clock of records: not before then."""
    hit: PrefixHit | None = None
    """Found, and not loaded yet."""
    considered: list[int] = field(default_factory=list)
    """Per group, the blocks from the first on that were stored or passed over."""
    next_tokens: int = 0
    """Computed tokens at which there is something to store."""

    def drop_hit(self) -> None:
        if self.hit is not None:
            self.hit.release()
            self.hit = None


def switch(params: Mapping[str, Any] | None, name: str) -> bool:
    """A request's own wish; anything but an explicit false means yes."""
    return params is None or params.get(name) is not False
