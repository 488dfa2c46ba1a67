"""What the scheduler's half remembers of a request of vLLM. One per request; not thread-safe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.store_planner import TrackedRequest
from kvwarehouse_connectors.vllm.adapters import AdapterLook
from kvwarehouse_connectors.vllm.handoff import Handoff


@dataclass(kw_only=True)
class VllmRequest(TrackedRequest):
    """loads: turned off for good by the first load that fails."""

    request: Any
    epoch: int
    """Of the engine when the request came; it stores into no later one."""
    look: AdapterLook | None = None
    """At its adapter's files; None where it has no adapter."""
    handoff: Handoff | None = None
    """What another engine said it stores of this prompt; until that is there, or given up."""
    note: kvw.RequestNote | None = None
    """What was found for it, until the engine says what it loads of that."""
    releases: bool = False
    """Its conversation ends with it."""
    keep_s: float = 0.0
    """For how long what is stored of it stays after its end; 0: as all else."""
    ask_again_s: float = 0.0
    """While it waits for that, on the clock of records: not before then."""
    next_tokens: int = 0
    """Computed tokens at which there is something to store."""
