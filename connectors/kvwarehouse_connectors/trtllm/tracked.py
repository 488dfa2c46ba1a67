"""What the scheduler remembers of a request of TensorRT-LLM. One per request; not thread-safe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvwarehouse_connectors.core.prefix_matcher import PrefixHit
from kvwarehouse_connectors.core.store_planner import TrackedRequest
from kvwarehouse_connectors.trtllm.keys import PromptKeys


@dataclass(kw_only=True)
class TrtllmRequest(TrackedRequest):
    """hit: promised, and no blocks given for it yet."""

    keys: PromptKeys
    prompt_tokens: int
    salt: bytes | None
    tables: list[list[int]] = field(default_factory=list)
    """Per layer group, the engine's block ids as scheduled so far."""
    computed: int = 0
    """Tokens whose KV is there when the step that is being planned has run."""
    step_begin: int = 0
    """Tokens from which on that step surely computes."""
    awaited: bool = False
    """Whether the engine waits to hear of an asynchronous load that is not ordered yet."""
    loading: PrefixHit | None = None
    """Ordered: its pins are let go when the load is over."""
    waits: bool = False
    """Whether the load in `loading` holds the step it was ordered with."""
    external_tokens: tuple[int, int] = (0, 0)
    """Of a load that the step waits for, which the engine leaves out of its next position: how many
    it takes at least, and at most."""

    def begin(self, data: Any) -> None:
        """The engine schedules it for the first time, or anew after its blocks were taken away."""
        self.keys.replace(data.new_tokens)
        self.tables = []
        self.considered = [0] * len(self.considered)
        self.waiting.clear()
        self.computed = 0
        self._schedule(data)

    def go_on(self, data: Any) -> None:
        self.keys.extend(data.new_tokens)
        self._schedule(data)

    def release(self) -> None:
        """Lets go what is pinned."""
        self.drop_hit()
        if self.loading is not None:
            self.loading.release()
            self.loading = None

    def _schedule(self, data: Any) -> None:
        grouped = getattr(data, "new_block_ids_by_layer_group", None) or [data.new_block_ids]
        self.tables = self.tables or [[] for _ in grouped]
        for table, fresh in zip(self.tables, grouped, strict=True):
            table += fresh
        begin = int(data.computed_position)
        least, most = self.external_tokens
        self.external_tokens = (0, 0)
        # Tokens that are not known yet may be taken back (drafts).
        self.computed = min(begin + least + int(data.num_scheduled_tokens), self.keys.tokens)
        self.step_begin = begin + most
